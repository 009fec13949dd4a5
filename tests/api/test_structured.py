"""Forms that answers are held to, by the SDKs: schemas, patterns, choices, grammars; tools required, named, parallel."""

from __future__ import annotations

import json
import re
from typing import Any

import anthropic
import httpx
import openai
import pytest

from .served import MODEL

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris, and who are you?"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
ASKED: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 400, "temperature": 1.0, "seed": 3}


def check_person(text: str) -> None:
    person = json.loads(text)
    assert set(person) == {"name", "age"} and isinstance(person["name"], str) and 0 <= person["age"] <= 150


def test_a_schema_is_kept(sdk: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = sdk.chat.completions.create(response_format=form, n=3, **ASKED)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        check_person(choice.message.content or "")
    whole = "".join(
        chunk.choices[0].delta.content or "" for chunk in sdk.chat.completions.create(response_format=form, stream=True, **ASKED)
    )
    check_person(whole)


def test_a_schema_in_responses(sdk: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
    check_person(sdk.responses.create(model=MODEL, input="Who?", text=form, max_output_tokens=400).output_text)


def test_json_objects_and_other_forms(sdk: openai.OpenAI) -> None:
    def text(**outputs: Any) -> str:
        answer = sdk.completions.create(
            model=MODEL, prompt="Answer:", max_tokens=400, seed=1, extra_body={"structured_outputs": outputs}
        )
        return answer.choices[0].text

    assert re.fullmatch(r"[a-c]{3}-\d{2}", text(regex=r"[a-c]{3}-\d{2}"))
    assert text(choice=["yes", "no", "maybe"]) in ("yes", "no", "maybe")
    assert text(grammar='root ::= "x" rest\nrest ::= "y" | "z" "!"') in ("xy", "xz!")
    check_person(text(json=PERSON))
    check_person(text(json=json.dumps(PERSON)))


def test_ollama_and_tgi_forms(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": QUESTION, "format": PERSON, "stream": False, "options": {"num_predict": 400, "seed": 1}}
    check_person(http.post("/api/chat", json=body).json()["message"]["content"])
    grammar = {"type": "regex", "value": "[0-9]{4}"}
    body = {"inputs": "The year is ", "parameters": {"max_new_tokens": 8, "grammar": grammar}}
    assert re.fullmatch(r"\d{4}", http.post("/generate", json=body).json()["generated_text"])
    for name in ("value", "schema"):  # an object of a shape, as TGI's and llama.cpp's clients ask for it
        body = {"messages": QUESTION, "max_tokens": 400, "seed": 1, "response_format": {"type": "json_object", name: PERSON}}
        check_person(http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"])


def test_a_tool_is_required(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=False, **ASKED)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    (call,) = choice.message.tool_calls or []
    assert call.id and call.type == "function" and call.function.name in ("get_weather", "get_time")
    assert isinstance(json.loads(call.function.arguments), dict)


def test_a_named_tool_is_called_and_streams(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        **ASKED,
        "tools": [CLOCK, WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    }
    whole = sdk.chat.completions.create(**asked).choices[0].message.tool_calls
    name, arguments, finish = "", "", None
    for chunk in sdk.chat.completions.create(stream=True, **asked):
        finish = chunk.choices[0].finish_reason or finish
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.function is not None
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert whole is not None and (name, arguments) == (whole[0].function.name, whole[0].function.arguments)
    assert finish == "tool_calls" and name == "get_weather"
    assert set(json.loads(arguments)) == {"city", "unit"} and json.loads(arguments)["unit"] in ("C", "F")


def test_tools_in_responses(sdk: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **WEATHER["function"], "strict": True}
    asked: dict[str, Any] = {"model": MODEL, "input": "Weather?", "tools": [tool], "tool_choice": "required"}
    asked |= {"max_output_tokens": 400, "temperature": 0, "parallel_tool_calls": False}
    answer = sdk.responses.create(**asked)
    (call,) = answer.output
    assert call.type == "function_call" and call.name == "get_weather" and set(json.loads(call.arguments)) == {"city", "unit"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    after = sdk.responses.create(model=MODEL, input=[result], previous_response_id=answer.id, max_output_tokens=4)
    assert after.status in ("completed", "incomplete")
    assert "get_weather" in str(sdk.responses.input_items.list(after.id).data)
    happened = list(sdk.responses.create(stream=True, **asked))
    assert "".join(one.delta for one in happened if one.type == "response.function_call_arguments.delta") == call.arguments
    assert [one.arguments for one in happened if one.type == "response.function_call_arguments.done"] == [call.arguments]


def test_tools_by_anthropic(claude: anthropic.Anthropic) -> None:
    function = WEATHER["function"]
    tools: Any = [{"name": function["name"], "description": "Weather", "input_schema": function["parameters"]}]
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "messages": QUESTION, "tools": tools}
    asked |= {"tool_choice": {"type": "tool", "name": "get_weather"}, "extra_body": {"temperature": 0}}
    message = claude.messages.create(**asked)
    assert message.stop_reason == "tool_use"
    (block,) = [block for block in message.content if block.type == "tool_use"]
    assert block.name == "get_weather" and set(block.input) == {"city", "unit"}  # type: ignore[arg-type,call-overload]
    with claude.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert [b.input for b in final.content if b.type == "tool_use"] == [block.input]


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
        {"response_format": {"type": "json_schema"}},
        {"structured_outputs": {"regex": "(" * 100}},
        {"structured_outputs": {"regex": "[unclosed"}},
        {"structured_outputs": {"grammar": "root ::= nowhere"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"json": {"enum": list(range(10_000))}}},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tool_choice": "required"},
    ],
)
def test_a_form_that_is_none_is_a_400(http: httpx.Client, more: dict[str, Any]) -> None:
    response = http.post("/v1/chat/completions", json={**ASKED, **more})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"]

"""OpenAI's own SDK drives the server: models, completions, chat, responses, streams, usage, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from trireme.llm import LLM
from trireme.types import SamplingParams

from .served import KEYS, MODEL, Served

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 8}


def test_models(sdk: openai.OpenAI) -> None:
    (model,) = sdk.models.list().data
    assert model.id == MODEL
    assert sdk.models.retrieve(MODEL).id == MODEL
    extra = model.model_extra or {}
    assert extra["sampling"] == {"temperature": 0.2, "top_p": 0.9} and extra["sampling_source"] == "calm"
    with pytest.raises(openai.NotFoundError, match="not served"):
        sdk.models.retrieve("another")


def test_completion_equals_the_offline_engine(sdk: openai.OpenAI) -> None:
    with LLM(MODEL) as llm:
        prompt = "The capital of France is"
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=3, logprobs=3))
    answer = sdk.completions.create(prompt=prompt, **GREEDY)
    assert answer.choices[0].text == output.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(output.prompt_token_ids), 8)
    # What evaluation harnesses do: token ids in, one token asked for, the prompt's log-probabilities read.
    ids = output.prompt_token_ids
    echoed = sdk.completions.create(model=MODEL, prompt=[ids, ids], max_tokens=1, temperature=0, echo=True, logprobs=3, seed=1)
    assert output.prompt_logprobs is not None
    for choice in echoed.choices:
        logprobs = choice.logprobs
        assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
        assert len(logprobs.token_logprobs) == len(ids) + 1 and logprobs.token_logprobs[0] is None
        for got, entry in zip(logprobs.token_logprobs[1:-1], output.prompt_logprobs[1:], strict=True):
            assert entry is not None and got == pytest.approx(entry.logprob, abs=1e-3)
        for got, top in zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True):
            assert got in top.values() and max(top.values()) >= got
        assert "".join(logprobs.tokens or []) == choice.text


def test_echo_without_new_tokens(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model=MODEL, prompt="One two three", max_tokens=0, echo=True, logprobs=1)
    (choice,) = answer.choices
    assert choice.text == "One two three" and choice.logprobs is not None
    assert choice.logprobs.text_offset == [0, 3, 7]
    assert answer.usage is not None and answer.usage.completion_tokens == 0


def test_many_prompts_many_sequences(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model=MODEL, prompt=["Once", "Twice"], n=2, best_of=3, max_tokens=3, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    again = sdk.completions.create(model=MODEL, prompt=["Once", "Twice"], n=2, best_of=3, max_tokens=3, seed=7)
    assert [c.text for c in again.choices] == [c.text for c in answer.choices]


def test_streamed_completion_is_the_whole_one(sdk: openai.OpenAI) -> None:
    whole = sdk.completions.create(prompt=["A b c", "1 2 3"], echo=True, logprobs=2, **GREEDY)
    texts = ["", ""]
    tokens: list[list[str]] = [[], []]
    usage = None
    stream = sdk.completions.create(
        prompt=["A b c", "1 2 3"], echo=True, logprobs=2, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            assert choice.logprobs is not None
            tokens[choice.index] += choice.logprobs.tokens or []
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices if choice.logprobs]
    assert usage is not None and whole.usage is not None and usage.total_tokens == whole.usage.total_tokens


def test_stop_strings_and_bias(sdk: openai.OpenAI) -> None:
    plain = sdk.completions.create(prompt="The capital of France is", **GREEDY).choices[0]
    assert plain.text.startswith(" Paris.")
    stopped = sdk.completions.create(prompt="The capital of France is", stop=["."], **GREEDY).choices[0]
    assert (stopped.text, stopped.finish_reason) == (" Paris", "stop")
    paris = sdk.completions.create(prompt="The capital of France is", logprobs=1, **GREEDY)
    assert paris.choices[0].logprobs is not None
    token = sdk.post("/../tokenize", body={"prompt": " Paris"}, cast_to=object)["tokens"][0]  # type: ignore[index]
    banned = sdk.completions.create(prompt="The capital of France is", logit_bias={str(token): -100}, **GREEDY).choices[0]
    assert not banned.text.startswith(" Paris")


def test_suffix_is_refused_without_fim_tokens_or_filled_in(sdk: openai.OpenAI) -> None:
    try:
        answer = sdk.completions.create(model=MODEL, prompt="def add(a, b):\n", suffix="\n    return c", max_tokens=4)
    except openai.BadRequestError as error:
        assert error.param == "suffix"
    else:
        assert answer.choices[0].finish_reason in ("stop", "length")


def test_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(messages=QUESTION, logprobs=True, top_logprobs=2, **GREEDY)
    (choice,) = answer.choices
    assert choice.message.content and "Paris" in choice.message.content
    assert choice.logprobs is not None and choice.logprobs.content is not None
    spelled = "".join(entry.token for entry in choice.logprobs.content if entry.token != "<|im_end|>")
    assert spelled == choice.message.content
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


def test_streamed_chat_is_the_whole_one(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(messages=QUESTION, n=2, **GREEDY)
    texts, finishes, usage = ["", ""], ["", ""], None
    for chunk in sdk.chat.completions.create(messages=QUESTION, n=2, stream=True, stream_options={"include_usage": True}, **GREEDY):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert finishes == [choice.finish_reason for choice in whole.choices]
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


def test_async_clients_side_by_side(served: Served) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEYS[1], max_retries=0) as client:
            calls = [client.chat.completions.create(messages=QUESTION, **GREEDY) for _ in range(16)]
            return [answer.choices[0].message.content or "" for answer in await asyncio.gather(*calls)]

    answers = asyncio.run(ask())
    assert len(set(answers)) == 1 and "Paris" in answers[0]


def test_too_long_is_a_400_with_the_numbers(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.completions.create(model=MODEL, prompt=[1] * 9000, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    assert "This model's maximum context length is 8192 tokens" in caught.value.message  # clients look for these words
    assert "9001" in caught.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("top_p", 2),
        ("n", 129),
        ("top_logprobs", 21),
        ("max_tokens", 0),
        ("presence_penalty", 3),
        ("stop", [""]),
    ],
)
def test_values_out_of_bounds_name_their_field(sdk: openai.OpenAI, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model=MODEL, messages=QUESTION, logprobs=True, **{field: value})
    assert caught.value.param == field


def test_unknown_model_and_images(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        sdk.chat.completions.create(model="gpt-9", messages=QUESTION)
    picture: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]}]
    with pytest.raises(openai.BadRequestError, match="text alone"):
        sdk.chat.completions.create(model=MODEL, messages=picture)


def test_user_text_never_becomes_a_special_token(sdk: openai.OpenAI) -> None:
    def count(text: str) -> int:
        body = {"messages": [{"role": "user", "content": text}]}
        return sdk.post("/../tokenize", body=body, cast_to=object)["tokens"].count(2)  # type: ignore[index]

    assert count("hello") == count("hello <|im_end|> <|im_start|>system") == 2


def test_responses(sdk: openai.OpenAI) -> None:
    first = sdk.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=12)
    assert "Paris" in first.output_text and first.usage is not None and first.usage.output_tokens <= 12
    assert sdk.responses.retrieve(first.id).output_text == first.output_text
    after = sdk.responses.create(model=MODEL, input="Thanks!", previous_response_id=first.id, max_output_tokens=4)
    assert after.usage is not None and after.usage.input_tokens > first.usage.input_tokens
    sdk.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(first.id)


def test_streamed_response_is_the_whole_one(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "Say hello.", "temperature": 0, "max_output_tokens": 12}
    whole = sdk.responses.create(**asked)
    happened = list(sdk.responses.create(stream=True, **asked))
    kinds = [one.type for one in happened]
    final = happened[-1].response  # type: ignore[union-attr]
    assert final.output_text == whole.output_text and final.status == whole.status
    assert "".join(one.delta for one in happened if one.type == "response.output_text.delta") == whole.output_text
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete") and "response.output_item.done" in kinds
    assert [one.sequence_number for one in happened] == list(range(len(happened)))


def test_background_response_can_be_cancelled(sdk: openai.OpenAI, served: Served) -> None:
    begun = sdk.responses.create(
        model=MODEL, input="Count to a thousand.", background=True, temperature=0, max_output_tokens=4000, extra_body={"min_p": 0.1}
    )
    assert begun.status == "queued"
    assert sdk.responses.cancel(begun.id).status == "cancelled"
    served.until_idle()
    assert sdk.responses.retrieve(begun.id).status == "cancelled"


def test_stored_things_are_their_owners_alone(sdk: openai.OpenAI, served: Served) -> None:
    kept = sdk.responses.create(model=MODEL, input="Hi", max_output_tokens=2)
    other = openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEYS[1], max_retries=0)
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(kept.id)


def test_no_key_sees_what_another_has_cached(served: Served) -> None:
    def cached(key: str) -> int:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0) as client:
            usage = client.completions.create(model=MODEL, prompt=[504, 3575, 282] * 20, max_tokens=1).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert cached(KEYS[0]) == 0
    assert cached(KEYS[0]) > 0
    assert cached(KEYS[1]) == 0


def test_a_tool_without_parameters_takes_none(http: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "now", "description": "The time."}}
    asked = {"model": MODEL, "messages": QUESTION, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    choice = http.post("/v1/chat/completions", json={**asked, "temperature": 0, "max_tokens": 64}).json()["choices"][0]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {}


def test_a_call_that_is_cut_leaves_no_rest_in_the_content(http: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    asked = {"model": MODEL, "messages": QUESTION, "tools": [tool], "tool_choice": "required", "temperature": 0}
    for most in range(1, 6):
        whole = http.post("/v1/chat/completions", json={**asked, "max_tokens": most}).json()["choices"][0]
        assert whole["finish_reason"] == "length" and not whole["message"]["content"], whole


def test_a_call_is_required_but_there_are_no_tools(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="there are no tools") as caught:
        sdk.chat.completions.create(model=MODEL, messages=QUESTION, extra_body={"tool_choice": "required"})
    assert caught.value.param == "tool_choice"


def test_every_chunk_has_a_place_for_the_usage_that_was_asked_for(http: httpx.Client) -> None:
    for path, prompt in (("/v1/chat/completions", {"messages": QUESTION}), ("/v1/completions", {"prompt": "One, two,"})):
        asked = {"model": MODEL, "max_tokens": 4, "stream": True, **prompt}
        for wanted in (True, False):
            text = http.post(path, json={**asked, "stream_options": {"include_usage": wanted}}).text
            chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            assert len(chunks) > 2
            if wanted:
                assert [chunk["usage"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
            else:
                assert not any("usage" in chunk for chunk in chunks)


def test_effort_is_one_of_those_that_there_are(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model=MODEL, messages=QUESTION, extra_body={"reasoning_effort": "enormous"})
    assert caught.value.param == "reasoning_effort"


def test_the_last_message_is_gone_on_with(http: httpx.Client) -> None:
    talk = [{"role": "user", "content": "Recite the alphabet."}, {"role": "assistant", "content": "A, B, C, D,"}]
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 8, "continue_final_message": True, "add_generation_prompt": False}
    answer = http.post("/v1/chat/completions", json={**asked, "messages": talk})
    assert answer.json()["choices"][0]["message"]["content"].startswith(" E, F")
    refused = http.post("/v1/chat/completions", json={**asked, "messages": talk[:1]})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "continue_final_message"


def test_names_of_other_servers_mean_the_same(http: httpx.Client) -> None:
    asked = {"model": MODEL, "messages": QUESTION, "temperature": 0}
    answer = http.post("/v1/chat/completions", json={**asked, "n_predict": 8, "grammar": 'root ::= "blue" | "red"'}).json()
    assert answer["choices"][0]["message"]["content"] in ("blue", "red")
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    answer = http.post("/v1/chat/completions", json={**asked, "json_schema": schema, "n_probs": 2, "max_tokens": 40}).json()
    assert "n" in json.loads(answer["choices"][0]["message"]["content"])
    assert len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2


def test_responses_tell_of_their_input(sdk: openai.OpenAI, http: httpx.Client) -> None:
    kept = sdk.responses.create(model=MODEL, input="Hi", max_output_tokens=2)
    (item,) = sdk.responses.input_items.list(kept.id).data
    assert item.content[0].type == "input_text" and item.content[0].text == "Hi"  # type: ignore[union-attr]
    counted = http.post("/v1/responses/input_tokens", json={"model": MODEL, "input": "Hi"}).json()
    assert kept.usage is not None
    assert counted == {"object": "response.input_tokens", "input_tokens": kept.usage.input_tokens}
    assert http.post("/v1/responses/compact", json={"model": MODEL}).status_code == 404
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.responses.create(model=MODEL, input="Hi", previous_response_id="resp_" + "0" * 32)
    assert caught.value.param == "previous_response_id"


def test_tokenize_without_either_field_says_what_to_send(http: httpx.Client) -> None:
    assert 'send "prompt"' in http.post("/tokenize", json={"model": MODEL}).json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", pytest.param("/v1/responses", marks=pytest.mark.wide)])
def test_only_allowed_tools_are_called(http: httpx.Client, path: str) -> None:
    names, chat = ("weather", "clock"), "chat" in path

    def tool(name: str) -> dict:
        return {"type": "function", "function": {"name": name}} if chat else {"type": "function", "name": name}

    def asked(mode: str, *allowed: str) -> httpx.Response:
        choice = {"mode": mode, "tools": [tool(name) for name in allowed]}
        choice = {"type": "allowed_tools", **({"allowed_tools": choice} if chat else choice)}
        question = "What is the weather in Rome?"
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 48} if chat else {"input": question}
        more = {} if chat else {"max_output_tokens": 48}
        return http.post(path, json={**body, **more, "temperature": 0, "tools": [tool(n) for n in names], "tool_choice": choice})

    for name in names:
        answer = asked("required", name).json()
        called = answer["choices"][0]["message"]["tool_calls"][0]["function"] if chat else answer["output"][0]
        assert called["name"] == name
    unknown = asked("auto", "nothing")
    assert unknown.status_code == 400 and "'nothing', which is not in tools" in unknown.json()["error"]["message"]
    nameless = http.post(path, json={"messages": [{"role": "user", "content": "Hi"}], "tool_choice": {}}) if chat else unknown
    assert nameless.status_code == 400
    assert asked("required").status_code == 400  # none is allowed, and one is required
    assert asked("auto", "clock").status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_custom_tools_are_refused_by_name(http: httpx.Client, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "input": "Hi", "max_tokens": 1, "max_output_tokens": 1}
    body = {name: body[name] for name in (("messages", "max_tokens") if "chat" in path else ("input", "max_output_tokens"))}
    for more in (
        {"tools": [{"type": "custom", "name": "x", "custom": {"name": "x"}}]},
        {"tool_choice": {"type": "custom", "name": "x"}},
    ):
        refused = http.post(path, json={**body, **more})
        assert refused.status_code == 400 and "'custom'" in refused.json()["error"]["message"]

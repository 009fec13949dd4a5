"""LiteLLM by its routes to OpenAI, vLLM and Anthropic: whole, streamed, a tool, a schema, an error, a stream that is left."""

import json
import sys

import litellm

url, key = sys.argv[1:]
talk = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
plain = {"messages": talk, "api_key": key, "temperature": 0, "max_tokens": 12, "num_retries": 0}
for model, base in (
    ("openai/smollm2", f"{url}/v1"),
    ("hosted_vllm/smollm2", f"{url}/v1"),
    ("anthropic/smollm2", url),
    ("text-completion-openai/smollm2", f"{url}/v1"),
):
    asked = plain | {"model": model, "api_base": base}
    whole = litellm.completion(**asked)
    assert whole.usage.prompt_tokens > 0 and whole.usage.completion_tokens > 0, whole
    text = whole.choices[0].message.content
    assert model.startswith("text") or "Paris" in text, whole
    pieces = list(litellm.completion(stream=True, stream_options={"include_usage": True}, **asked))
    # LiteLLM drops the space that a stream may begin with.
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices).strip() == text.strip(), pieces
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens, pieces[-1]

chat = plain | {"model": "openai/smollm2", "api_base": f"{url}/v1", "max_tokens": 80}
schema = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
shape = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}}
assert "city" in json.loads(litellm.completion(response_format=shape, **chat).choices[0].message.content)
tool = {"type": "function", "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": schema}}
for model, base in (("openai/smollm2", f"{url}/v1"), ("anthropic/smollm2", url)):
    asked = chat | {"model": model, "api_base": base, "tools": [tool]}
    choice = {"type": "function", "function": {"name": "get_weather"}}
    called = litellm.completion(tool_choice=choice, **asked).choices[0].message.tool_calls[0]
    assert called.function.name == "get_weather" and "city" in json.loads(called.function.arguments), called
    pieces = list(litellm.completion(tool_choice=choice, stream=True, **asked))
    streamed = litellm.stream_chunk_builder(pieces, messages=talk).choices[0].message.tool_calls[0]
    assert json.loads(streamed.function.arguments) == json.loads(called.function.arguments), streamed
for model, base in (("openai/smollm2", f"{url}/v1"), ("anthropic/smollm2", url)):
    long = {"model": model, "api_base": base, "messages": [{"role": "user", "content": "word " * 20_000}]}
    try:
        litellm.completion(**chat | long)
        raise SystemExit("a prompt that is too long was taken")
    except litellm.ContextWindowExceededError as error:  # what its fallbacks to larger models go by
        assert error.status_code == 400, error
stream = litellm.completion(stream=True, **chat | {"max_tokens": 2000})
next(stream)
stream.completion_stream.close()

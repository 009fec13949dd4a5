"""Ollama's client against the server: list, show, chat, generate, streams, a schema, a tool, a stream that is left."""

import json
import sys

import ollama

url, key = sys.argv[1:]
client = ollama.Client(host=url, headers={"authorization": f"Bearer {key}"})
assert client.list().models[0].model == "smollm2:latest"
assert client.show("smollm2").modelinfo["llama.context_length"] > 0
assert client.ps().models[0].model == "smollm2:latest"
asked = {"model": "smollm2", "options": {"temperature": 0, "num_predict": 12}}
talk = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
whole = client.chat(messages=talk, **asked).message.content
assert "Paris" in whole, whole
assert "".join(piece.message.content or "" for piece in client.chat(messages=talk, stream=True, **asked)) == whole
scored = client.generate(prompt="The capital of France is", raw=True, logprobs=True, top_logprobs=2, **asked).logprobs
assert scored and len(scored) == 12 and scored[0].token == " Paris" and len(scored[0].top_logprobs) == 2, scored
assert len(client.chat(messages=talk, logprobs=True, **asked).logprobs) > 0
assert client.generate(prompt="The capital of France is", raw=True, **asked).response.strip().startswith("Paris")
schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
asked["options"]["num_predict"] = 60
assert "city" in json.loads(client.chat(messages=talk, format=schema, **asked).message.content)


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"sunny in {city}"


# Ollama's API cannot demand a call, and this model may do without one; what it does call is the tool.
for piece in client.chat(
    messages=[{"role": "user", "content": "The weather in Paris?"}], tools=[get_weather], stream=True, **asked
):
    for call in piece.message.tool_calls or []:
        assert call.function.name == "get_weather", piece
talk += [
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}]},
    {"role": "tool", "tool_name": "get_weather", "content": "sunny"},
]
assert client.chat(messages=talk, tools=[get_weather], **asked).eval_count > 0
asked["options"]["num_predict"] = 2000
stream = client.chat(messages=[{"role": "user", "content": "Count up."}], stream=True, **asked)
assert next(stream).message.role == "assistant"
stream.close()

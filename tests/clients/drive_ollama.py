"""Ollama's client against the server: list, show, chat, generate, streams, a schema."""

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
assert client.generate(prompt="The capital of France is", raw=True, **asked).response.strip().startswith("Paris")
schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
asked["options"]["num_predict"] = 60
assert "city" in json.loads(client.chat(messages=talk, format=schema, **asked).message.content)

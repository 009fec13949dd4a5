"""huggingface_hub's InferenceClient against the server: chat, streams, cancel, a tool, a schema, and TGI's text generation."""

import asyncio
import json
import sys

from huggingface_hub import AsyncInferenceClient, InferenceClient

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
PLACE = {"city": {"type": "string", "maxLength": 12}}
SCHEMA = {"type": "object", "properties": PLACE, "required": ["city"], "additionalProperties": False}
url, key = sys.argv[1:]
chat = InferenceClient(base_url=f"{url}/v1", api_key=key)
whole = chat.chat_completion(QUESTION, model="smollm2", max_tokens=12, temperature=0)
text = whole.choices[0].message.content
assert "Paris" in text and whole.usage.completion_tokens > 0, whole
pieces = list(chat.chat_completion(QUESTION, model="smollm2", max_tokens=12, temperature=0, stream=True))
assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == text, pieces
asked = {"model": "smollm2", "max_tokens": 80, "temperature": 0}
shape = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
assert "city" in json.loads(chat.chat_completion(QUESTION, response_format=shape, **asked).choices[0].message.content)
tool = {"type": "function", "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": SCHEMA}}
choice = {"type": "function", "function": {"name": "get_weather"}}
called = chat.chat_completion(QUESTION, tools=[tool], tool_choice=choice, **asked).choices[0].message.tool_calls[0]
assert called.function.name == "get_weather" and "city" in json.loads(called.function.arguments), called

tgi = InferenceClient(model=url, token=key)
told = tgi.text_generation("The capital of France is", max_new_tokens=8, details=True)
assert told.generated_text.strip().startswith("Paris") and told.details.generated_tokens == 8, told
parts = list(tgi.text_generation("The capital of France is", max_new_tokens=8, stream=True, details=True))
assert "".join(part.token.text for part in parts) == told.generated_text == parts[-1].generated_text, parts
assert tgi.text_generation("The capital of France is", max_new_tokens=8).strip().startswith("Paris")


async def leave() -> None:
    async with AsyncInferenceClient(base_url=f"{url}/v1", api_key=key) as client:
        async for piece in await client.chat_completion(
            [{"role": "user", "content": "Count up."}], stream=True, **asked | {"max_tokens": 2000}
        ):
            assert piece.choices
            return


asyncio.run(leave())

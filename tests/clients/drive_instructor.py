"""Instructor against the server: one object as tool call, as JSON and by schema, partial objects, an answer given up."""

import asyncio
import sys

import httpx
import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")  # a small model would invent fields until its tokens are used up

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


url, key = sys.argv[1:]
plain = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
asked = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Anna is 31 years old."}],
    "temperature": 0,
    "max_tokens": 100,
    "max_retries": 0,
}
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(plain, mode=mode)
    person, answer = client.chat.completions.create_with_completion(response_model=Person, **asked)
    assert isinstance(person, Person) and answer.usage.completion_tokens > 0, (mode, answer)
    # Each part of the stream holds more than the one before; the last is the whole.
    parts = list(client.chat.completions.create_partial(response_model=Person, **asked))
    assert parts[-1].model_dump() == person.model_dump(), (mode, parts, person)
    assert len({part.model_dump_json() for part in parts}) > 1, (mode, parts)
client = instructor.from_openai(plain, mode=instructor.Mode.JSON)  # any JSON object; the model may miss the shape
try:
    client.chat.completions.create(response_model=Person, **asked)
except instructor.core.InstructorRetryException as error:
    assert "validation error" in str(error) and "Invalid JSON" not in str(error), error


class Story(BaseModel):
    model_config = ConfigDict(extra="forbid")
    text: str = Field(min_length=3000)


async def leave() -> None:
    busy = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    client = instructor.from_openai(busy, mode=instructor.Mode.JSON_SCHEMA)
    task = asyncio.ensure_future(client.chat.completions.create(response_model=Story, **asked | {"max_tokens": 2000}))
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}) as probe:
        while not (await probe.get(f"{url}/load")).json()["running"]:
            assert not task.done(), task
            await asyncio.sleep(0.05)
    task.cancel()


asyncio.run(leave())

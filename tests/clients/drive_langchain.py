"""LangChain against the server: whole, streamed, a tool, structured output, a stream that is left."""

import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


url, key = sys.argv[1:]
chat = ChatOpenAI(base_url=f"{url}/v1", api_key=key, model="smollm2", temperature=0, max_tokens=60, max_retries=0)
question = "What is the capital of France? Answer in one word."
whole = chat.invoke(question)
assert "Paris" in whole.content, whole
assert whole.usage_metadata["output_tokens"] > 0
assert "".join(chunk.content for chunk in chat.stream(question)) == whole.content
person = chat.with_structured_output(Person, method="json_schema").invoke("Invent a person.")
assert isinstance(person, Person), person
called = chat.bind_tools([get_weather], tool_choice="get_weather").invoke("What is the weather in Paris?")
assert called.tool_calls[0]["name"] == "get_weather" and "city" in called.tool_calls[0]["args"], called
stream = chat.bind(max_tokens=2000).stream("Count up.")
assert next(stream) is not None
stream.close()

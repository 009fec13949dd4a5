"""LlamaIndex against the server: completion, chat, streams, a tool, a structured answer, a stream that is left."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict, Field


class Place(BaseModel):
    """A place."""

    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=12)


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


url, key = sys.argv[1:]
common = {"api_base": f"{url}/v1", "api_key": key, "model": "smollm2", "temperature": 0, "max_tokens": 12, "max_retries": 0}
plain = OpenAILike(is_chat_model=False, **common)
assert plain.complete("The capital of France is").text.strip().startswith("Paris")
chat = OpenAILike(is_chat_model=True, **common)
question = [ChatMessage(role="user", content="What is the capital of France? Answer in one word.")]
whole = chat.chat(question).message.content
assert "Paris" in whole, whole
assert "".join(piece.delta or "" for piece in chat.stream_chat(question)) == whole
able = OpenAILike(is_chat_model=True, is_function_calling_model=True, **common | {"max_tokens": 80})
tool = FunctionTool.from_defaults(get_weather)
answer = able.chat_with_tools([tool], user_msg="What is the weather in Paris?", tool_required=True)
calls = able.get_tool_calls_from_response(answer)
assert calls[0].tool_name == "get_weather" and "city" in calls[0].tool_kwargs, answer
assert isinstance(able.as_structured_llm(Place).complete("The capital of France.").raw, Place)
endless = {"extra_body": {"ignore_eos": True}}
stream = OpenAILike(is_chat_model=True, additional_kwargs=endless, **common | {"max_tokens": 2000}).stream_chat(
    [ChatMessage(role="user", content="Count up.")]
)
assert next(stream)
stream.close()

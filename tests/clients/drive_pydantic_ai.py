"""Pydantic AI against the server: chat, stream and cancel, an output by schema and by tool, a function called and answered."""

import asyncio
import sys

from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.direct import model_request
from pydantic_ai.messages import ModelRequest, ToolCallPart, ToolReturnPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=12)


SCHEMA = Place.model_json_schema()
QUESTION = "What is the capital of France? Answer in one word."
url, key = sys.argv[1:]
provider = OpenAIProvider(base_url=f"{url}/v1", api_key=key)


async def drive(kind: type[OpenAIChatModel] | type[OpenAIResponsesModel]) -> None:
    model = kind("smollm2", provider=provider, settings={"temperature": 0, "max_tokens": 80})
    agent = Agent(model, retries=0)
    whole = await agent.run(QUESTION)
    assert "Paris" in whole.output and whole.usage.output_tokens > 0, whole
    async with agent.run_stream(QUESTION) as stream:
        assert [text async for text in stream.stream_text(debounce_by=None)][-1] == whole.output
    async with agent.run_stream("Count up.", model_settings={"max_tokens": 2000}) as stream:
        async for _ in stream.stream_text(delta=True, debounce_by=None):
            break  # the client leaves
    for shape in (NativeOutput(Place), ToolOutput(Place)):
        output = (await Agent(model, output_type=shape, retries=0).run(QUESTION)).output
        assert isinstance(output, Place), output
    await call_a_tool(model)


async def call_a_tool(model: OpenAIChatModel | OpenAIResponsesModel) -> None:
    """The model must call; what the tool said goes back, and the model answers."""
    tool = ToolDefinition(name="get_weather", description="The weather of a city.", parameters_json_schema=SCHEMA)
    talk = [ModelRequest.user_text_prompt("What is the weather in Paris?")]
    must = ModelRequestParameters(function_tools=[tool], allow_text_output=False)
    answer = await model_request(model, talk, model_request_parameters=must)
    call = next(part for part in answer.parts if isinstance(part, ToolCallPart))
    assert call.tool_name == "get_weather" and "city" in call.args_as_dict(), answer
    said = ModelRequest([ToolReturnPart("get_weather", "sunny", call.tool_call_id)])
    last = await model_request(model, [*talk, answer, said], model_request_parameters=ModelRequestParameters(function_tools=[tool]))
    assert last.usage.input_tokens > answer.usage.input_tokens and last.parts, last


asyncio.run(drive(OpenAIChatModel))
asyncio.run(drive(OpenAIResponsesModel))

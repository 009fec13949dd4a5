"""/v1/responses: create (whole, streamed or in the background), get, cancel, delete. Knows its shapes and the shelf.

A response that is kept lies on the shelf, so any HTTP process can tell of it; one in the background is worked at by the process
that took it, which looks at the shelf for the mark that cancels it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from trireme.api.chat.parsing import CallDelta, Delta
from trireme.api.chat.turn import (
    ChatJob,
    ChatResult,
    Conversation,
    allowed_of,
    chat_tokens,
    open_chat,
    template_variables,
    tools_of,
)
from trireme.api.openai.logprobs import LogprobWriter
from trireme.api.openai.response_events import ResponseEvents
from trireme.api.openai.responses_protocol import (
    ResponsesRequest,
    listed_item,
    response_choice,
    response_format,
    response_messages,
    response_tools,
)
from trireme.api.parameters.constraints import constrained
from trireme.api.parameters.sampling import sampling_params, top_logprobs
from trireme.api.service import Service
from trireme.api.stored.shelf import Shelf, absent
from trireme.api.transport.failures import Failure, failure_of
from trireme.api.transport.http import Call, Events, Reply, json_reply
from trireme.errors import BadRequest, Overloaded
from trireme.serve.answers import Answer
from trireme.types import DRAWN, SamplingParams

MAX_BACKGROUND = 256  # responses that one process computes in the background at the same time
LOOK_SECONDS = 0.5


class Responses:
    """The handlers of /v1/responses."""

    def __init__(self, service: Service, shelf: Shelf):
        self.service, self.shelf = service, shelf
        self._background: set[asyncio.Task] = set()

    async def create(self, call: Call) -> Reply | Events:
        request = await call.read(ResponsesRequest)
        model = self.service.check_model(request.model, call)
        items = self._items(call, request)
        job = await self._job(request, items)
        draft = _Draft(self.service, request, model, self.shelf.new_name("resp", call.tenant, "_"))
        if request.background:
            return json_reply(self._begin_background(call, request, job, draft, items))
        conversation = await open_chat(self.service, call, job, streamed=bool(request.stream))
        if request.stream:
            return self._stream(call, request, conversation, draft, items)
        (result,) = await conversation.whole()
        document = draft.finished(result, conversation.flight.answer)
        self._keep(call.tenant, request, document, items)
        return json_reply(document)

    async def get(self, call: Call) -> Reply:
        return json_reply(self._stored(call)["response"])

    async def input_items(self, call: Call) -> Reply:
        items = [listed_item(item, number) for number, item in enumerate(self._stored(call)["items"])]
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
        return json_reply({"object": "list", "data": items, "has_more": False, **ends})

    async def input_tokens(self, call: Call) -> Reply:
        """Counts the tokens in the prompt of such a request."""
        request = await call.read(ResponsesRequest)
        self.service.check_model(request.model, call)
        tokens = await chat_tokens(self.service, await self._job(request, self._items(call, request)))
        return json_reply({"object": "response.input_tokens", "input_tokens": len(tokens)})

    async def compact(self, call: Call) -> Reply:
        text = "POST /v1/responses/compact is not supported here. Fix: shorten the conversation, and send it in input"
        raise Failure(404, text, code="not_found")

    async def delete(self, call: Call) -> Reply:
        name = self._stored(call)["response"]["id"]
        self.shelf.mark(name)
        self.shelf.remove(name)
        return json_reply({"id": name, "object": "response", "deleted": True})

    async def cancel(self, call: Call) -> Reply:
        document = self._stored(call)["response"]
        if not document["background"]:
            raise BadRequest("Only a response in the background can be cancelled.", "close the connection instead", "id")
        if document["status"] in ("queued", "in_progress"):
            self.shelf.mark(document["id"])
            document["status"] = "cancelled"
            self.shelf.put(document["id"], call.tenant, {**self._stored(call), "response": document})
        return json_reply(document)

    async def close(self) -> None:
        """Ends the work in the background."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    # --- the request ----------------------------------------------------------------------------------------------------------

    def _stored(self, call: Call) -> dict[str, Any]:
        return self._stored_by(call.path_params["id"], call.tenant)

    def _stored_by(self, name: str, owner: str) -> dict[str, Any]:
        if not name.startswith("resp_"):
            raise absent(name)
        return self.shelf.get(name, owner)

    def _items(self, call: Call, request: ResponsesRequest) -> list[dict[str, Any]]:
        """All items of the conversation: the earlier response's items, its answer, and the new input."""
        before: list[dict[str, Any]] = []
        if request.previous_response_id:
            try:
                stored = self._stored_by(request.previous_response_id, call.tenant)
            except Failure as failure:
                failure.param = "previous_response_id"
                raise
            before = [*stored["items"], *stored["response"]["output"]]
        if isinstance(request.input, str):
            return [*before, {"type": "message", "role": "user", "content": request.input}]
        given = msgspec.to_builtins(request.input)
        return [*before, *({name: value for name, value in item.items() if value is not None} for item in given)]

    async def _job(self, request: ResponsesRequest, items: list[dict[str, Any]]) -> ChatJob:
        choice = response_choice(request.tool_choice)
        effort = request.reasoning.effort if request.reasoning else None
        return ChatJob(
            messages=response_messages(items, request.instructions),
            sampling=await constrained(self.service, self._sampling(request), response_format(request.text), None),
            tools=allowed_of(tools_of(response_tools(request.tools)), choice.allowed),
            tool_choice=choice.how,
            named=choice.named,
            parallel=request.parallel_tool_calls is not False,
            template=template_variables(None, reasoning_effort=effort),
        )

    def _sampling(self, request: ResponsesRequest) -> SamplingParams:
        names = (*DRAWN, "seed")
        advice = self.service.info.generation
        chosen: dict[str, Any] = {name: advice[name] for name in names if isinstance(advice.get(name), int | float)}
        chosen |= {name: value for name in names if (value := getattr(request, name)) is not None}
        if request.max_output_tokens is not None and request.max_output_tokens < 1:
            raise BadRequest("max_output_tokens must be at least 1.", param="max_output_tokens")
        chosen["max_tokens"] = request.max_output_tokens
        chosen["logprobs"] = top_logprobs(request.top_logprobs or None, "top_logprobs")
        return sampling_params(chosen)

    # --- the answer -----------------------------------------------------------------------------------------------------------

    def _keep(self, owner: str, request: ResponsesRequest, document: dict[str, Any], items: list[dict[str, Any]]) -> None:
        if request.store is not False:
            self.shelf.make_room("resp", owner)
            self.shelf.put(document["id"], owner, {"response": document, "items": items})

    def _stream(
        self, call: Call, request: ResponsesRequest, conversation: Conversation, draft: _Draft, items: list[dict[str, Any]]
    ) -> Events:
        events = ResponseEvents(draft.id)

        async def pieces() -> AsyncIterator[bytes]:
            yield events.status("created", draft.begun()) + events.status("in_progress", draft.begun())
            result = ChatResult()
            async for piece in conversation:
                result.take(piece)
                yield events.delta(piece.delta)
            yield events.close()
            document = draft.finished(result, conversation.flight.answer, events.output)
            self._keep(call.tenant, request, document, items)
            yield events.status(document["status"], document)

        return Events(pieces(), failed=lambda failure: events.status("failed", draft.failed(failure)) + events.error(failure))

    def _begin_background(
        self, call: Call, request: ResponsesRequest, job: ChatJob, draft: _Draft, items: list[dict[str, Any]]
    ) -> dict[str, Any]:
        if request.store is False:
            raise BadRequest("A response in the background must be stored.", "leave store out", "store")
        if request.stream:
            raise BadRequest("A response in the background cannot be streamed here.", "ask for it by its id", "stream")
        if len(self._background) >= MAX_BACKGROUND:
            raise Overloaded(f"{MAX_BACKGROUND} responses are at work in the background.", "wait for one to end")
        document = {**draft.begun(), "status": "queued"}
        self._keep(call.tenant, request, document, items)
        own = Call(call.path, {}, b"", {}, {}, call.request_id, call.tenant)
        task = asyncio.create_task(self._work(own, request, job, draft, items))
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return document

    async def _work(self, call: Call, request: ResponsesRequest, job: ChatJob, draft: _Draft, items: list[dict[str, Any]]) -> None:
        try:
            async with call.exits:
                whole = asyncio.ensure_future(self._answer(call, job, draft))
                while not whole.done():
                    await asyncio.wait({whole}, timeout=LOOK_SECONDS)
                    if self.shelf.marked(draft.id):
                        whole.cancel()
                        with contextlib.suppress(asyncio.CancelledError):
                            await whole
                        return
                document = whole.result()
        except Exception as error:
            document = draft.failed(failure_of(error))
        if not self.shelf.marked(draft.id):
            self._keep(call.tenant, request, document, items)

    async def _answer(self, call: Call, job: ChatJob, draft: _Draft) -> dict[str, Any]:
        conversation = await open_chat(self.service, call, job)
        (result,) = await conversation.whole()
        return draft.finished(result, conversation.flight.answer)


class _Draft:
    """The fields of a response at its beginning and at its end."""

    def __init__(self, service: Service, request: ResponsesRequest, model: str, id: str):
        self.id, self._service, self._request, self._model = id, service, request, model
        self._created = int(time.time())

    def begun(self) -> dict[str, Any]:
        request = self._request
        choice = request.tool_choice or "auto"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress",
            "background": bool(request.background),
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "store": request.store is not False,
            "temperature": request.temperature,
            "text": {"format": request.text.format if request.text and request.text.format else {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else msgspec.to_builtins(choice),
            "tools": msgspec.to_builtins(request.tools or []),
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
        }

    def finished(self, result: ChatResult, answer: Answer, output: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        made = len(result.token_ids)
        cut = result.finish == "length"
        output = output if output is not None else _output(self.id, result)
        if self._request.top_logprobs:
            self._add_logprobs(output, result)
        document = {
            **self.begun(),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": {
                "input_tokens": len(answer.tokens),
                "input_tokens_details": {"cached_tokens": answer.cached_tokens},
                "output_tokens": made,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": len(answer.tokens) + made,
            },
        }
        return msgspec.to_builtins(document)

    def failed(self, failure: Failure) -> dict[str, Any]:
        return msgspec.to_builtins(
            {**self.begun(), "status": "failed", "error": {"code": "server_error", "message": failure.message}}
        )

    def _add_logprobs(self, output: list[dict[str, Any]], result: ChatResult) -> None:
        writer = LogprobWriter(self._service.client.tokenizer)
        listed = msgspec.to_builtins(writer.chat(result.logprobs, self._request.top_logprobs or 0).content)
        for item in output:
            for part in item.get("content") or [] if item["type"] == "message" else []:
                part["logprobs"] = listed


def _output(id: str, result: ChatResult) -> list[dict[str, Any]]:
    """The items of a whole answer, built as if it had come in one piece."""
    events = ResponseEvents(id)
    calls = [CallDelta(i, call.id, call.function.name, call.function.arguments) for i, call in enumerate(result.calls)]
    events.delta(Delta(result.content, result.reasoning, calls))
    events.close()
    return events.output

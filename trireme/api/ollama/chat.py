"""Ollama's API: /api/chat, /api/generate, /api/tags, /api/show, /api/ps, /api/version. Knows its answers, lines of JSON."""

from __future__ import annotations

import datetime
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

import trireme
from trireme.api.chat.turn import ChatJob, ChatResult, Conversation, allowed_of, bounded, messages_of, open_chat, tools_of
from trireme.api.ollama.card import model_facts
from trireme.api.ollama.protocol import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    Options,
    ShowRequest,
    format_of,
    message_of,
    thinking_of,
)
from trireme.api.openai.infill import infill_tokens
from trireme.api.openai.logprobs import LogprobWriter
from trireme.api.openai.protocol import choice_of
from trireme.api.parameters.constraints import constrained
from trireme.api.parameters.sampling import sampling_params, stop_strings, top_logprobs
from trireme.api.service import Flight, Service
from trireme.api.transport.failures import Failure, Shape, failure_body
from trireme.api.transport.http import Call, Events, Reply, json_reply
from trireme.errors import BadRequest
from trireme.serve.answers import Answer
from trireme.types import DRAWN, SamplingParams, TokenLogprobs


class Ollama:
    """The handlers of Ollama's API."""

    def __init__(self, service: Service):
        self.service = service
        self._facts: dict[str, Any] | None = None  # facts of the model's files, after the first request for them

    async def chat(self, call: Call) -> Reply | Events:
        request = await call.read(OllamaChatRequest)
        model = self._model(request.model, call)
        if not request.messages:  # a request without messages asks the server to load the model
            return json_reply(_line(model, {"message": {"role": "assistant", "content": ""}}, request.load_reason))
        choice = choice_of(request.tool_choice)
        job = ChatJob(
            messages=messages_of([message_of(message) for message in request.messages]),
            sampling=await self._sampling(request),
            tools=allowed_of(tools_of(request.tools), choice.allowed),
            tool_choice=choice.how,
            named=choice.named,
            template=thinking_of(request),
            context=self._context(request),
        )
        conversation = await open_chat(self.service, call, job, streamed=request.stream)
        writer = self._writer(model, "message", call, request)
        if request.stream:
            return _lines(writer.stream(conversation))
        return json_reply(await writer.whole(conversation))

    async def generate(self, call: Call) -> Reply | Events:
        request = await call.read(OllamaGenerateRequest)
        model = self._model(request.model, call)
        if not request.prompt:
            return json_reply(_line(model, {"response": ""}, request.load_reason))
        if request.images:
            raise BadRequest("This route takes no images.", "send text alone", "images")
        sampling = await self._sampling(request)
        writer = self._writer(model, "response", call, request)
        if request.suffix or request.raw or self.service.client.tokenizer.chat_template is None:
            tokens = await self._prompt_tokens(request.prompt, request.suffix)
            context = self._context(request)
            sampling = sampling if context is None else bounded(sampling, len(tokens), context)
            flight = await self.service.open(call, tokens, sampling, prompt=request.prompt, streamed=request.stream)
            if request.stream:
                return _lines(writer.stream_raw(flight))
            return json_reply(await writer.whole_raw(flight))
        messages = [{"role": "system", "content": request.system}] if request.system else []
        messages.append({"role": "user", "content": request.prompt})
        job = ChatJob(messages=messages, sampling=sampling, template=thinking_of(request), context=self._context(request))
        conversation = await open_chat(self.service, call, job, streamed=request.stream)
        if request.stream:
            return _lines(writer.stream(conversation))
        return json_reply(await writer.whole(conversation))

    async def _prompt_tokens(self, prompt: str, suffix: str | None) -> list[int]:
        """The tokens of a prompt; with a suffix, of a prompt to fill the middle in."""
        if not suffix:
            return await self.service.encode(prompt)
        size = len(prompt) + len(suffix)
        await self.service.check_text(size)
        return await self.service.with_tokenizer(size, lambda tokenizer: infill_tokens(tokenizer, prompt, suffix))

    async def tags(self, call: Call) -> Reply:
        return json_reply({"models": [await self._card()]})

    async def ps(self, call: Call) -> Reply:
        if self.service.client.state().name != "ready":
            return json_reply({"models": []})
        return json_reply({"models": [{**await self._card(), "size_vram": 0, "expires_at": "9999-12-31T00:00:00Z"}]})

    async def show(self, call: Call) -> Reply:
        request = await call.read(ShowRequest)
        self._model(request.model or request.name, call)
        info = self.service.info
        kind = str(info.config.get("model_type", "unknown"))
        template = self.service.client.tokenizer.chat_template
        able = ["completion", *(["tools"] if template and "tools" in template else [])]
        return json_reply(
            {
                "modelfile": "",
                "parameters": "",
                "template": template or "",
                "details": (await self._card())["details"],
                "model_info": {"general.architecture": kind, f"{kind}.context_length": info.max_model_len},
                "capabilities": able,
                "modified_at": _stamp(info.created),
            }
        )

    async def version(self, call: Call) -> Reply:
        return json_reply({"version": trireme.__version__})

    async def _card(self) -> dict[str, Any]:
        info = self.service.info
        if self._facts is None:
            self._facts = await self.service.in_thread(model_facts, info.path)
        name = f"{info.name}:latest" if ":" not in info.name else info.name
        return {"name": name, "model": name, "modified_at": _stamp(info.created), **self._facts}

    def _model(self, name: str, call: Call) -> str:
        self.service.check_model(name, call)
        return name

    def _context(self, request: OllamaRequest) -> int | None:
        """The client's bound on the context, if it is smaller than the server's."""
        asked, most = request.options.num_ctx if request.options else None, self.service.info.max_model_len
        return asked if asked is not None and 0 < asked < most else None

    def _writer(self, model: str, field: str, call: Call, request: OllamaRequest) -> _Writer:
        return _Writer(model, field, call.begun, LogprobWriter(self.service.client.tokenizer), _alternatives(request))

    async def _sampling(self, request: OllamaRequest) -> SamplingParams:
        options = request.options or Options()
        options.check_penalties()
        names = (*DRAWN, "seed", "presence_penalty", "frequency_penalty")
        advice = self.service.info.generation
        chosen = {name: advice[name] for name in names if isinstance(advice.get(name), int | float)}
        chosen |= {name: value for name in names if (value := getattr(options, name)) is not None}
        if options.repeat_penalty is not None:
            chosen["repetition_penalty"] = options.repeat_penalty
        predict = options.num_predict
        chosen["max_tokens"] = predict if predict is not None and predict >= 0 else None
        chosen["stop"] = stop_strings(options.stop)
        chosen["logprobs"] = _alternatives(request)
        return await constrained(self.service, sampling_params(chosen), format_of(request.format), None)


class _Writer:
    """Writes an answer as lines of JSON. Durations are in nanoseconds."""

    def __init__(self, model: str, field: str, begun: float, logprobs: LogprobWriter, alternatives: int | None):
        """alternatives: of each token, beside its log-probability; None: log-probabilities are not asked for"""
        self._model, self._field, self._begun = model, field, begun
        self._logprobs, self._alternatives = logprobs, alternatives
        self._first: float | None = None

    async def whole(self, conversation: Conversation) -> dict[str, Any]:
        result = ChatResult()
        async for piece in conversation:
            self._first = self._first or time.monotonic()
            result.take(piece)
        return self._finished(result, conversation.flight.answer)

    async def whole_raw(self, flight: Flight) -> dict[str, Any]:
        result = ChatResult()
        async for piece in flight:
            self._first = self._first or time.monotonic()
            result.content += piece.text
            result.logprobs += piece.logprobs or []
            result.finish = str(piece.finish_reason or result.finish)
        return self._finished(result, flight.answer)

    def _finished(self, result: ChatResult, answer: Answer) -> dict[str, Any]:
        calls = [(call.function.name, call.function.arguments) for call in result.calls]
        body = self._body(result.content, result.reasoning, calls) | self._scores(result.logprobs)
        return _line(self._model, body, done_reason=_reason(result.finish)) | self._figures(answer)

    async def stream(self, conversation: Conversation) -> AsyncIterator[bytes]:
        result = ChatResult()
        async for piece in conversation:
            self._first = self._first or time.monotonic()
            result.take(piece)
            scores = self._scores(piece.logprobs)
            if piece.delta.content or piece.delta.reasoning or scores:
                yield _encoded(_line(self._model, self._body(piece.delta.content, piece.delta.reasoning, []) | scores))
        if result.calls:  # the arguments of a call are objects, so they are complete only at the end
            calls = [(call.function.name, call.function.arguments) for call in result.calls]
            yield _encoded(_line(self._model, self._body("", "", calls)))
        last = _line(self._model, self._body("", "", []), done_reason=_reason(result.finish))
        yield _encoded(last | self._figures(conversation.flight.answer))

    async def stream_raw(self, flight: Flight) -> AsyncIterator[bytes]:
        finish = "stop"
        async for piece in flight:
            self._first = self._first or time.monotonic()
            finish = str(piece.finish_reason or finish)
            scores = self._scores(piece.logprobs)
            if piece.text or scores:
                yield _encoded(_line(self._model, self._body(piece.text, "", []) | scores))
        yield _encoded(_line(self._model, self._body("", "", []), done_reason=finish) | self._figures(flight.answer))

    def _body(self, content: str, reasoning: str, calls: list[tuple[str, str]]) -> dict[str, Any]:
        if self._field == "response":
            return {"response": content, **({"thinking": reasoning} if reasoning else {})}
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["thinking"] = reasoning
        if calls:
            message["tool_calls"] = [{"function": {"name": name, "arguments": _object(text)}} for name, text in calls]
        return {"message": message}

    def _scores(self, entries: list[TokenLogprobs] | None) -> dict[str, Any]:
        """The log-probabilities of a line's tokens, if the request asks for them."""
        if self._alternatives is None or not entries:
            return {}
        return {"logprobs": self._logprobs.chat(entries, self._alternatives).content}

    def _figures(self, answer: Answer) -> dict[str, int]:
        now = time.monotonic()
        first = self._first or now
        return {
            "total_duration": int((now - self._begun) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": len(answer.tokens),
            "prompt_eval_duration": int((first - self._begun) * 1e9),
            "eval_count": sum(len(completion.token_ids) for completion in answer.completions),
            "eval_duration": int((now - first) * 1e9),
        }


def _alternatives(request: OllamaRequest) -> int | None:
    return top_logprobs(request.top_logprobs or 0, "top_logprobs") if request.logprobs else None


def _line(model: str, body: dict[str, Any], done_reason: str | None = None) -> dict[str, Any]:
    line = {"model": model, "created_at": _stamp(time.time()), **body, "done": done_reason is not None}
    return line | ({"done_reason": done_reason} if done_reason else {})


def _lines(pieces: AsyncIterator[bytes]) -> Events:
    return Events(pieces, "application/x-ndjson", _failed, keep_alive=b"")


def _encoded(line: dict[str, Any]) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _failed(failure: Failure) -> bytes:
    return failure_body(failure, Shape.OLLAMA) + b"\n"


def _reason(finish: str) -> str:
    return "stop" if finish == "tool_calls" else finish


def _object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {"arguments": text}


def _stamp(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")

"""LightLLM's native API and TGI's, which share their paths: /generate, /generate_stream; and POST /, /tokens, /token_load, /info.

Knows both shapes. A body is TGI's if it has a field that only TGI's clients send, or by `?api=tgi`; else it is native.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, ClassVar

import msgspec

import trireme
from trireme.api.openai.logprobs import finite
from trireme.api.openai.protocol import ResponseFormat, StructuredOutputs
from trireme.api.operation.metrics import kv_usage
from trireme.api.parameters.constraints import constrained
from trireme.api.parameters.sampling import sampling_params, top_logprobs
from trireme.api.service import Flight, Service
from trireme.api.transport.failures import Shape, failure_document
from trireme.api.transport.fields import OtherFields
from trireme.api.transport.http import Call, Events, Reply, event, json_reply
from trireme.errors import BadRequest
from trireme.serve.answers import Answer, Piece
from trireme.types import DRAWN, Completion, Draw, FinishReason, SamplingParams, TokenLogprobs


class TgiGrammar(msgspec.Struct):
    type: str
    value: str | dict[str, Any]


_OTHER_PARAMETERS = OtherFields(
    refused={
        "adapter_id": "start a server with the model that you want",
        "exponential_decay_length_penalty": f"sample by {', '.join(DRAWN)} and the penalties",
        "input_penalty": "use repetition_penalty, which counts the prompt's tokens, too",
        "image_max_patch_num": "send text alone",
    },
    neutral={"image_max_patch_num": (-1,)},
    harmless=frozenset({"add_spaces_between_special_tokens", "group_request_id", "suggested_dp_index"}),
)


class Parameters(Draw, kw_only=True):
    """Both APIs' parameters; the comment says whose those of one alone are."""

    max_new_tokens: int | None = None
    do_sample: bool | None = None
    repetition_penalty: float | None = None
    best_of: int | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    # native
    stop_sequences: str | list[str] | None = None
    n: int | None = None
    presence_penalty: float | None = None
    ignore_eos: bool = False
    min_new_tokens: int | None = None
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    return_details: bool = False
    allowed_token_ids: list[int] | None = None
    guided_grammar: str | None = None
    guided_json: str | dict[str, Any] | None = None
    regular_constraint: str | None = None
    # TGI
    details: bool = False
    decoder_input_details: bool = False
    return_full_text: bool | None = None
    stop: list[str] | None = None
    top_n_tokens: int | None = None
    grammar: TgiGrammar | None = None
    truncate: int | None = None
    typical_p: float | None = None
    watermark: bool = False
    others: ClassVar[OtherFields] = _OTHER_PARAMETERS


_TGI_ONLY = (
    "details",
    "decoder_input_details",
    "return_full_text",
    "stop",
    "top_n_tokens",
    "grammar",
    "truncate",
    "typical_p",
    "watermark",
)
_UNSET = Parameters()


class GenerateRequest(msgspec.Struct, kw_only=True):
    """POST /, /generate and /generate_stream"""

    inputs: str
    parameters: Parameters | None = None
    stream: bool | None = None
    others: ClassVar[OtherFields] = OtherFields(refused={"multimodal_params": "send text alone"})


class TokensRequest(msgspec.Struct):
    """POST /tokens"""

    text: str
    parameters: Parameters | None = None


class Native:
    """The handlers of the native API and of TGI's."""

    def __init__(self, service: Service):
        self.service = service

    async def generate(self, call: Call) -> Reply | Events:
        request = await call.read(GenerateRequest)
        if request.stream:
            return await self._stream(call, request)
        parameters, flight = await self._open(call, request)
        output = await flight.output()
        writer = _Writer(self.service, request.inputs, parameters, flight.answer)
        return json_reply(writer.tgi(output.completions) if _is_tgi(call, request) else writer.native(output.completions))

    async def root(self, call: Call) -> Reply | Events:
        """POST /, which only TGI has: huggingface_hub's client generates here. A whole answer is a list with one item."""
        request = await call.read(GenerateRequest)
        if request.stream:
            return await self._stream(call, request)
        parameters, flight = await self._open(call, request)
        output = await flight.output()
        return json_reply([_Writer(self.service, request.inputs, parameters, flight.answer).tgi(output.completions)])

    async def generate_stream(self, call: Call) -> Reply | Events:
        return await self._stream(call, await call.read(GenerateRequest))

    async def _stream(self, call: Call, request: GenerateRequest) -> Events:
        if request.parameters and (request.parameters.best_of or 1) > 1:
            raise BadRequest("best_of cannot be streamed.", "use /generate", "best_of")
        parameters, flight = await self._open(call, request, streamed=True)
        writer = _Writer(self.service, request.inputs, parameters, flight.answer)
        pieces = writer.stream_tgi(flight) if _is_tgi(call, request) else writer.stream_native(flight)
        return Events(pieces, failed=lambda failure: event(failure_document(failure, Shape.TGI)))

    async def tokens(self, call: Call) -> Reply:
        request = await call.read(TokensRequest)
        add_special = request.parameters is None or request.parameters.add_special_tokens
        return json_reply({"ntokens": len(await self.service.encode(request.text, add_special))})

    async def token_load(self, call: Call) -> Reply:
        """The shares of KV memory in use, in the form that LightLLM's load balancers read."""
        load = kv_usage(await self.service.client.stats())
        return json_reply({"current_load": load, "logical_max_load": load, "dynamic_max_load": load})

    async def info(self, call: Call) -> Reply:
        info = self.service.info
        return json_reply(
            {
                "model_id": info.name,
                "model_dtype": info.dtype,
                "model_device_type": info.backend,
                "max_concurrent_requests": self.service.config.schedule.max_waiting,
                "max_best_of": 128,
                "max_stop_sequences": 64,
                "max_input_tokens": max(info.max_model_len - 1, 0),
                "max_total_tokens": info.max_model_len,
                "version": trireme.__version__,
                "router": "trireme",
            }
        )

    async def _open(self, call: Call, request: GenerateRequest, streamed: bool = False) -> tuple[Parameters, Flight]:
        parameters = request.parameters or _UNSET
        tokens = await self.service.encode(request.inputs, parameters.add_special_tokens)
        if parameters.truncate is not None:  # the client asked for truncation explicitly
            if parameters.truncate < 1:
                raise BadRequest("truncate must be at least 1.", param="truncate")
            tokens = tokens[-parameters.truncate :]
        sampling = _sampling(parameters, self.service.info.generation)
        sampling = await constrained(self.service, sampling, *_constraint(parameters))
        return parameters, await self.service.open(call, tokens, sampling, prompt=request.inputs, streamed=streamed)


def _is_tgi(call: Call, request: GenerateRequest) -> bool:
    if "api" in call.query:
        return call.query["api"] == "tgi"
    parameters = request.parameters or _UNSET
    return request.stream is not None or any(getattr(parameters, name) != getattr(_UNSET, name) for name in _TGI_ONLY)


def _sampling(parameters: Parameters, advice: dict[str, Any]) -> SamplingParams:
    if parameters.typical_p not in (None, 1.0) or parameters.watermark:
        raise BadRequest("typical_p and watermark are not offered here.", "leave them out", "typical_p")
    stop = parameters.stop if parameters.stop is not None else parameters.stop_sequences
    alternatives = top_logprobs(parameters.top_n_tokens, "top_n_tokens")
    details = parameters.details or parameters.return_details or alternatives is not None
    chosen: dict[str, Any] = {
        "max_tokens": 128 if parameters.max_new_tokens is None else parameters.max_new_tokens,
        "min_tokens": parameters.min_new_tokens,
        "n": parameters.n,
        "best_of": parameters.best_of,
        "stop": [stop] if isinstance(stop, str) else stop,
        "ignore_eos": parameters.ignore_eos,
        "skip_special_tokens": parameters.skip_special_tokens,
        "allowed_token_ids": parameters.allowed_token_ids,
        "logprobs": (alternatives or 0) if details else None,
        "prompt_logprobs": 0 if parameters.decoder_input_details else None,
    }
    names = (*DRAWN, "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")
    chosen |= {name: getattr(parameters, name) for name in names}
    sampled = parameters.do_sample if parameters.do_sample is not None else parameters.temperature is not None
    if not sampled:
        chosen["temperature"] = 0.0
    elif chosen["temperature"] is None and isinstance(advice.get("temperature"), int | float):
        chosen["temperature"] = advice["temperature"]
    if chosen["top_k"] == -1:
        chosen["top_k"] = 0
    return sampling_params({name: value for name, value in chosen.items() if value is not None})


def _constraint(parameters: Parameters) -> tuple[ResponseFormat | None, StructuredOutputs | None]:
    grammar = parameters.grammar
    if grammar is not None:
        if grammar.type == "regex":
            if not isinstance(grammar.value, str):
                raise BadRequest("grammar.value is an object; a grammar of type 'regex' needs a string.", param="grammar")
            return None, StructuredOutputs(regex=grammar.value)
        if grammar.type in ("json", "json_schema"):
            return None, StructuredOutputs(json=grammar.value)
        raise BadRequest(f"grammar.type is {grammar.type[:40]!r}; it must be 'json' or 'regex'.", param="grammar")
    if parameters.guided_json is not None:
        return None, StructuredOutputs(json=parameters.guided_json)
    if parameters.guided_grammar is not None:
        return None, StructuredOutputs(grammar=parameters.guided_grammar)
    if parameters.regular_constraint is not None:
        return None, StructuredOutputs(regex=parameters.regular_constraint)
    return None, None


_TGI_FINISH = {FinishReason.STOP: "eos_token", FinishReason.LENGTH: "length"}


class _Writer:
    """Writes an answer in the shape of either API."""

    def __init__(self, service: Service, prompt: str, parameters: Parameters, answer: Answer):
        self._service, self._prompt, self._parameters, self._answer = service, prompt, parameters, answer

    def native(self, completions: list[Completion]) -> dict[str, Any]:
        document: dict[str, Any] = {
            "generated_text": [completion.text for completion in completions],
            "count_output_tokens": sum(len(completion.token_ids) for completion in completions),
            "finish_reason": str(completions[0].finish_reason),
            "prompt_tokens": len(self._answer.tokens),
        }
        if self._parameters.return_details:
            document["tokens"] = [self._token(token, entry) for token, entry in _pairs(completions[0])]
        return document

    async def stream_native(self, flight: Flight) -> AsyncIterator[bytes]:
        made = 0
        async for piece in flight:
            made += len(piece.token_ids)
            token = self._piece_token(piece) | {"count_output_tokens": made, "prompt_tokens": len(self._answer.tokens)}
            finish = str(piece.finish_reason) if piece.finish_reason else None
            document = {"token": token, "generated_text": None, "finished": finish is not None, "finish_reason": finish}
            yield event({**document, "details": None})

    def tgi(self, completions: list[Completion]) -> dict[str, Any]:
        completion = completions[0]
        document: dict[str, Any] = {"generated_text": self._full(completion.text)}
        if self._parameters.details:
            tokens = [self._token(token, entry) for token, entry in _pairs(completion)]
            document["details"] = {**self._details(completion), "prefill": self._prefill(), "tokens": tokens}
        return document

    async def stream_tgi(self, flight: Flight) -> AsyncIterator[bytes]:
        index = 0
        async for piece in flight:
            index += len(piece.token_ids)
            document: dict[str, Any] = {"index": index, "token": self._piece_token(piece), "generated_text": None, "details": None}
            if piece.finish_reason:
                completion = self._answer.completions[0]
                document |= {"generated_text": self._full(completion.text), "details": self._details(completion)}
            yield event(document)

    def _full(self, text: str) -> str:
        return self._prompt + text if self._parameters.return_full_text else text

    def _details(self, completion: Completion) -> dict[str, Any]:
        finish = _TGI_FINISH.get(completion.finish_reason, "stop_sequence")  # type: ignore[arg-type]
        if finish == "eos_token" and completion.token_ids[-1:] and completion.token_ids[-1] not in self._service.info.eos_token_ids:
            finish = "stop_sequence"
        return {
            "finish_reason": finish,
            "generated_tokens": len(completion.token_ids),
            "seed": self._parameters.seed,
            "input_length": len(self._answer.tokens),
        }

    def _prefill(self) -> list[dict[str, Any]]:
        entries = self._answer.prompt_logprobs or []
        return [self._token(token, entry) for token, entry in zip(self._answer.tokens, entries, strict=False)]

    def _piece_token(self, piece: Piece) -> dict[str, Any]:
        """The token to show for a piece: its last one. A piece may hold none (the rest of a text) or several (accepted drafts)."""
        token = piece.token_ids[-1] if piece.token_ids else -1
        entry = piece.logprobs[-1] if piece.logprobs else None
        return {**self._token(token, entry), "text": piece.text}

    def _token(self, token: int, entry: TokenLogprobs | None) -> dict[str, Any]:
        tokenizer = self._service.client.tokenizer
        return {
            "id": token,
            "text": tokenizer.token_bytes(token).decode("utf-8", "replace") if token >= 0 else "",
            "logprob": finite(entry.logprob) if entry else None,
            "special": token in tokenizer.special_ids,
        }


def _pairs(completion: Completion) -> list[tuple[int, TokenLogprobs | None]]:
    entries: list[Any] = [*completion.logprobs] if completion.logprobs else [None] * len(completion.token_ids)
    return list(zip(completion.token_ids, entries, strict=False))

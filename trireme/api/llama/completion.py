"""POST /completion and /infill, in the shape of llama.cpp's server. Knows that shape; what it asks for is done elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, ClassVar

import msgspec

from trireme.api.openai.completions import prompt_list
from trireme.api.openai.infill import infill_tokens
from trireme.api.openai.logprobs import LogprobWriter, finite
from trireme.api.openai.other_fields import COMPLETIONS
from trireme.api.openai.protocol import SamplingFields
from trireme.api.openai.timings import timings_of
from trireme.api.parameters.constraints import constrained
from trireme.api.parameters.sampling import sampling_of, stop_strings, top_logprobs
from trireme.api.service import Flight, Service
from trireme.api.transport.fields import OtherFields
from trireme.api.transport.http import Call, Events, Reply, event, json_reply, openai_event_failure
from trireme.errors import BadRequest
from trireme.types import DRAWN, FinishReason, SamplingParams, TokenLogprobs

BANNED = -100.0  # the bias of a token that is `false`
MAX_BIASES = 1024
Bias = dict[str, float | bool] | list[tuple[int | str, float | bool]]


class CompletionFields(SamplingFields, kw_only=True):
    """What both routes take besides the prompt."""

    logit_bias: Bias | None = None  # type: ignore[assignment]
    model: str | None = None
    return_tokens: bool = False
    others: ClassVar[OtherFields] = OtherFields(
        refused=COMPLETIONS.refused,
        neutral=COMPLETIONS.neutral,
        harmless=COMPLETIONS.harmless | {"n_keep", "n_cache_reuse", "response_fields"},
    )


class LlamaRequest(CompletionFields, kw_only=True):
    """POST /completion"""

    prompt: str | list[str | int | list[int]]


class ExtraFile(msgspec.Struct):
    text: str
    filename: str = "extra"


class InfillRequest(CompletionFields, kw_only=True):
    """POST /infill"""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraFile] = []
    prompt: str = ""  # already written after the prefix


class LlamaCompletion:
    """The handlers of both routes."""

    def __init__(self, service: Service):
        self.service = service

    async def completion(self, call: Call) -> Reply | Events:
        request = await call.read(LlamaRequest)
        prompts = prompt_list(request.prompt)
        if len(prompts) != 1:
            raise BadRequest("/completion takes one prompt.", "use /v1/completions for several", "prompt")
        if isinstance(prompts[0], str):
            return await self._answer(call, request, await self.service.encode(prompts[0]), prompts[0])
        return await self._answer(call, request, prompts[0], None)

    async def infill(self, call: Call) -> Reply | Events:
        request = await call.read(InfillRequest)
        before = request.input_prefix + request.prompt
        extra = [(file.filename, file.text) for file in request.input_extra]
        size = len(before) + len(request.input_suffix) + sum(len(name) + len(text) for name, text in extra)
        await self.service.check_text(size)
        tokens = await self.service.with_tokenizer(size, lambda t: infill_tokens(t, before, request.input_suffix, extra))
        return await self._answer(call, request, tokens, before)

    async def _answer(self, call: Call, request: CompletionFields, tokens: list[int], prompt: str | None) -> Reply | Events:
        model = self.service.check_model(request.model, call)
        if (request.n or 1) > 1:
            raise BadRequest("n is above 1; this route gives one answer.", "use /v1/completions for several", "n")
        self._resolve_bias(request)
        wanted = top_logprobs(request.n_probs, "n_probs") if request.n_probs else None
        most = request.n_predict if request.n_predict is not None and request.n_predict >= 0 else None
        sampling = sampling_of(request, self.service.info.generation, most, logprobs=wanted)
        sampling = await constrained(self.service, sampling, request.response_format, request.structured_outputs)
        how: dict[str, Any] = {"salt": request.cache_salt, "priority": request.priority, "streamed": bool(request.stream)}
        flight = await self.service.open(call, tokens, sampling, prompt=prompt, **how)
        writer = _Writer(self.service, request, sampling, flight, model)
        if request.stream:
            return Events(writer.stream(), failed=openai_event_failure)
        await flight.output()
        return json_reply(writer.last(whole=True))

    def _resolve_bias(self, request: CompletionFields) -> None:
        """Turns biases of texts into biases of their tokens."""
        if not request.logit_bias:
            return
        given = request.logit_bias.items() if isinstance(request.logit_bias, dict) else request.logit_bias
        if len(given) > MAX_BIASES:
            raise BadRequest(f"logit_bias has {len(given)} entries; at most {MAX_BIASES} are taken.", param="logit_bias")
        found: dict[str, float | bool] = {}
        for name, value in given:
            bias = BANNED if value is False else float(value)
            found |= dict.fromkeys(map(str, self._named_tokens(name)), bias)
        request.logit_bias = found

    def _named_tokens(self, name: int | str) -> list[int]:
        if isinstance(name, int):
            return [name]
        if name.isdecimal():
            return [int(name[:10])]
        if len(name) > 256:
            raise BadRequest(f"logit_bias names a text of {len(name)} characters; at most 256 are taken.", param="logit_bias")
        return self.service.client.tokenizer.encode(name, add_special=False, allow_special=False)


class _Writer:
    """Writes one answer in llama.cpp's shape."""

    def __init__(self, service: Service, request: CompletionFields, sampling: SamplingParams, flight: Flight, model: str):
        self._service, self._request, self._sampling, self._flight, self._model = service, request, sampling, flight, model

    async def stream(self) -> AsyncIterator[bytes]:
        made = 0
        async for piece in self._flight:
            made += len(piece.token_ids)
            document: dict[str, Any] = {
                "index": 0,
                "content": piece.text,
                "tokens": piece.token_ids,
                "stop": False,
                "id_slot": -1,
                "tokens_predicted": made,
                "tokens_evaluated": len(self._flight.answer.tokens),
            }
            if piece.logprobs:
                document["completion_probabilities"] = self._probabilities(piece.logprobs)
            if self._request.timings_per_token:
                document["timings"] = timings_of(self._flight)
            yield event(document)
        yield event(self.last(whole=False))

    def last(self, whole: bool) -> dict[str, Any]:
        """The whole answer, or what ends a stream: the same without text."""
        answer = self._flight.answer
        completion = answer.completions[0]
        document: dict[str, Any] = {
            "index": 0,
            "content": completion.text if whole else "",
            "tokens": completion.token_ids if whole and self._request.return_tokens else [],
            "id_slot": -1,
            "stop": True,
            "model": self._model,
            "tokens_predicted": len(completion.token_ids),
            "tokens_evaluated": len(answer.tokens),
            "generation_settings": self._settings(),
            "prompt": answer.prompt or "",
            "has_new_line": "\n" in completion.text,
            "truncated": False,  # what does not fit is refused here
            "tokens_cached": answer.cached_tokens,
            "timings": timings_of(self._flight),
            **self._stop(),
        }
        if whole and completion.logprobs:
            document["completion_probabilities"] = self._probabilities(completion.logprobs)
        return document

    def _stop(self) -> dict[str, str]:
        """Why the answer ended: by a token of the model's, a text of the request's, or the limit."""
        completion = self._flight.answer.completions[0]
        if completion.finish_reason is not FinishReason.STOP:
            return {"stop_type": "limit", "stopping_word": ""}
        stops = stop_strings(self._request.stop)
        text = self._service.client.tokenizer.decode(completion.token_ids) if stops else ""
        found = [stop for stop in stops if stop in text[max(len(completion.text) - len(stop), 0) :]]
        return {"stop_type": "word", "stopping_word": found[0]} if found else {"stop_type": "eos", "stopping_word": ""}

    def _settings(self) -> dict[str, Any]:
        sampling, names = self._sampling, (*DRAWN, "seed", "stop", "logprobs")
        shown = {name: getattr(sampling, name) for name in names}
        most = -1 if sampling.max_tokens is None else sampling.max_tokens
        return {
            **shown,
            "n_predict": most,
            "repeat_penalty": sampling.repetition_penalty,
            "n_ctx": self._service.info.max_model_len,
        }

    def _probabilities(self, entries: list[TokenLogprobs]) -> list[dict[str, Any]]:
        writer, tokenizer = LogprobWriter(self._service.client.tokenizer), self._service.client.tokenizer

        def scored(token: int, logprob: float) -> dict[str, Any]:
            spelled = list(tokenizer.token_bytes(token))
            return {"id": token, "token": writer.spelling(token), "bytes": spelled, "logprob": finite(logprob)}

        most = self._request.n_probs or 0
        return [{**scored(e.token, e.logprob), "top_logprobs": [scored(*pair) for pair in e.top[:most]]} for e in entries]

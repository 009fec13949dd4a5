"""From a request's fields to sampling parameters: bounds, defaults of the model's makers, names. Knows no engine."""

from __future__ import annotations

from typing import Any

import msgspec

from trireme.api.openai.protocol import SamplingFields
from trireme.api.transport.mistakes import field_mistake, field_of
from trireme.errors import BadRequest
from trireme.types import DRAWN, SamplingParams

MAX_TOP_LOGPROBS = 20
_ADVISED = (*DRAWN, "repetition_penalty")
_SAME_NAME = (
    *DRAWN,
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "n",
    "min_tokens",
    "stop_token_ids",
    "allowed_token_ids",
)
_OTHER_NAMES = {"no_repeat_ngram": "no_repeat_ngram_size"}  # our name -> the request's name


def sampling_of(fields: SamplingFields, advice: dict[str, Any], max_tokens: int | None, **more: Any) -> SamplingParams:
    """Sampling parameters of an OpenAI-like request; `advice` is the model's generation config.

    `max_tokens` None is a value of its own: until the context is full.
    """
    chosen: dict[str, Any] = {name: advice[name] for name in _ADVISED if isinstance(advice.get(name), int | float)}
    chosen |= {name: value for name in _SAME_NAME if (value := getattr(fields, name)) is not None}
    if chosen.get("top_k") == -1:
        chosen["top_k"] = 0
    if fields.no_repeat_ngram_size is not None:
        chosen["no_repeat_ngram"] = fields.no_repeat_ngram_size
    if fields.skip_special_tokens is not None:
        chosen["skip_special_tokens"] = fields.skip_special_tokens
    chosen |= {
        "max_tokens": max_tokens,
        "stop": stop_strings(fields.stop),
        "logit_bias": _bias(fields.logit_bias),
        "ignore_eos": fields.ignore_eos,
        "include_stop": fields.include_stop_str_in_output,
    }
    try:
        return sampling_params(chosen | {name: value for name, value in more.items() if value is not None})
    except BadRequest as error:
        error.param = _OTHER_NAMES.get(error.param or "", error.param)
        raise


def sampling_params(chosen: dict[str, Any]) -> SamplingParams:
    """Sampling parameters whose numbers are within their bounds; token ids are checked where the vocabulary is known."""
    try:
        sampling = msgspec.convert(chosen, SamplingParams)
    except msgspec.ValidationError as error:
        raise BadRequest(field_mistake(error, SamplingParams), param=field_of(error)) from None
    sampling.check_fields()
    return sampling


def stop_strings(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else list(stop or [])


def top_logprobs(count: int | None, param: str) -> int | None:
    """Checks the number of alternatives against its bound."""
    if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
        raise BadRequest(f"{param} is {count}; it must lie between 0 and {MAX_TOP_LOGPROBS}.", param=param)
    return count


def _bias(given: dict[str, float] | None) -> dict[int, float]:
    bias: dict[int, float] = {}
    for name, value in (given or {}).items():
        if not name.isdecimal() or len(name) > 9:
            raise BadRequest(f"logit_bias names {name[:40]!r}, which is no token id.", param="logit_bias")
        bias[int(name)] = value
    return bias

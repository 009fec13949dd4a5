"""The default sampling parameters, for requests that set none: the operator's, or those the model recommends. Knows no request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trireme.errors import BadConfig, BadRequest
from trireme.types import DRAWN, SamplingParams

ADVISED = (*DRAWN, "repetition_penalty")
CALM = {"temperature": 0.2, "top_p": 0.9}  # small models become incoherent at temperature 1


def advised(generation: Mapping[str, Any]) -> dict[str, float]:
    """The sampling parameters in generation_config.json."""
    return {name: generation[name] for name in ADVISED if generation.get(name) and isinstance(generation[name], int | float)}


def given_sampling(settings: Sequence[str]) -> dict[str, float]:
    """The sampling parameters of --default-sampling: NAME=VALUE each, or calm."""
    chosen: dict[str, float] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if setting == "calm":
            chosen |= CALM
            continue
        if not equals or name not in ADVISED:
            raise BadConfig(f"default_sampling is {setting!r}.", f"write NAME=VALUE with one of {', '.join(ADVISED)}; or calm")
        try:
            chosen[name] = int(value) if name == "top_k" else float(value)
        except ValueError:
            raise BadConfig(f"default_sampling has {setting!r}, which is not a number.", f"write {name}=NUMBER") from None
    try:
        SamplingParams(**chosen).check(1 << 31)  # type: ignore[arg-type]
    except BadRequest as error:
        raise BadConfig(f"default_sampling: {error.cause}", error.fix) from None
    return chosen


def chat_advice(generation: Mapping[str, Any], settings: Sequence[str] = ()) -> tuple[dict[str, float], str]:
    """The default sampling of a chat, and its source: "server" (--default-sampling), "model" or "calm"."""
    given, found = given_sampling(settings), advised(generation)
    if given:
        return found | given, "server"
    return (found, "model") if found else (dict(CALM), "calm")

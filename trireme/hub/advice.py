"""How a model's makers advise to sample its answers, and what is used in chats where they say nothing. Knows no request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trireme.types import DRAWN

ADVISED = (*DRAWN, "repetition_penalty")
CALM = {"temperature": 0.2, "top_p": 0.9}  # small models lose the thread at temperature 1


def advised(generation: Mapping[str, Any]) -> dict[str, float]:
    """What generation_config.json says of sampling."""
    return {name: generation[name] for name in ADVISED if generation.get(name) and isinstance(generation[name], int | float)}


def chat_advice(generation: Mapping[str, Any]) -> tuple[dict[str, float], str]:
    """How a chat samples, and whose advice that is: "model" or "calm"."""
    found = advised(generation)
    return (found, "model") if found else (dict(CALM), "calm")

"""Trireme: LLM inference and serving. `LLM` and `SamplingParams` are the public surface; importing this loads no torch."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from trireme.types import Completion, Output, SamplingParams

if TYPE_CHECKING:
    from trireme.llm import LLM

__version__ = "0.2.0"
__all__ = ["LLM", "Completion", "Output", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":  # loaded on first use: it brings torch
        collecting = gc.isenabled()
        gc.disable()  # a tenth of the import would go into looking for garbage that modules do not make
        try:
            from trireme.llm import LLM
        finally:
            if collecting:
                gc.enable()
        return LLM
    raise AttributeError(f"module 'trireme' has no attribute {name!r}")

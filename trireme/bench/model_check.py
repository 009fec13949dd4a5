"""A model class beside `transformers`: the probabilities of a prompt's tokens and a greedy answer, computed in several ways.

Knows the Python API and transformers; nothing of layers. A checkpoint of random numbers serves as well as a trained one.
"""

from __future__ import annotations

import math
import pathlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trireme.errors import BadConfig, TriremeError
from trireme.llm import LLM
from trireme.types import SamplingParams, TokenLogprobs

ALTERNATIVES = 20  # of each token, whose log-probabilities are compared
NUM_NEW = 8
TOLERANCE = 2e-3  # of a log-probability, in float32: through all layers, and through a softmax


@dataclass(frozen=True)
class Way:
    """How a prompt is computed."""

    name: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class Finding:
    way: str
    error: float  # the largest of any log-probability
    same: bool  # whether the greedy answer is that of transformers
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= TOLERANCE and self.same


def ways(backend: str, ranks: int) -> list[Way]:
    """On the plain bodies: at once, in chunks, by several ranks; then on the backend of this machine."""
    plain = {"backend": "reference"}
    found = [
        Way("reference, the prompt at once", plain),
        Way("reference, in chunks of 7", {**plain, "max_step_tokens": 7, "page_size": 4}),
    ]
    found += [Way(f"reference, {ranks} ranks", {**plain, "tp": ranks})] if ranks > 1 else []
    return found if backend == "reference" else [*found, Way(f"{backend}, the prompt at once", {"backend": backend})]


def check_model(folder: pathlib.Path, backend: str, length: int, ranks: int) -> Iterator[Finding]:
    """Compares every way with transformers."""
    tokens, expected, answer = _by_transformers(folder, length)
    for way in ways(backend, ranks):
        yield _checked(folder, way, tokens, expected, answer)


def _by_transformers(folder: pathlib.Path, length: int) -> tuple[list[int], Any, list[int]]:
    """A random prompt, the log-probabilities after each of its tokens, and the greedy answer."""
    try:
        import torch
        import transformers
    except ImportError:
        raise BadConfig("transformers is not installed, and the comparison needs it.", "pip install transformers") from None
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except Exception as error:  # whatever a library of many models may raise
        line = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        raise BadConfig(f"transformers cannot load {folder}: {line}.", "give a folder that it can load") from None
    numbers = random.Random(1)
    tokens = [numbers.randrange(model.config.get_text_config().vocab_size) for _ in range(length)]
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        told = [*tokens]
        for _ in range(NUM_NEW):
            told.append(int(model(torch.tensor([told])).logits[0, -1].argmax()))
    return tokens, logprobs, told[length:]


def _checked(folder: pathlib.Path, way: Way, tokens: list[int], expected: Any, answer: list[int]) -> Finding:
    sampling = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, prompt_logprobs=ALTERNATIVES)
    settings = {"dtype": "float32", "quantize": "none", "max_model_len": len(tokens) + NUM_NEW, **way.settings}
    try:
        with LLM(str(folder), **settings) as llm:
            (output,) = llm.generate([tokens], sampling)
    except TriremeError as error:
        return Finding(way.name, math.inf, False, str(error))
    entries = output.prompt_logprobs or []
    errors = [_error(entry, expected[at - 1]) for at, entry in enumerate(entries) if entry is not None]
    return Finding(way.name, max(errors, default=math.inf), output.completions[0].token_ids == answer)


def _error(entry: TokenLogprobs, expected: Any) -> float:
    """The largest error of this token's log-probabilities; infinite where one is no number."""
    errors = [abs(logprob - float(expected[token])) for token, logprob in [*entry.top, (entry.token, entry.logprob)]]
    return math.inf if any(map(math.isnan, errors)) else max(errors)

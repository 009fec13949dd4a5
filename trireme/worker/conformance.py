"""Tests whether a backend runs whole models: compares small random models, with KV cache and sampler, to the reference backend.

Plans are written by hand here: chunked prompts, mixed steps, decodes, scattered pages, starts that are the most they can be. Knows
no scheduler and no real checkpoint.
"""

from __future__ import annotations

import json
import math
import pathlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from trireme.backends import open_backend
from trireme.backends.conformance import Finding, difference
from trireme.config import DeviceOptions, resolve
from trireme.ipc.messages import Admit, Plan
from trireme.layers import Env
from trireme.models import model_class
from trireme.quant import Noise
from trireme.types import SamplingParams
from trireme.worker.worker import LocalWorker

VOCAB, LENGTH, PAGE, ROWS = 257, 64, 4, 4
MOST_TOO_FAR = 3
TOLERANCE = 2e-4  # of the largest logit, in float32, through all layers

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen3, window": _LLAMA | {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 7, "tie_word_embeddings": True},
    "qwen2": _LLAMA | {"architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 6, "head_dim": 16},
    "gemma3": _LLAMA | {"architectures": ["Gemma3ForCausalLM"], "head_dim": 32, "sliding_window": 9, "sliding_window_pattern": 2},
    "bloom": {"architectures": ["BloomForCausalLM"], "vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4},
}

_CHOICES = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=11),
    SamplingParams(temperature=1.3, min_p=0.02, seed=12),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5, no_repeat_ngram=2, logit_bias={5: 3.0}),
)


def check_models(name: str) -> Iterator[Finding]:
    """Every small model on the named backend: its logits, then the tokens it samples."""
    for title, raw in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                write_checkpoint(pathlib.Path(folder), raw)
                exact, found = (run(other, pathlib.Path(folder)) for other in ("reference", name))
                error, note = difference(found.logits, exact.logits), ""
                # A graph or a fused sampler runs only where nobody watches the layers.
                wrong, settled = (
                    sum(a != b for a, b in zip(tokens, exact.tokens, strict=True)) / len(exact.tokens)
                    for tokens in (run(name, pathlib.Path(folder), watch=False, too_far=far).tokens for far in (False, True))
                )
            except Exception as failure:  # any exception is a failure of the backend
                error, wrong, settled, note = math.inf, math.inf, math.inf, f"{type(failure).__name__}: {failure}".splitlines()[0]
        yield Finding("model", title, "float32", error, TOLERANCE, note)
        yield Finding("sampler", title, "float32", wrong, 0.0, note)
        yield Finding("lengths", title, "float32", settled, 0.0, note)


# --- a checkpoint of random numbers ---------------------------------------------------------------------------------------------


def write_checkpoint(folder: pathlib.Path, raw: dict[str, Any]) -> None:
    """A config and the tensors its model reads, drawn large enough that every layer shows in the logits."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str, shape: tuple[int, ...]) -> Noise:
        shapes[name] = shape
        return Noise(name, shape)

    cls = model_class(raw)
    cls(Env(open_backend(DeviceOptions(backend="reference")), max_len=LENGTH), cls.config(raw)).load(note)
    numbers = np.random.default_rng(7)
    tensors = {name: _drawn(numbers, shape) for name, shape in shapes.items()}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "model.safetensors").write_bytes(_safetensors(tensors))


def _drawn(numbers: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    values = numbers.standard_normal(shape, dtype=np.float32)
    return values * np.float32(1.4 * shape[1] ** -0.5) if len(shape) > 1 else 1.0 + np.float32(0.3) * values


def _safetensors(tensors: dict[str, np.ndarray]) -> bytes:
    """The file format: the header's length, the header, the bytes."""
    header, offset = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [offset, offset + values.nbytes]}
        offset += values.nbytes
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(values.tobytes() for values in tensors.values())


# --- plans by hand --------------------------------------------------------------------------------------------------------------


@dataclass
class _Sequence:
    """One row of the plans below."""

    prompt: list[int]
    sampling: SamplingParams
    computed: int = 0
    pages: int = 0
    generated: int = 0

    @property
    def left(self) -> int:
        return len(self.prompt) + self.generated - self.computed


@dataclass
class Outcome:
    logits: list[Tensor] = field(default_factory=list)  # per step
    tokens: list[int] = field(default_factory=list)  # in the order they were sampled


def run(name: str, folder: pathlib.Path, watch: bool = True, too_far: bool = False, num_steps: int = 14) -> Outcome:
    """Prompts in chunks beside decodes, decodes alone, then one more with rules.

    watch: keeps the logits, through the hooks on layers; too_far: the plans let rows that generate begin behind where they are
    """
    settings = {"backend": name, "dtype": "float32", "max_model_len": LENGTH, "page_size": PAGE, "kv_tokens": ROWS * LENGTH}
    worker = LocalWorker(resolve(settings | {"max_running": ROWS, "max_step_tokens": 64}, environ={}), folder)
    numbers = np.random.default_rng(3)
    lengths = (1, 9, 30, 17)
    waiting = [_Sequence(numbers.integers(0, VOCAB, n).tolist(), s) for n, s in zip(lengths, _CHOICES, strict=True)]
    free = numbers.permutation(ROWS * LENGTH // PAGE).tolist()
    rows: list[_Sequence] = []
    outcome = Outcome()

    def steps() -> None:
        for step in range(1, num_steps + 1):
            admitted = [waiting.pop(0)] if len(waiting) > 1 or (waiting and step > 8) else []
            rows.extend(admitted)
            plan = _plan(step, rows, len(admitted), free)
            worker.runner.launch(_too_far(plan, rows, numbers) if too_far else plan)
            outcome.tokens.extend(worker.runner.collect().tokens)

    if watch:
        with worker.capture("lm_head") as values:
            steps()
        outcome.logits = [x for x in values["lm_head"] if len(x)]
    else:
        steps()
    worker.close()
    return outcome


def _plan(step: int, rows: list[_Sequence], admitted: int, free: list[int], chunk: int = 8) -> Plan:
    """One more chunk or token for every row; the last `admitted` of them are new."""
    plan = Plan(step, [], [], [], [], [], [], [], [], [])
    for row, sequence in enumerate(rows):
        if row >= len(rows) - admitted:
            seed = sequence.sampling.seed or 0
            prompt = np.array(sequence.prompt, np.int32)
            plan.admit.append(Admit(row, prompt.tobytes(), len(prompt), sequence.sampling, seed))
        count = min(sequence.left, chunk)
        last = count == sequence.left
        plan.rows.append(row)
        plan.starts.append(sequence.computed)
        plan.counts.append(count)
        plan.logits.append(int(last))
        plan.samples.append(last)
        sequence.computed += count
        sequence.generated += last
        while sequence.pages * PAGE < sequence.computed + MOST_TOO_FAR:
            plan.page_rows.append(row)
            plan.page_ids.append(free.pop())
            sequence.pages += 1
    return plan


def _too_far(plan: Plan, rows: list[_Sequence], numbers: np.random.Generator) -> Plan:
    """The plan as if earlier steps had carried drafts that may be refused: rows that generate begin as far as they could be."""
    behind = [sequence.computed > len(sequence.prompt) for sequence in rows]
    ahead = numbers.integers(0, MOST_TOO_FAR + 1, len(rows)) * behind
    starts = (np.array(plan.starts) + ahead).tolist()
    return msgspec.structs.replace(plan, starts=starts, drafts=[0] * len(rows))

"""The plain body: how the plainest engine answers, and what it thinks of the tokens that another engine chose.

It is the reference backend, eager, without a prefix cache, with one sequence at a time. Knows nothing of the other ways.
"""

from __future__ import annotations

import math
import pathlib
from array import array
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from trireme.ipc.messages import Admit
from trireme.llm import LLM
from trireme.types import Completion, FinishReason, Output, SamplingParams
from trireme.worker.logits import Choice

from .cover import Row
from .models import END, LENGTH, Forms
from .table import ENGINE, form_of, given

FEW = 30  # log-probabilities: fewer are averaged as if the others were right
EXACT = 1e-3  # by which a log-probability may differ where tokens may not: sums in float32 have no order
WORST = 10  # times the tolerance is allowed to a single log-probability
_SETTINGS = {"backend": "reference", "graphs": False, "prefix_cache": False, "max_running": 1}


class Plain:
    """The plain engine over one model, with the settings that say what is computed: type, weights, kind of KV."""

    def __init__(self, path: pathlib.Path, **settings: Any):
        self.llm = LLM(str(path), max_model_len=LENGTH, kv_tokens=LENGTH, **(_SETTINGS | settings))
        self._known: dict[str, Output] = {}

    def answer(self, tokens: list[int], sampling: SamplingParams) -> Output:
        key = repr((tokens, sampling))
        if key not in self._known:
            self._known[key] = self.llm.generate(tokens, sampling)[0]
        return self._known[key]

    def answers(self, tokens: list[int], sampling: SamplingParams) -> list[Completion]:
        """The sequences that a request for several gets; with best_of, those that are likeliest per token."""
        found = [self.answer(tokens, alone).completions[0] for alone in sequences(sampling)]
        if len(found) > sampling.n:
            found.sort(key=lambda c: -sum(entry.logprob for entry in c.logprobs or []) / len(c.logprobs or [0]))
        return found[: sampling.n]

    def logits(self, tokens: list[int]) -> Tensor:
        """What follows each token but the last, computed in one step."""
        with self.llm.capture("lm_head") as values:
            self.llm.generate(tokens, SamplingParams(max_tokens=0, prompt_logprobs=0))
        return torch.cat(values["lm_head"]).float()[: len(tokens) - 1]

    def ruled(self, logits: Tensor, tokens: list[int], num_prompt: int, sampling: SamplingParams) -> Tensor:
        """The logits of an answer's tokens after the rules of its request.  logits: as above"""
        rules, table = self.llm.worker.runner.sampler.rules, torch.tensor([tokens], dtype=torch.int32)
        admit = Admit(0, array("i", tokens).tobytes(), num_prompt, sampling, 0, [END])
        for rule in rules:
            rule.admit(admit)
        row, prompt, edited = np.zeros(1, np.int64), np.array([num_prompt]), []
        for length in range(num_prompt, len(tokens)):
            lengths = np.array([length])
            self.llm.worker.grammars.prepare(row, lengths, table)
            choice = Choice(logits[length - 1 : length].clone(), row, lengths, prompt, table)
            for rule in rules:
                if rule.touches(row):
                    rule.apply(choice, [0])
            edited.append(choice.logits)
        return torch.cat(edited)


class Bodies:
    """The plain engines of one model, each opened when the first row asks for it."""

    def __init__(self, forms: Forms):
        self.forms, self._open = forms, dict[tuple[Any, ...], Plain]()

    def of(self, row: Row) -> Plain:
        """The plain engine that computes what the row does: with the same type and kind of KV, and weights of the same values."""
        settings = given(row, ENGINE)
        packed = settings["quantize"] not in ("none", "auto")
        chosen = settings["backend"], settings["quantize"], settings["dtype"]
        path = self.forms.unpacked(*chosen) if packed else self.forms.stored(form_of(row))
        key = path, settings["dtype"], settings["kv_dtype"]
        if key not in self._open:
            self._open[key] = Plain(path, quantize="none", dtype=key[1], kv_dtype=key[2])
        return self._open[key]

    def close(self) -> None:
        for plain in self._open.values():
            plain.llm.close()


def sequences(sampling: SamplingParams) -> list[SamplingParams]:
    """Each sequence of a request as one of its own: their seeds follow from the first's. Those of which the best are chosen have
    log-probabilities to choose by."""
    scored = 0 if sampling.logprobs is None and sampling.num_sequences > sampling.n else sampling.logprobs
    whole = msgspec.structs.replace(sampling, n=1, best_of=None, logprobs=scored)
    later = msgspec.structs.replace(whole, prompt_logprobs=None)
    return [msgspec.structs.replace(later if i else whole, seed=(sampling.seed or 0) + i) for i in range(sampling.num_sequences)]


def check(found: Output, sampling: SamplingParams, plain: Plain, tolerance: float) -> None:
    """The answer is the plain body's own; with a tolerance, one that the plain body finds as likely."""
    if tolerance:
        check_near(found, sampling, plain, tolerance)
    else:
        check_same(found, sampling, plain)


def check_same(found: Output, sampling: SamplingParams, plain: Plain) -> None:
    """The answer is the plain one: tokens, text, ends and log-probabilities."""
    for completion, plainly in zip(found.completions, plain.answers(found.prompt_token_ids, sampling), strict=True):
        assert (completion.token_ids, completion.text) == (plainly.token_ids, plainly.text)
        assert (completion.finish_reason, completion.error) == (plainly.finish_reason, None)
        _check_near(completion.logprobs, plainly.logprobs if sampling.logprobs is not None else None, EXACT)
    first = plain.answer(found.prompt_token_ids, sequences(sampling)[0])
    _check_near(found.prompt_logprobs, first.prompt_logprobs, EXACT)


def _check_near(found: list[Any] | None, expected: list[Any] | None, tolerance: float) -> None:
    """The same tokens with nearly the same log-probabilities; of alternatives, whose order rounding may decide, only these."""
    assert (found is None) == (expected is None)
    for one, other in zip(found or [], expected or [], strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.token == other.token and len(one.top) == len(other.top)
            pairs = [(one.logprob, other.logprob), *((a[1], b[1]) for a, b in zip(one.top, other.top, strict=True))]
            assert max(abs(a - b) for a, b in pairs) <= tolerance


def check_near(found: Output, sampling: SamplingParams, plain: Plain, tolerance: float) -> None:
    """The plain body, given the tokens that were chosen, finds them as likely, and would have chosen them or others like them."""
    assert len(found.completions) == sampling.n
    errors: list[float] = []
    for completion, alone in zip(found.completions, sequences(sampling), strict=False):
        assert completion.error is None and completion.token_ids
        assert completion.finish_reason is FinishReason.STOP or len(completion.token_ids) == sampling.max_tokens
        tokens, start = [*found.prompt_token_ids, *completion.token_ids], len(found.prompt_token_ids)
        logits = plain.logits(tokens)
        errors += _errors(completion.logprobs, sampling.logprobs, logits[start - 1 :])
        if alone.prompt_logprobs is not None:
            assert found.prompt_logprobs and found.prompt_logprobs[0] is None
            errors += _errors(found.prompt_logprobs[1:], alone.prompt_logprobs, logits[: start - 1])
        edited = plain.ruled(logits, tokens, start, alone)
        gaps = edited.amax(-1) - edited.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        allowed = 0.0 if alone.greedy else -alone.temperature * math.log(alone.min_p)
        assert float(gaps.max()) <= allowed + WORST * tolerance, f"the chosen tokens lie below the likeliest by {gaps.tolist()}"
    assert max(errors, default=0.0) <= WORST * tolerance
    assert sum(errors) <= tolerance * max(len(errors), FEW), f"log-probabilities are {sum(errors) / len(errors)} off on average"


def _errors(found: Any, top: int | None, logits: Tensor) -> list[float]:
    """By how much log-probabilities, of given tokens and of the likeliest, differ from those that follow from the logits."""
    assert (found is None) == (top is None)
    errors = []
    for one, row in zip(found or [], torch.log_softmax(logits if found else logits[:0], -1), strict=True):
        errors.append(abs(one.logprob - float(row[one.token])))
        best = row.topk(top or 0).values.tolist()
        errors += [abs(a - b) for (_, a), b in zip(one.top, best, strict=True)]
    return errors

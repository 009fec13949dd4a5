"""Sampling through the worker: every rule against one row of plain Python, seeds, failures, log-probabilities."""

from __future__ import annotations

import math
import pathlib
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from drive import Drive, Run
from tiny_models import LENGTH, VOCAB, prompt
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trireme.ops import Ops
from trireme.types import FinishReason, SamplingParams, TokenLogprobs
from trireme.worker.sampler import uniform
from trireme.worker.tables import Step

NEGATIVE = -math.inf
EOS = 3
ONE_NAN = 0.0  # stands for: one logit of the row is not a number


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_models.save("qwen2", tmp_path_factory.mktemp("qwen2"))


def make(folder: pathlib.Path, **settings: Any) -> Drive:
    return Drive(folder, full=False, max_model_len=LENGTH, **settings)


# --- one row of plain Python ------------------------------------------------------------------------------------------------------


def edited(logits: list[float], tokens: list[int], num_prompt: int, s: SamplingParams) -> list[float]:
    """The logits after every rule, by the rules' plain words."""
    logits, answered = list(logits), Counter(tokens[num_prompt:])
    for token in set(tokens):
        logits[token] = logits[token] / s.repetition_penalty if logits[token] > 0 else logits[token] * s.repetition_penalty
    for token, count in answered.items():
        logits[token] -= s.frequency_penalty * count + s.presence_penalty
    n = s.no_repeat_ngram
    if n:
        tail = tokens[len(tokens) - n + 1 :]
        for i in range(len(tokens) - n + 1):
            if tokens[i : i + n - 1] == tail:
                logits[tokens[i + n - 1]] = NEGATIVE
    for token, bias in s.logit_bias.items():
        logits[token] += bias
    for token in range(len(logits)):
        early = len(tokens) - num_prompt < s.min_tokens and token in (EOS, *s.stop_token_ids)
        if early or token in s.banned_token_ids or (s.allowed_token_ids is not None and token not in s.allowed_token_ids):
            logits[token] = NEGATIVE
    return logits


def random_number(seed: int, position: int) -> float:
    """splitmix64's finaliser, twice, in Python's own whole numbers."""
    mask = (1 << 64) - 1
    x = ((seed & mask) + (position + 1) * 0x9E3779B97F4A7C15) & mask
    for _ in range(2):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        x ^= x >> 31
    return (x >> 40) / (1 << 24)


def chosen(logits: list[float], s: SamplingParams, number: float) -> int:
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if s.temperature == 0:
        return order[0]
    kept = order[: s.top_k] if s.top_k > 0 else order
    weights = {i: math.exp((logits[i] - logits[order[0]]) / s.temperature) for i in kept}
    total, before, shares = sum(weights.values()), 0.0, {}
    for i in kept:
        if not shares or (before < s.top_p and weights[i] >= s.min_p):
            shares[i] = weights[i]
        before += weights[i] / total
    passed, target = 0.0, number * sum(shares.values())
    for i in sorted(shares):
        passed += shares[i]
        if passed > target:
            return i
    return max(i for i in shares if shares[i] > 0)


def check(run: Run, tokens: list[int], s: SamplingParams) -> None:
    """Every token of the run is the one that plain Python chooses from the same raw logits."""
    assert run.tokens
    history = list(tokens)
    for token in run.tokens:
        logits = run.logits[len(history) - 1].double().tolist()
        wanted = chosen(edited(logits, history, len(tokens), s), s, random_number(s.seed or 0, len(history)))
        assert token == wanted, f"token {len(history)}: {token} instead of {wanted}"
        history.append(token)


RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 4},
    "top_k of one": {"top_k": 1, "temperature": 2.0},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.2},
    "all three": {"temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.8},
    "repetition, wanted": {"temperature": 0.0, "repetition_penalty": 0.5},
    "presence": {"temperature": 0.0, "presence_penalty": 2.0},
    "frequency": {"temperature": 0.0, "frequency_penalty": 1.5},
    "frequency, wanted": {"temperature": 0.0, "frequency_penalty": -2.0},
    "all penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "no token twice": {"temperature": 0.0, "no_repeat_ngram": 1},
    "no pair twice": {"temperature": 0.0, "no_repeat_ngram": 2, "frequency_penalty": -2.0},
    "no triple twice": {"temperature": 0.0, "no_repeat_ngram": 3, "frequency_penalty": -2.0},
    "bias": {"temperature": 0.0, "logit_bias": {7: 2.5, 90: -100.0, 11: 4.0}},
    "allowed": {"temperature": 2.0, "allowed_token_ids": [4, 99, 130, 0]},
    "banned": {"temperature": 0.0, "banned_token_ids": list(range(0, VOCAB, 2))},
    "allowed, some banned": {"allowed_token_ids": [1, 2, 5, 8], "banned_token_ids": [2, 5]},
    "min_tokens": {"temperature": 0.0, "min_tokens": 6, "stop_token_ids": [9], "logit_bias": {EOS: 100.0, 9: 99.0}},
    "everything": {
        "temperature": 0.9, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1, "presence_penalty": 0.2, "no_repeat_ngram": 3,
        "logit_bias": {5: 1.0}, "banned_token_ids": [1, 2], "min_tokens": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_rule_alone(rule: str, folder: pathlib.Path) -> None:
    tokens, sampling = prompt(12, 1), {"max_tokens": 20, "temperature": 1.0, "seed": 5} | RULES[rule]
    run = make(folder).run("a", tokens, eos=[EOS], **sampling)
    check(run, tokens, SamplingParams(**sampling))


def test_min_tokens_ends_at_the_first_moment(folder: pathlib.Path) -> None:
    for min_tokens in (0, 1, 6):
        run = make(folder).run("a", prompt(5, 2), eos=[EOS], max_tokens=20, min_tokens=min_tokens, logit_bias={EOS: 100.0})
        assert run.tokens.index(EOS) == min_tokens == len(run.tokens) - 1
        assert run.progress[-1].finish == FinishReason.STOP


def test_all_rules_in_one_batch(folder: pathlib.Path) -> None:
    """Rows of every kind side by side, in rows that others held before them."""
    drive, order = make(folder, max_running=5, max_step_tokens=24, page_size=4), list(RULES) * 2
    random.Random(3).shuffle(order)
    asked = []
    for i, rule in enumerate(order):
        asked.append((f"{i} {rule}", prompt(1 + i % 17, i), {"max_tokens": 4 + i % 9, "temperature": 1.0, "seed": i} | RULES[rule]))
        sampling = asked[-1][2]
        sampling["min_tokens"] = min(sampling.get("min_tokens", 0), sampling["max_tokens"])
        drive.add(asked[-1][0], asked[-1][1], eos=[EOS], **sampling)
    runs = drive.finish()
    for id, tokens, sampling in asked:
        check(runs[id], tokens, SamplingParams(**sampling))


# --- seeds ------------------------------------------------------------------------------------------------------------------------


def test_random_numbers_are_the_written_formula() -> None:
    seeds = [0, 1, 12345, 2**63 - 1, -1, -(2**63)]
    with np.errstate(over="ignore"):
        found = uniform(np.array([seed & (2**64 - 1) for seed in seeds], dtype=np.uint64), np.arange(6, dtype=np.uint64))
    assert found.tolist() == [np.float32(random_number(seed, i)) for i, seed in enumerate(seeds)]
    with np.errstate(over="ignore"):
        many = uniform(np.full(20000, 7, dtype=np.uint64), np.arange(20000, dtype=np.uint64))
    counts = np.bincount((many * 20).astype(int), minlength=20)
    assert many.min() >= 0 and many.max() < 1 and np.abs(counts - 1000).max() < 150  # five standard deviations


def test_seed_decides_whatever_else_runs(folder: pathlib.Path) -> None:
    tokens = prompt(20, 4)
    alone = make(folder).run("a", tokens, temperature=1.5, seed=42, max_tokens=24).tokens
    busy = make(folder, max_step_tokens=11, page_size=1)
    for i in range(5):
        busy.add(f"other {i}", prompt(7 * i + 1, 30 + i), temperature=1.0, seed=i, max_tokens=15)
    busy.add("a", tokens, temperature=1.5, seed=42, max_tokens=24)
    assert busy.finish()["a"].tokens == alone
    assert make(folder).run("a", tokens, temperature=1.5, seed=43, max_tokens=24).tokens != alone


def test_seed_decides_through_pauses(folder: pathlib.Path) -> None:
    asked = {str(i): prompt(30, 60 + i) for i in range(3)}
    sampling = {"temperature": 1.5, "max_tokens": 25, "frequency_penalty": 0.8, "no_repeat_ngram": 3}
    alone = {id: make(folder).run(id, tokens, seed=int(id), **sampling).tokens for id, tokens in asked.items()}
    tight = Drive(folder, full=False, max_model_len=60, kv_tokens=110, page_size=1, policy="aggressive", prefix_cache=False)
    for id, tokens in asked.items():
        tight.add(id, tokens, seed=int(id), **sampling)
    runs = tight.finish()
    assert tight.scheduler.stats().preemptions > 0
    assert {id: run.tokens for id, run in runs.items()} == alone


# --- a broken row fails alone -----------------------------------------------------------------------------------------------------


class Poisoned(Drive):
    """The logits of one request turn bad at its third token."""

    poison: dict[str, float]

    def _recorded(self, step: Step) -> Tensor:
        logits = super()._recorded(step)
        for i, id in enumerate(self._plan_ids):
            if id in self.poison and len(self.runs[id].logits) == 3:
                logits[i, 5 if self.poison[id] == ONE_NAN else slice(None)] = (
                    math.nan if self.poison[id] == ONE_NAN else self.poison[id]
                )
        return logits


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, ONE_NAN])
def test_a_broken_row_fails_alone(bad: float, folder: pathlib.Path) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "random": {"temperature": 1.0, "seed": 1},
        "ruled": {"temperature": 1.0, "seed": 2, "repetition_penalty": 1.2, "logprobs": 2},
    }
    healthy = {kind: make(folder).run(kind, prompt(6, 9), max_tokens=9, **s).tokens for kind, s in kinds.items()}
    drive = Poisoned(folder, full=False, max_model_len=LENGTH)
    drive.poison = {f"bad {kind}": bad for kind in kinds}
    for kind, s in kinds.items():
        drive.add(kind, prompt(6, 9), max_tokens=9, **s)
        drive.add(f"bad {kind}", prompt(6, 9), max_tokens=9, **s)
    runs = drive.finish()
    for kind in kinds:
        assert runs[kind].tokens == healthy[kind]
        last = runs[f"bad {kind}"].progress[-1]
        assert last.finish == FinishReason.ERROR and "no finite logits" in (last.error or "")
        assert runs[f"bad {kind}"].tokens == healthy[kind][:2]


def test_nothing_left_to_choose_fails_alone(folder: pathlib.Path) -> None:
    drive = make(folder)
    drive.add("impossible", prompt(4, 1), allowed_token_ids=[1, 2], banned_token_ids=[1, 2])
    drive.add("fine", prompt(4, 1), max_tokens=5)
    runs = drive.finish()
    assert runs["impossible"].progress[-1].finish == FinishReason.ERROR
    assert runs["fine"].tokens == make(folder).run("fine", prompt(4, 1), max_tokens=5).tokens


# --- log-probabilities ------------------------------------------------------------------------------------------------------------


def check_logprobs(found: TokenLogprobs, token: int, logits: Tensor, num_top: int) -> None:
    exact = torch.log_softmax(logits.double(), -1)
    assert found.token == token
    assert found.logprob == pytest.approx(float(exact[token]), abs=1e-5)
    assert found.rank == int((exact > exact[token]).sum()) + 1
    assert [i for i, _ in found.top] == exact.topk(num_top).indices.tolist()
    assert [p for _, p in found.top] == pytest.approx(exact.topk(num_top).values.tolist(), abs=1e-5)


def test_logprobs_are_of_the_models_own_distribution(folder: pathlib.Path) -> None:
    """Before temperature and rules, whatever number of alternatives others ask for."""
    drive, tokens = make(folder), prompt(10, 3)
    for num_top in (0, 1, 5):
        drive.add(str(num_top), tokens, max_tokens=6, logprobs=num_top, temperature=1.8, seed=num_top, presence_penalty=1.0)
    drive.add("none", tokens, max_tokens=6)
    runs = drive.finish()
    assert all(not progress.logprobs for progress in runs["none"].progress)
    for num_top in (0, 1, 5):
        run = runs[str(num_top)]
        said = [entry for progress in run.progress for entry in progress.logprobs or []]
        assert len(said) == len(run.tokens) == 6
        for i, (entry, token) in enumerate(zip(said, run.tokens, strict=True)):
            check_logprobs(entry, token, run.logits[len(tokens) - 1 + i], num_top)


@pytest.mark.parametrize("settings", [{}, {"max_step_tokens": 5, "page_size": 1}, {"page_size": 0, "kv_tokens": 2 * LENGTH}])
@pytest.mark.parametrize("num_top", [0, 3])
def test_prompt_logprobs(settings: dict[str, Any], num_top: int, folder: pathlib.Path) -> None:
    tokens = prompt(23, 6)
    _, logits = tiny_models.reference("qwen2", tokens, 1)
    drive = make(folder, **settings)
    drive.run("before", tokens, max_tokens=2)  # its KV is cached; scores are still given for the whole prompt
    run = drive.run("a", tokens, max_tokens=3, prompt_logprobs=num_top)
    scores = [progress.prompt_logprobs for progress in run.progress if progress.prompt_logprobs is not None]
    assert len(scores) == 1 and len(scores[0]) == len(tokens) and scores[0][0] is None
    for at in range(1, len(tokens)):
        entry = scores[0][at]
        assert entry is not None
        check_logprobs(entry, tokens[at], logits[at - 1], num_top)


def test_prompt_logprobs_without_an_answer(folder: pathlib.Path) -> None:
    run = make(folder).run("a", prompt(7, 1), max_tokens=0, prompt_logprobs=1)
    assert run.tokens == [] and run.progress[-1].finish == FinishReason.LENGTH
    assert len(run.progress[-1].prompt_logprobs or []) == 7


class Reads(TorchFunctionMode):
    """Counts how often something waits for values of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        waiting = (Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.cpu, Tensor.__float__, Tensor.__int__, Tensor.__bool__)
        self.count += func in waiting
        return func(*args, **(kwargs or {}))


def test_log_probabilities_of_a_step_come_in_one_copy(folder: pathlib.Path) -> None:
    """Of however many rows and prompts: one more read than without them, and that when the step is collected."""
    counts: dict[bool, list[tuple[int, int]]] = {}
    for scored in (False, True):
        drive = make(folder)
        runner = drive.worker.runner
        runner._forward = drive._forward  # type: ignore[method-assign]
        for i in range(8):
            more = {"logprobs": i, "prompt_logprobs": i % 3} if scored else {}
            drive.add(str(i), prompt(4 + i, i), max_tokens=6, **more)
        counts[scored] = []
        while plan := drive.scheduler.schedule():
            with Reads() as launching:
                runner.launch(plan)
            with Reads() as collecting:
                sampled = runner.collect()
            counts[scored].append((launching.count, collecting.count))
            drive.scheduler.update(sampled)
    assert [(launching, collecting + 1) for launching, collecting in counts[False]] == counts[True]


def test_random_numbers_are_the_same_on_host_and_device() -> None:
    draw = np.random.default_rng(5)
    seeds, positions = draw.integers(0, 2**64, 1000, dtype=np.uint64), draw.integers(0, 2**20, 1000, dtype=np.int32)
    found = Ops().uniforms(torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(positions))
    assert np.array_equal(found.numpy(), uniform(seeds, positions.astype(np.uint64)))

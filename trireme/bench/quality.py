"""What weight methods and kinds of KV cost in quality: perplexity of a public-domain text, and agreement with float32.

Knows methods by name and texts; nothing of how weights are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
import statistics
import sys
from importlib.resources import files

import msgspec

from trireme.backends.registry import automatic
from trireme.bench.plain import ROUNDED_BY_ROWS, plain_backend
from trireme.command.fetch import fetched
from trireme.command.flags import config_from
from trireme.config import Config
from trireme.llm import LLM
from trireme.types import SamplingParams, TokenLogprobs


class Beside(msgspec.Struct):
    """How much larger a perplexity is than another of the same text: a share, and the standard error of its tokens' mean."""

    more: float
    error: float

    @classmethod
    def of(cls, mine: list[TokenLogprobs], other: list[TokenLogprobs]) -> Beside:
        apart = [b.logprob - a.logprob for a, b in zip(mine, other, strict=True)]
        return cls(math.exp(statistics.fmean(apart)) - 1, statistics.pstdev(apart) / math.sqrt(len(apart)))


class Quality(msgspec.Struct, kw_only=True):
    """The results of one method and kind of KV over the whole text. Agreement is with the first of them."""

    method: str
    kv: str
    weight_bytes: int
    perplexity: float
    perplexity_few: float  # of the windows that were also read in steps of few tokens; NaN if none were
    agreement: float  # share of places in the text where the likeliest next token is the same
    agreement_few: float
    greedy_tokens: float  # average number of tokens in its own continuations before the first that differs
    plain: Beside | None = None  # beside the plain bodies: the same rounded weights, activations and KV
    plain_few: Beside | None = None


def run(args: argparse.Namespace) -> int:
    config = fetched(config_from(args))
    text = pathlib.Path(args.text).read_text() if args.text else files("trireme.bench").joinpath("data/alice.txt").read_text()
    if args.plain:
        plain_backend(_backend_of(config))  # refuses one without a plain form before anything is read
    results = compare(config, args, text)
    print(
        f"{'method':<8}{'KV':<6}{'weights MB':>12}{'perplexity':>12}{'few rows':>10}{'beside plain':>18}{'few rows':>18}"
        f"{'agreement':>11}{'few rows':>10}{'greedy tokens':>15}"
    )
    for r in results:
        plain = "".join(f"{f'{b.more:+.2%} ± {b.error:.2%}' if b else '':>18}" for b in (r.plain, r.plain_few))
        print(
            f"{r.method:<8}{r.kv:<6}{r.weight_bytes / 1e6:>12.1f}{r.perplexity:>12.3f}{_number(r.perplexity_few, '.3f'):>10}{plain}"
            f"{r.agreement:>11.1%}{_number(r.agreement_few, '.1%'):>10}{r.greedy_tokens:>9.1f} of {args.continue_tokens}"
        )
    if args.json:
        pathlib.Path(args.json).write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    return 0


def _number(value: float, form: str) -> str:
    """Nothing for what was not measured."""
    return "" if math.isnan(value) else format(value, form)


def compare(config: Config, args: argparse.Namespace, text: str) -> list[Quality]:
    """Measures each method with each kind of KV in turn and compares it with the first."""
    results: list[Quality] = []
    first: _Reading | None = None
    for method in args.methods:
        for kv in args.kv_kinds:
            chosen = dataclasses.replace(config, cache=dataclasses.replace(config.cache, kv_dtype=kv))
            reading = _Reading.take(chosen, method, text, args)
            first = first or reading
            found = reading.beside(first)
            if args.plain:
                found.plain, found.plain_few = _beside_plain(reading, chosen, method, text, args)
            print(f"{method}, KV {kv}: {found.perplexity:.3f}", file=sys.stderr, flush=True)
            results.append(found)
    return results


def _backend_of(config: Config) -> str:
    return automatic() if config.device.backend == "auto" else config.device.backend


def _beside_plain(
    reading: _Reading, config: Config, method: str, text: str, args: argparse.Namespace
) -> tuple[Beside, Beside | None]:
    """Beside the same rounding of weights, activations, keys and values, computed by the plain bodies."""
    name = _backend_of(config)
    device = dataclasses.replace(config.device, backend=plain_backend(name))
    plain = dataclasses.replace(config, device=device, model=dataclasses.replace(config.model, dtype="float32"))
    asked = argparse.Namespace(**{**vars(args), "continue_tokens": 0})
    if name not in ROUNDED_BY_ROWS:
        asked.few_windows = 0  # the plain bodies would compute the same again
    same = _Reading.take(plain, method, text, asked)
    few = same.few or same.whole[: len(reading.few)]
    return Beside.of(reading.whole, same.whole), Beside.of(reading.few, few) if few else None


@dataclasses.dataclass
class _Reading:
    """What a method said of the text: of every token after a window's first, its log-probability and the likeliest instead."""

    method: str
    kv: str
    weight_bytes: int
    whole: list[TokenLogprobs]
    few: list[TokenLogprobs]
    continuations: list[list[int]]

    @classmethod
    def take(cls, config: Config, method: str, text: str, args: argparse.Namespace) -> _Reading:
        window, continue_tokens = args.window, args.continue_tokens
        with LLM(config=_changed(config, method, config.schedule.max_step_tokens)) as llm:
            assert llm.tokenizer is not None
            ids = llm.tokenizer.encode(text)
            windows = [ids[i : i + window] for i in range(0, len(ids), window)]
            windows = [part for part in windows if len(part) >= min(window // 2, len(ids))]
            whole = read(llm, windows)
            sampling = SamplingParams(temperature=0.0, max_tokens=continue_tokens, ignore_eos=True)
            answers = llm.generate([part[: window // 4] for part in windows], sampling) if continue_tokens else []
            weight_bytes = llm.worker.ready.weight_bytes
        few: list[TokenLogprobs] = []
        if args.few_windows:
            with LLM(config=_changed(config, method, args.few_tokens)) as llm:
                few = read(llm, windows[: args.few_windows])
        return cls(method, config.cache.kv_dtype, weight_bytes, whole, few, [answer.token_ids for answer in answers])

    def beside(self, other: _Reading) -> Quality:
        common = [_common(a, b) for a, b in zip(self.continuations, other.continuations, strict=True)]
        return Quality(
            method=self.method,
            kv=self.kv,
            weight_bytes=self.weight_bytes,
            perplexity=perplexity(self.whole),
            perplexity_few=perplexity(self.few),
            agreement=_agreement(self.whole, other.whole),
            agreement_few=_agreement(self.few, other.whole[: len(self.few)]),
            greedy_tokens=sum(common) / max(len(common), 1),
        )


def _changed(config: Config, method: str, step_tokens: int) -> Config:
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, quantize=method),
        cache=dataclasses.replace(config.cache, prefix_cache=False),
        schedule=dataclasses.replace(config.schedule, max_step_tokens=step_tokens),
    )


def read(llm: LLM, windows: list[list[int]]) -> list[TokenLogprobs]:
    """Reads the text in windows: each token with those before it in its window."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    found = [llm.generate([window], sampling)[0].prompt_logprobs or [] for window in windows]
    return [token for window in found for token in window if token is not None]


def perplexity(tokens: list[TokenLogprobs]) -> float:
    return math.exp(-sum(token.logprob for token in tokens) / len(tokens)) if tokens else math.nan


def _agreement(mine: list[TokenLogprobs], other: list[TokenLogprobs]) -> float:
    return sum(a.top[0][0] == b.top[0][0] for a, b in zip(mine, other, strict=True)) / len(mine) if mine else math.nan


def _common(mine: list[int], other: list[int]) -> int:
    """How many tokens at the beginning are the same."""
    return next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other)))

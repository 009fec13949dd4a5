"""How much memory is left for what layers keep, and how it is divided. Knows specs, sizes and settings; nothing of steps.

A band is the layers that keep alike: every token, or the last ones of each sequence. Each band has pages of its own numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from trireme.backends import Backend
from trireme.config import Config
from trireme.errors import OutOfMemory, UnsupportedModel
from trireme.ipc.messages import ALL, BandSize
from trireme.models import cache_specs
from trireme.ops import CacheSpec, StateSpec
from trireme.parallel import Group
from trireme.worker.load import Loaded


class Window(NamedTuple):
    """What a layer reads of a sequence."""

    keep: int  # how many of the last tokens; ALL of them
    chunked: bool = False  # whether the window begins anew at every multiple of its length

    def band(self, num_pages: int, page_size: int) -> BandSize:
        return BandSize(self.keep, num_pages, page_size, self.chunked)


WHOLE = Window(ALL)


@dataclass(frozen=True)
class Room:
    """What is kept and where: the specs by their keys, the bands, and the band of each key."""

    caches: dict[int, CacheSpec]
    states: dict[int, StateSpec]
    num_states: int  # slots for states, the kept places among them
    num_kept: int | None  # kept places for states, from which prefixes can be resumed; None: no layer keeps a state
    bands: list[BandSize]
    band_of: dict[int, int]
    max_model_len: int
    num_bytes: int


@dataclass(frozen=True)
class _Needs:
    """The memory to divide and the needs of the layers."""

    budget: int  # bytes
    per_token: Mapping[Window, int]  # bytes a token takes in layers of this window
    max_len: int
    tokens: int  # wanted in layers that keep all
    page: int
    config: Config

    @property
    def bytes_per_token(self) -> int:
        return sum(self.per_token.values())

    @property
    def fits(self) -> int:
        """How many tokens fit if all layers keep all tokens."""
        return self.budget // max(self.bytes_per_token, 1)

    @property
    def windows(self) -> list[Window]:
        return sorted(window for window in self.per_token if window != WHOLE)


def make_room(config: Config, loaded: Loaded, backend: Backend, group: Group, kind: str) -> Room:
    """How many pages fit in the memory that is left. What was not set shrinks to fit; what was set and does not is refused.

    kind: what keys and values are kept as
    """
    asked = cache_specs(loaded.model)
    caches = _of_kind(kind, backend, {key: spec for key, spec in asked.items() if isinstance(spec, CacheSpec)})
    states = {key: spec for key, spec in asked.items() if isinstance(spec, StateSpec)}
    max_len, page = loaded.max_model_len, config.cache.page_size
    # If the window is as long as the context, it is kept like full attention. A static page holds the whole context anyway.
    window_of = {
        key: Window(spec.window, spec.chunked) if page and 0 < spec.window < max_len else WHOLE for key, spec in caches.items()
    }
    per_token = {WHOLE: 0}
    for key, spec in caches.items():
        per_token[window_of[key]] = per_token.get(window_of[key], 0) + spec.bytes_per_token(loaded.dtype)
    tokens = config.cache.kv_tokens or backend.kv_default_tokens(max_len, config.schedule.max_running)
    budget = backend.kv_budget(config.cache.memory_fraction)
    num_states, num_kept = _states(config, sum(spec.num_bytes for spec in states.values()), budget, tokens)
    state_bytes = num_states * sum(spec.num_bytes for spec in states.values())
    budget -= state_bytes
    needs = _Needs(budget, per_token, max_len, tokens, page or max_len, config)
    split = _split(needs)
    short, able = _agreed(needs, split, group, backend) if needs.windows else (False, False)
    if not able or not (short or config.cache.kv_windows == "on"):
        needs = dataclasses.replace(needs, per_token={WHOLE: needs.bytes_per_token})
        split = {WHOLE: min(tokens, needs.fits)}
    elif short and not config.cache.kv_tokens and config.cache.prefix_cache and getattr(loaded.model, "shares_prefixes", True):
        split = _with_tails(needs, split)
    bands, max_len = _in_pages(needs, split)
    places = {window: band for band, window in enumerate(split)}
    used = sum(band.num_pages * band.page_size * needs.per_token[window] for window, band in zip(split, bands, strict=True))
    band_of = {key: places.get(window, 0) for key, window in window_of.items()}
    return Room(caches, states, num_states, num_kept if states else None, bands, band_of, max_len, used + state_bytes)


def _states(config: Config, state_bytes: int, budget: int, tokens: int) -> tuple[int, int]:
    """How many slots for states there are, and how many of them are kept places: at most a tenth of the memory, and no more than
    are wanted for this many tokens and two in each row's prompt."""
    own = 2 * (config.schedule.max_running + 1)  # two for every row, the one for padding included
    if not state_bytes:
        return own, 0
    wanted = tokens // max(config.cache.checkpoint_tokens, 1) if config.cache.prefix_cache else 0
    kept = min(wanted + 2 * config.schedule.max_running, max(budget - own * state_bytes, 0) // (10 * state_bytes))
    return own + kept, kept


def _of_kind(kind: str, backend: Backend, specs: dict[int, CacheSpec]) -> dict[int, CacheSpec]:
    """The specs as this kind. Raises for what the backend does not know."""
    if not backend.chunked_windows and any(spec.chunked for spec in specs.values()):
        raise UnsupportedModel(f"The backend {backend.name} knows no windows that begin anew (chunks).", "use --backend cpu")
    return {key: spec.as_kind(kind) for key, spec in specs.items()}


def _agreed(needs: _Needs, split: dict[Window, int], group: Group, backend: Backend) -> tuple[bool, bool]:
    """Whether some rank is short of memory for all tokens in all layers, and whether every rank can keep windows alone.

    Windows kept alone save memory, but not every prefix can then be resumed. Ranks may have memory of different sizes and have to
    do the same.
    """
    said = backend.zeros((2,), torch.float32)
    said[0], said[1] = float(needs.tokens > needs.fits), float(bool(split))
    short_ranks, able_ranks = group.comm.all_reduce(said).tolist()
    return short_ranks > 0, able_ranks == group.size


def _split(needs: _Needs) -> dict[Window, int]:
    """Tokens by window, WHOLE first; empty where one band is better.

    Windows get what all rows need, but no more than half of the memory while the rest wants it: then neither the number of
    sequences nor their length is less than half of what it could be. Nothing is added for tails where the user sets kv_tokens, or
    where windows are kept alone without need: memory that was not asked for is left alone, on a host above all.
    """
    options, full = needs.config.schedule, needs.per_token[WHOLE]
    windows = needs.windows
    if not windows or needs.config.cache.kv_windows == "off":
        return {}
    least = {window: window.band(1 << 40, needs.page).pages_of_row(needs.max_len) * needs.page for window in windows}
    each = {window: options.max_running * least[window] + options.max_step_tokens for window in windows}
    rows = {window: min(slots, needs.tokens) for window, slots in each.items()}
    wanted = sum(rows[window] * needs.per_token[window] for window in windows)
    rest = needs.budget - needs.tokens * full
    given = min(wanted, rest if needs.config.cache.kv_tokens else max(rest, needs.budget // 2))
    tokens = min(needs.tokens, (needs.budget - given) // full) if full else needs.tokens
    split = {WHOLE: tokens} | {window: int(rows[window] * (given / wanted)) for window in windows}
    enough = all(split[window] >= least[window] for window in windows)  # for one sequence
    better = tokens >= min(needs.fits, needs.tokens) or needs.config.cache.kv_windows == "on"
    return split if enough and better else {}


def _with_tails(needs: _Needs, split: dict[Window, int]) -> dict[Window, int]:
    """The split, and for tails what the layers that keep all leave of the memory.

    A window gets as many tokens as those layers have at most: its page is of no use without the page of the same tokens there.
    """
    tokens, of_rows = split[WHOLE], sum(split[window] * needs.per_token[window] for window in needs.windows)
    slots, left = {}, needs.budget - tokens * needs.per_token[WHOLE]
    for window in sorted(needs.windows, key=lambda window: -split[window]):  # those that have enough first; the others get the rest
        slots[window] = min(tokens, split[window] * left // of_rows)
        left -= slots[window] * needs.per_token[window]
        of_rows -= split[window] * needs.per_token[window]
    return {WHOLE: tokens} | {window: slots[window] for window in needs.windows}


def _in_pages(needs: _Needs, split: dict[Window, int]) -> tuple[list[BandSize], int]:
    """The bands, and the longest sequence that the first of them holds."""
    config, max_len, tokens = needs.config, needs.max_len, split[WHOLE]
    wanted, per_token = config.cache.kv_tokens, needs.bytes_per_token
    if (wanted or 0) > tokens or tokens < 1:
        raise OutOfMemory(
            f"KV for {wanted or 1} tokens needs {(wanted or 1) * per_token / 2**20:.0f} MiB ({per_token} bytes a token); "
            f"{needs.budget / 2**20:.0f} MiB are left.",
            f"use --kv-tokens {needs.fits} or raise --memory-fraction",
        )
    if tokens < max_len:
        if config.model.max_model_len is not None:
            raise OutOfMemory(
                f"One sequence of max_model_len {max_len} needs {max_len} KV slots; there are {tokens}.",
                f"use --max-model-len {tokens} or less, or raise --kv-tokens",
            )
        max_len = tokens
    page = config.cache.page_size or max_len
    bands = [window.band(slots // page, page) for window, slots in split.items()]
    return bands, min(max_len, bands[0].num_pages * page)

"""What the scheduler must know about the workers: their memory, and what their model requires of a plan. Knows no requests."""

from __future__ import annotations

from dataclasses import dataclass

from trireme.config import CacheOptions
from trireme.ipc.messages import ALL, BandSize, Ready


@dataclass(frozen=True)
class Capacity:
    num_pages: int  # 0: the model has no KV cache and no state
    page_size: int  # 0: static cache, where every row has one page for its whole context
    max_model_len: int
    prefix_cache: bool = True  # whether computed KV is kept and reused for later prompts
    whole_prompts: bool = False  # whether a prompt must be computed in one step (no chunked prefill)
    tells: bool = False  # the workers do not keep what they sample: a row waits for its answer, and its token is told to them

    bands: tuple[BandSize, ...] = ()  # of layers that keep alike, the first all tokens; empty: there is that one alone
    forks: bool = True  # whether a row may go on from what another has computed; neither a state nor a window's open page can be

    @classmethod
    def of(cls, ready: Ready, cache: CacheOptions) -> Capacity:
        """The capacity that ready workers have reported."""
        return cls(
            num_pages=ready.num_pages,
            page_size=0 if cache.page_size == 0 else ready.page_size,
            max_model_len=ready.max_model_len,
            prefix_cache=cache.prefix_cache and ready.shares_prefixes,
            whole_prompts=ready.whole_prompts,
            bands=tuple(ready.bands),
            forks=all(band.keep == ALL for band in ready.bands),
        )

    @property
    def slots_per_page(self) -> int:
        return self.page_size or self.max_model_len

    @property
    def longest(self) -> int:
        """The most tokens that one request may have: as many as the model's context and the whole KV memory both allow."""
        return min(self.max_model_len, self.num_pages * self.slots_per_page) if self.num_pages else self.max_model_len

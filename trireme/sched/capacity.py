"""What the scheduler must know about the workers: their memory, and what their model requires of a plan. Knows no requests."""

from __future__ import annotations

from dataclasses import dataclass

from trireme.config import CacheOptions
from trireme.errors import BadRequest
from trireme.ipc.messages import ONE_STATE, BandSize, Ready
from trireme.sched.plan import MOST_SCORED
from trireme.sched.states import States
from trireme.sched.tails import Tails
from trireme.sched.windows import Windows
from trireme.types import Request


@dataclass(frozen=True)
class Capacity:
    num_pages: int  # 0: the model has no KV cache and no state
    page_size: int  # 0: static cache, where every row has one page for its whole context
    max_model_len: int
    prefix_cache: bool = True  # whether computed KV is kept and reused for later prompts
    whole_prompts: bool = False  # whether a prompt must be computed in one step (no chunked prefill)
    tells: bool = False  # the workers do not keep what they sample: a row waits for its answer, and its token is told to them

    bands: tuple[BandSize, ...] = ()  # of layers that keep alike, the first all tokens; empty: there is that one alone
    checkpoint_tokens: int = 1024  # how many tokens may lie between two kept states of a sequence

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
            checkpoint_tokens=cache.checkpoint_tokens,
        )

    @property
    def slots_per_page(self) -> int:
        return self.page_size or self.max_model_len

    @property
    def longest(self) -> int:
        """The most tokens that one request may have: as many as the model's context and the whole KV memory both allow."""
        return min(self.max_model_len, self.num_pages * self.slots_per_page) if self.num_pages else self.max_model_len

    def check(self, request: Request, max_step_tokens: int) -> None:
        """Raises for a request that can never be computed."""
        length, sampling = len(request.tokens), request.sampling
        if not length:
            raise BadRequest("The prompt is empty.", "give at least one token", "prompt")
        keeps = self.num_pages > 0
        if not keeps and sampling.max_tokens != 0:
            raise BadRequest("This model reads prompts and writes nothing.", "ask for max_tokens 0", "max_tokens")
        if length >= self.longest + (not keeps):
            cause = f"The prompt has {length} tokens; prompt and answer together may have {self.longest}."
            raise BadRequest(cause, "shorten the prompt, or serve with a larger max_model_len and kv_tokens", "prompt")
        most = min(max_step_tokens, MOST_SCORED if sampling.prompt_logprobs is not None else length)
        if self.whole_prompts and length > most:
            cause = f"The prompt has {length} tokens; this model computes a prompt in one step, which may have {most}."
            raise BadRequest(cause, "shorten the prompt, or serve with a larger max_step_tokens", "prompt")

    def tails(self, max_rows: int, caching: bool) -> Tails:
        """The keeper of what layers need that do not keep every token.  caching: whether prefixes are kept for later prompts"""
        size = self.slots_per_page
        kept = [States(band.num_pages) for band in self.bands if band.keep == ONE_STATE]
        spacing = max(self.checkpoint_tokens // size, 1) * size if caching else 0
        return Tails(Windows(self.bands, size, max_rows), kept[0] if kept else None, max_rows, spacing)

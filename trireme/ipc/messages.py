"""The messages between scheduler and workers. A plan is a message: columns of whole numbers, no tensors, no text.

Lengths, for every row:  computed <= scheduled <= total.
A step may be planned before the one before it has answered; then the last scheduled token of a row is still unknown to the
scheduler, and the worker takes it from its own token table, where sampling has put it.
"""

from __future__ import annotations

import msgspec

from trireme.types import SamplingParams, TokenLogprobs

NO_PARENT = -1  # of a fork: the row that computed this is gone
AHEAD = 32  # tokens of a row that generates, drafts among them, that may be planned beyond what is answered
ALL, ONE_STATE = 0, -1  # what a band keeps, where it is no number of tokens


class Admit(msgspec.Struct, array_like=True):
    """A request takes a row of the workers' tables."""

    row: int
    tokens: bytes  # int32 each, all that is known: the prompt and, after a pause, what had been generated
    num_prompt: int
    sampling: SamplingParams
    seed: int
    eos_token_ids: list[int] = []  # masked until min_tokens
    begins: list[int] = []  # by band: the place in its page table that its first page takes; empty: 0 in every band


class Fork(msgspec.Struct, array_like=True):
    """A row takes over what has been computed up to `length`, by another row or by one that has left since. All forks of a plan
    read before any of them writes, so rows may change places."""

    row: int
    parent: int  # its tokens, page table and sampling become the row's; NO_PARENT: the row was admitted in this plan
    length: int  # positions whose KV the row takes over; it takes one token more, or is told it, and computes that one itself
    seed: int
    copies: list[tuple[int, int, int]] = []  # (band, from page, to page): pages that the row writes to, so has of its own


class Plan(msgspec.Struct, array_like=True, tag="plan"):
    """What every rank computes in one step. It is applied in this order: release, admit, forks, trims, pages, told; then it is
    computed."""

    step: int
    release: list[int]  # rows that hold no request any more
    admit: list[Admit]
    page_rows: list[int]  # with page_ids: each page is appended to its row's page table, in this order
    page_ids: list[int]
    rows: list[int]  # with starts, counts, logits: one entry per row that computes
    starts: list[int]  # position of the first token to compute
    counts: list[int]  # how many tokens to compute
    logits: list[int]  # how many of the last of them need logits: 0 for an unfinished prompt, 1 to sample, all for prompt logprobs
    samples: list[bool]  # whether a token is sampled after the last one that is no draft
    forks: list[Fork] = []
    trims: list[tuple[int, int, int]] = []  # (row, band, pages): the row's page table is cut to so many pages
    page_bands: list[int] = []  # beside page_rows; empty: all of band 0
    told_rows: list[int] = []  # with told_tokens: the token at the row's start, which the workers' tables do not have
    told_tokens: list[int] = []
    drafts: list[int] = []  # beside rows: how many of its last tokens are drafts; empty: none. Such a row's start is the most it
    # can be: a row that samples begins where the tokens end that the worker knows


class RowNote(msgspec.Struct, array_like=True):
    """What only some rows have to say about a step; at most one note a row."""

    row: int
    logprobs: list[TokenLogprobs] | None = None  # one for each token that it sampled
    prompt_logprobs: list[TokenLogprobs] | None = None  # for positions start+1 .. start+count
    error: str | None = None  # this row failed, and only this row
    values: bytes | None = None  # float32: what a model that answers with numbers made of the prompt


class Sampled(msgspec.Struct, array_like=True, tag="sampled"):
    """The answer to a plan: the tokens of every row that samples, in the plan's order."""

    step: int
    tokens: list[int]
    notes: list[RowNote] = []
    counts: list[int] = []  # per row that samples: how many of the tokens are its own; empty: one each


class Start(msgspec.Struct, array_like=True, tag="start"):
    """The first message to a rank: its place and its settings."""

    rank: int
    size: int
    store: str  # the file the ranks meet at; unused by a group of one
    config: dict[str, dict[str, str | int | float | bool | list[str] | None]]  # group -> setting -> value
    path: str  # of the model, already on this machine


class BandSize(msgspec.Struct, array_like=True, frozen=True):
    """The memory of the layers that keep alike: what they keep of a sequence, and how many pages there are for it."""

    keep: int  # tokens: ALL of them, the last so many, or ONE_STATE in their place
    num_pages: int  # for states: how many of them
    page_size: int  # slots per page; for static caches the whole context; 1 for states

    def pages_of_row(self, length: int) -> int:
        """Of a window: the pages with which a sequence that may become so long always moves on. They hold the window, the page that
        is cut at either end, and the tokens of steps that are not answered."""
        return min(-(-length // self.page_size), -(-(self.keep + AHEAD) // self.page_size) + 2, self.num_pages)


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """A worker has loaded its model; these are its numbers."""

    num_pages: int
    page_size: int  # slots per page; for static caches the whole context
    max_model_len: int
    vocab_size: int
    shares_prefixes: bool  # whether KV may be reused between prompts
    depth: int
    backend: str
    dtype: str
    weight_bytes: int
    kv_bytes: int
    load_seconds: float
    workspace_bytes: int = 0  # kept free for activations and captured graphs
    taken_bytes: int = 0  # of it, what the first step took
    token_seconds: float = 0.0  # how long a step of one token took
    bands: list[BandSize] = []  # empty: one that keeps all, with num_pages and page_size
    whole_prompts: bool = False  # whether a prompt must be computed in one step
    weights: str = ""  # what the checkpoint holds and how that is kept, for people


class Phase(msgspec.Struct, array_like=True, tag="phase"):
    """What a starting worker is doing, with the share done so far."""

    name: str
    share: float


class Beat(msgspec.Struct, array_like=True, tag="beat"):
    """A sign of life, sent beside the step loop: how long the step in hand has taken; 0 when idle."""

    busy_seconds: float


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """A worker cannot go on: the one line to show, the exit code of its class, and the details for the log."""

    line: str
    exit_code: int
    details: str = ""


class Reload(msgspec.Struct, array_like=True, tag="reload"):
    """Between two plans, when nothing is in flight: the weights of this folder take the place of those that are loaded."""

    path: str


class Reloaded(msgspec.Struct, array_like=True, tag="reloaded"):
    """A rank's answer to Reload."""

    problem: str = ""  # why the folder was refused, in one line; then the old weights are still there


class Stop(msgspec.Struct, array_like=True, tag="stop"):
    """The last message to a rank."""


ToWorker = Start | Plan | Reload | Stop
FromWorker = Ready | Phase | Beat | Sampled | Reloaded | Failed

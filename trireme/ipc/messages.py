"""The messages between scheduler and workers. A plan is a message: columns of whole numbers, no tensors, no text.

Lengths, for every row:  computed <= scheduled <= total.
A step may be planned before the one before it has answered; then the last scheduled token of a row is still unknown to the
scheduler, and the worker takes it from its own token table, where sampling has put it.
"""

from __future__ import annotations

import msgspec

from trireme.types import SamplingParams, TokenLogprobs

NO_PARENT = -1  # in a fork: the row that computed the prompt is gone
AHEAD = 32  # how many tokens, drafts included, may be planned for a generating row beyond what is answered
ALL, ONE_STATE = 0, -1  # values of `keep` that are not a number of tokens


class Admit(msgspec.Struct, array_like=True):
    """A request takes a row of the workers' tables."""

    row: int
    tokens: bytes  # int32 each, all that is known: the prompt and, after a pause, what had been generated
    num_prompt: int
    sampling: SamplingParams
    seed: int
    eos_token_ids: list[int] = []  # masked until min_tokens are generated
    begins: list[int] = []  # by band: the place in its page table that its first page takes; empty: 0 in every band


class Fork(msgspec.Struct, array_like=True):
    """A row takes over what has been computed up to `length`, by another row or by one that has left since. All forks of a plan
    are read before any of them is written, so two rows may be swapped."""

    row: int
    parent: int  # its tokens, page table and sampling become the row's; NO_PARENT: the row was admitted in this plan
    length: int  # positions whose KV the row takes over; the row computes the next token itself
    seed: int
    copies: list[tuple[int, int, int]] = []  # (band, from page, to page): pages that the row will write to, so it needs copies


class Plan(msgspec.Struct, array_like=True, tag="plan"):
    """What every rank computes in one step. Changes are applied in this order: release, admit, forks, resumes, trims, pages, told.
    Then the step is computed."""

    step: int
    release: list[int]  # rows whose requests have left
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
    resumes: list[tuple[int, int]] = []  # (row, place): the row goes on from the state in this kept place
    keeps: list[tuple[int, int]] = []  # (row, place): its state after this step goes to this kept place, where it goes on from


class RowNote(msgspec.Struct, array_like=True):
    """What a step's answer says about one row beside its tokens; at most one note per row."""

    row: int
    logprobs: list[TokenLogprobs] | None = None  # one for each token that it sampled
    prompt_logprobs: list[TokenLogprobs] | None = None  # for positions start+1 .. start+count
    error: str | None = None  # why this row failed; other rows are not affected


class Sampled(msgspec.Struct, array_like=True, tag="sampled"):
    """The answer to a plan: the tokens of every row that samples, in the plan's order."""

    step: int
    tokens: list[int]
    notes: list[RowNote] = []
    counts: list[int] = []  # per row that samples: how many of the tokens belong to it; empty: one each


class Start(msgspec.Struct, array_like=True, tag="start"):
    """The first message to a rank: its number in the group and its settings."""

    rank: int
    size: int
    store: str  # the file by which the ranks find each other; unused with one rank
    config: dict[str, dict[str, str | int | float | bool | list[str] | None]]  # group -> setting -> value
    path: str  # of the model, already on this machine


class BandSize(msgspec.Struct, array_like=True, frozen=True):
    """The memory of one band (layers with the same KV needs): what they keep of a sequence, and how many pages there are."""

    keep: int  # ALL tokens, a number (only the last so many), or ONE_STATE instead of tokens
    num_pages: int  # for states: the number of kept places, beside those that every row has of its own
    page_size: int  # slots per page; for static caches the whole context; 1 for states
    chunked: bool = False  # whether `keep` is no number of last tokens, but the length of chunks of which a sequence keeps the last

    def pages_of_row(self, length: int) -> int:
        """For a window: how many pages a sequence of at most this length needs to go on. They hold the window, a partly used page
        at either end, and the tokens of unanswered steps."""
        return min(-(-length // self.page_size), -(-(self.keep + AHEAD) // self.page_size) + 2, self.num_pages)


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """A worker has loaded its model and reports its sizes."""

    num_pages: int
    page_size: int  # slots per page; for static caches the whole context
    max_model_len: int
    vocab_size: int
    shares_prefixes: bool  # whether prompts may share KV (prefix cache)
    depth: int
    backend: str
    dtype: str
    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int = 0  # kept free for activations and captured graphs
    taken_bytes: int = 0  # how much of it the first step took
    token_seconds: float = 0.0  # how long a step of one token took
    bands: list[BandSize] = []  # empty: one that keeps all, with num_pages and page_size
    whole_prompts: bool = False  # whether a prompt must be computed in one step
    weights: str = ""  # text for people: the checkpoint's formats and how the weights are kept
    kv: str = ""  # text for people: what keys and values are kept as, if not in the activations' type


class Phase(msgspec.Struct, array_like=True, tag="phase"):
    """The phase of a starting worker, with the share done so far."""

    name: str
    share: float


class Beat(msgspec.Struct, array_like=True, tag="beat"):
    """A heartbeat from a thread beside the step loop: how long the current step has taken; 0 when idle."""

    busy_seconds: float


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """A worker cannot go on: the line to show, the exit code of its error class, and details for the log."""

    line: str
    exit_code: int
    details: str = ""


class Reload(msgspec.Struct, array_like=True, tag="reload"):
    """Replaces the loaded weights by those of this folder. Sent only when no plan is in flight."""

    path: str


class Reloaded(msgspec.Struct, array_like=True, tag="reloaded"):
    """A rank's answer to Reload."""

    problem: str = ""  # why the folder was refused, in one line; then the old weights are still there


class Stop(msgspec.Struct, array_like=True, tag="stop"):
    """The last message to a rank."""


ToWorker = Start | Plan | Reload | Stop
FromWorker = Ready | Phase | Beat | Sampled | Reloaded | Failed

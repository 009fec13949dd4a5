"""The messages between scheduler and workers. A plan is a message: columns of whole numbers, no tensors, no text.

Lengths, for every row:  computed <= scheduled <= total.
A step may be planned before the one before it has answered; then the last scheduled token of a row is still unknown to the
scheduler, and the worker takes it from its own token table, where sampling has put it.
"""

from __future__ import annotations

import msgspec

from trireme.types import SamplingParams, TokenLogprobs


class Admit(msgspec.Struct, array_like=True):
    """A request takes a row of the workers' tables."""

    row: int
    tokens: bytes  # int32 each, all that is known: the prompt and, after a pause, what had been generated
    num_prompt: int
    sampling: SamplingParams
    seed: int
    eos_token_ids: list[int] = []  # masked until min_tokens


class Plan(msgspec.Struct, array_like=True, tag="plan"):
    """What every rank computes in one step, applied in the order of the fields."""

    step: int
    release: list[int]  # rows that hold no request any more
    admit: list[Admit]
    page_rows: list[int]  # with page_ids: each page is appended to its row's page table, in this order
    page_ids: list[int]
    rows: list[int]  # with starts, counts, logits: one entry per row that computes
    starts: list[int]  # position of the first token to compute
    counts: list[int]  # how many tokens to compute
    logits: list[int]  # how many of the last of them need logits: 0 for an unfinished prompt, 1 to sample, all for prompt logprobs
    samples: list[bool]  # whether a token is sampled after the last one


class RowNote(msgspec.Struct, array_like=True):
    """What only some rows have to say about a step; at most one note a row."""

    row: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # for positions start+1 .. start+count
    error: str | None = None  # this row failed, and only this row


class Sampled(msgspec.Struct, array_like=True, tag="sampled"):
    """The answer to a plan: one token for every row that samples, in the plan's order."""

    step: int
    tokens: list[int]
    notes: list[RowNote] = []


class Start(msgspec.Struct, array_like=True, tag="start"):
    """The first message to a rank: its place and its settings."""

    rank: int
    size: int
    store: str  # the file the ranks meet at; unused by a group of one
    config: dict[str, dict[str, str | int | float | bool | None]]  # group -> setting -> value
    path: str  # of the model, already on this machine


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


class Stop(msgspec.Struct, array_like=True, tag="stop"):
    """The last message to a rank."""


ToWorker = Start | Plan | Stop
FromWorker = Ready | Phase | Beat | Sampled | Failed

"""The rule that makes rows follow a grammar: masks over the vocabulary, made on the host while the device computes the logits.

Knows grammars and tokens; nothing of what a grammar is for. If a row's grammar fails, only that row fails.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from trireme.errors import BadRequest, TriremeError
from trireme.hub.grammar import GrammarTokens, first_line
from trireme.ipc.messages import Admit, Fork
from trireme.types import GRAMMAR_TOO_COSTLY
from trireme.worker.logits import NEGATIVE, Choice

MAX_COMPILED = 64  # how many compiled grammars are kept, because many requests use the same one


class Grammars:
    """One per worker. The vocabulary is read when the first grammar arrives, or earlier if the worker is idle."""

    def __init__(self, load: Callable[[], GrammarTokens], width: int):
        self.errors: dict[int, str] = {}  # by row: why its grammar failed
        self._load = load
        self._nothing = np.zeros(-(-width // 32) * 4, dtype=np.uint8)  # one bit per token, in whole words
        self._tokens: GrammarTokens | None = None
        self._rows: dict[int, _Row] = {}
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        # One thread: compiling and masks go beside the steps, in order.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def warm_up(self) -> None:
        """Reads the vocabulary in the background. It takes about a second, and the first grammar's batch would wait for it."""
        self._thread.submit(self._vocabulary)

    def admit(self, admit: Admit) -> bool:
        self.release(admit.row)
        grammar = admit.sampling.grammar
        if grammar is None:
            return False
        compiled = self._thread.submit(self._compile, grammar)
        self._rows[admit.row] = _Row(admit, compiled, lambda: self._renew(grammar), self._nothing)
        return True

    def fork(self, forks: list[Fork]) -> None:
        """Each row is where its parent is in the grammar; if the parent has gone on since, it follows its own tokens there."""
        parents = [self._rows.get(fork.parent) for fork in forks]
        for fork, parent in zip(forks, parents, strict=True):
            self.release(fork.row)
            if parent is None:
                continue
            if parent.seen == fork.length + 1:
                self._rows[fork.row] = parent.forked(self._thread)
            else:
                self.admit(msgspec.structs.replace(parent.admit, row=fork.row))

    def release(self, row: int) -> None:
        self.errors.pop(row, None)
        self._rows.pop(row, None)

    def touches(self, rows: np.ndarray) -> list[int]:
        return [i for i, row in enumerate(rows.tolist()) if row in self._rows] if self._rows else []

    def prepare(self, rows: np.ndarray, lengths: np.ndarray, tokens: Tensor) -> None:
        """Starts computing the masks of a step before its forward. Only rows with a grammar wait for the answer of the last step.

        rows, lengths: those that sample, and how many tokens each has; tokens: the token table
        """
        at = self.touches(rows)
        if not at:
            return
        waiting = [(self._rows[int(rows[i])], int(rows[i]), int(lengths[i])) for i in at]
        fresh = _fresh(waiting, tokens)
        for (row, _, length), ids in zip(waiting, fresh, strict=True):
            row.seen = length
            row.mask = self._thread.submit(row.advance, ids)

    def apply(self, choice: Choice, at: list[int]) -> None:
        """Forbids what the grammars do not allow."""
        masks = np.stack([self._mask(int(choice.rows[i])) for i in at])
        forbidden = _unpacked(~masks, choice.logits.shape[1], choice.logits.device)
        if at == list(range(len(at))):  # adjacent rows need no copy
            choice.logits[: len(at)].masked_fill_(forbidden, NEGATIVE)
        else:
            where = torch.tensor(at, device=choice.logits.device)
            choice.logits[where] = choice.logits[where].masked_fill(forbidden, NEGATIVE)
        for i in at:
            row = self._rows[int(choice.rows[i])]
            if row.ended and row.ends:  # the end must stay allowed, because nothing else can be chosen
                choice.logits[i, row.ends] = 0.0

    def take_errors(self, rows: np.ndarray) -> dict[int, str]:
        """By row, why its grammar failed, for those of these rows where it did. Each reason is returned once."""
        return {row: self.errors.pop(row) for row in rows.tolist() if row in self.errors} if self.errors else {}

    def _mask(self, row: int) -> np.ndarray:
        mask = self._rows[row].mask
        assert mask is not None, f"row {row} is sampled without having been prepared"
        try:
            return mask.result()
        except Exception as error:
            own = str(error) if isinstance(error, TriremeError) else f"{type(error).__name__}: {error}"
            self.errors[row] = own if own.startswith(GRAMMAR_TOO_COSTLY) else f"the grammar of this request failed: {own}"
            return self._nothing

    def _vocabulary(self) -> GrammarTokens:
        if self._tokens is None:
            self._tokens = self._load()
        return self._tokens

    def _compile(self, grammar: str) -> LLMatcher:
        found = self._compiled.pop(grammar, None) or self._vocabulary().matcher(grammar)
        self._compiled[grammar] = found
        while len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return found.deep_copy()

    def _renew(self, grammar: str) -> LLMatcher:
        """The grammar compiled for one row alone; whoever comes next finds a fresh one too."""
        self._compiled.pop(grammar, None)
        return self._vocabulary().matcher(grammar)


class _TooCostly(BadRequest):
    """A compiled grammar has reached the limit of its cost and cannot be followed further."""

    def __init__(self, matcher: LLMatcher):
        super().__init__(f"{GRAMMAR_TOO_COSTLY}: {first_line(matcher.get_error())}.", "make it simpler")


class _Row:
    """A row's position in its grammar.

    The copies of a compiled grammar share the states it has built, and with them the bounds on its cost: where they are spent,
    it may have been by others, so the row tries again with a grammar of its own before it fails.
    """

    def __init__(self, admit: Admit, compiled: Future[LLMatcher], renew: Callable[[], LLMatcher], nothing: np.ndarray):
        self.admit = admit
        self.seen = admit.num_prompt  # after a pause, the generated tokens are followed again
        self.ends = admit.eos_token_ids
        self.ended = False  # only an end token may follow
        self.mask: Future[np.ndarray] | None = None
        self._compiled, self._renew, self._nothing = compiled, renew, nothing
        self._past: list[int] = []
        self._own: LLMatcher | None = None

    def forked(self, thread: ThreadPoolExecutor) -> _Row:
        """Another row at the same place in the grammar. The copy is made when the work queued for this row is done."""
        other = copy.copy(self)

        def follow() -> LLMatcher:
            other._past, other.ended = list(self._past), self.ended
            return (self._own or self._compiled.result()).deep_copy()

        other._compiled, other._own = thread.submit(follow), None
        return other

    def advance(self, ids: list[int]) -> np.ndarray:
        """Follows the new tokens, and returns which may come next: one bit per token of the vocabulary."""
        self._past += ids
        try:
            return self._follow(self._own or self._compiled.result(), ids)
        except _TooCostly:
            if self._own is not None:
                raise
            self._own = self._renew()
            return self._follow(self._own, self._past)

    def _follow(self, matcher: LLMatcher, ids: list[int]) -> np.ndarray:
        for token in ids:
            if token in self.ends:
                self.ended = True
            if not self.ended and not matcher.consume_token(token):
                error = matcher.get_error()
                raise _TooCostly(matcher) if "satisfy" not in error else ValueError(f"token {token} does not fit: {error[:200]}")
        self.ended = self.ended or (matcher.is_stopped() and not matcher.is_error())
        if self.ended:
            return self._nothing
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)[: len(self._nothing)]
        if matcher.is_error():
            raise _TooCostly(matcher)
        return mask


def _unpacked(bits: np.ndarray, width: int, device: torch.device) -> Tensor:
    """[rows, width] of bool from one bit per token; on a device of its own the bits travel and are unpacked there."""
    if device.type == "cpu":
        unpacked = torch.from_numpy(np.unpackbits(bits, axis=1, bitorder="little")).view(torch.bool)
    else:
        moved = torch.from_numpy(bits).to(device, non_blocking=True)
        unpacked = ((moved.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=device)) & 1).bool().flatten(1)
    lacking = width - unpacked.shape[1]
    return torch.nn.functional.pad(unpacked, (0, lacking), value=True) if lacking > 0 else unpacked[:, :width]


def _fresh(waiting: list[tuple[_Row, int, int]], tokens: Tensor) -> list[list[int]]:
    """The tokens of each row that its grammar has not seen: one copy from the device for all of them."""
    counts = [length - row.seen for row, _, length in waiting]
    longest = max(counts)
    if not longest:
        return [[] for _ in waiting]
    starts = torch.tensor([[row.seen] for row, _, _ in waiting], device=tokens.device)
    places = (starts + torch.arange(longest, device=tokens.device)).clamp_max(tokens.shape[1] - 1)
    rows = torch.tensor([[number] for _, number, _ in waiting], device=tokens.device)
    found = tokens[rows, places].tolist()
    return [ids[:count] for ids, count in zip(found, counts, strict=True)]

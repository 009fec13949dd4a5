"""A worker without a model. It keeps the tables a real one keeps, a digest in every KV slot, and checks each read of them."""

from __future__ import annotations

from array import array
from collections import deque

from trireme.ipc.messages import Admit, Plan, RowNote, Sampled
from trireme.types import TokenLogprobs

VOCABULARY = 50


def chain(tokens: list[int], before: list[int] | None = None) -> list[int]:
    """For each position, a digest of all tokens up to it."""
    digests = list(before or [])
    for token in tokens[len(digests) :]:
        digests.append(hash((digests[-1] if digests else 17, token)))
    return digests


def next_token(digest: int, seed: int) -> int:
    """What the pretended model says after a prefix: a function of it and of the seed, whatever else is in the batch."""
    return hash((digest, seed, 3)) // 7 % VOCABULARY


def solo(prompt: list[int], seed: int, stops: set[int], max_tokens: int, min_tokens: int = 0) -> list[int]:
    """The answer as it would be with nobody else around."""
    tokens, digests = list(prompt), chain(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(digests[-1], seed))
        digests = chain(tokens, digests)
        if tokens[-1] in stops and len(tokens) - len(prompt) > min_tokens:
            break
    return tokens[len(prompt) :]


class Row:
    def __init__(self, admit: Admit):
        self.admit, self.tokens, self.pages = admit, array("i", admit.tokens).tolist(), list[int]()
        self.digests = chain(self.tokens)


class FakeWorker:
    def __init__(self, num_pages: int, page_size: int, depth: int = 1, fails: set[int] | None = None):
        self.depth, self.num_pages, self.page_size = depth, num_pages, page_size
        self.fails = fails or set()  # seeds whose rows report an error when they sample
        self.slots: dict[int, int] = {}
        self.rows: dict[int, Row] = {}
        self.answers: deque[Sampled] = deque()
        self.plans: list[Plan] = []

    def launch(self, plan: Plan) -> None:
        assert plan.step == len(self.plans) + 1
        self.plans.append(plan)
        for row in plan.release:
            del self.rows[row]
        for admit in plan.admit:
            assert admit.row not in self.rows, "admitted to a row that was not released"
            self.rows[admit.row] = Row(admit)
        for row, page in zip(plan.page_rows, plan.page_ids, strict=True):
            assert 0 <= page < self.num_pages and page not in self.rows[row].pages
            self.rows[row].pages.append(page)
        assert plan.rows and len(set(plan.rows)) == len(plan.rows)
        columns = zip(plan.rows, plan.starts, plan.counts, plan.logits, plan.samples, strict=True)
        results = [self._compute(*column) for column in columns]
        # Writes of one step come before its reads, as on a device: rows must not step on each other.
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            self._verify(self.rows[row], start + count)
        sampled = [token for token, _ in results if token is not None]
        self.answers.append(Sampled(plan.step, sampled, [note for _, note in results if note is not None]))

    def collect(self) -> Sampled:
        return self.answers.popleft()

    def _slot(self, row: Row, position: int) -> int:
        return row.pages[position // self.page_size] * self.page_size + position % self.page_size

    def _compute(self, number: int, start: int, count: int, logits: int, samples: bool) -> tuple[int | None, RowNote | None]:
        row = self.rows[number]
        tokens, admit = row.tokens, row.admit
        assert count > 0 and start + count <= len(tokens), "planned a token that does not exist"
        for position in range(start, start + count):
            self.slots[self._slot(row, position)] = row.digests[position]
        note = None
        if admit.sampling.prompt_logprobs is not None and logits == count and start < admit.num_prompt:
            positions = range(start + 1, min(start + count + 1, admit.num_prompt))
            note = RowNote(number, prompt_logprobs=[TokenLogprobs(tokens[p], -float(p), 1) for p in positions])
        else:
            assert logits == int(samples)
        if not samples:
            return None, note
        assert start + count == len(tokens), "sampled in the middle of what is known"
        tokens.append(next_token(row.digests[-1], admit.seed))
        row.digests = chain(tokens, row.digests)
        if admit.seed in self.fails:
            return tokens[-1], RowNote(number, error="its logits were not finite")
        if admit.sampling.logprobs is not None:
            note = note or RowNote(number)
            note.logprobs = [TokenLogprobs(tokens[-1], -0.5, 1)]
        return tokens[-1], note

    def _verify(self, row: Row, end: int) -> None:
        """Every context slot of the row must hold the digest of exactly its prefix."""
        for position in range(end):
            slot = self._slot(row, position)
            assert self.slots.get(slot) == row.digests[position], f"the KV at position {position} is another's"

"""A worker without a model. It keeps the tables a real one keeps, a digest in every KV slot, and checks each read of them."""

from __future__ import annotations

import hashlib
from collections import deque

from trireme.ipc.messages import Plan, RowNote, Sampled
from trireme.types import TokenLogprobs

VOCABULARY = 50


def digest(tokens: list[int], seed: int = 0) -> int:
    return int.from_bytes(hashlib.blake2b(repr((seed, tokens)).encode(), digest_size=8).digest(), "little")


def next_token(tokens: list[int], seed: int) -> int:
    """What the pretended model says after `tokens`: a function of them and of the seed, whatever else is in the batch."""
    return digest(tokens, seed) % VOCABULARY


def solo(prompt: list[int], seed: int, stops: set[int], max_tokens: int, min_tokens: int = 0) -> list[int]:
    """The answer as it would be with nobody else around."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens, seed))
        if tokens[-1] in stops and len(tokens) - len(prompt) > min_tokens:
            break
    return tokens[len(prompt) :]


class FakeWorker:
    def __init__(self, num_pages: int, page_size: int, depth: int = 1, fails: set[int] | None = None):
        self.depth, self.num_pages, self.page_size = depth, num_pages, page_size
        self.slots: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.pages: dict[int, list[int]] = {}
        self.admits: dict[int, object] = {}
        self.fails = fails or set()  # seeds whose rows report an error when they sample
        self.answers: deque[Sampled] = deque()
        self.most_tokens = self.num_rows = self.last_step = 0

    def launch(self, plan: Plan) -> None:
        assert plan.step == self.last_step + 1
        self.last_step = plan.step
        for row in plan.release:
            del self.tokens[row], self.pages[row], self.admits[row]
        for admit in plan.admit:
            assert admit.row not in self.tokens
            self.tokens[admit.row], self.pages[admit.row], self.admits[admit.row] = list(admit.tokens), [], admit
        for row, page in zip(plan.page_rows, plan.page_ids, strict=True):
            assert 0 <= page < self.num_pages and page not in self.pages[row]
            self.pages[row].append(page)
        assert len(set(plan.rows)) == len(plan.rows)
        columns = zip(plan.rows, plan.starts, plan.counts, plan.logits, plan.samples, strict=True)
        # Writes of one step come before its reads, as on a device: rows must not step on each other.
        results = [self._compute(*column) for column in columns]
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            self._verify(row, start + count)
        self.most_tokens = max(self.most_tokens, sum(plan.counts))
        self.num_rows += len(plan.rows)
        sampled = [token for token, _ in results if token is not None]
        self.answers.append(Sampled(plan.step, sampled, [note for _, note in results if note is not None]))

    def collect(self) -> Sampled:
        return self.answers.popleft()

    def _slot(self, row: int, position: int) -> int:
        return self.pages[row][position // self.page_size] * self.page_size + position % self.page_size

    def _compute(self, row: int, start: int, count: int, logits: int, samples: bool) -> tuple[int | None, RowNote | None]:
        tokens, admit = self.tokens[row], self.admits[row]
        assert count > 0 and start + count <= len(tokens), "planned a token that does not exist"
        for position in range(start, start + count):
            self.slots[self._slot(row, position)] = digest(tokens[: position + 1])
        assert logits >= int(samples)
        note = None
        if logits > 1 or (logits and admit.sampling.prompt_logprobs is not None and start < admit.num_prompt):
            assert logits == count
            scores = [
                TokenLogprobs(tokens[p], -float(p), 1) for p in range(start + 1, min(start + count + 1, admit.num_prompt))
            ]
            note = RowNote(row, prompt_logprobs=scores)
        if not samples:
            return None, note
        assert start + count == len(tokens), "sampled in the middle of what is known"
        tokens.append(next_token(tokens, admit.seed))
        if admit.seed in self.fails:
            return tokens[-1], RowNote(row, error="its logits were not finite")
        if admit.sampling.logprobs is not None:
            note = note or RowNote(row)
            note.logprobs = TokenLogprobs(tokens[-1], -0.5, 1)
        return tokens[-1], note

    def _verify(self, row: int, end: int) -> None:
        """Every context slot of the row must hold the digest of exactly its prefix."""
        tokens = self.tokens[row]
        for position in range(end):
            assert self.slots.get(self._slot(row, position)) == digest(tokens[: position + 1]), (
                f"row {row}: the KV at position {position} is not its own"
            )

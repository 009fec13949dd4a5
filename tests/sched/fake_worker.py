"""A worker without a model. It keeps the tables a real one keeps, a digest in every KV slot, and checks each read of them."""

from __future__ import annotations

import copy
import random
from array import array
from collections import deque
from dataclasses import dataclass, field

import msgspec

from trireme.ipc.messages import NO_PARENT, Admit, BandSize, Plan, RowNote, Sampled
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
    def __init__(self, admit: Admit, bands: int):
        self.admit, self.tokens = admit, array("i", admit.tokens).tolist()
        self.tables: list[dict[int, int]] = [{} for _ in range(bands)]  # by band: page of the sequence -> page of the memory
        self.ends = list(admit.begins) or [0] * bands  # of each table
        self.digests = chain(self.tokens)

    def forked(self, row: int, length: int, seed: int) -> Row:
        """Another row with the tokens up to the one behind `length`."""
        other = copy.copy(self)
        other.admit = msgspec.structs.replace(self.admit, row=row, seed=seed)
        other.tokens, other.digests = self.tokens[: length + 1], self.digests[: length + 1]
        other.tables, other.ends = [dict(table) for table in self.tables], list(self.ends)
        return other

    def trim(self, band: int, pages: int) -> None:
        self.tables[band] = {at: page for at, page in self.tables[band].items() if at < pages}
        self.ends[band] = pages


@dataclass
class FakeWorker:
    num_pages: int
    page_size: int
    depth: int = 1
    fails: set[int] = field(default_factory=set)  # seeds whose rows report an error when they sample
    tells: bool = False  # keeps no sampled token
    likeness: float = 0.5  # how often a draft is what will be sampled
    windows: tuple[BandSize, ...] = ()  # bands behind the first
    states: int | None = None  # kept places for states; None: no layer keeps a state

    def __post_init__(self) -> None:
        self.sizes = [self.num_pages, *(band.num_pages for band in self.windows)]
        self.slots: list[dict[int, int]] = [{} for _ in self.sizes]  # by band
        self.rows: dict[int, Row] = {}
        # The digest of what a state has seen, by its place: a number of kept ones, or (row, 0 or 1), a row's own two.
        self.places: dict[int | tuple[int, int], int] = {}
        self.newest: dict[int, int | tuple[int, int]] = {}  # by row
        self.answers: deque[Sampled] = deque()
        self.plans: list[Plan] = []
        self.kept = 0  # drafts
        self.dice = random.Random(0)

    def launch(self, plan: Plan) -> None:
        assert plan.step == len(self.plans) + 1
        self.plans.append(plan)
        for row in plan.release:
            del self.rows[row]
        for admit in plan.admit:
            assert admit.row not in self.rows, "admitted to a row that was not released"
            self.rows[admit.row] = Row(admit, len(self.sizes))
        self._fork(plan)
        self.newest |= {admit.row: (admit.row, 0) for admit in plan.admit} | {fork.row: (fork.row, 0) for fork in plan.forks}
        self.newest |= dict(plan.resumes)
        for row, band, count in plan.trims:
            assert 0 <= count < self.rows[row].ends[band]
            self.rows[row].trim(band, count)
        for row, page, band in zip(plan.page_rows, plan.page_ids, plan.page_bands or [0] * len(plan.page_rows), strict=True):
            known = self.rows[row]
            assert 0 <= page < self.sizes[band] and (band or page not in known.tables[0].values())
            known.tables[band][known.ends[band]] = page
            known.ends[band] += 1
        assert plan.rows and len(set(plan.rows)) == len(plan.rows)
        self._tell(plan)
        columns = zip(
            plan.rows, plan.starts, plan.counts, plan.logits, plan.samples, plan.drafts or [0] * len(plan.rows), strict=True
        )
        results = [self._compute(*column) for column in columns]
        self._pass_states(plan, results)
        # Writes of one step come before its reads, as on a device: rows must not step on each other.
        for row, _, _, digests, start in results:
            self._verify(row, digests, start)
        for row, new, *_ in results:
            if not self.tells:
                row.tokens += new
                row.digests = chain(row.tokens, row.digests)
        gained = [new for _, new, *_ in results if new]
        counts = [len(new) for new in gained] if plan.drafts else []
        notes = [note for _, _, note, *_ in results if note is not None]
        self.answers.append(Sampled(plan.step, [token for new in gained for token in new], notes, counts))

    def collect(self) -> Sampled:
        return self.answers.popleft()

    def _fork(self, plan: Plan) -> None:
        """All forks read before any of them writes."""
        read = []
        for fork in plan.forks:
            parent = self.rows[fork.row if fork.parent == NO_PARENT else fork.parent]
            live = fork.length % self.page_size
            assert [band for band, _, _ in fork.copies] == (list(range(len(self.sizes))) if live and self.num_pages else [])
            held = [[self.slots[band].get(at * self.page_size + i) for i in range(live)] for band, at, _ in fork.copies]
            read.append((fork, parent, held))
        for fork, parent, held in read:
            if fork.parent != NO_PARENT:
                assert fork.row not in self.rows, "forked into a row that was not released"
                row = self.rows[fork.row] = parent.forked(fork.row, fork.length, fork.seed)
                for band in range(len(row.tables)):
                    row.trim(band, -(-fork.length // self.page_size))
                for band, page, target in fork.copies:
                    assert row.tables[band][fork.length // self.page_size] == page
                    row.tables[band][fork.length // self.page_size] = target
            for (band, _, target), digests in zip(fork.copies, held, strict=True):
                for i in range(self.page_size):
                    self.slots[band].pop(target * self.page_size + i, None)
                copied = {target * self.page_size + i: digest for i, digest in enumerate(digests) if digest is not None}
                self.slots[band] |= copied

    def _pass_states(self, plan: Plan, results: list) -> None:
        """Each row's state goes from its newest place to the next. All are read while all are written."""
        if self.states is None:
            assert not plan.keeps and not plan.resumes
            return
        keeps, written, read = dict(plan.keeps), {}, set()
        assert keeps.keys() <= set(plan.rows) and all(0 <= place < self.states for place in keeps.values())
        assert dict(plan.resumes).keys() <= set(plan.rows), "resumed in a plan that computes nothing of the row"
        for number, (_, _, _, digests, start) in zip(plan.rows, results, strict=True):
            before = self.newest[number]
            if start:
                assert self.places.get(before) == digests[start - 1], f"the state of row {number} at {start} is another's"
                read.add(before)
            after = keeps.get(number, (number, 1) if before == (number, 0) else (number, 0))
            assert after not in written, "two rows write one state"
            written[after], self.newest[number] = digests[-1], after
        assert not read & written.keys(), "a state is written while it is read"
        self.places |= written

    def _tell(self, plan: Plan) -> None:
        for row, token in zip(plan.told_rows, plan.told_tokens, strict=True):
            known = self.rows[row]
            assert self.tells and plan.starts[plan.rows.index(row)] == len(known.tokens)
            known.tokens.append(token)
            known.digests = chain(known.tokens, known.digests)

    def _slot(self, row: Row, position: int, band: int) -> int:
        return row.tables[band][position // self.page_size] * self.page_size + position % self.page_size

    def _compute(
        self, number: int, start: int, count: int, logits: int, samples: bool, drafts: int
    ) -> tuple[Row, list[int], RowNote | None, list[int], int]:
        """The row, what it samples, what it says, the digests of all that it has computed, and where this step began."""
        row = self.rows[number]
        if samples:  # the plan's start is the most it can be
            own = len(row.tokens) - (count - drafts)
            assert own <= start, "sampled in the middle of what is known"
            start = own
        assert count > 0 and start + count - drafts <= len(row.tokens), "planned a token that does not exist"
        tokens = row.tokens + self._drafted(row, drafts)
        digests = chain(tokens, row.digests)
        if self.num_pages:
            for band, slots in enumerate(self.slots):
                slots.update({self._slot(row, at, band): digests[at] for at in range(start, start + count)})
        note, admit = None, row.admit
        if admit.sampling.prompt_logprobs is not None and logits == count and start < admit.num_prompt:
            positions = range(start + 1, min(start + count + 1, admit.num_prompt))
            note = RowNote(number, prompt_logprobs=[TokenLogprobs(tokens[p], -float(p), 1) for p in positions])
        else:
            assert logits == int(samples) + drafts
        if not samples:
            return row, [], note, digests[: start + count], start
        new = self._sample(row, tokens, digests)
        self.kept += len(new) - 1
        if admit.seed in self.fails:
            return row, new, RowNote(number, error="its logits were not finite"), digests[: start + count], start
        if admit.sampling.logprobs is not None:
            note = note or RowNote(number)
            note.logprobs = [TokenLogprobs(token, -0.5, 1) for token in new]
        return row, new, note, digests[: start + count], start

    def _drafted(self, row: Row, count: int) -> list[int]:
        """Guesses at what the row will sample, of which some are right."""
        tokens, digests = list(row.tokens), row.digests
        for _ in range(count):
            right = next_token(digests[-1], row.admit.seed)
            tokens.append(right if self.dice.random() < self.likeness else self.dice.randrange(VOCABULARY))
            digests = chain(tokens, digests)
        return tokens[len(row.tokens) :]

    def _sample(self, row: Row, tokens: list[int], digests: list[int]) -> list[int]:
        """One token behind what is known, and one behind each draft that was right."""
        new: list[int] = []
        for end in range(len(row.tokens), len(tokens) + 1):
            new.append(next_token(digests[end - 1], row.admit.seed))
            if end < len(tokens) and tokens[end] != new[-1]:
                break
        return new

    def _verify(self, row: Row, digests: list[int], start: int) -> None:
        """Every slot that a step from `start` on reads must hold the digest of exactly its prefix."""
        reach = [0, *(_first_seen(band, start) for band in self.windows)] if self.num_pages else []
        for band, first in enumerate(reach):
            for position in range(first, len(digests)):
                found = self.slots[band].get(self._slot(row, position, band))
                assert found == digests[position], f"the KV at position {position} of band {band} is another's"


def _first_seen(band: BandSize, position: int) -> int:
    """The first position of the band that the token at this one reads."""
    return position // band.keep * band.keep if band.chunked else max(0, position - band.keep + 1)

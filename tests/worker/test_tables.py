"""The tables behind a step: a step that only goes on holds the same columns as one laid out anew."""

from __future__ import annotations

from array import array

import msgspec
import numpy as np
import pytest
import torch

from trireme.backends.reference import Reference
from trireme.config import DeviceOptions
from trireme.ipc.messages import Admit, BandSize, Plan
from trireme.ops import Choosing
from trireme.types import SamplingParams
from trireme.worker.tables import Padding, Step, Tables

BANDS = [BandSize(0, 32, 16), BandSize(20, 9, 16)]
NAMES = (
    "rows",
    "query_starts",
    "lengths",
    "positions",
    "token_rows",
    "reach",
    "pick_rows",
    "pick_positions",
    "logits_at",
)


def columns(tables: Tables, step: Step) -> dict[str, list[int]]:
    found = {
        name: step.column(name).tolist()
        for name in (*NAMES, *(("uniform", *Choosing._fields) if "uniform" in step.columns else ()))
    }
    return found | {"starts": step.starts.tolist(), "pages": tables.all_pages.tolist()}


def decode(step: int, rows: list[int], starts: list[int], **changes: list) -> Plan:
    ones = [1] * len(rows)
    plan = {"release": [], "admit": [], "page_rows": [], "page_ids": [], "rows": rows, "starts": starts, "counts": ones}
    return Plan(step, **{**plan, "logits": ones, "samples": [True] * len(rows), **changes})


def admissions(rows: list[int], lengths: list[int]) -> Plan:
    admits = [
        Admit(row=row, tokens=array("i", range(5, 5 + length)).tobytes(), num_prompt=length, sampling=SamplingParams(), seed=row)
        for row, length in zip(rows, lengths, strict=True)
    ]
    starts = [length - 1 for length in lengths]
    return decode(0, rows, starts, admit=admits, page_rows=rows, page_ids=list(range(len(rows))))


@pytest.mark.parametrize("padded", [3, 4])
@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("apart", [False, True])  # whether the device has memory of its own, and columns are sent to it
def test_going_on_is_laying_out_anew(padded: int, random: bool, apart: bool) -> None:
    backend, size = Reference(DeviceOptions()), Padding(padded, padded, True)
    going, anew = (Tables(backend, 8, 64, BANDS, 64) for _ in range(2))
    if apart:
        going.packed.on_host, going.packed.target = False, torch.zeros_like(going.packed.target)
    draw, lengths, rows = np.random.default_rng(1), [3, 9, 5], [4, 0, 2]
    plans = [admissions(rows, lengths)]
    plans += [decode(i, rows, [length - 1 + i for length in lengths]) for i in range(1, 4)]
    plans += [decode(4, rows, [n + 3 for n in lengths], page_rows=[0, 0], page_ids=[9, 3], page_bands=[0, 1])]  # a page more
    plans += [decode(5, rows, [n + 4 for n in lengths]), decode(6, rows, [n + 5 for n in lengths])]
    plans += [decode(7, [0, 4, 2], [14, 8, 10]), decode(8, [0, 4, 2], [15, 8, 11])]  # another order; one row stands still
    moved = 0
    for plan in plans:
        uniforms = draw.random(3, dtype=np.float32) if random else None
        moved += going._goes_on(plan, size)
        anew.before = None
        step = going.fill(plan, uniforms, size)
        assert columns(going, step) == columns(anew, anew.fill(plan, uniforms, size)), plan
        assert torch.equal(going.tokens, anew.tokens)
        assert ("uniform" in step.columns) == random
    assert moved == 6  # three after the prompts, the one with a page more, two after it


@pytest.mark.parametrize("counts, logits, padding, every", [
    ([1, 1, 1], [1, 1, 1], None, True),
    ([1, 1, 1], [1, 1, 1], Padding(4, 4, True), True),
    ([2, 3], [2, 3], None, True),
    ([2, 3], [1, 1], None, False),
    ([2, 3], [0, 0], None, False),
    ([1, 1, 1], [1, 1, 1], Padding(3, 3, False), False),  # the next one that is replayed may hold a prompt
])  # fmt: skip
def test_all_tokens_are_wanted(counts: list[int], logits: list[int], padding: Padding | None, every: bool) -> None:
    tables, rows = Tables(Reference(DeviceOptions()), 8, 64, BANDS, 64), list(range(len(counts)))
    plan = admissions(rows, [5] * len(rows))
    step = tables.fill(msgspec.structs.replace(plan, starts=[0] * len(rows), counts=counts, logits=logits), None, padding)
    assert (step.logits_at is None) == every


def test_columns_that_find_no_room_travel_by_themselves_unchanged() -> None:
    tables = Tables(Reference(DeviceOptions()), 8, 64, BANDS, 64)
    tables.packed.used = len(tables.packed.host) - 1
    shares, counts = np.array([0.25, 0.75], np.float32), np.array([3, 4], np.int64)
    assert tables.packed.at(tables.packed.put(shares)).view(torch.float32).tolist() == shares.tolist()
    assert tables.packed.at(tables.packed.put(counts)).tolist() == counts.tolist()


@pytest.mark.parametrize("padding", [None, Padding(4, 4, True, True)])
@pytest.mark.parametrize("ahead", [0, 3])
def test_a_step_that_settles_is_where_its_rows_are(ahead: int, padding: Padding | None) -> None:
    """A plan's starts may be too far where its rows' lengths are settled on the device; where they are right, nothing changes."""
    backend, rows, lengths = Reference(DeviceOptions()), [4, 0, 2], [3, 9, 5]
    right, settled = (Tables(backend, 8, 64, BANDS, 64) for _ in range(2))
    ids = torch.tensor([7, 8, 9, 0][: padding.sequences if padding else 3])
    for i in range(4):
        starts = [length - 1 + i for length in lengths]
        plan = admissions(rows, lengths) if not i else decode(i, rows, starts)
        exact = right.fill(plan, None, padding and padding._replace(settled=False))
        too_far = [start + ahead * (i > 0) for start in starts]
        step = settled.fill(msgspec.structs.replace(plan, starts=too_far, drafts=[0, 0, 0]), None, padding)
        for _ in range(2):  # as often as a step is run, as a graph's first one is twice
            settled.settle(step)
            assert settled_columns(step) == settled_columns(exact), i
            settled.append(step, ids)
        right.append(exact, ids)
        assert torch.equal(settled.tokens, right.tokens)
    last = settled.exact(msgspec.structs.replace(decode(4, rows, [40, 41, 42]), drafts=[0, 0, 0]))
    assert last.starts == [length + 3 for length in lengths] and not last.drafts


def settled_columns(step: Step) -> dict[str, list[int]]:
    return {name: step.column(name).tolist() for name in NAMES}

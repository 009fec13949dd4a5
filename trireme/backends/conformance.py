"""Checks a backend's ops: runs every case on the backend and compares it with the plain bodies in double precision.

Knows ops and their cases; nothing of models. `worker/conformance.py` goes on from here with whole models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trireme.backends.base import Backend
from trireme.ops import Ops
from trireme.ops.cases import ALL, Case, Draw, Result, cases

SMALL = 0.1  # tensors smaller than this are compared as if they had such values


@dataclass(frozen=True)
class Finding:
    """One comparison: how far off, how far off it may be."""

    op: str
    case: str
    dtype: str
    error: float  # relative to the largest value; infinite where shapes differ or the op failed
    tolerance: float
    note: str = ""  # what went wrong, where it is not a matter of numbers

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance


def check_ops(backend: Backend, ops: Iterable[str] = (), dtypes: Iterable[torch.dtype] = ALL) -> Iterator[Finding]:
    """Every case of the named ops (all, if none is named) in every type, one finding each."""
    wanted, kinds = set(ops), list(dtypes)
    for case in cases():
        understood = case.kv in backend.kv_kinds and (backend.chunked_windows or not case.chunked)
        if understood and (not wanted or case.op in wanted):
            for dtype in kinds:
                if dtype in case.tolerances:
                    yield check_case(backend, case, dtype)


@torch.inference_mode()
def check_case(backend: Backend, case: Case, dtype: torch.dtype) -> Finding:
    name = str(dtype).removeprefix("torch.")
    exact = case.run(Ops(), Draw(case.seed, dtype, torch.float64))
    try:
        found = case.run(backend.ops, Draw(case.seed, dtype, device=backend.device, make_cache=backend.cache))
        error, note = difference(found, exact), ""
    except Exception as failure:  # whatever a backend raises is a finding about it
        error, note = math.inf, f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
    return Finding(case.op, case.name, name, error, case.tolerances[dtype], note)


def difference(found: Result, exact: Result) -> float:
    """The largest error of any value, relative to the largest value of its tensor."""
    if isinstance(exact, tuple | list):
        if len(found) != len(exact):
            raise ValueError(f"{len(found)} results instead of {len(exact)}")
        return max(difference(a, b) for a, b in zip(found, exact, strict=True))
    if tuple(found.shape) != tuple(exact.shape):
        raise ValueError(f"shape {tuple(found.shape)} instead of {tuple(exact.shape)}")
    return _relative(found.cpu(), exact)


def _relative(found: Tensor, exact: Tensor) -> float:
    if not exact.is_floating_point():
        return float((found.long() != exact.long()).double().mean()) if exact.numel() else 0.0
    found, exact = found.double(), exact.double()
    if exact.numel() == 0:
        return 0.0
    finite = exact.isfinite()
    if not torch.equal(found[~finite], exact[~finite]) or not bool(found[finite].isfinite().all()):
        return math.inf
    largest = float(exact[finite].abs().max()) if bool(finite.any()) else 0.0
    worst = float((found - exact)[finite].abs().max()) if bool(finite.any()) else 0.0
    return worst / max(largest, SMALL)

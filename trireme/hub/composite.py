"""A quantized matrix of a checkpoint, stored as several tensors of a file, those tensors by their suffixes, and lazy cuts of it.

Knows which entries of each part belong to a cut of the matrix. `schemes` knows which tensors belong together, and `quant` what
their bits mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trireme.errors import BadCheckpoint, UnsupportedModel
from trireme.hub.weights import Weight

_FETCH = "fetch the model again, or ask who published it"


@dataclass(frozen=True)
class Along:
    """How an axis of a part maps to an axis of the matrix: each `entries` entries hold `values` rows or columns of the matrix."""

    axis: int
    values: int = 1
    entries: int = 1

    def outward(self, first: int, stop: int) -> slice:
        """The entries that hold the values [first, stop), rounded outward to whole groups of entries."""
        return slice(first // self.values * self.entries, -(-stop // self.values) * self.entries)


@dataclass(frozen=True)
class Part:
    """One tensor of a quantized matrix. Without `rows` it applies to all rows, without `columns` to all columns."""

    weight: Weight
    rows: Along | None = None
    columns: Along | None = None


@dataclass(frozen=True)
class Format:
    """The format of a quantized matrix. `kind` is the type of its numbers, `layout` is how its parts are stored."""

    kind: str
    layout: str
    title: str  # for people: "GPTQ 4 bit"
    bits: int = 8
    group: int = 0  # columns that share a scale; 0: all of them
    facts: Mapping[str, Any] = field(default_factory=dict)


class Composite:
    """A matrix of several parts, or a cut of one. Cutting is lazy: `read` reads a part, rounded outward to whole entries, and
    `inside` says where the cut is in what was read."""

    offset = 0.0

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        form: Format,
        parts: Mapping[str, Part],
        rows: range | np.ndarray | None = None,
        columns: range | None = None,
    ) -> None:
        """shape: [rows, columns] of the whole matrix, or [matrices, rows, columns] of a stack, which only `part` can cut"""
        self.name, self.form, self.parts, self._whole = name, form, parts, shape
        self._rows = range(shape[-2]) if rows is None else rows
        self._columns = range(shape[-1]) if columns is None else columns

    @property
    def kind(self) -> str:
        return self.form.kind

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self._whole[:-2], len(self._rows), len(self._columns))

    @property
    def first(self) -> tuple[int, int]:
        """The first row and the first column of the whole matrix that `read` reads."""
        return self._reach()[0], self._columns.start

    @property
    def origin(self) -> str | None:
        """Identifies the bytes: which files, in which state, and where in them. None if a part has no such identity."""
        origins = [part.weight.origin for part in self.parts.values()]
        if None in origins:
            return None
        rows = self._rows if isinstance(self._rows, range) else hashlib.sha256(self._rows.astype("<i8").tobytes()).hexdigest()
        return repr((self.form.layout, self.kind, dict(self.form.facts), origins, rows, self._columns))

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts, whole."""
        return sum(part.weight.num_bytes for part in self.parts.values())

    def rows(self, index: slice | np.ndarray) -> Composite:
        """The chosen rows, in the order given."""
        chosen = self._rows[index] if isinstance(index, slice) else np.asarray(self._rows)[index]
        return self._cut(chosen, self._columns)

    def columns(self, span: slice) -> Composite:
        """A span of columns; it need not fall on groups."""
        return self._cut(self._rows, self._columns[span])

    def turned(self) -> Composite:
        raise UnsupportedModel(
            f"{self.name} is a quantized matrix that would have to be turned, which only plain matrices can be.",
            "use the model in float32, float16 or bfloat16",
        )

    def part(self, index: int) -> Composite:
        """One matrix of a stack."""
        parts = {name: Part(part.weight.part(index), part.rows, part.columns) for name, part in self.parts.items()}
        return Composite(f"{self.name}[{index}]", self._whole[1:], self.form, parts)

    def read(self, name: str) -> np.ndarray:
        """A part of the cut, rounded outward to whole entries. Read only."""
        part = self.parts[name]
        chosen = [slice(None)] * len(part.weight.shape)
        if part.rows is not None:
            chosen[part.rows.axis] = part.rows.outward(*self._reach())
        if part.columns is not None:
            chosen[part.columns.axis] = part.columns.outward(self._columns.start, self._columns.stop)
        return np.ascontiguousarray(part.weight.mapped()[tuple(chosen)])

    def inside(self, name: str) -> tuple[slice | np.ndarray, slice]:
        """Where the cut is in the result of `read`, counted in values after each entry is unpacked."""
        part = self.parts[name]
        rows: slice | np.ndarray = slice(None)
        if part.rows is not None:
            skipped = self._reach()[0] // part.rows.values * part.rows.values
            if isinstance(self._rows, range) and self._rows.step == 1:
                rows = slice(self._rows.start - skipped, self._rows.stop - skipped)
            else:
                rows = np.asarray(self._rows) - skipped
        if part.columns is None:
            return rows, slice(None)
        begin = self._columns.start % part.columns.values
        return rows, slice(begin, begin + len(self._columns))

    def raw(self) -> np.ndarray:
        raise TypeError(f"{self.name} has several parts: {', '.join(self.parts)}")

    def release(self) -> None:
        """Gives back the memory that reading took; the parts can be read again."""
        for part in self.parts.values():
            part.weight.release()

    def _reach(self) -> tuple[int, int]:
        """The first row and the one after the last."""
        if not len(self._rows):
            return 0, 0
        if isinstance(self._rows, range):
            return min(self._rows), max(self._rows) + 1
        return int(self._rows.min()), int(self._rows.max()) + 1

    def _cut(self, rows: range | np.ndarray, columns: range) -> Composite:
        return Composite(self.name, self._whole, self.form, self.parts, rows, columns)

    def __repr__(self) -> str:
        return f"Composite({self.name!r}, {self.kind}, {self.shape})"


class Tensors:
    """The tensors that belong to one matrix, by their suffixes (such as ".scales"). Its errors give the name of the matrix."""

    def __init__(self, base: str, weights: Mapping[str, Weight]):
        self.base, self._weights = base, weights
        self.asked: set[str] = set()  # full names of the tensors that were asked for

    def __contains__(self, suffix: str) -> bool:
        return self.get(suffix) is not None

    def __getitem__(self, suffix: str) -> Weight:
        found = self.get(suffix)
        if found is None:
            raise BadCheckpoint(f"The quantized matrix {self.base} has no tensor {self.base + suffix}.", _FETCH)
        return found

    @property
    def matrix(self) -> str:
        """The name that a model uses for this matrix."""
        return f"{self.base}.weight"

    def get(self, suffix: str) -> Weight | None:
        self.asked.add(self.base + suffix)
        return self._weights.get(self.base + suffix)

    def shaped(self, suffix: str, *shapes: tuple[int, ...]) -> Weight:
        """The tensor; refused if it has none of these shapes."""
        found = self[suffix]
        if found.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise BadCheckpoint(f"Tensor {found.name} has shape {list(found.shape)}; its matrix calls for {wanted}.", _FETCH)
        return found

    def kind(self, suffix: str, *kinds: str) -> Weight:
        """The tensor; refused if it is stored as none of these kinds."""
        found = self[suffix]
        if found.kind not in kinds:
            raise BadCheckpoint(f"Tensor {found.name} is stored as {found.kind}, not {' or '.join(kinds)}.", _FETCH)
        return found

    def wrong(self, suffix: str, what: str) -> BadCheckpoint:
        return BadCheckpoint(f"Tensor {self.base + suffix} {what}.", _FETCH)

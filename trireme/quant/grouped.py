"""One form for all quantized matrices: small numbers, and a scale for each group of columns of a row.

Knows the layouts that `hub.schemes` names; nothing of files, and nothing of how a device multiplies by the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from trireme.errors import BadCheckpoint

# Kinds of matrices that are stored as several tensors: integers by group or by row, floats of eight and of four bits
KINDS = frozenset({"INT2", "INT3", "INT4", "INT8", "I8C", "I8B", "F8T", "F8C", "F8G", "F8B", "MXFP4", "NVFP4", "NF4", "FP4"})


class Form(Protocol):
    """What a quantized matrix is; see `hub.composite.Format`."""

    @property
    def layout(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def bits(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def facts(self) -> Mapping[str, Any]: ...


class Composite(Protocol):
    """A matrix stored as several tensors, or a cut of one; see `hub.composite.Composite`."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def form(self) -> Form: ...
    @property
    def parts(self) -> Mapping[str, Any]: ...
    @property
    def first(self) -> tuple[int, int]: ...
    def read(self, name: str) -> np.ndarray: ...
    def inside(self, name: str) -> tuple[slice | np.ndarray, slice]: ...
    def release(self) -> None: ...


@dataclass
class Grouped:
    """value[i, j] = (number[i, j] - zeros[i, g]) * scales[i, g], where g is the group of column j.

    codes: [rows, columns], whole numbers or floats of eight bits; with a table they are its indices.
    scales, zeros: [rows, groups] float32.
    """

    codes: Tensor
    scales: Tensor
    group: int  # columns in a group if all groups are whole and follow each other; else 0, and `of` has the groups
    zeros: Tensor | None = None
    of: Tensor | None = None  # [columns] the group of each
    table: Tensor | None = None  # float32

    def numbers(self) -> Tensor:
        """What the codes stand for, as float32."""
        return self.codes.float() if self.table is None else self.table[self.codes.int()]

    def values(self) -> Tensor:
        """The matrix, as float32."""
        numbers = self.numbers()
        if self.of is not None:
            if self.zeros is not None:
                numbers -= self.zeros[:, self.of]
            return numbers.mul_(self.scales[:, self.of])
        by_group = numbers.view(len(numbers), -1, self.group)
        if self.zeros is not None:
            by_group -= self.zeros.unsqueeze(-1)
        by_group *= self.scales.unsqueeze(-1)
        return numbers

    def in_order(self) -> tuple[Grouped, Tensor | None]:
        """The matrix with the columns of each group side by side, and which column each was; None: as they are."""
        found = None if self.of is None else order_by_group(self.of)
        if self.of is None or found is None:
            return self, None
        order, size = found
        live = self.of.unique()
        zeros = None if self.zeros is None else self.zeros[:, live]
        codes = self.codes.view(torch.uint8)[:, order].view(self.codes.dtype)
        return Grouped(codes, self.scales[:, live], size, zeros, None, self.table), order


def order_by_group(of: Tensor) -> tuple[Tensor, int] | None:
    """(the columns sorted by group, columns in a group); None where a cut went through a group.  of: the group of each column"""
    counts = of.bincount()
    size = int(counts.max())
    return None if bool((counts[counts > 0] != size).any()) else (of.argsort(stable=True), size)


def composite(stored: Any) -> Composite | None:
    """The stored matrix as a composite if it consists of several tensors, else None."""
    return stored if hasattr(stored, "form") else None


Reader = Callable[[Composite, "torch.device | str"], Grouped]


def grouped(stored: Composite, device: torch.device | str = "cpu") -> Grouped:
    """Reads a quantized matrix, or a cut of one."""
    reader = _READERS.get(stored.form.layout) or _plugged(stored.form.layout)
    found = reader(stored, device)
    stored.release()
    for what in (found.scales, found.table):
        if what is not None and not bool(what.isfinite().all()):
            raise BadCheckpoint(f"A scale of {stored.name} is not a finite number.", "fetch the model again")
    return found


def _plugged(layout: str) -> Reader:
    """The reader of a plug-in's format, by the name of its layout."""
    for entry in entry_points(group="trireme.schemes", name=layout):
        return entry.load().read
    raise KeyError(layout)


# --- pieces the layouts share ---------------------------------------------------------------------------------------------------


def _tensor(stored: Composite, name: str, device: torch.device | str) -> Tensor:
    """A part as a tensor of the type that torch has for it; fp8 stays bytes."""
    kind, raw = stored.parts[name].weight.kind, torch.from_numpy(stored.read(name)).to(device)
    return raw.view(_AS_TORCH[kind]) if kind in _AS_TORCH else raw


_AS_TORCH = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


def _rows(stored: Composite, name: str, values: Tensor) -> Tensor:
    """The rows of the cut, taken from an unpacked part."""
    chosen = stored.inside(name)[0]
    return values[chosen if isinstance(chosen, slice) else torch.from_numpy(chosen).to(values.device)]


def _cut(stored: Composite, name: str, values: Tensor) -> Tensor:
    """The rows and columns of the cut, taken from an unpacked part."""
    return _rows(stored, name, values[:, stored.inside(name)[1]]).contiguous()


def _by_row(stored: Composite, name: str, values: Tensor) -> Tensor:
    """Scales or zeros as float32 [rows, groups], from [entries, groups], [entries] or a single one."""
    wide = values.float().reshape(len(values) if values.dim() else 1, -1)
    along = stored.parts[name].rows
    if along is None:
        return wide.expand(stored.shape[0], -1).contiguous()
    if along.values > 1 and along.entries == 1 and len(wide):
        wide = wide.repeat_interleave(along.values, 0)
    return _rows(stored, name, wide)


def _groups(stored: Composite, device: torch.device | str) -> tuple[int, Tensor | None]:
    """(columns in a group, or 0 and the group of each column) of a cut."""
    columns, along = stored.shape[1], stored.parts["scales"].columns
    if "order" in stored.parts:
        return 0, _tensor(stored, "order", device).long()
    if along is None:
        return columns, None
    begin = stored.inside("scales")[1].start
    if begin == 0 and columns % along.values == 0:
        return along.values, None
    return 0, (torch.arange(columns, device=device) + begin) // along.values


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Numbers that fill words of 32 bits, low bits first.  words: [rows, n] int32; result: [rows, 32 n / bits] uint8"""
    packed = words.flatten().view(torch.uint8).view(len(words), -1)
    if bits == 8:
        return packed
    if bits == 3:  # eight numbers in three bytes
        low, middle, high = packed.view(len(packed), -1, 3).int().unbind(-1)
        joined = (low | middle << 8 | high << 16).unsqueeze(-1)
        return (joined >> torch.arange(0, 24, 3, dtype=torch.int32, device=words.device) & 7).flatten(1).to(torch.uint8)
    mask = (1 << bits) - 1
    return torch.stack([packed >> shift & mask for shift in range(0, 8, bits)], -1).flatten(1)


def _powers(stored: Tensor) -> Tensor:
    """Powers of two, stored as a byte (e8m0), as float32."""
    power = stored.view(torch.uint8).int()
    return torch.where(power == 0, 1 << 22, power << 23).view(torch.float32)  # 255 stands for NaN, and becomes infinite


def _nibbles(packed: Tensor, high_first: bool = False) -> Tensor:
    """Two numbers of four bits in each byte.  packed: [rows, n] uint8; result: [rows, 2 n] uint8"""
    pair = [packed >> 4, packed & 15] if high_first else [packed & 15, packed >> 4]
    return torch.stack(pair, -1).flatten(1)


# --- layouts ----------------------------------------------------------------------------------------------------------------------


def _gptq(stored: Composite, device: torch.device | str) -> Grouped:
    """Words down the columns of a turned matrix: codes [columns, rows]; scales and zeros [groups, rows], zeros packed by rows."""
    bits = stored.form.bits
    codes = _cut(stored, "codes", unpack_words(_tensor(stored, "codes", device).t(), bits))
    scales = _by_row(stored, "scales", _tensor(stored, "scales", device).t())
    group, of = _groups(stored, device)
    if stored.form.facts["zeros"] == "none":
        return Grouped(codes, scales, group, torch.full_like(scales, float(1 << (bits - 1))), of)
    zeros = _tensor(stored, "zeros", device)
    if stored.form.facts["zeros"] == "plain":
        spread = unpack_words(zeros, bits)
    elif bits == 3:
        spread = unpack_words(zeros, bits) + 1 & 7  # of numbers that lie across words, each is less by itself: 7 stands for 0
    else:  # subtracts one from every number of a word at once, borrowing from the next number
        spread = unpack_words(zeros + _as_int32(sum(1 << shift for shift in range(0, 32, bits))), bits)
    return Grouped(codes, scales, group, _rows(stored, "zeros", spread.t().float()), of)


def _as_int32(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number


_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where the numbers of eight rows lie in a word


def _awq(stored: Composite, device: torch.device | str) -> Grouped:
    """Words along the rows of a turned matrix: codes and zeros [columns or groups, rows], eight rows in a word in an order of
    their own."""

    def spread(name: str) -> Tensor:
        numbers = unpack_words(_tensor(stored, name, device), 4)
        return numbers.view(len(numbers), -1, 8)[:, :, list(_AWQ_PLACES)].flatten(1).t()

    group, of = _groups(stored, device)
    scales = _by_row(stored, "scales", _tensor(stored, "scales", device).t())
    return Grouped(_cut(stored, "codes", spread("codes")), scales, group, _rows(stored, "zeros", spread("zeros").float()), of)


def _words(stored: Composite, device: torch.device | str) -> Grouped:
    """Words along the columns, zeros along the rows, both moved up by half of what their bits can hold."""
    bits = stored.form.bits

    def spread(words: Tensor) -> Tensor:
        if bits != 3:
            return unpack_words(words, bits)
        if stored.form.facts["dense"]:
            return unpack_words(torch.nn.functional.pad(words, (0, -words.shape[1] % 3)), 3)
        places = torch.arange(0, 30, 3, dtype=torch.int32, device=words.device)  # ten numbers in a word; two bits are unused
        return (words.unsqueeze(-1) >> places & 7).flatten(1).to(torch.uint8)

    codes = _cut(stored, "codes", spread(_tensor(stored, "codes", device)))
    scales = _by_row(stored, "scales", _tensor(stored, "scales", device))
    group, of = _groups(stored, device)
    if "zeros" not in stored.parts:
        return Grouped(codes, scales, group, torch.full_like(scales, float(1 << (bits - 1))), of)
    zeros = spread(_tensor(stored, "zeros", device).t()).t().float()
    return Grouped(codes, scales, group, _rows(stored, "zeros", zeros), of)


def _bytes(stored: Composite, device: torch.device | str) -> Grouped:
    """Whole numbers or floats of eight bits, as they are."""
    codes = _tensor(stored, "codes", device)
    codes = _cut(stored, "codes", codes.view(torch.uint8)).view(codes.dtype)
    scales = _tensor(stored, "scales", device)
    if stored.parts["scales"].weight.kind in ("U8", "F8_E8M0"):
        scales = _powers(scales)
    scales = _by_row(stored, "scales", scales) / stored.form.facts.get("over", 1.0)
    group, of = _groups(stored, device)
    return Grouped(codes, scales, group, None, of)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def _fp4(stored: Composite, device: torch.device | str) -> Grouped:
    """Floats of four bits (e2m1), the first of two in the low half of a byte. Scales are powers of two, or floats of eight bits
    times one of the whole matrix."""
    packed = _tensor(stored, "codes", device)
    codes = _cut(stored, "codes", _nibbles(packed.flatten(1)))
    scales = _tensor(stored, "scales", device)
    if stored.kind == "MXFP4":
        wide = _powers(scales)
    else:
        whole = _tensor(stored, "global", device).float().reshape(())
        wide = scales.float() / whole if stored.form.facts["divides"] else scales.float() * whole
    group, of = _groups(stored, device)
    return Grouped(codes, _by_row(stored, "scales", wide), group, None, of, torch.tensor(E2M1, device=device))


def _table(stored: Composite, device: torch.device | str) -> Grouped:
    """bitsandbytes: the first of two codes in the high half of a byte; scales that are bytes have a table, runs and an offset."""
    facts = stored.form.facts
    codes = _cut(stored, "codes", _nibbles(_tensor(stored, "codes", device), high_first=True))
    scales = _tensor(stored, "scales", device)
    if "nested" in facts:
        first_row, first_column = stored.first
        row = torch.arange(len(scales), device=device).unsqueeze(1) + first_row
        run = torch.arange(scales.shape[1], device=device) + first_column // stored.form.group
        factors = _tensor(stored, "nested", device)[(row * facts["per_row"] + run) // facts["nested"]]
        scales = _tensor(stored, "nested_table", device)[scales.int()] * factors + facts["nested_offset"]
    group, of = _groups(stored, device)
    return Grouped(codes, _by_row(stored, "scales", scales), group, None, of, _tensor(stored, "table", device).float())


_READERS: dict[str, Reader] = {
    "gptq": _gptq,
    "awq": _awq,
    "words": _words,
    "bytes": _bytes,
    "fp4": _fp4,
    "table": _table,
}

"""Weight methods of the GPU: matrices of four and of eight bits as the kernels read them, kept as the checkpoint has them or
quantized at load. What no kernel takes is decoded and stays dense."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from trireme.backends.cuda.ops import HALVES, CudaOps
from trireme.kernels.steps import packed, scaled
from trireme.kernels.steps.packed import FourBits
from trireme.kernels.steps.scaled import EightBits
from trireme.ops import Ops
from trireme.quant import Dense, Grouped, Stored, WeightMethod, composite, decode, grouped
from trireme.quant.grouped import E2M1
from trireme.quant.online import kind_for, quantize

MANY = 128  # rows from which on four bits are decoded first, for the library's product of dense matrices
FP8 = torch.float8_e4m3fn


class Quantized(WeightMethod):
    """What the kernels' methods share: how parts become one matrix, and rows look-ups."""

    bias: Tensor | None

    @classmethod
    def load(cls, parts: list[Stored], bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> WeightMethod:
        made = None if dtype not in HALVES else cls.of([_in_order(matrix) for matrix in _read(parts, device)], bias, dtype)
        return Dense.load(parts, bias, dtype, device) if made is None else made

    @classmethod
    def of(cls, read: list[tuple[Grouped, Tensor | None]], bias: Tensor | None, dtype: torch.dtype) -> WeightMethod | None:
        """The parts, and the order in which they take columns; None where no kernel takes them."""
        raise NotImplementedError


def _read(parts: list[Stored], device: torch.device) -> list[Grouped]:
    wholes = [composite(part) for part in parts]
    return [grouped(whole, device) for whole in wholes if whole is not None] if all(wholes) else []


def _in_order(matrix: Grouped) -> tuple[Grouped, Tensor | None]:
    """The matrix with the columns of each group side by side, and which column of x each takes; None: as they are."""
    if matrix.of is None:
        return matrix, None
    counts = matrix.of.bincount(minlength=matrix.scales.shape[1])
    live = counts.nonzero().flatten()
    size = int(counts.max())
    if bool((counts[live] != size).any()):  # a cut went through a group
        return matrix, None
    order = matrix.of.argsort(stable=True)
    zeros = None if matrix.zeros is None else matrix.zeros[:, live]
    codes = matrix.codes.view(torch.uint8)[:, order].view(matrix.codes.dtype)
    return Grouped(codes, matrix.scales[:, live], size, zeros, None, matrix.table), order


def _one_order(read: list[tuple[Grouped, Tensor | None]]) -> bool:
    """Whether all parts are in whole groups of one size, and take columns in one order."""
    first, order = read[0]
    if any(matrix.of is not None or matrix.group != first.group for matrix, _ in read):
        return False
    return all(other is None if order is None else other is not None and torch.equal(order, other) for _, other in read)


class Packed(Quantized):
    """Four bits a weight."""

    def __init__(self, weight: FourBits, order: Tensor | None, bias: Tensor | None, dtype: torch.dtype):
        self.weight, self.order, self.bias, self.dtype = weight, order, bias, dtype
        self.table = torch.tensor(E2M1, device=weight.words.device)

    @classmethod
    def of(cls, read: list[tuple[Grouped, Tensor | None]], bias: Tensor | None, dtype: torch.dtype) -> Packed | None:
        if not read or not _one_order(read):
            return None
        group, columns = read[0][0].group, read[0][0].codes.shape[1]
        width = packed.width_for(columns, group)
        matrices = [matrix for matrix, _ in read]
        small = all(matrix.table is None for matrix in matrices)
        if not width or not (small or all(matrix.table is not None for matrix in matrices)):
            return None
        scales = torch.cat([matrix.scales for matrix in matrices]).t().contiguous()
        if small:
            zeros = torch.cat([_zeros(matrix) for matrix in matrices]).t()
            if bool((zeros != zeros.round()).any()) or float(zeros.min()) < 0 or float(zeros.max()) > 16:
                return None
            stored = None if bool((zeros == 8).all()) else zeros.to(torch.uint8).contiguous()
            half = scales.half()
            scales = half if bool(((half.float() - scales).abs() <= scales.abs() * 2.0**-12).all()) else scales
            kind = "int4"
        else:
            stored, kind = None, "e2m1"
        words = torch.cat([packed.pack(matrix.codes, width) for matrix in matrices])
        return cls(FourBits(words, scales, stored, group, width, kind), read[0][1], bias, dtype)

    def linear(self, ops: Ops, x: Tensor) -> Tensor:
        return self._product(ops, x, None)

    def logits(self, ops: Ops, x: Tensor) -> Tensor:
        return self._product(ops, x, torch.float32)

    def _product(self, ops: Ops, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        assert isinstance(ops, CudaOps), type(ops)
        if not len(x):
            return x.new_empty((0, self.weight.rows), dtype=dtype)
        x = _even(x if self.order is None else x.index_select(1, self.order))
        if len(x) <= MANY:
            return packed.linear(x, self.weight, self.bias, pdl=ops.pdl, dtype=dtype)
        return F.linear(x, packed.dense(self.weight, x.dtype), self.bias).to(dtype or x.dtype)

    def embed(self, ops: Ops, ids: Tensor) -> Tensor:
        weight, ids = self.weight, ids.long()
        codes = packed.unpack(weight.words[ids], weight.width)
        zeros = torch.full_like(weight.scales[:, :1], 8.0) if weight.zeros is None else weight.zeros[:, ids].float()
        zeros = None if weight.kind == "e2m1" else zeros.t().expand(len(ids), -1)
        table = self.table if weight.kind == "e2m1" else None
        return Grouped(codes, weight.scales[:, ids].t().float(), weight.group, zeros, None, table).values().to(self.dtype)

    def num_bytes(self) -> int:
        return self.weight.num_bytes() + _bytes_of(self.bias, self.order)


def _zeros(matrix: Grouped) -> Tensor:
    return torch.zeros_like(matrix.scales) if matrix.zeros is None else matrix.zeros


class Scaled(Quantized):
    """Eight bits a weight, whole numbers or floats."""

    def __init__(self, weight: EightBits, order: Tensor | None, bias: Tensor | None, dtype: torch.dtype):
        self.weight, self.order, self.bias, self.dtype = weight, order, bias, dtype

    @classmethod
    def of(cls, read: list[tuple[Grouped, Tensor | None]], bias: Tensor | None, dtype: torch.dtype) -> Scaled | None:
        if not read or not _one_order(read):
            return None
        matrices = [matrix for matrix, _ in read]
        group, columns = matrices[0].group, matrices[0].codes.shape[1]
        kinds = {matrix.codes.dtype for matrix in matrices}
        if len(kinds) > 1 or columns % 16 or (group < columns and (columns % group or (group & -group) < 32)):
            return None
        codes = torch.cat([matrix.codes.view(torch.uint8) for matrix in matrices]).view(kinds.pop())
        zeros = None if all(matrix.zeros is None for matrix in matrices) else torch.cat([_zeros(matrix) for matrix in matrices])
        if codes.dtype == torch.uint8:
            codes = (codes.int() - 128).to(torch.int8)
            zeros = torch.full_like(torch.cat([m.scales for m in matrices]), -128.0) if zeros is None else zeros - 128
        if codes.dtype not in (torch.int8, FP8):
            return None
        if zeros is not None and bool((zeros == 0).all()):
            zeros = None
        if zeros is not None and (columns & -columns) < 32:
            return None
        scales = torch.cat([matrix.scales for matrix in matrices]).t().contiguous()
        return cls(EightBits(codes, scales, None if zeros is None else zeros.t().contiguous(), group), read[0][1], bias, dtype)

    def linear(self, ops: Ops, x: Tensor) -> Tensor:
        return self._product(ops, x, x.dtype)

    def logits(self, ops: Ops, x: Tensor) -> Tensor:
        return self._product(ops, x, torch.float32)

    def _product(self, ops: Ops, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows as they are meet whole numbers in groups; other rows are quantized first."""
        assert isinstance(ops, CudaOps), type(ops)
        if not len(x):
            return x.new_empty((0, self.weight.rows), dtype=dtype)
        x = _even(x if self.order is None else x.index_select(1, self.order))
        weight = self.weight
        if weight.codes.dtype == torch.int8 and (weight.zeros is not None or weight.group < x.shape[1]):
            if len(x) <= scaled.MOST_WIDE:
                return scaled.wide_rows(x, weight, self.bias, pdl=ops.pdl, dtype=dtype)
            return F.linear(x, self._dense(x.dtype), self.bias).to(dtype)
        q, sizes = scaled.quantize(x, weight.codes.dtype, pdl=ops.pdl)
        return scaled.rows(q, sizes, weight, self.bias, dtype=dtype, pdl=ops.pdl)

    def _dense(self, dtype: torch.dtype) -> Tensor:
        weight = self.weight
        zeros = None if weight.zeros is None else weight.zeros.t()
        return Grouped(weight.codes, weight.scales.t(), weight.group, zeros).values().to(dtype)

    def embed(self, ops: Ops, ids: Tensor) -> Tensor:
        rows = ops.embedding(ids, self.weight.codes.view(torch.int8)).view(self.weight.codes.dtype).float()
        scales = ops.embedding(ids, self.weight.scales.t().contiguous())
        zeros = None if self.weight.zeros is None else ops.embedding(ids, self.weight.zeros.t().contiguous())
        return Grouped(rows, scales, self.weight.group, zeros).values().to(self.dtype)

    def num_bytes(self) -> int:
        return self.weight.num_bytes() + _bytes_of(self.bias, self.order)


def _even(x: Tensor) -> Tensor:
    """x as the kernels take it: rows of numbers side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _bytes_of(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


class Online(Quantized):
    """Quantized at load, whatever the checkpoint has."""

    kind: ClassVar[str] = ""

    @classmethod
    def load(cls, parts: list[Stored], bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> WeightMethod:
        kinds = {kind_for(cls.kind, part.shape) for part in parts}
        method = Packed if kinds <= {"int4", "mxfp4"} else Scaled
        if dtype in HALVES and len(kinds) == 1:
            kind = kinds.pop()
            read = [(quantize(decode(part, torch.float32, device), kind), None) for part in parts]
            made = method.of(list(read), bias, dtype)
            if made is not None:
                return made
            return Dense(torch.cat([matrix.values().to(dtype) for matrix, _ in read]), bias)
        return Dense.load(parts, bias, dtype, device)


def _online(kind: str) -> type[WeightMethod]:
    return type(f"Online{kind.capitalize()}", (Online,), {"kind": kind})


WHOLE: dict[str, type[WeightMethod]] = {
    **dict.fromkeys(("INT2", "INT3", "INT4", "MXFP4"), Packed),
    **dict.fromkeys(("INT8", "I8C"), Scaled),
    **{kind: _online(kind) for kind in ("int8", "int4", "mxfp4")},
}
FLOATS: dict[str, type[WeightMethod]] = {**dict.fromkeys(("F8T", "F8C", "F8G", "F8B"), Scaled), "fp8": _online("fp8")}

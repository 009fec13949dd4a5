"""Weight methods of the GPU: matrices of four and of eight bits as the kernels read them, kept as the checkpoint has them or
quantized at load. What no kernel takes is decoded and stays dense."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from trireme.backends.cuda.ops import HALVES, CudaOps
from trireme.kernels.steps import packed, scaled
from trireme.kernels.steps.packed import Words
from trireme.kernels.steps.scaled import EightBits
from trireme.ops import Ops
from trireme.quant import Decoded, Dense, Grouped, Stored, WeightMethod, decode, numbers_of
from trireme.quant.base import take_tensors
from trireme.quant.grouped import E2M1
from trireme.quant.online import kind_for, quantize

FP8 = torch.float8_e4m3fn


class Quantized(WeightMethod):
    """Base of the methods with kernels: joins parts into one matrix, and gives the kernels rows as they read them."""

    def __init__(self, weight: Words | EightBits, order: Tensor | None, bias: Tensor | None, dtype: torch.dtype):
        self.weight, self.order, self.bias, self.dtype = weight, order, bias, dtype

    @classmethod
    def load(cls, parts: list[Stored], bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> WeightMethod:
        made = None if dtype not in HALVES else cls.of([matrix.in_order() for matrix in _read(parts, device)], bias, dtype)
        return Decoded.load(parts, bias, dtype, device) if made is None else made

    @classmethod
    def of(cls, read: list[tuple[Grouped, Tensor | None]], bias: Tensor | None, dtype: torch.dtype) -> WeightMethod | None:
        """The parts, and the order in which they take columns; None where no kernel takes them."""
        raise NotImplementedError

    def linear(self, ops: Ops, x: Tensor) -> Tensor:
        return self._product(ops, x, x.dtype)

    def logits(self, ops: Ops, x: Tensor) -> Tensor:
        return self._product(ops, x, torch.float32)

    def _product(self, ops: Ops, x: Tensor, dtype: torch.dtype) -> Tensor:
        assert isinstance(ops, CudaOps), type(ops)
        if not len(x):
            return x.new_empty((0, self.weight.rows), dtype=dtype)
        return self._rows(ops, _even(x if self.order is None else x.index_select(1, self.order)), dtype)

    def _rows(self, ops: CudaOps, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The product of at least one row. Each row is contiguous, and its columns are in the weight's order."""
        raise NotImplementedError

    def take(self, new: WeightMethod) -> bool:
        return take_tensors(self, new)

    def num_bytes(self) -> int:
        return self.weight.num_bytes() + _bytes_of(self.bias, self.order)


def _read(parts: list[Stored], device: torch.device) -> list[Grouped]:
    read = [numbers_of(part, device) for part in parts]
    return [matrix for matrix in read if matrix is not None] if None not in read else []


def _one_order(read: list[tuple[Grouped, Tensor | None]]) -> bool:
    """Whether all parts have whole groups of the same size and the same order of columns."""
    first, order = read[0]
    if any(matrix.of is not None or matrix.group != first.group for matrix, _ in read):
        return False
    return all(other is None if order is None else other is not None and torch.equal(order, other) for _, other in read)


class Packed(Quantized):
    """Weights of four bits, or int8 in groups, that the kernel unpacks while it multiplies."""

    title = "packed"

    weight: Words

    def __init__(self, weight: Words, order: Tensor | None, bias: Tensor | None, dtype: torch.dtype):
        super().__init__(weight, order, bias, dtype)
        self.table = torch.tensor(E2M1, device=weight.words.device) if weight.kind == "e2m1" else None

    @classmethod
    def of(cls, read: list[tuple[Grouped, Tensor | None]], bias: Tensor | None, dtype: torch.dtype) -> Packed | None:
        if not read or not _one_order(read):
            return None
        (first, order), matrices = read[0], [matrix for matrix, _ in read]
        kind = _kind_of(matrices)
        width = packed.width_for(first.codes.shape[1], first.group, kind) if kind else 0
        if not width:
            return None
        zeros = None if kind == "e2m1" else torch.cat([_zeros(matrix) for matrix in matrices]).t().contiguous()
        if zeros is not None:
            if kind == "int8":
                zeros = zeros - _middle(matrices)
            if bool((zeros != zeros.round()).any()) or float(zeros.min()) < -128 or float(zeros.max()) > 127:
                return None
            zeros = None if bool((zeros == (8 if kind == "int4" else 0)).all()) else zeros.to(torch.int8)
        words = packed.pack(torch.cat([_signed(matrix.codes, kind) for matrix in matrices]), width, kind)
        scales = torch.cat([matrix.scales for matrix in matrices]).t().contiguous()
        half = scales.half()
        scales = half if bool(((half.float() - scales).abs() <= scales.abs() * 2.0**-12).all()) else scales
        return cls(Words(words, scales, zeros, first.group, width, kind), order, bias, dtype)

    def _rows(self, ops: CudaOps, x: Tensor, dtype: torch.dtype) -> Tensor:
        if len(x) <= packed.most_rows():
            return packed.linear(x, self.weight, self.bias, pdl=ops.pdl, dtype=dtype)
        return F.linear(x, packed.dense(self.weight, x.dtype), self.bias).to(dtype)

    def embed(self, ops: Ops, ids: Tensor) -> Tensor:
        weight, ids = self.weight, ids.long()
        codes, zeros = packed.of_rows(weight, ids), None
        if weight.zeros is not None:
            zeros = weight.zeros[:, ids].t().float()
        elif weight.kind == "int4":
            zeros = torch.full_like(weight.scales[:, ids].t(), 8.0).float()
        return Grouped(codes, weight.scales[:, ids].t().float(), weight.group, zeros, None, self.table).values().to(self.dtype)


def _kind_of(matrices: list[Grouped]) -> str:
    """The kernels' name for the kind of numbers; empty if no name fits all parts."""
    tables, types = {matrix.table is not None for matrix in matrices}, {matrix.codes.dtype for matrix in matrices}
    if tables == {True}:
        return "e2m1"
    if tables != {False} or len(types) > 1:
        return ""
    if types == {torch.uint8} and all(int(matrix.codes.max()) < 16 for matrix in matrices):
        return "int4"
    return "int8" if types <= {torch.uint8, torch.int8} else ""


def _middle(matrices: list[Grouped]) -> float:
    return 128.0 if matrices[0].codes.dtype == torch.uint8 else 0.0


def _signed(codes: Tensor, kind: str) -> Tensor:
    return codes ^ 128 if kind == "int8" and codes.dtype == torch.uint8 else codes


def _zeros(matrix: Grouped) -> Tensor:
    return torch.zeros_like(matrix.scales) if matrix.zeros is None else matrix.zeros


class Scaled(Quantized):
    """Weights and activations of eight bits, both int8 or both fp8."""

    title = "scaled"
    takes_gated = True

    weight: EightBits

    @classmethod
    def of(cls, read: list[tuple[Grouped, Tensor | None]], bias: Tensor | None, dtype: torch.dtype) -> Scaled | None:
        if not read or not _one_order(read):
            return None
        (first, order), matrices = read[0], [matrix for matrix, _ in read]
        group, columns, kind = first.group, first.codes.shape[1], first.codes.dtype
        if kind not in (torch.int8, FP8) or any(matrix.codes.dtype != kind or matrix.zeros is not None for matrix in matrices):
            return None
        if columns % 16 or (group < columns and (columns % group or (group & -group) < 32)):
            return None
        codes = torch.cat([matrix.codes.view(torch.uint8) for matrix in matrices]).view(kind)
        scales = torch.cat([matrix.scales for matrix in matrices]).t().contiguous()
        return cls(EightBits(codes, scales, group), order, bias, dtype)

    def _rows(self, ops: CudaOps, x: Tensor, dtype: torch.dtype) -> Tensor:
        q, sizes = scaled.quantize(x, self.weight.codes.dtype, pdl=ops.pdl)
        return scaled.rows(q, sizes, self.weight, self.bias, dtype=dtype, pdl=ops.pdl)

    def of_gated(self, ops: Ops, x: Tensor, kind: str) -> Tensor:
        """The gate and the rounding to eight bits in one kernel."""
        if self.order is not None or not len(x):
            return super().of_gated(ops, x, kind)
        assert isinstance(ops, CudaOps), type(ops)
        q, sizes = scaled.quantize(_even(x), self.weight.codes.dtype, gated=kind, pdl=ops.pdl)
        return scaled.rows(q, sizes, self.weight, self.bias, dtype=x.dtype, pdl=ops.pdl)

    def embed(self, ops: Ops, ids: Tensor) -> Tensor:
        codes = ops.embedding(ids, self.weight.codes.view(torch.int8)).view(self.weight.codes.dtype)
        scales = self.weight.scales[:, ids.long()].t()
        return Grouped(codes, scales, self.weight.group).values().to(self.dtype)


def _even(x: Tensor) -> Tensor:
    """x with each row contiguous, as the kernels require."""
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
    **dict.fromkeys(("INT2", "INT3", "INT4", "INT8", "MXFP4", "Q4_0", "Q8_0"), Packed),
    "I8C": Scaled,
    **{kind: _online(kind) for kind in ("int8", "int4", "mxfp4")},
}
FLOATS: dict[str, type[WeightMethod]] = {**dict.fromkeys(("F8T", "F8C", "F8G", "F8B"), Scaled), "fp8": _online("fp8")}

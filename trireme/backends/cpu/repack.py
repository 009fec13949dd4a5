"""Converts published quantized matrices to the blocks that the C kernels pack: chooses the kind, and makes the blocks' bytes.

Knows forms and blocks of 32; nothing of files or layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.quant import Composite, Grouped

UNIT = 32  # columns of a block
_SMALL = ("INT2", "INT3", "INT4")
_FLOAT8 = ("F8T", "F8C", "F8G", "F8B")
HALF_LOSS = 2.0**-10  # the largest relative error of a scale rounded to float16


def kind_for(part: Composite) -> str:
    """The packed kind for a matrix of several tensors: one that keeps its numbers, else one that loses little."""
    form = part.form
    if part.kind in _FLOAT8:
        return "bf16"  # its eight bits are a float
    whole = not form.facts.get("ordered") and _on_blocks(part, form.group)
    if part.kind in _SMALL and whole:
        return "q4" if form.facts.get("symmetric") else "q4_min"
    return "q8"


def _on_blocks(part: Composite, group: int) -> bool:
    """Whether each block of 32 columns of this cut lies in one group."""
    return part.shape[1] % UNIT == 0 and (group == 0 or (group % UNIT == 0 and part.first[1] % UNIT == 0))


def blocks_for(kind: str, matrix: Grouped) -> tuple[str, Tensor] | None:
    """(GGUF type, bytes [rows, bytes of a row]) that hold the matrix's own numbers; None where its numbers or scales do not fit."""
    columns = matrix.codes.shape[1]
    if columns % UNIT or kind not in ("q4", "q4_min", "q8"):
        return None
    scales, zeros = _by_block(matrix.scales, matrix, columns), None
    if scales is None or not _fit_halves(scales):
        return None
    if matrix.zeros is not None:
        zeros = _by_block(matrix.zeros, matrix, columns)
    if matrix.table is None and not matrix.codes.is_floating_point():
        return _whole_numbers(kind, matrix.codes, scales, zeros)
    doubled = matrix.numbers() * 2
    if kind == "q8" and bool((doubled == doubled.round()).all()) and float(doubled.abs().max()) <= 127 and _fit_halves(scales / 2):
        return "Q8_0", _eight(doubled, scales / 2)
    return None


def _whole_numbers(kind: str, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple[str, Tensor] | None:
    if kind == "q4_min" and zeros is not None:
        return "Q4_1", _four(codes, scales, (-zeros * scales).unsqueeze(-1))
    if kind == "q4" and zeros is not None:
        middle = zeros.flatten()[0]
        return ("Q4_0", _four(codes + (8 - int(middle)), scales)) if bool((zeros == middle).all()) else None
    if kind == "q8":
        numbers = codes.view(len(codes), -1, UNIT).int() - (0 if zeros is None else zeros.unsqueeze(-1).int())
        return ("Q8_0", _eight(numbers, scales)) if int(numbers.min()) >= -128 and int(numbers.max()) <= 127 else None
    return None


def _by_block(values: Tensor, matrix: Grouped, columns: int) -> Tensor | None:
    """Scales or zeros for each block of 32 columns; None where a block lies in several groups."""
    if matrix.of is not None:
        by_block = matrix.of.view(-1, UNIT)
        return values[:, by_block[:, 0]] if bool((by_block == by_block[:, :1]).all()) else None
    return values.repeat_interleave(matrix.group // UNIT, 1) if matrix.group % UNIT == 0 else None


def _fit_halves(scales: Tensor) -> bool:
    lost = (scales.half().float() - scales).abs()
    return bool((lost <= scales.abs() * HALF_LOSS).all())


def _eight(numbers: Tensor, scales: Tensor) -> Tensor:
    """d f16 | q 32 int8"""
    blocks = numbers.reshape(*scales.shape, UNIT).to(torch.int8).view(torch.uint8)
    return torch.cat([_bytes(scales.unsqueeze(-1)), blocks], -1).flatten(1)


def _four(codes: Tensor, scales: Tensor, minima: Tensor | None = None) -> Tensor:
    """d f16 | m f16, if there are minima | q 16 bytes: low nibbles are values 0-15, high nibbles 16-31"""
    low, high = codes.reshape(*scales.shape, 2, UNIT // 2).unbind(2)
    head = [_bytes(scales.unsqueeze(-1))] + ([] if minima is None else [_bytes(minima)])
    return torch.cat([*head, (low | high << 4).to(torch.uint8)], -1).flatten(1)


def _bytes(values: Tensor) -> Tensor:
    return values.half().view(torch.uint8)

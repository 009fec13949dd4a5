"""Converts published quantized matrices to the blocks that the C kernels pack: chooses the kind, and makes the blocks' bytes.

Knows forms and blocks of 32; nothing of files or layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.backends.cpu.tables import NEAR, TABLES
from trireme.quant import Composite, Grouped, Stored, composite
from trireme.quant.grouped import order_by_group

UNIT = 32  # columns of a block
_SMALL = ("INT2", "INT3", "INT4")
_WHOLE = (*_SMALL, "INT8")
_FLOAT8 = ("F8T", "F8C", "F8G", "F8B")
_TABLE_OF = {"MXFP4": "mxfp4", "NF4": "nf4", "FP4": "fp4"}
HALF_LOSS = 2.0**-10  # the largest relative error of a scale rounded to float16
FAR_BELOW = 2.0**-16  # of the largest scale of a row: a loss that nothing shows


def kind_for(part: Composite) -> str:
    """The packed kind for a matrix of several tensors: one that keeps its numbers, else one that loses little."""
    form = part.form
    if part.kind in _FLOAT8:
        return "bf16"  # its eight bits are a float
    whole = order_of(part) is not None if form.facts.get("ordered") else _on_blocks(part, form.group)
    if part.kind in _SMALL and whole:
        return "q4" if form.facts.get("symmetric") else "q4_min"
    table = _TABLE_OF.get(part.kind, "")
    if table and whole and ("table" not in part.parts or _near(table, torch.from_numpy(part.read("table")))):
        return table
    return "q8"


def order_of(part: Stored | Composite) -> Tensor | None:
    """The order that brings the columns of each group together; None where none is needed, or where a block of columns would
    lie in several groups."""
    matrix = composite(part)
    if matrix is None or matrix.kind not in _WHOLE or not matrix.form.facts.get("ordered"):
        return None
    found = order_by_group(torch.from_numpy(matrix.read("order")).long())
    return found[0] if found is not None and found[1] % UNIT == 0 else None


def _near(table: str, values: Tensor) -> bool:
    """Whether these sixteen values are those of a table that the kernels have."""
    numbers = torch.tensor(TABLES[table].numbers) * TABLES[table].unit
    return bool(((values.float() - numbers).abs() <= NEAR).all())


def _on_blocks(part: Composite, group: int) -> bool:
    """Whether each block of 32 columns of this cut lies in one group."""
    return part.shape[1] % UNIT == 0 and (group == 0 or (group % UNIT == 0 and part.first[1] % UNIT == 0))


def blocks_for(kind: str, matrix: Grouped) -> tuple[str, Tensor] | None:
    """(GGUF type, bytes [rows, bytes of a row]) that hold the matrix's own numbers; None where its numbers or scales do not fit."""
    columns = matrix.codes.shape[1]
    if columns % UNIT or kind not in ("q4", "q4_min", "q8", *TABLES):
        return None
    scales, zeros = _by_block(matrix.scales, matrix, columns), None
    if scales is not None and kind in TABLES:
        scales = scales * TABLES[kind].unit
    if scales is None or not _fit_halves(scales):
        return None
    if kind in TABLES:  # a scale and sixteen bytes: the blocks of every table
        return ("IQ4_NL", _four(matrix.codes, scales)) if matrix.table is not None and _near(kind, matrix.table) else None
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
    """Whether float16 holds each scale, or what it loses is little beside the largest scale of the row."""
    lost, most = (scales.half().float() - scales).abs(), scales.abs().amax(1, keepdim=True)
    return bool((lost <= torch.maximum(scales.abs() * HALF_LOSS, most * FAR_BELOW)).all())


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

"""Fuses recorded steps: a norm between two products becomes part of them. Knows addresses and ops, not models.

    x = a·A;  r += x;  y = norm(r);  z = y·B      becomes      r += a·A;  z = norm(r)·B

if nothing else reads x or y. This saves a barrier and two passes over memory. In two products with a gate between them

    x = a·A;  z = gate(x)·B

the first is told about the second, if nothing else reads x. A kernel that can do so then writes gate(x) in the second's format.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import Structure

from trireme.backends.cpu.library import ARGUMENTS, OPS, TRANSFORMS, LinearStruct, RowMapStruct, StepStruct

_NAMES = {code: name for name, code in OPS.items()}
_READS = ("input", "residual", "query", "key", "value")
_GATES = tuple(TRANSFORMS[name] for name in ("silu_mul", "gelu_mul", "gelu_tanh_mul"))
_NORMS = (TRANSFORMS["rms_norm"], TRANSFORMS["layer_norm"])

Region = range  # of addresses
IsFree = Callable[[int], bool]  # whether no tensor holds this address any more, so that only recorded steps can read it


def fused(steps: Sequence[StepStruct], later: Sequence[StepStruct], is_free: IsFree) -> list[StepStruct]:
    """The steps after fusing. `later` has the steps of the same recording that run after them."""
    kept, index = list(steps), 1
    while index < len(kept) - 1:
        if _fuse_at(kept, index, later, is_free):
            del kept[index]
        index += 1
    for index in range(len(kept) - 1):
        _introduce(kept, index, later, is_free)
    return kept


def _introduce(steps: list[StepStruct], index: int, later: Sequence[StepStruct], is_free: IsFree) -> None:
    """Tells the product at `index` about the next one, if only that one reads its result, through a gate."""
    step, after = steps[index], steps[index + 1]
    first, second = arguments(step), arguments(after)
    if not isinstance(first, LinearStruct) or not isinstance(second, LinearStruct) or first.accumulate:
        return
    same = (first.output, first.output_stride, step.rows, step.live) == (second.input, second.input_stride, after.rows, after.live)
    region = _region(first.output, first.output_stride, step.rows)
    if not same or second.transform.kind not in _GATES or not is_free(first.output) or second.output in region:
        return
    if not _is_read(region, [*steps[index + 2 :], *later]):
        first.reader = after.args


def _fuse_at(steps: list[StepStruct], index: int, later: Sequence[StepStruct], is_free: IsFree) -> bool:
    """Fuses the step at `index` into the products around it, if it is a norm and nothing else reads the values between them."""
    before, norm = arguments(steps[index - 1]), arguments(steps[index])
    if not isinstance(norm, RowMapStruct) or not isinstance(before, LinearStruct) or not _feeds(before, norm):
        return False
    after = []
    for step in steps[index + 1 :]:
        product = arguments(step)
        if not isinstance(product, LinearStruct) or not _reads_plainly(product, norm):
            break
        after.append(product)
    rows = steps[index].rows
    if not after or any(step.rows != rows for step in steps[index - 1 : index + 1 + len(after)]):
        return False
    product_region, norm_region = _region(norm.input, norm.input_stride, rows), _region(norm.output, norm.output_stride, rows)
    residual = _region(norm.residual, norm.residual_stride, rows)
    rest = [*steps[index + 1 + len(after) :], *later]
    if before.input in residual or any(product.output in residual for product in after):
        return False
    if not all(is_free(region.start) and not _is_read(region, rest) for region in (product_region, norm_region)):
        return False
    before.output, before.output_stride, before.accumulate = norm.residual, norm.residual_stride, 1
    for product in after:
        product.input, product.input_stride, product.transform = norm.residual, norm.residual_stride, norm.transform
    return True


def arguments(step: StepStruct) -> Structure:
    """The struct that a step points to, not a copy of it."""
    return ctypes.cast(step.args, ctypes.POINTER(ARGUMENTS[_NAMES[step.op]])).contents


def _feeds(before: LinearStruct, norm: RowMapStruct) -> bool:
    """Whether the norm adds exactly the result of this product to its residual."""
    same = (before.output, before.output_stride) == (norm.input, norm.input_stride)
    whole = before.weight.contents.rows == norm.width and not before.accumulate
    return bool(norm.residual) and same and whole and not norm.accumulate and norm.transform.kind in _NORMS


def _reads_plainly(product: LinearStruct, norm: RowMapStruct) -> bool:
    same = (product.input, product.input_stride) == (norm.output, norm.output_stride)
    return same and product.transform.kind == TRANSFORMS["none"] and product.weight.contents.columns == norm.width


def _region(address: int, stride: int, rows: int) -> Region:
    return range(address, address + 4 * stride * rows)


def _is_read(region: Region, steps: Sequence[StepStruct]) -> bool:
    """Whether these steps read the present contents of the region before they overwrite it."""
    for step in steps:
        args = arguments(step)
        if any((getattr(args, name, None) or 0) in region for name in _READS):
            return True
        if (getattr(args, "output", None) or 0) in region:
            return False
    return False

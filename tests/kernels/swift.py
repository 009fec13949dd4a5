"""Triton's interpreter, told not to repeat itself: the same answers in less time. `install` it once; test_swift.py compares.

What took most of the time in Triton 3.6, and is done otherwise here:
- At every call of every helper within a kernel the language is told anew to be interpreted, which looks through all of its names.
  Here what there is to exchange is found once, exchanged when a kernel starts and put back when it ends; a helper finds it done.
- A reduction by a function of ours calls that for one pair of elements after the other. Here it is called for the halves of what is
  left, as a chip does.
- Types of blocks, and the shapes of what has them, are put together anew for every value. Here those already made are taken.
- Whether whole numbers overflow is worked out by seven more operations and told to nobody, unless debugging is asked for. Here it
  is worked out only then.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language.core import block_type, constexpr
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

MADE_FOR = "3.6."
original_patch = interpreter._patch_lang
original_reduce = interpreter.ReduceOps.generic_reduce
original_overflow = TritonSemantic.binary_op_sanitize_overflow_impl
original_numpy_type = interpreter._get_np_dtype
original_block, original_tensor = block_type.__init__, tl.tensor.__init__


class Exchange:
    """All that interpreting exchanges in the language, and whether that is done. Stands in for `_patch_lang` and its scope."""

    def __init__(self) -> None:
        self.done = False
        self.changes: list[tuple[Any, str, Any, Any]] = []  # where, name, as it was, as it is when interpreted

    def find(self) -> None:
        knows_both = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
        scope = original_patch(knows_both)
        was: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        for where, name, before in scope._changes:
            was.setdefault((id(where), name), (where, name, before))  # of a name exchanged twice, the first
        self.changes = [(where, name, before, getattr(where, name)) for where, name, before in was.values()]
        scope.restore()

    def __call__(self, fn: Any) -> Exchange | Nothing:
        if self.done:
            return NOTHING
        if not self.changes:
            self.find()
        for where, name, _, now in self.changes:
            setattr(where, name, now)
        self.done = True
        return self

    def restore(self) -> None:
        for where, name, before, _ in self.changes:
            if before is interpreter._MISSING:
                delattr(where, name)
            else:
                setattr(where, name, before)
        self.done = False


class Nothing:
    """The scope of a call within another, whose scope it is that restores."""

    def restore(self) -> None:
        pass


NOTHING = Nothing()


def reduce_by_halves(self: Any, values: tuple[Any, ...]) -> list[Any]:
    """`generic_reduce` along one axis, whose length is a power of two, as it is of all blocks."""
    axis = self.axis
    if axis is None:
        return original_reduce(self, values)
    left = [np.moveaxis(value.handle.data, axis, 0) for value in values]
    while (length := len(left[0])) > 1:
        if length % 2:
            return original_reduce(self, values)
        halves = [data[part] for part in (slice(length // 2), slice(length // 2, None)) for data in left]
        both = self.combine_fn.fn(*(self.to_tensor(half, value.dtype) for half, value in zip(halves, values * 2, strict=True)))
        left = [result.handle.data for result in (both if isinstance(both, tuple) else (both,))]
    results = [np.expand_dims(data[0], axis) if self.keep_dims else data[0] for data in left]
    return [self.to_tensor(data, value.dtype) for data, value in zip(results, values, strict=True)]


blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
extents: dict[tuple[int, ...], tuple[Any, Any]] = {}
numpy_types: dict[str, Any] = {}


def block_once(self: Any, element_ty: Any, shape: Any) -> None:
    known = isinstance(shape, (list, tl.tuple))
    sizes = tuple([size.value if type(size) is constexpr else size for size in shape]) if known else ()
    made = blocks.get((element_ty.name, sizes)) if {*map(type, sizes)} == {int} else None
    if made is None:
        original_block(self, element_ty, shape)  # or its complaint
        blocks[element_ty.name, sizes] = {name: value for name, value in vars(self).items() if name != "element_ty"}
    else:
        self.__dict__.update(made, element_ty=element_ty)


def tensor_once(self: Any, handle: Any, type: Any) -> None:
    sizes = tuple(type.shape.values) if type.is_block() else ()
    made = extents.get(sizes)
    if made is None:
        original_tensor(self, handle, type)
        extents[sizes] = self.numel, self.shape
    else:
        self.handle, self.type, self.dtype, (self.numel, self.shape) = handle, type, type.scalar, made


def numpy_type_once(kind: Any) -> Any:
    name = kind.scalar.name  # of pointers to one type all are held alike
    made = numpy_types.get(name)
    if made is None:
        made = numpy_types[name] = original_numpy_type(kind)
    return made


def overflow_when_told(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
    if self.builder.options.debug:
        original_overflow(self, lhs, rhs, binary_op)


STAND_INS: list[tuple[Any, str, Any, Any]] = [  # where, name, Triton's own, ours
    (interpreter, "_patch_lang", original_patch, Exchange()),
    (interpreter, "_get_np_dtype", original_numpy_type, numpy_type_once),
    (interpreter.ReduceOps, "generic_reduce", original_reduce, reduce_by_halves),
    (TritonSemantic, "binary_op_sanitize_overflow_impl", original_overflow, overflow_when_told),
    (block_type, "__init__", original_block, block_once),
    (tl.tensor, "__init__", original_tensor, tensor_once),
]


def install() -> None:
    """Of another Triton nothing is taken for granted."""
    if triton.__version__.startswith(MADE_FOR):
        for where, name, _, ours in STAND_INS:
            setattr(where, name, ours)

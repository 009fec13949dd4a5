"""One tensor of a checkpoint that is still on disk: its name, kind and shape, and lazy cuts of it.

Knows bytes and blocks, never what their values mean: decoding belongs to `quant`.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import pathlib

import numpy as np

from trireme.blocks import BLOCKS
from trireme.errors import BadCheckpoint, UnsupportedModel

# kind of a plain tensor: the numpy type that holds its bits (numpy has no bfloat16 and no float8)
PLAIN: dict[str, str] = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "|u1",
    "BOOL": "|u1",
    "F8_E4M3": "|u1",
    "F8_E5M2": "|u1",
    "F8_E8M0": "|u1",
}


class Weight:
    """A tensor or a cut of one. Cutting copies nothing; `raw` reads what is left."""

    def __init__(self, name: str, kind: str, mapped: np.ndarray, *, offset: float = 0.0, row_ids: np.ndarray | None = None) -> None:
        """`mapped`: values of a plain kind, or bytes whose last axis is a row of blocks. `row_ids` are still to be taken."""
        self.name, self.kind, self.offset = name, kind, offset
        self._mapped, self._row_ids = mapped, row_ids

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self._mapped.shape)
        if self._row_ids is not None:
            shape[0] = len(self._row_ids)
        if self.kind in BLOCKS:
            values, size = BLOCKS[self.kind]
            shape[-1] = shape[-1] // size * values
        return tuple(shape)

    @property
    def num_bytes(self) -> int:
        """Bytes that `raw` would return."""
        rows = self._mapped.shape[0] if self._mapped.ndim else 1
        return self._mapped.nbytes if self._row_ids is None else self._mapped.nbytes // max(rows, 1) * len(self._row_ids)

    @property
    def origin(self) -> str | None:
        """Which bytes of which file, as it was when it was mapped; None for what lies in no mapped file."""
        mapping = mapping_of(self._mapped)
        if not isinstance(mapping, MappedFile):
            return None
        chosen = None if self._row_ids is None else hashlib.sha256(self._row_ids.astype("<i8").tobytes()).hexdigest()
        place = (_begin(mapping, self._mapped), self._mapped.shape, self._mapped.strides, chosen)
        return repr((mapping.identity, self.name, self.kind, self.offset, *place))

    def rows(self, index: slice | np.ndarray) -> Weight:
        """The chosen entries of the first axis, in the order given."""
        if not self._mapped.ndim or (self._mapped.ndim == 1 and self.kind in BLOCKS):
            raise BadCheckpoint(f"Tensor {self.name} of shape {self.shape} and kind {self.kind} has no rows to choose.")
        if self._row_ids is not None:
            return self._cut(self._mapped, self._row_ids[index])
        if isinstance(index, slice):
            return self._cut(self._mapped[index], None)
        ids = np.asarray(index)
        if ids.size and not (int(ids.min()) >= 0 and int(ids.max()) < self.shape[0]):
            raise BadCheckpoint(f"Rows up to {int(ids.max())} are asked of tensor {self.name}, which has {self.shape[0]}.")
        return self._cut(self._mapped, ids)

    def columns(self, span: slice) -> Weight:
        """A span of the last axis. Blocks cannot be cut in two."""
        if self._mapped.ndim < 2 and self._row_ids is not None:
            return self.rows(span)
        start, stop, step = span.indices(self.shape[-1])
        if self.kind in BLOCKS:
            values, size = BLOCKS[self.kind]
            if step != 1 or start % values or stop % values:
                raise BadCheckpoint(
                    f"Columns {start} to {stop} of {self.name} do not fall on {self.kind} blocks of {values} values.",
                    "use fewer tensor-parallel ranks, or another quantization of the model",
                )
            start, stop = start // values * size, stop // values * size
        return self._cut(self._mapped[..., slice(start, stop, step)], self._row_ids)

    def turned(self) -> Weight:
        """A matrix that is stored [in, out], as [out, in]."""
        if self.kind in BLOCKS or self._row_ids is not None or self._mapped.ndim != 2:
            raise UnsupportedModel(
                f"{self.name} is stored as {self.kind} of shape {self.shape} and must be turned; only plain matrices can be.",
                "use a file in float32, float16 or bfloat16",
            )
        return self._cut(self._mapped.T, None)

    def part(self, index: int) -> Weight:
        """Entry `index` of the first axis, as a tensor of one axis less (an expert of a stacked tensor)."""
        return self._cut(self._mapped[index if self._row_ids is None else self._row_ids[index]], None)

    def mapped(self) -> np.ndarray:
        """The chosen values, mapped from the file: only pages that are touched are read. Read only."""
        return self._mapped if self._row_ids is None else self._mapped[self._row_ids]

    def reshaped(self, *shape: int) -> Weight:
        """The same values of a plain kind in another shape."""
        return self._cut(self.mapped().reshape(shape), None)

    def raw(self) -> np.ndarray:
        """The chosen values (plain kinds) or bytes [..., bytes per row] (blocks), contiguous. Not to be written to."""
        chosen = self._mapped if self._row_ids is None else self._mapped[self._row_ids]
        return np.ascontiguousarray(chosen).reshape(chosen.shape)

    def release(self) -> None:
        """Gives back the memory that reading this tensor took, except pages shared with other tensors. It can be read again."""
        mapping = mapping_of(self._mapped)
        if mapping is not None:
            begin = _begin(mapping, self._mapped)
            first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
            length = (begin + self._mapped.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
            if length > 0:
                mapping.madvise(mmap.MADV_DONTNEED, first, length)

    def renamed(self, name: str, offset: float = 0.0) -> Weight:
        return Weight(name, self.kind, self._mapped, offset=offset, row_ids=self._row_ids)

    def _cut(self, mapped: np.ndarray, row_ids: np.ndarray | None) -> Weight:
        return Weight(self.name, self.kind, mapped, offset=self.offset, row_ids=row_ids)

    def __repr__(self) -> str:
        return f"Weight({self.name!r}, {self.kind}, {self.shape})"


class MappedFile(mmap.mmap):
    """A mapped file that knows which file it is, in which state."""

    identity: tuple[str, int, int, int] = ("", 0, 0, 0)  # path, bytes, times of the last change of content and of anything


def map_file(path: pathlib.Path) -> np.ndarray:
    """The bytes of a file, mapped and read only when touched."""
    try:
        with open(path, "rb") as file:
            try:
                # Private pages: a caller that needs a writable array gets one, and the file does not change.
                mapped = MappedFile(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError:
                mapped = MappedFile(file.fileno(), 0, access=mmap.ACCESS_READ)
            state = os.fstat(file.fileno())
            mapped.identity = (str(path.resolve()), state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    except ValueError:
        raise BadCheckpoint(f"{path} is empty.", "fetch the file again") from None
    except OSError as error:
        raise BadCheckpoint(f"Cannot read {path}: {error.strerror}.", "check the path and its permissions") from None
    return np.frombuffer(mapped, dtype=np.uint8)


def mapping_of(array: np.ndarray) -> mmap.mmap | None:
    """The mapped file in which an array lies, if it lies in one whose pages can be given back."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    owner = owner.obj if isinstance(owner, memoryview) else owner
    return owner if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED") else None


def _begin(mapping: mmap.mmap, array: np.ndarray) -> int:
    return array.ctypes.data - np.frombuffer(mapping, dtype=np.uint8).ctypes.data


def weight_from_bytes(name: str, kind: str, shape: tuple[int, ...], data: np.ndarray) -> Weight:
    """A tensor of `shape` over `data`, whose length the caller has checked with `num_bytes`."""
    try:
        if kind in BLOCKS:
            values, size = BLOCKS[kind]
            return Weight(name, kind, data.reshape(*shape[:-1], shape[-1] // values * size))
        return Weight(name, kind, data.view(PLAIN[kind]).reshape(shape))
    except ValueError as error:  # a zero-sized tensor with an absurd axis
        raise BadCheckpoint(f"Tensor {name} cannot have the shape {list(shape)}: {error}.", "fetch the file again") from None


def num_bytes(name: str, kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor on disk, computed without overflow."""
    count = 1
    for size in shape:
        count *= size
    if kind in PLAIN:
        return count * np.dtype(PLAIN[kind]).itemsize
    values, size = BLOCKS[kind]
    if not shape or shape[-1] % values:
        raise BadCheckpoint(f"Tensor {name} has rows of {shape[-1:]} values, which {kind} blocks of {values} cannot fill.")
    return count // values * size

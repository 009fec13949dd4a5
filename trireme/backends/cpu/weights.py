"""Packed weights (quantized blocks, or floats laid out anew): matrices in the order in which the kernels read them.

Made from floats or from GGUF blocks. Knows no layers.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch

from trireme.backends.cpu.library import KINDS, SOURCES, WeightStruct, library
from trireme.backends.cpu.tables import TABLES
from trireme.errors import UnsupportedModel

TILE = 16
KIND_OF_GGUF = {
    "Q4_0": "q4",
    "Q4_1": "q4_min",
    "Q8_0": "q8",
    "Q5_0": "q8",
    "Q4_K": "q4_k",
    "Q6_K": "q6_k",
    "IQ4_NL": "iq4",
    "IQ4_XS": "iq4",
    "MXFP4": "mxfp4",
}
_LARGE = 4 << 20  # bytes from which a matrix is asked for in large pages
_FLOATS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def aligned_zeros(count: int, large_pages: bool = False) -> torch.Tensor:
    """`count` zero bytes whose first lies on a cache line. The system gives their pages when they are first touched, and takes
    them back when the last tensor over them is gone. Large pages suit what is written as a whole and read from end to end."""
    pages = mmap.mmap(-1, max(count, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if large_pages and count >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the system has no large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)[:count]


class PackedWeight:
    """A [rows, columns] matrix of one kind, or of a table by its name.

    Rows may be filled in several pieces, so that fused projections need no copy.
    """

    def __init__(self, kind: str, rows: int, columns: int, data: torch.Tensor | None = None):
        code, tiles = KINDS["q4_table" if kind in TABLES else kind], -(-rows // TILE)
        tile_bytes = library().trireme_tile_bytes(code, columns)
        self.kind, self.rows, self.columns = kind, rows, columns
        self.data = aligned_zeros(tiles * tile_bytes, large_pages=True) if data is None else data
        padded = library().trireme_padded_columns(code, columns)
        self.struct = WeightStruct(code, rows, columns, padded, self.data.data_ptr(), tile_bytes)
        if kind in TABLES:
            self.struct.table[:] = TABLES[kind].numbers
        self.pointer = ctypes.pointer(self.struct)
        self.order: torch.Tensor | None = None

    def in_order(self, order: torch.Tensor | None) -> PackedWeight:
        """Itself, its column i to take column order[i] of what it multiplies."""
        self.order = None if order is None else order.to(torch.int32).contiguous()
        self.struct.order = None if self.order is None else self.order.data_ptr()
        return self

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @classmethod
    def from_floats(cls, kind: str, weight: torch.Tensor) -> PackedWeight:
        """Packs a float matrix: quantises it, or only reorders it."""
        packed = cls(kind, *weight.shape)
        packed.put_floats(0, weight)
        return packed

    @classmethod
    def from_gguf(cls, kind: str, blocks: torch.Tensor, columns: int) -> PackedWeight:
        """Repacks GGUF blocks, bytes of shape [rows, bytes of a row], without changing a weight."""
        packed = cls(KIND_OF_GGUF[kind.upper()], blocks.shape[0], columns)
        packed.put_gguf(0, kind, blocks)
        return packed

    def put_floats(self, first: int, weight: torch.Tensor) -> None:
        """Fills rows from `first` on with float rows."""
        if weight.dtype not in _FLOATS or weight.stride(-1) != 1:
            weight = weight.float().contiguous()
        self._put(first, weight, _FLOATS[weight.dtype], weight.element_size() * weight.stride(0))

    def put_gguf(self, first: int, kind: str, blocks: torch.Tensor) -> None:
        """Fills rows from `first` on with rows of GGUF blocks of that kind."""
        self._put(first, blocks, kind.lower(), blocks.stride(0))

    def _put(self, first: int, source: torch.Tensor, name: str, stride: int) -> None:
        assert first >= 0 and first + source.shape[0] <= self.rows, (first, source.shape, self.rows)
        if library().trireme_pack(self.pointer, first, source.shape[0], SOURCES[name], source.data_ptr(), stride):
            raise UnsupportedModel(
                f"{name} weights of width {self.columns} cannot be packed as {self.kind}.", "dequantise them first"
            )

    def floats(self, first: int = 0, count: int | None = None) -> torch.Tensor:
        """Rows as float32."""
        count = self.rows - first if count is None else count
        output = torch.empty(count, self.columns)
        library().trireme_unpack(self.pointer, first, count, output.data_ptr(), self.columns)
        return output

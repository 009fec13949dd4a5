"""Weight methods of the CPU backend: packed matrices of any kind, kept as the checkpoint has them or quantised at load."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trireme.backends.cpu.cache import PackCache
from trireme.backends.cpu.library import library
from trireme.backends.cpu.ops import CpuOps, gate_transform
from trireme.backends.cpu.program import PLAIN, Transform
from trireme.backends.cpu.repack import blocks_for, kind_for, order_of
from trireme.backends.cpu.weights import KIND_OF_GGUF, TILE, PackedWeight
from trireme.blocks import BLOCKS
from trireme.ops import Ops
from trireme.quant import Stored, WeightMethod, check_scales, composite, decode, grouped
from trireme.quant.online import VOCABULARY, quantize

PIECE = 1 << 21  # weights of a matrix that one thread reads at a time
_LOSSLESS = {"F32": "f32", "BF16": "bf16", "F16": "f16"}
_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}


class Packed(WeightMethod):
    """Stacked matrices. Neighbours of the same kind become one product. `kind` None keeps the checkpoint's own kinds."""

    kind: ClassVar[str | None] = None
    rounds: ClassVar[str | None] = None  # the kind of `quant.online` that values pass through
    cache: ClassVar[PackCache | None] = None

    def __init__(self, weights: list[PackedWeight], bias: Tensor | None):
        self.weights, self.bias = weights, bias
        self.rows = sum(weight.rows for weight in weights)
        self.title = f"packed as {' and '.join(dict.fromkeys(weight.kind for weight in weights))}"

    @classmethod
    def load(cls, parts: list[Stored], bias: Tensor | None, dtype: torch.dtype, device: torch.device) -> Packed:
        runs: list[Run] = []
        for part in parts:
            run = Run(cls.kind_of(part), [part], cls.rounds, order_of(part) if cls.kind is None else None)
            if runs and runs[-1].goes_on_with(run):
                runs[-1].parts.append(part)
            else:
                runs.append(run)
        weights = [_pack(run) if cls.cache is None else _kept(cls.cache, run) for run in runs]
        return cls(weights, None if bias is None else bias.float().contiguous())

    @classmethod
    def kept_in(cls, cache: PackCache) -> type[Packed]:
        """A version of this method that packs only the matrices that `cache` does not have."""
        return type(cls.__name__, (cls,), {"cache": cache})

    @classmethod
    def kind_of(cls, part: Stored) -> str:
        return cls.kind or _kept_kind(part)

    @classmethod
    def title_of(cls, part: Stored) -> str:
        return f"packed as {cls.kind_of(part)}"

    def linear(self, ops: Ops, x: Tensor, transform: Transform = PLAIN) -> Tensor:
        assert isinstance(ops, CpuOps), type(ops)
        return ops.packed_linear(self.weights, x, self.bias, transform)

    def of_gated(self, ops: Ops, x: Tensor, kind: str) -> Tensor:
        """Applies the activation while the product reads its input."""
        return self.linear(ops, x, gate_transform(kind))

    def embed(self, ops: Ops, ids: Tensor) -> Tensor:
        assert isinstance(ops, CpuOps) and len(self.weights) == 1, type(ops)
        return ops.packed_embedding(self.weights[0], ids)

    def take(self, new: WeightMethod) -> bool:
        return False  # packed weights may be read-only maps of the pack cache

    def num_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)


class PackedFloats(Packed):
    """float32, decoded at load: what `--quantize none` asks for."""

    kind = "f32"


class PackedInt8(Packed):
    """8 bits, a scale per 32 weights and per 32 activations.

    One scale per output and token would cost SmolLM2 5 % of perplexity; this costs half a per cent.
    """

    kind = "q8"


class PackedInt4(Packed):
    """4 bits with a scale and a minimum per 32 weights. A vocabulary has 8: in 4 it would cost SmolLM2 6 % of perplexity."""

    @classmethod
    def kind_of(cls, part: Stored) -> str:
        rows, columns = part.shape
        return "q8" if rows > VOCABULARY * columns else "q4_min"


class PackedMxfp4(Packed):
    """Floats of 4 bits with a power of two for each 32 weights. A vocabulary has 8 bits, as with int4."""

    rounds = "mxfp4"

    @classmethod
    def kind_of(cls, part: Stored) -> str:
        rows, columns = part.shape
        return "q8" if rows > VOCABULARY * columns else "mxfp4"


class PackedFp8(Packed):
    """Rounded to floats of 8 bits with a scale for each row, and kept as bfloat16, which the kernels multiply by."""

    rounds, kind = "fp8", "bf16"


METHODS: dict[str, type[Packed]] = {
    "auto": Packed,
    "none": PackedFloats,
    "int8": PackedInt8,
    "int4": PackedInt4,
    "mxfp4": PackedMxfp4,
    "fp8": PackedFp8,
} | dict.fromkeys(KIND_OF_GGUF, Packed)


def _kept_kind(part: Stored) -> str:
    """The packed kind that keeps the numbers of a stored tensor exactly, or the nearest one that loses almost nothing."""
    matrix = composite(part)
    if matrix is not None:
        return kind_for(matrix)
    if part.kind in KIND_OF_GGUF and not part.offset:
        return KIND_OF_GGUF[part.kind]
    return "q8" if part.kind in BLOCKS else _LOSSLESS.get(part.kind, "f32")


@dataclass
class Run:
    """Stacked matrices that become one packed weight: of a kind, perhaps rounded to another first, their columns in one order."""

    kind: str
    parts: list[Stored]
    rounds: str | None = None
    order: Tensor | None = None

    @property
    def rows(self) -> int:
        return sum(part.shape[0] for part in self.parts)

    @property
    def columns(self) -> int:
        return self.parts[0].shape[1]

    def goes_on_with(self, other: Run) -> bool:
        if self.kind != other.kind or (self.order is None) != (other.order is None):
            return False
        return self.order is None or other.order is None or torch.equal(self.order, other.order)


def _kept(cache: PackCache, run: Run) -> PackedWeight:
    """Packs matrices that are not in the cache. Adds them to it if that saves time and every part has an origin."""
    kind, parts = run.kind, run.parts
    reordered = kind in _LOSSLESS.values() or all(hasattr(part, "form") or KIND_OF_GGUF.get(part.kind) == kind for part in parts)
    if reordered and not run.rounds and not cache.everything:
        return _pack(run)
    origins = [origin for part in parts if (origin := part.origin) is not None]
    if len(origins) < len(parts):
        return _pack(run)
    origins += [f"rounded to {run.rounds}"] if run.rounds else []
    found = cache.read(kind, run.rows, run.columns, origins)
    if found is None:
        found = _pack(run)
        cache.write(found, origins)
    return found.in_order(run.order)


def _pack(run: Run) -> PackedWeight:
    packed, first = PackedWeight(run.kind, run.rows, run.columns).in_order(run.order), 0
    places = []
    for piece in (piece for part in run.parts for piece in _pieces(part)):
        places.append((first, piece))
        first += piece.shape[0]
    packing = threading.Lock()  # one matrix at a time, because packing uses all threads

    def put_decoded(place: tuple[int, Stored]) -> None:
        first, piece = place
        blocks, values = _blocks_or_values(run, piece)
        with packing:
            if blocks:
                packed.put_gguf(first, *blocks)
            else:
                packed.put_floats(first, values)

    others = []
    for first, piece in places:
        if composite(piece) is None and not run.rounds and KIND_OF_GGUF.get(piece.kind) == run.kind:
            raw = piece.raw()
            check_scales(piece.name, piece.kind, raw)
            packed.put_gguf(first, piece.kind, torch.from_numpy(raw).view(piece.shape[0], -1))
            piece.release()
        else:
            others.append((first, piece))
    if others:
        _in_threads(put_decoded, others)
    return packed


def _blocks_or_values(run: Run, piece: Stored) -> tuple[tuple[str, Tensor] | None, Tensor]:
    """Blocks that hold the numbers of a piece as they are, where the kind can; else None and its values."""
    whole, nothing = composite(piece), torch.empty(0)
    matrix = None if whole is None else grouped(whole)
    if matrix is not None and run.order is not None:
        matrix, _ = matrix.in_order()
    blocks = None if matrix is None else blocks_for(run.kind, matrix)
    if blocks:
        return blocks, nothing
    if matrix is not None:
        values = matrix.values()
    else:
        values = decode(piece, torch.float32 if run.rounds else _HALVES.get(piece.kind, torch.float32))
    if not run.rounds or run.kind == "q8":
        return None, values
    matrix = quantize(values, run.rounds)
    blocks = blocks_for(run.kind, matrix)
    return blocks, nothing if blocks else matrix.values()


def _in_threads(work: Callable[[tuple[int, Stored]], None], places: list[tuple[int, Stored]]) -> None:
    """Works on pieces in parallel, with one thread for each. Torch's own threads wait for each other in every operation, which is
    up to ten times slower when other processes keep the cores busy."""
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(library().trireme_threads(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for _ in pool.map(work, places):
                pass
    finally:
        torch.set_num_threads(before)


def _pieces(part: Stored) -> Iterator[Stored]:
    """Splits a large matrix by rows, so that it is never in memory as a whole beside its packed form."""
    rows, columns = part.shape
    step = max(PIECE // columns // TILE, 1) * TILE
    if part.kind == "RANDOM" or rows <= step:
        yield part
        return
    for begin in range(0, rows, step):
        yield part.rows(slice(begin, min(begin + step, rows)))

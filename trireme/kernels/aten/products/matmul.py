"""c = α a b + β bias: mm, addmm, bmm, mv. Knows three regimes: large tiles through tensor descriptors on a persistent grid,
tiles through plain pointers, and few rows, where the matrix is streamed once and split along the summed dimension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from trireme.kernels import chips
from trireme.kernels.aten.calls import tune
from trireme.kernels.aten.calls.originals import original
from trireme.kernels.aten.elementwise.pointwise import Number
from trireme.kernels.aten.products.streamed import few_rows, in_tiles, one_matrix, streams
from trireme.kernels.launch import Unsupported, blocks, empty, kernel, next_power, setting, unrepeatable
from trireme.kernels.steps.tiles import place

_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_FEW = 32  # rows (or columns) up to which the other matrix is read once and decides the time
_MOST_ITEMS = 65535  # which a grid's second and third numbers count
_SMALL_ITEM = 2**22  # multiplications of an item of a batch that plain pointers do as fast as torch
OURS_ONLY = False  # even where torch's own kernels are faster; for tests of ours
_FARTHEST = 2**24  # between neighbours along the summed dimension, of which a tile has at most 64


@triton.jit
def _finish(total, bias, row, column, m, n, bias_m, bias_n, alpha, beta, BIAS: tl.constexpr):
    """α total + β bias, where the bias is absent (0), one row (1) or a matrix (2)"""
    if BIAS == 1:
        line = tl.load(bias + column.to(tl.int64) * bias_n, mask=column < n, other=0.0).to(tl.float32)
        total = total * alpha + beta * line[None, :]
    elif BIAS == 2:
        mask = (row < m)[:, None] & (column < n)[None, :]
        at = row[:, None].to(tl.int64) * bias_m + column[None, :].to(tl.int64) * bias_n
        total = total * alpha + beta * tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
    return total


@kernel
def _descriptor_tiles(
    a, b, c, bias, batch, m, n, k, bias_m, bias_n, alpha, beta,
    A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, PRECISION: tl.constexpr,
    BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, HALVES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """c = a b (+ bias): each program walks tiles; a turned operand is stored with its rows and columns exchanged"""
    chips.begin(EARLY, OPEN=False)
    tiles_m, tiles_n = tl.cdiv(m, M), tl.cdiv(n, N)
    tiles = tiles_m * tiles_n * batch
    steps = tl.cdiv(k, K)
    # The store's own counter keeps the tile's place from living through the pipelined inner loop.
    done = tl.program_id(0) - tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        item = tile // (tiles_m * tiles_n)
        tile_m, tile_n = place(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
        total = tl.zeros((M, N), tl.float32)
        for step in range(steps):
            if A_TURNED:
                left = a.load([item * k + step * K, tile_m * M]).T
            else:
                left = a.load([item * m + tile_m * M, step * K])
            if B_TURNED:
                right = b.load([item * n + tile_n * N, step * K]).T
            else:
                right = b.load([item * k + step * K, tile_n * N])
            total = tl.dot(left, right, total, input_precision=PRECISION)
        done += tl.num_programs(0)
        item = done // (tiles_m * tiles_n)
        tile_m, tile_n = place(done % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
        row = tile_m * M + tl.arange(0, M)
        if HALVES:
            # Two stores of half the width need half the shared memory, which buys one more stage of loads.
            width: tl.constexpr = N // 2
            left, right = tl.split(total.reshape(M, 2, width).permute(0, 2, 1))
            column = tile_n * N + tl.arange(0, width)
            left = _finish(left, bias, row, column, m, n, bias_m, bias_n, alpha, beta, BIAS)
            c.store([item * m + tile_m * M, tile_n * N], left.to(c.dtype))
            right = _finish(right, bias, row, column + width, m, n, bias_m, bias_n, alpha, beta, BIAS)
            c.store([item * m + tile_m * M, tile_n * N + width], right.to(c.dtype))
        else:
            column = tile_n * N + tl.arange(0, N)
            total = _finish(total, bias, row, column, m, n, bias_m, bias_n, alpha, beta, BIAS)
            c.store([item * m + tile_m * M, tile_n * N], total.to(c.dtype))


@kernel
def _pointer_tiles(
    a, b, c, bias, m, n, k, a_item, a_m, a_k, b_item, b_k, b_n, c_item, c_m, bias_m, bias_n, alpha, beta,
    PRECISION: tl.constexpr, BIAS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """c[item] = a[item] b[item] (+ bias), any strides"""
    chips.begin(EARLY, OPEN=False)
    tile_m, tile_n = place(tl.program_id(0), tl.cdiv(m, M), tl.cdiv(n, N), GROUP)
    item = tl.program_id(1).to(tl.int64)
    row, column = tile_m * M + tl.arange(0, M), tile_n * N + tl.arange(0, N)
    inner = tl.arange(0, K)
    left = a + item * a_item + row[:, None].to(tl.int64) * a_m + inner[None, :] * a_k
    right = b + item * b_item + inner[:, None] * b_k + column[None, :].to(tl.int64) * b_n
    total = tl.zeros((M, N), tl.float32)
    for at in range(0, k, K):
        left_mask = (row < m)[:, None] & (inner < k - at)[None, :]
        right_mask = (inner < k - at)[:, None] & (column < n)[None, :]
        x = tl.load(left, mask=left_mask, other=0.0)
        y = tl.load(right, mask=right_mask, other=0.0)
        total = tl.dot(x, y, total, input_precision=PRECISION)
        left += K * a_k
        right += K * b_k
    total = _finish(total, bias, row, column, m, n, bias_m, bias_n, alpha, beta, BIAS)
    at = item * c_item + row[:, None].to(tl.int64) * c_m + column[None, :]
    tl.store(c + at, total.to(c.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])


@dataclass(frozen=True)
class _Problem:
    """c[batch, m, n] = α a[batch, m, k] b[batch, k, n] + β bias[m, n]."""

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    bias: torch.Tensor | None
    alpha: float
    beta: float

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.a.shape[0], self.a.shape[1], self.b.shape[2], self.a.shape[2]

    @property
    def bias_walk(self) -> tuple[int, int]:
        return (0, 0) if self.bias is None else (self.bias.stride(0), self.bias.stride(1))

    @property
    def bias_kind(self) -> int:
        """0 none, 1 the same for every row, 2 a matrix."""
        return 0 if self.bias is None else 1 if self.bias.stride(0) == 0 else 2


def precision(dtype: torch.dtype) -> str:
    """How float32 operands enter the tensor cores: three roundings keep float32's accuracy, one is what `allow_tf32` allows."""
    if dtype is not torch.float32 or chips.current().interpreted:
        return "ieee"
    return "tf32" if setting(chips.allows_tf32) else "tf32x3" if chips.current().descriptors else "ieee"


def _config(m: int, n: int, k: int, warps: int, stages: int, halves: bool = False, group: int = 8) -> dict[str, Any]:
    return {"M": m, "N": n, "K": k, "GROUP": group, "HALVES": halves, "warps": warps, "stages": stages}


_TORCH = {"torch": True}  # a candidate like others: what torch does faster stays torch's


# Candidates for half types on Hopper, from the largest tile to the smallest; warps of 4 make one warpgroup.
_CUTS: list[tuple[Any, ...]] = [
    (128, 256, 64, 8, 4, True), (128, 256, 64, 8, 3), (128, 256, 64, 8, 3, True), (256, 128, 64, 8, 4, True),
    (256, 128, 64, 8, 3), (128, 256, 64, 8, 4, True, 16), (128, 256, 64, 8, 4, True, 4), (128, 128, 64, 8, 4),
    (128, 128, 64, 4, 4), (128, 128, 128, 8, 3), (128, 64, 64, 4, 5), (64, 128, 64, 4, 5), (64, 64, 128, 4, 4),
    (128, 64, 128, 4, 4), (64, 128, 128, 4, 4), (64, 128, 64, 4, 7), (64, 64, 128, 4, 5),
]  # fmt: skip
_TILES = [_config(*cut) for cut in _CUTS]
_LARGE = _TILES[0]
_SMALLER = [_TILES[14], _TILES[16]]  # those of them that keep up with torch where one round of them fills the chip


def _used(p: _Problem, config: dict[str, Any]) -> float:
    """What is needed of all that the chip computes in the rounds these tiles take: 0.97 where 128 of 132 processors have one."""
    batch, m, n, _ = p.sizes
    tile = config["M"] * config["N"]
    rounds = blocks(_programs(p, config), chips.current().multiprocessors)
    return batch * m * n / (rounds * chips.current().multiprocessors * tile)


def _programs(p: _Problem, config: dict[str, Any]) -> int:
    batch, m, n, _ = p.sizes
    return blocks(m, config["M"]) * blocks(n, config["N"]) * batch


def _keeps_up(p: _Problem, config: dict[str, Any], measured: bool = False) -> bool:
    """Whether these tiles are as fast as torch's, which has cuts for all shapes: if they use nearly all of the chip in the rounds
    they take, smaller ones in one round only, and sums are long enough to hide what storing takes. `measured`: for such shapes."""
    depth = p.sizes[3]
    if measured or config["M"] * config["N"] >= _LARGE["M"] * _LARGE["N"]:
        return _used(p, config) >= 0.95 and depth >= 1024
    return _used(p, config) >= 0.95 and _programs(p, config) <= chips.current().multiprocessors and depth <= 4096


def _default(p: _Problem) -> dict[str, Any]:
    """The largest tile if it uses the chip well, else whichever uses most of it."""
    if p.a.element_size() == 4:
        return _config(128, 128, 32, 8, 3)
    return _LARGE if _keeps_up(p, _LARGE) else max([*_SMALLER, _LARGE], key=lambda config: _used(p, config))


def _flat(x: torch.Tensor) -> tuple[torch.Tensor, bool] | None:
    """A batch as one 2-d matrix with a contiguous, aligned last dimension, and whether that is the turned one."""
    for turned, (outer, inner) in enumerate(((1, 2), (2, 1))):
        flat = one_matrix(x, outer, inner)
        if flat is not None:
            return flat, bool(turned)
    return None


class _Described:
    """A problem whose operands fit tensor descriptors, and how a configuration runs it."""

    def __init__(self, p: _Problem, left: tuple[torch.Tensor, bool], right: tuple[torch.Tensor, bool]) -> None:
        self.problem = p
        (self.a, self.a_turned), (self.b, self.b_turned) = left, right
        batch, m, n, _ = p.sizes
        self.c = p.c.view(batch * m, n)

    @property
    def name(self) -> str:
        half = "half" if self.a.element_size() == 2 else "float"
        return f"mm.{half}.{int(self.a_turned)}{int(self.b_turned)}{self.problem.bias_kind}"

    def run(self, config: dict[str, Any]) -> None:
        p = self.problem
        if config.get("torch"):
            _by_torch(p)
        else:
            self._persistent(config)

    def _operands(self, config: dict[str, Any]) -> tuple[TensorDescriptor, TensorDescriptor]:
        tile_m, tile_n, tile_k = config["M"], config["N"], config["K"]
        return (
            in_tiles(self.a, *((tile_k, tile_m) if self.a_turned else (tile_m, tile_k))),
            in_tiles(self.b, *((tile_n, tile_k) if self.b_turned else (tile_k, tile_n))),
        )

    def _persistent(self, config: dict[str, Any]) -> None:
        p, c = self.problem, self.c
        batch, m, n, k = p.sizes
        tile_m, tile_n = config["M"], config["N"]
        result = in_tiles(c, tile_m, tile_n // 2 if config["HALVES"] else tile_n)
        tiles = blocks(m, tile_m) * blocks(n, tile_n) * batch
        constants = {name: value for name, value in config.items() if name != "splits"}
        _descriptor_tiles((min(tiles, chips.current().multiprocessors),), *self._operands(config), result, p.bias, batch, m, n, k,
                          *p.bias_walk, p.alpha, p.beta, A_TURNED=self.a_turned, B_TURNED=self.b_turned,
                          PRECISION=precision(p.a.dtype), BIAS=p.bias_kind, **constants)  # fmt: skip


def _by_torch(p: _Problem) -> None:
    """torch's own product, for the tuner's clock only."""
    if p.a.shape[0] > 1:
        original("bmm")(p.a, p.b)
    elif p.bias is None:
        original("mm")(p.a[0], p.b[0])
    else:
        line = p.bias[0] if p.bias_kind == 1 else p.bias
        original("addmm")(line, p.a[0], p.b[0], beta=p.beta, alpha=p.alpha)


def _described(p: _Problem) -> _Described | None:
    """The problem in descriptors if the chip has them and the operands fit them."""
    if not chips.current().descriptors or p.sizes[2] * p.a.element_size() % 16:
        return None
    left, right = _flat(p.a), _flat(p.b)
    return None if left is None or right is None else _Described(p, left, right)


def _leave(reason: str) -> None:
    """Leaves a product to torch, whose own kernel was measured to be faster on an H200."""
    if not (OURS_ONLY or chips.current().interpreted):
        raise Unsupported(reason)


def _by_descriptors(p: _Problem) -> bool:
    """Runs the product in large tiles if its operands fit descriptors."""
    described = _described(p)
    if described is None:
        return False
    batch, m, n, k = p.sizes
    name, default = described.name, _default(p)
    candidates = [_TORCH, *_TILES] if p.a.element_size() == 2 else [default]
    if batch > 1:
        # Items lie one after the other, so a tile must not reach into the next.
        fitting = [c for c in (default, *_TILES[:10]) if m % c["M"] == 0 and k % c["K"] == 0]
        if not fitting:
            return False
        name, default, candidates = f"{name}.batched.{m & -m}.{k & -k}", fitting[0], [_TORCH, *fitting]
    config = tune.choose(name, tune.shape_class(m * batch, n, k), default, candidates, described.run)
    if config.get("torch") or not _keeps_up(p, config, config is not default):
        _leave("tiles of this size leave too much of the chip idle")
        config = default if config.get("torch") else config
    described.run(config)
    return True


def _stream(p: _Problem) -> None:
    _, m, n, _ = p.sizes
    x, w, y, bias = p.a, p.b.transpose(1, 2), p.c, p.bias
    if m > _FEW or n <= m:
        x, w, y, bias = w, x, y.transpose(1, 2), None if bias is None else bias.t()
    if not streams(x.shape[1], w):
        _leave("torch streams these faster")
    few_rows(x, w, y, bias, p.alpha, p.beta, precision(x.dtype))


def _by_pointers(p: _Problem) -> None:
    batch, m, n, k = p.sizes
    if batch > _MOST_ITEMS or max(p.a.stride(2), p.b.stride(1)) >= _FARTHEST:
        raise Unsupported("more items than a grid's second number counts, or elements too far apart for 32 bits")
    half = p.a.element_size() == 2
    if not _suits_pointers(p):
        _leave("plain pointers are slow for large items")
    tile_m, tile_n = min(128 if half else 64, max(16, next_power(m))), min(128 if half else 64, max(16, next_power(n)))
    tile_k = min(64 if half else 32, max(16, next_power(k)))
    grid = (blocks(m, tile_m) * blocks(n, tile_n), batch)
    strides = (*p.a.stride(), *p.b.stride(), p.c.stride(0), p.c.stride(1))
    _pointer_tiles(grid, p.a, p.b, p.c, p.bias, m, n, k, *strides, *p.bias_walk, p.alpha, p.beta,
                   PRECISION=precision(p.a.dtype), BIAS=p.bias_kind, M=tile_m, N=tile_n, K=tile_k, GROUP=8,
                   warps=8 if half else 4)  # fmt: skip


def _suits_pointers(p: _Problem) -> bool:
    """Small even items of a batch."""
    batch, m, n, k = p.sizes
    even = all(stride == 1 or stride % 16 == 0 for x in (p.a, p.b) for stride in x.stride()[1:])
    return batch > 1 and even and k <= 256 and m * n * k <= _SMALL_ITEM


def _leave_by_shape(a: torch.Tensor, batch: int, m: int, n: int, k: int) -> None:
    """Leaves what torch does faster in all the ways we have."""
    few = min(m, n)
    if a.dtype is torch.float32 and (batch > 1 or few > _FEW):
        _leave("float32 in tiles")
    if batch > 1 and k <= 256 and few >= 128:
        _leave("batches of shallow products")


def _run(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, alpha: float, beta: float) -> torch.Tensor:
    """The product of [batch, m, k] and [batch, k, n] in whichever regime fits."""
    if a.dtype not in _TYPES or b.dtype is not a.dtype or (bias is not None and bias.dtype is not a.dtype):
        raise Unsupported(f"no product of {a.dtype} and {b.dtype}")
    batch, m, k = a.shape
    n = b.shape[2]
    if bias is not None and beta == 0:
        if bias.dim() > 2 or any(size not in (1, whole) for size, whole in zip(reversed(bias.shape), (n, m), strict=False)):
            raise Unsupported("a bias that does not count and does not fit: torch refuses it on one device and not on another")
        bias = None  # whose contents, even NaN, do not matter
    if bias is not None:
        bias = bias.expand(m, n)
    if alpha == 0 or (bias is None and alpha != 1):
        raise Unsupported("a bias without a product, or a scaled product without a bias")
    c = empty((batch, m, n), a.dtype, a.device)
    if c.numel() == 0:
        return c
    if k == 0:
        unrepeatable()
        return c.zero_() if bias is None else c.copy_(bias * beta)
    _leave_by_shape(a, batch, m, n, k)
    problem = _Problem(a, b, c, bias, alpha, beta)
    if min(m, n) <= _FEW and batch <= _MOST_ITEMS:
        _stream(problem)
    elif not _by_descriptors(problem):
        _by_pointers(problem)
    return c


def mm(self: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """a b"""
    _check(self, mat2, 2, "mm")
    return _run(self[None], mat2[None], None, 1.0, 0.0)[0]


def bmm(self: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """a[i] b[i]"""
    _check(self, mat2, 3, "bmm")
    if self.shape[0] != mat2.shape[0]:
        raise RuntimeError(f"bmm: batch sizes {self.shape[0]} and {mat2.shape[0]} differ")
    return _run(self, mat2, None, 1.0, 0.0)


def addmm(self: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: Number = 1, alpha: Number = 1) -> torch.Tensor:
    """β c + α a b; with β = 0 the contents of c, even NaN, do not matter"""
    _check(mat1, mat2, 2, "addmm")
    return _run(mat1[None], mat2[None], self, float(alpha), float(beta))[0]


def mv(self: torch.Tensor, vec: torch.Tensor) -> torch.Tensor:
    """a v"""
    if self.dim() != 2 or vec.dim() != 1 or self.shape[1] != vec.shape[0]:
        raise RuntimeError(f"mv: sizes {tuple(self.shape)} and {tuple(vec.shape)} do not match")
    return _run(self[None], vec[None, :, None], None, 1.0, 0.0).view(-1)


def _check(a: torch.Tensor, b: torch.Tensor, rank: int, name: str) -> None:
    if a.dim() != rank or b.dim() != rank:
        raise RuntimeError(f"{name}: expected {rank}-d operands, but got {a.dim()}-d and {b.dim()}-d")
    if a.shape[-1] != b.shape[-2]:
        raise RuntimeError(f"{name}: mat1 and mat2 shapes cannot be multiplied ({tuple(a.shape)} and {tuple(b.shape)})")
    if a.dtype != b.dtype:
        raise RuntimeError(f"{name}: expected operands of one type, but got {a.dtype} and {b.dtype}")

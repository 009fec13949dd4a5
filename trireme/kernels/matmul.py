"""Matrix products: mm, addmm, bmm, mv. Knows three regimes: large tiles through tensor descriptors on a persistent grid,
tiles through plain pointers, and few rows, where the matrix is streamed once and split along the summed dimension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from trireme.kernels import chips, tune
from trireme.kernels.launch import Unsupported, blocks, empty, kernel, next_power, setting, unrepeatable
from trireme.kernels.pointwise import Number
from trireme.kernels.streamed import few_rows

_TYPES = (torch.bfloat16, torch.float16, torch.float32)
# Up to this many rows (or columns) the other matrix is read once and decides the time.
_FEW = 64
_LARGE_SINGLE = 2**30


@triton.jit
def _place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Tile number → row and column of tiles, GROUP rows at a time so that neighbours share what they read."""
    width = GROUP * tiles_n
    first = (tile // width) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    return first + (tile % width) % height, (tile % width) // height


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
):  # fmt: skip
    """c = a b (+ bias): each program walks tiles; a turned operand is stored with its rows and columns exchanged"""
    tiles_m, tiles_n = tl.cdiv(m, M), tl.cdiv(n, N)
    tiles = tiles_m * tiles_n * batch
    steps = tl.cdiv(k, K)
    # The store's own counter keeps the tile's place from living through the pipelined inner loop.
    done = tl.program_id(0) - tl.num_programs(0)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        item = tile // (tiles_m * tiles_n)
        tile_m, tile_n = _place(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
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
        tile_m, tile_n = _place(done % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
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
):  # fmt: skip
    """c[item] = a[item] b[item] (+ bias), any strides"""
    tile_m, tile_n = _place(tl.program_id(0), tl.cdiv(m, M), tl.cdiv(n, N), GROUP)
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


# Candidates for half types on Hopper, from the largest tile to the smallest; warps of 4 make one warpgroup.
_TILES = [
    _config(128, 256, 64, 8, 4, True),
    _config(128, 256, 64, 8, 3),
    _config(128, 256, 64, 8, 3, True),
    _config(256, 128, 64, 8, 4, True),
    _config(256, 128, 64, 8, 3),
    _config(128, 256, 64, 8, 4, True, 16),
    _config(128, 256, 64, 8, 4, True, 4),
    _config(128, 128, 64, 8, 4),
    _config(128, 128, 64, 4, 4),
    _config(128, 128, 128, 8, 3),
    _config(128, 64, 64, 4, 5),
    _config(64, 128, 64, 4, 5),
    _config(64, 64, 128, 4, 4),
]
_LARGE, _MIDDLE, _SMALL, _LEAST = _TILES[0], _TILES[7], _TILES[11], _TILES[12]


def _default(m: int, n: int, batch: int, itemsize: int) -> dict[str, Any]:
    """The largest tile that still gives nearly every multiprocessor one."""
    if itemsize == 4:
        return _config(128, 128, 32, 8, 3)
    for config in (_LARGE, _MIDDLE, _SMALL):
        if blocks(m, config["M"]) * blocks(n, config["N"]) * batch >= 0.7 * chips.current().multiprocessors:
            return config
    return _LEAST


def _flat(x: torch.Tensor) -> tuple[torch.Tensor, bool] | None:
    """A batch as one 2-d matrix with a contiguous, aligned last dimension, and whether that is the turned one."""
    _, rows, columns = x.shape
    for turned, (outer, inner) in enumerate(((1, 2), (2, 1))):
        height = (rows, columns)[turned]
        stride = x.stride(outer)
        if x.stride(inner) != 1 or stride * x.element_size() % 16 or x.data_ptr() % 16 or stride < x.shape[inner]:
            continue
        if x.shape[0] == 1 or x.stride(0) == height * stride:
            return x.as_strided((x.shape[0] * height, x.shape[inner]), (stride, 1)), bool(turned)
    return None


def _by_descriptors(p: _Problem) -> bool:
    """Runs the persistent kernel if the chip has descriptors and the operands fit them."""
    batch, m, n, k = p.sizes
    size = p.a.element_size()
    if not chips.current().descriptors or n * size % 16:
        return False
    left, right = _flat(p.a), _flat(p.b)
    if left is None or right is None:
        return False
    (a, a_turned), (b, b_turned) = left, right
    c = p.c.view(batch * m, n)

    def run(config: dict[str, Any]) -> None:
        tile_m, tile_n, tile_k = config["M"], config["N"], config["K"]
        descriptors = (
            TensorDescriptor(a, list(a.shape), list(a.stride()), [tile_k, tile_m] if a_turned else [tile_m, tile_k]),
            TensorDescriptor(b, list(b.shape), list(b.stride()), [tile_n, tile_k] if b_turned else [tile_k, tile_n]),
            TensorDescriptor(c, list(c.shape), list(c.stride()), [tile_m, tile_n // 2 if config["HALVES"] else tile_n]),
        )
        tiles = blocks(m, tile_m) * blocks(n, tile_n) * batch
        _descriptor_tiles((min(tiles, chips.current().multiprocessors),), *descriptors, p.bias, batch, m, n, k, *p.bias_walk,
                          p.alpha, p.beta, A_TURNED=a_turned, B_TURNED=b_turned, PRECISION=precision(a.dtype),
                          BIAS=p.bias_kind, **config)  # fmt: skip

    default = _default(m, n, batch, size) if p.bias_kind < 2 else _config(128, 128, 64 if size == 2 else 32, 8, 3)
    name = f"mm.{'half' if size == 2 else 'float'}.{int(a_turned)}{int(b_turned)}{p.bias_kind}"
    candidates = _TILES if size == 2 and p.bias_kind < 2 else [default]
    if batch > 1:
        # Items lie one after the other, so a tile must not reach into the next.
        fitting = [config for config in (default, *candidates) if m % config["M"] == 0 and k % config["K"] == 0]
        if not fitting:
            return False
        name, default, candidates = f"{name}.batched.{m & -m}.{k & -k}", fitting[0], fitting
    run(tune.choose(name, tune.shape_class(m * batch, n, k), default, candidates, run))
    return True


def _by_pointers(p: _Problem) -> None:
    batch, m, n, k = p.sizes
    half = p.a.element_size() == 2
    tile_m, tile_n = min(128 if half else 64, max(16, next_power(m))), min(128 if half else 64, max(16, next_power(n)))
    tile_k = min(64 if half else 32, max(16, next_power(k)))
    grid = (blocks(m, tile_m) * blocks(n, tile_n), batch)
    strides = (*p.a.stride(), *p.b.stride(), p.c.stride(0), p.c.stride(1))
    _pointer_tiles(grid, p.a, p.b, p.c, p.bias, m, n, k, *strides, *p.bias_walk, p.alpha, p.beta,
                   PRECISION=precision(p.a.dtype), BIAS=p.bias_kind, M=tile_m, N=tile_n, K=tile_k, GROUP=8,
                   warps=8 if half else 4)  # fmt: skip


def _leave_to_torch(a: torch.Tensor, batch: int, m: int, n: int, k: int) -> None:
    """Where torch's own kernel was clearly faster on an H200, it stays: measured 2026-11, torch against ours."""
    if chips.current().interpreted:
        return
    few = min(m, n)
    if a.dtype is torch.float32 and batch * m * n * k >= _LARGE_SINGLE and few > _FEW and precision(a.dtype) == "tf32x3":
        raise Unsupported("large float32 products without tf32: 51 against 35 TFLOP/s at 4096 cubed")
    if batch == 1 and 32 < few <= _FEW:
        raise Unsupported("33 to 64 rows: 8.4 against 12.8 µs for 64 x 4096 x 4096")
    if batch > 1 and k <= 256 and few >= 256:
        raise Unsupported("batches of shallow products: 93 against 133 µs for 32 x 2048 x 128 x 2048")


def _run(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, alpha: float, beta: float) -> torch.Tensor:
    """The product of [batch, m, k] and [batch, k, n] in whichever regime fits."""
    if a.dtype not in _TYPES or b.dtype is not a.dtype or (bias is not None and bias.dtype is not a.dtype):
        raise Unsupported(f"no product of {a.dtype} and {b.dtype}")
    batch, m, k = a.shape
    n = b.shape[2]
    c = empty((batch, m, n), a.dtype, a.device)
    if c.numel() == 0:
        return c
    if k == 0:
        unrepeatable()
        return c.zero_() if bias is None else c.copy_(bias * beta)
    _leave_to_torch(a, batch, m, n, k)
    if bias is not None:
        bias = bias.expand(m, n)
    elif alpha != 1:
        raise Unsupported("a scaled product without a bias")
    if batch == 1 and m <= _FEW and n > m:
        few_rows(a[0], b[0].t(), c[0], bias, alpha, beta, precision(a.dtype))
    elif batch == 1 and n <= _FEW:
        few_rows(b[0].t(), a[0], c[0].t(), None if bias is None else bias.t(), alpha, beta, precision(a.dtype))
    else:
        problem = _Problem(a, b, c, bias, alpha, beta)
        if not _by_descriptors(problem):
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
    if beta == 0:
        if alpha != 1:
            raise Unsupported("a scaled product without a bias")
        return _run(mat1[None], mat2[None], None, 1.0, 0.0)[0]
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

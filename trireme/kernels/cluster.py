"""Long rows held by the blocks of a cluster: each keeps its part in shared memory from the one reading to the writing, and sends
the others what a whole row needs. For chips with clusters. Knows rows, and strips of rows side by side, of even sizes only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from trireme.kernels.fold import Fold
from trireme.kernels.launch import Kernel

BLOCKS = 8  # of a cluster: as many as every chip that has clusters takes
_BLOCKS = gl.constexpr(BLOCKS)
_STRIP = gl.constexpr(32)  # rows of a strip: one for each lane, when blocks send
_LOG2E = gl.constexpr(1.4426950408889634)
_MOST_BYTES = 65536  # that a block holds; three lie on a multiprocessor
_LEAST_BESIDE = 2048  # elements of rows side by side: 1024 took 65.5 µs for 64 MiB on an H200, and 64.8 when read twice


class _ClusterKernel(Kernel):
    """A kernel whose program is a cluster."""

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__(function)
        self.jit = gluon.jit(function)

    def _fitted(self, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any], constants: dict[str, Any]) -> Any:
        return super()._fitted(grid, args, options | {"num_ctas": BLOCKS}, constants)


@gluon.constexpr_function
def _over_blocks(rank):
    """The first dimension is the block."""
    return [[2**bit] + [0] * (rank - 1) for bit in range(3)]


@gluon.constexpr_function
def _part_layout(VECTOR, WARPS):
    return gl.BlockedLayout([1, VECTOR], [1, 32], [1, WARPS], [1, 0], _over_blocks(2))


@gluon.constexpr_function
def _strip_layout(VECTOR, WARPS):
    lanes = 32 // VECTOR
    return gl.BlockedLayout([1, 1, VECTOR], [1, 32 // lanes, lanes], [1, WARPS, 1], [2, 1, 0], _over_blocks(3))


@gluon.constexpr_function
def _lane_layout(WARPS):
    """A row of the strip for each lane, the same in all warps."""
    return gl.BlockedLayout([1, 1], [1, 32], [1, WARPS], [1, 0], _over_blocks(2))


@gluon.constexpr_function
def _held_layout(rank):
    return gl.SwizzledSharedLayout(8, 1, 1, list(range(rank))[::-1], _over_blocks(rank))


@gluon.constexpr_function
def _open_text(PAIRS):
    """Room for so many pairs of each block and a gate that opens when all have come; then waits until every block has these.
    The names hold until the kernel ends."""
    return f"""
        .shared .align 16 .b64 trireme_box[{8 * PAIRS}];
        .shared .align 8 .b64 trireme_gate;
        {{
            .reg .pred first;
            .reg .b32 thread, gate;
            mov.u32 thread, %tid.x;
            mov.u32 gate, trireme_gate;
            setp.eq.u32 first, thread, 0;
            @first mbarrier.init.shared::cta.b64 [gate], 1;
            @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [gate], {64 * PAIRS};
            @first fence.mbarrier_init.release.cluster;
            barrier.cluster.arrive.relaxed.aligned;
            barrier.cluster.wait.aligned;
            mov.u32 $0, $1;
        }}"""


@gluon.constexpr_function
def _send_text(PAIRS, WARPS, JOINED):
    """Sends this block's pairs $2, $3 to all and waits for theirs, a0, b0 to a7, b7; then does what `JOINED` says. A pair of each
    lane is sent to a block by one warp, a single pair by one thread."""
    sender, senders = ("tid.x", 32 * WARPS) if PAIRS == 1 else ("warp", WARPS)
    lines = [
        "{",
        ".reg .pred sends, open;",
        ".reg .b32 lane, peer, box, gate, mine, there, its_gate;",
        ".reg .f32 one, two, off, " + ", ".join(f"a{i}, b{i}" for i in range(8)) + ";",
        "mov.u32 peer, %tid.x;",
        "and.b32 lane, peer, 31;",
        "mov.u32 box, trireme_box;",
        "mov.u32 gate, trireme_gate;",
        "mov.u32 mine, %cluster_ctarank;",
    ]
    if sender == "warp":
        lines += ["shr.u32 peer, peer, 5;", "mad.lo.u32 box, lane, 8, box;"]
    lines += [f"mad.lo.u32 mine, mine, {8 * PAIRS}, box;"]
    for _ in range(0, 8, senders):
        lines += [
            "setp.lt.u32 sends, peer, 8;",
            "@sends mapa.shared::cluster.u32 there, mine, peer;",
            "@sends mapa.shared::cluster.u32 its_gate, gate, peer;",
            "@sends st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {$2, $3}, [its_gate];",
            f"add.u32 peer, peer, {senders};",
        ]
    lines += ["SHUT:", "mbarrier.try_wait.parity.shared::cta.b64 open, [gate], 0;", "@!open bra SHUT;"]
    lines += [f"ld.shared.v2.f32 {{a{i}, b{i}}}, [box+{8 * PAIRS * i}];" for i in range(8)]
    return "\n".join([*lines, *JOINED, "}"])


@gluon.constexpr_function
def _moments_text(WARPS):
    """From the mean and the sum of squares about it of parts of $4 elements to those of the row."""
    joined = ["mov.f32 one, a0;", "mov.f32 two, b0;"]
    for i in range(1, 8):
        joined += [f"add.f32 one, one, a{i};", f"add.f32 two, two, b{i};"]
    joined += ["mul.f32 one, one, 0.125;", "mov.f32 $1, 0f00000000;"]
    for i in range(8):
        joined += [f"sub.f32 off, a{i}, one;", "fma.rn.f32 $1, off, off, $1;"]
    return _send_text(1, WARPS, [*joined, "fma.rn.f32 $1, $1, $4, two;", "mov.f32 $0, one;"])


@gluon.constexpr_function
def _peaks_text(WARPS):
    """From the highest element and the sum of exponentials below it of parts to those of the row."""
    joined = ["mov.f32 one, a0;"]
    joined += [f"max.f32 one, one, a{i};" for i in range(1, 8)]
    joined += ["mov.f32 two, 0f00000000;"]
    for i in range(8):
        joined += [f"sub.f32 off, a{i}, one;", "mul.f32 off, off, 0f3FB8AA3B;", "ex2.approx.ftz.f32 off, off;"]
        joined += [f"fma.rn.f32 two, off, b{i}, two;"]
    return _send_text(32, WARPS, [*joined, "mov.f32 $0, one;", "mov.f32 $1, two;"])


@gluon.jit
def _open(part, PAIRS: gl.constexpr):
    """The numbers of the blocks, once all of them run and can be sent to."""
    return gl.inline_asm_elementwise(_open_text(PAIRS), "=r,r", [part], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _join_moments(mean, square, share, WARPS: gl.constexpr):
    both: gl.constexpr = (gl.float32, gl.float32)
    inputs = [mean, square, share]
    return gl.inline_asm_elementwise(_moments_text(WARPS), "=&f,=&f,f,f,f", inputs, dtype=both, is_pure=False, pack=1)


@gluon.jit
def _join_peaks(top, total, WARPS: gl.constexpr):
    both: gl.constexpr = (gl.float32, gl.float32)
    return gl.inline_asm_elementwise(_peaks_text(WARPS), "=&f,=&f,f,f", [top, total], dtype=both, is_pure=False, pack=1)


@_ClusterKernel
def _norm(
    x, weight, bias, y, means, scales, length, share, groups, channel, eps,
    CHUNKS: gl.constexpr, SIZE: gl.constexpr, VECTOR: gl.constexpr, WARPS: gl.constexpr, EACH: gl.constexpr,
):  # fmt: skip
    """norms._layer_norm of a row in parts of `share` elements, CHUNKS times SIZE; a part takes one weight, with EACH an element"""
    LAYOUT: gl.constexpr = _part_layout(VECTOR, WARPS)
    row = gl.program_id(0).to(gl.int64)
    part = _open(gl.arange(0, _BLOCKS, gl.SliceLayout(1, LAYOUT)), 1)
    within = part[:, None] * share + gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT))[None, :]
    at = row * length + within
    held = gl.allocate_shared_memory(x.dtype.element_ty, [CHUNKS, _BLOCKS, SIZE], _held_layout(2))
    for k in gl.static_range(CHUNKS):
        async_copy.async_copy_global_to_shared(held.index(k), x + k * SIZE + at)
    async_copy.commit_group()
    place = (row % groups) * (length // channel) + part * share // channel
    shift = (part * 0).to(gl.float32)
    factor = shift + 1.0
    if weight is not None and not EACH:
        factor = gl.load(weight + place).to(gl.float32)
    if bias is not None and not EACH:
        shift = gl.load(bias + place).to(gl.float32)
    async_copy.wait_group(0)
    # Each thread sums up how far elements lie from its first ones, whose outliers then are few against what it sums up.
    first = held.index(0).load(LAYOUT).to(gl.float32)
    total = gl.full((_BLOCKS, SIZE), 0.0, gl.float32, LAYOUT)
    square = gl.full((_BLOCKS, SIZE), 0.0, gl.float32, LAYOUT)
    for k in range(1, CHUNKS):
        off = held.index(k).load(LAYOUT).to(gl.float32) - first
        total += off
        square += off * off
    off = total * (1.0 / CHUNKS)
    square -= total * off
    first += off
    mean = gl.sum(first, 1) * (1.0 / SIZE)
    first -= mean[:, None]
    square = gl.sum(square + CHUNKS * (first * first), 1)
    mean, square = _join_moments(mean, square, (part * 0 + share).to(gl.float32), WARPS)
    scale = 1.0 / gl.sqrt(square / length + eps)
    factor = factor * scale
    for k in range(CHUNKS):
        value = (held.index(k).load(LAYOUT).to(gl.float32) - mean[:, None]) * factor[:, None] + shift[:, None]
        if weight is not None and EACH:
            value = value * gl.load(weight + k * SIZE + within).to(gl.float32)
        if bias is not None and EACH:
            value = value + gl.load(bias + k * SIZE + within).to(gl.float32)
        gl.store(y + k * SIZE + at, value.to(y.dtype.element_ty))
    gl.store(means + row + part * 0, mean.to(means.dtype.element_ty))
    gl.store(scales + row + part * 0, scale.to(scales.dtype.element_ty))


@_ClusterKernel
def _softmax(
    x, y, strips, x_outer, x_step, y_outer, y_step,
    LOG: gl.constexpr, CHUNKS: gl.constexpr, LINES: gl.constexpr, VECTOR: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """softmax of a strip of rows side by side, each in parts of CHUNKS times LINES elements"""
    LAYOUT: gl.constexpr = _strip_layout(VECTOR, WARPS)
    LANES: gl.constexpr = _lane_layout(WARPS)
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    outer, strip = (gl.program_id(0) // strips).to(gl.int64), gl.program_id(0) % strips
    part = _open(gl.arange(0, _BLOCKS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))), _STRIP)[:, None, None]
    line = part * (CHUNKS * LINES) + gl.arange(0, LINES, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    row = strip * _STRIP + gl.arange(0, _STRIP, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    held = gl.allocate_shared_memory(x.dtype.element_ty, [CHUNKS, _BLOCKS, LINES, _STRIP], _held_layout(3))
    source = x + outer * x_outer + (line * x_step + row)
    for k in gl.static_range(CHUNKS):
        async_copy.async_copy_global_to_shared(held.index(k), source + k * LINES * x_step)
    async_copy.commit_group()
    async_copy.wait_group(0)
    best = gl.full((_BLOCKS, LINES, _STRIP), float("-inf"), gl.float32, LAYOUT)
    for k in range(CHUNKS):
        best = gl.maximum(best, held.index(k).load(LAYOUT).to(gl.float32))
    top = gl.max(best, 1)
    finite = gl.where(top == float("-inf"), 0.0, top)[:, None, :]
    total = gl.full((_BLOCKS, LINES, _STRIP), 0.0, gl.float32, LAYOUT)
    for k in range(CHUNKS):
        total += gl.exp2((held.index(k).load(LAYOUT).to(gl.float32) - finite) * _LOG2E)
    peak, whole = _join_peaks(gl.convert_layout(top, LANES), gl.convert_layout(gl.sum(total, 1), LANES), WARPS)
    peak = gl.convert_layout(peak, ROWS)[:, None, :]
    whole = gl.convert_layout(gl.log2(whole), ROWS)[:, None, :]
    target = y + outer * y_outer + (line * y_step + row)
    for k in range(CHUNKS):
        value = held.index(k).load(LAYOUT).to(gl.float32) - peak
        value = value - whole * (1.0 / _LOG2E) if LOG else gl.exp2(value * _LOG2E - whole)
        gl.store(target + k * LINES * y_step, value.to(y.dtype.element_ty))


def _chunks(share: int, size: int, bytes_each: int) -> int:
    """How many chunks a part consists of: a power of two; 0 if it does not, or is more than a block holds."""
    count = share // size
    return count if count * size == share and count & (count - 1) == 0 and share * bytes_each <= _MOST_BYTES else 0


def _aligned(*tensors: torch.Tensor) -> bool:
    return all(x.data_ptr() % 16 == 0 for x in tensors)


def normalise(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, y: torch.Tensor, means: torch.Tensor,
    scales: torch.Tensor, groups: int, channel: int, eps: float,
) -> bool:  # fmt: skip
    """`norms.layer_rows` of a contiguous x; False, and nothing done, if its rows are of other sizes."""
    rows, vector, warps = means.numel(), 16 // x.element_size(), 8
    length, size = x.numel() // rows, 32 * warps * vector
    share, each = length // BLOCKS, groups == channel == 1
    chunks = _chunks(share, size, x.element_size()) if share * BLOCKS == length else 0
    if x.dtype is torch.float64 or chunks < 2 or not (each or channel % share == 0) or not _aligned(x, y):
        return False
    _norm((rows,), x, weight, bias, y, means, scales, length, share, groups, channel, float(eps),
          CHUNKS=chunks, SIZE=size, VECTOR=vector, WARPS=warps, EACH=each, warps=warps)  # fmt: skip
    return True


def soften(x: torch.Tensor, y: torch.Tensor, f: Fold, g: Fold, log: bool) -> bool:
    """softmax of long rows side by side; False, and nothing done, if these are of other sizes."""
    vector, warps = 16 // x.element_size(), 4
    lines, share = warps * vector, f.length // BLOCKS
    (x_outer, x_inner, x_step), (y_outer, y_inner, y_step) = f.walk, g.walk
    chunks = _chunks(share, lines, _STRIP.value * x.element_size())
    even = share * BLOCKS == f.length and f.inner % 32 == 0 and all(n % 16 == 0 for n in (x_outer, x_step, y_outer, y_step))
    near = x_inner == y_inner == 1 and f.length >= _LEAST_BESIDE and f.length * max(x_step, y_step) < 2**31
    if x.dtype is torch.float64 or y.dtype is torch.float64 or not (chunks and even and near and _aligned(x, y)):
        return False
    _softmax((f.rows // 32,), x, y, f.inner // 32, x_outer, x_step, y_outer, y_step,
             LOG=log, CHUNKS=chunks, LINES=lines, VECTOR=vector, WARPS=warps, warps=warps)  # fmt: skip
    return True

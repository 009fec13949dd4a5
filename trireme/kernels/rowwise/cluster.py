"""Long rows held by the blocks of a cluster: each keeps its part on the chip from the one reading to the writing, and sends the
others what a whole row needs. Clusters stay and draw their next row as they come to it, so that none waits for others to begin.
For chips with clusters. Knows rows, and strips of rows side by side, of even sizes only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from trireme.kernels import chips
from trireme.kernels.calls.launch import Kernel
from trireme.kernels.counters import workspace
from trireme.kernels.folds.fold import Fold

BLOCKS = 8  # of a cluster: as many as every chip that has clusters takes
_BLOCKS = gl.constexpr(BLOCKS)
_STRIP = gl.constexpr(32)  # rows of a strip: one for each lane, when blocks send
_LOG2E = gl.constexpr(1.4426950408889634)
_MOST_BYTES = 65536  # of a row or strip that a block holds; of a row's weights and biases as many each
_WARP_BYTES = 8192  # of these that a warp of a norm takes
_WARP_ELEMENTS = 4096  # that a warp of a softmax holds in registers
_REGISTERS = 65536  # of a multiprocessor
_RESERVED = (
    1024 + 4352
)  # bytes of shared memory that a block has besides: the driver's, and at most so many for what blocks send each other
_LEAST_BESIDE = 2048  # elements of rows side by side: 1024 took 65.5 µs for 64 MiB on an H200, and 64.8 when read twice


def _abreast(built: Any, warps: int) -> int:
    """How many clusters of a compiled kernel lie on the chip at once."""
    # Triton asks the driver about blocks of four warps. Of others as many fit as registers leave room for, which the driver is told
    # by asking for the share of the shared memory that each of them then has.
    each = -(-built.n_regs // 8) * 8 * 32 * warps
    share = chips.current().shared_memory // max(1, _REGISTERS // each) - _RESERVED
    return driver.active.utils.cuOccupancyMaxActiveClusters(built.function, max(built.metadata.shared, share), BLOCKS)


class _ClusterKernel(Kernel):
    """A kernel whose programs are clusters that stay."""

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__(function)
        self.jit = gluon.jit(function)
        self.abreast: dict[tuple[Any, ...], int] = {}

    def _fitted(self, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any], constants: dict[str, Any]) -> Any:
        return super()._fitted(grid, args, options | {"num_ctas": BLOCKS}, constants)

    def over(self, items: int, *args: Any, warps: int, **constants: Any) -> None:
        """Starts as many clusters as lie on the chip at once, which draw the items among them."""
        counters = workspace(args[0].device, 0, 1)[1]
        key = (warps, args[0].dtype, args[0].get_device(), *constants.values(), *(x is None for x in args))
        if key not in self.abreast:
            named = constants | {"EARLY": chips.current().early}
            built = self.jit.warmup(counters, items, items, *args, grid=(1,), num_warps=warps, num_ctas=BLOCKS, **named)
            built._init_handles()
            self.abreast[key] = _abreast(built, warps)
        abreast = min(items, max(1, self.abreast[key]))
        self((abreast,), counters, items, abreast, *args, warps=warps, **constants)


@gluon.constexpr_function
def _over_blocks(rank):
    """The first dimension is the block."""
    return [[2**bit] + [0] * (rank - 1) for bit in range(3)]


@gluon.constexpr_function
def _part_layout(VECTOR, WARPS):
    """[block, warp, element]"""
    return gl.BlockedLayout([1, 1, VECTOR], [1, 1, 32], [1, WARPS, 1], [2, 1, 0], _over_blocks(3))


@gluon.constexpr_function
def _each_warps_layout(WARPS):
    """[block, warp], all of a block in every thread"""
    return gl.BlockedLayout([1, WARPS], [1, 32], [1, WARPS], [1, 0], _over_blocks(2))


@gluon.constexpr_function
def _strip_layout(VECTOR, WARPS):
    """[block, warp, element, row]"""
    lanes = 32 // VECTOR
    return gl.BlockedLayout([1, 1, 1, VECTOR], [1, 1, 32 // lanes, lanes], [1, WARPS, 1, 1], [3, 2, 1, 0], _over_blocks(4))


@gluon.constexpr_function
def _lanes_layout(WARPS):
    """[block, warp, row], a row of the strip for each lane, the same in all warps"""
    return gl.BlockedLayout([1, WARPS, 1], [1, 1, 32], [1, 1, WARPS], [2, 1, 0], _over_blocks(3))


@gluon.constexpr_function
def _held_layout(rank):
    return gl.SwizzledSharedLayout(8, 1, 1, list(range(rank))[::-1], _over_blocks(rank))


@gluon.constexpr_function
def _met_layout(rank):
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(rank))[::-1], _over_blocks(rank))


@gluon.constexpr_function
def _tile_layout(bits):
    """[outer, element, row] as a descriptor's copies lay it out, the elements over the blocks"""
    return gl.NVMMASharedLayout(0, bits, 3, cga_layout=[[0, 2**bit, 0] for bit in range(3)])


@gluon.constexpr_function
def _arrival_layout():
    """A barrier of its own for each block"""
    return mbarrier.MBarrierLayout(cga_layout=[[0]] * 3)


# What blocks send each other: a box of pairs from each block and the next item's number, and a gate that opens when all have come.
# There are two of both, taken in turns: whoever sends for the turn after next has heard that this block is done with this one.


@gluon.constexpr_function
def _open_text(PAIRS):
    """Makes boxes and gates, whose names hold until the kernel ends, and says so to the other blocks."""
    # Triton's own shared memory begins after them: where that is a multiple of 128 bytes, 64 MiB of group norm take 36.7 µs on an
    # H200, where only of 32 37.5, of 16 39 to 42.
    even = -(-2 * _box_bytes(PAIRS) // 128) * 128
    return f"""
        .shared .align 128 .b8 trireme_box[{even}];
        .shared .align 128 .b64 trireme_gate[16];
        {{
            .reg .pred first;
            .reg .b32 thread, gate;
            mov.u32 thread, %tid.x;
            mov.u32 gate, trireme_gate;
            setp.eq.u32 first, thread, 0;
            @first mbarrier.init.shared::cta.b64 [gate], 1;
            @first mbarrier.init.shared::cta.b64 [gate+8], 1;
            @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [gate], {64 * PAIRS + 4};
            @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [gate+8], {64 * PAIRS + 4};
            @first fence.mbarrier_init.release.cluster;
            barrier.cluster.arrive.relaxed.aligned;
            mov.u32 $0, 0;
        }}"""


@gluon.constexpr_function
def _box_bytes(PAIRS):
    return 64 * PAIRS + 16


@gluon.constexpr_function
def _draw_text():
    """The cluster's next ticket, in the first thread of its first block; whoever draws the last one, $2, leaves zero behind."""
    return """{
        .reg .pred draws, last;
        .reg .b32 thread, block;
        mov.u32 thread, %tid.x;
        mov.u32 block, %cluster_ctarank;
        or.b32 thread, thread, block;
        setp.eq.u32 draws, thread, 0;
        mov.u32 $0, 0;
        @draws atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
        setp.eq.and.u32 last, $0, $2, draws;
        @last st.relaxed.gpu.global.u32 [$1], 0;
        }"""


@gluon.constexpr_function
def _box_text(PAIRS, TURN):
    """Begins a text that knows the box and the gate of a turn, and which pair and which other block are this thread's to send."""
    lines = [
        "{",
        ".reg .pred sends, open, first;",
        ".reg .b32 thread, block, peer, box, gate, mine, there, its_gate, turn;",
        "mov.u32 thread, %tid.x;",
        f"and.b32 turn, {TURN}, 1;",
        "mov.u32 box, trireme_box;",
        f"mad.lo.u32 box, turn, {_box_bytes(PAIRS)}, box;",
        "mov.u32 gate, trireme_gate;",
        "mad.lo.u32 gate, turn, 8, gate;",
        f"shr.u32 peer, thread, {PAIRS.bit_length() - 1};",
    ]
    return lines if PAIRS == 1 else [*lines, "and.b32 mine, thread, 31;", "mad.lo.u32 box, mine, 8, box;"]


@gluon.constexpr_function
def _send_text(PAIRS, WARPS):
    """Sends this block's pairs $1, $2 to all blocks in turn $3, and the first block's ticket $4."""
    lines = [*_box_text(PAIRS, "$3"), "mov.u32 block, %cluster_ctarank;", f"mad.lo.u32 mine, block, {8 * PAIRS}, box;"]
    senders = 32 * WARPS // PAIRS
    for _ in range(0, 8, senders):
        lines += [
            "setp.lt.u32 sends, peer, 8;",
            "@sends mapa.shared::cluster.u32 there, mine, peer;",
            "@sends mapa.shared::cluster.u32 its_gate, gate, peer;",
            "@sends st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {$1, $2}, [its_gate];",
            f"add.u32 peer, peer, {senders};",
        ]
    return "\n".join([
        *lines,
        "shfl.sync.idx.b32 turn, $4, 0, 31, -1;",
        "setp.lt.u32 sends, thread, 8;",
        "setp.eq.and.u32 sends, block, 0, sends;",
        "mov.u32 mine, trireme_box;",
        "and.b32 there, $3, 1;",
        f"mad.lo.u32 mine, there, {_box_bytes(PAIRS)}, mine;",
        f"add.u32 mine, mine, {64 * PAIRS};",
        "@sends mapa.shared::cluster.u32 there, mine, thread;",
        "@sends mapa.shared::cluster.u32 its_gate, gate, thread;",
        "@sends st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], turn, [its_gate];",
        "mov.b32 $0, 0;",
        "}",
    ])  # fmt: skip


@gluon.constexpr_function
def _wait_text(PAIRS, TURN, JOINED):
    """Waits for all that is sent to this block in a turn, a0, b0 to a7, b7, makes its gate ready again; then what `JOINED` says."""
    lines = [
        *_box_text(PAIRS, TURN),
        ".reg .f32 one, two, off, " + ", ".join(f"a{i}, b{i}" for i in range(8)) + ";",
        f"shr.u32 turn, {TURN}, 1;",
        "and.b32 turn, turn, 1;",
        "SHUT:",
        "mbarrier.try_wait.parity.shared::cta.b64 open, [gate], turn;",
        "@!open bra SHUT;",
        "setp.eq.u32 first, thread, 0;",
        f"@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [gate], {64 * PAIRS + 4};",
    ]
    lines += [f"ld.shared.v2.f32 {{a{i}, b{i}}}, [box+{8 * PAIRS * i}];" for i in range(8)]
    return "\n".join([*lines, *JOINED, "}"])


@gluon.constexpr_function
def _moments_text():
    """From the mean and the sum of squares about it of parts of $3 elements to those of the row."""
    joined = ["mov.f32 one, a0;", "mov.f32 two, b0;"]
    for i in range(1, 8):
        joined += [f"add.f32 one, one, a{i};", f"add.f32 two, two, b{i};"]
    joined += ["mul.f32 one, one, 0.125;", "mov.f32 $1, 0f00000000;"]
    for i in range(8):
        joined += [f"sub.f32 off, a{i}, one;", "fma.rn.f32 $1, off, off, $1;"]
    return _wait_text(1, "$2", [*joined, "fma.rn.f32 $1, $1, $3, two;", "mov.f32 $0, one;"])


@gluon.constexpr_function
def _peaks_text():
    """From the highest element and the sum of exponentials below it of parts to those of the row."""
    joined = ["mov.f32 one, a0;"]
    joined += [f"max.f32 one, one, a{i};" for i in range(1, 8)]
    joined += ["mov.f32 two, 0f00000000;"]
    for i in range(8):
        joined += [f"sub.f32 off, a{i}, one;", "mul.f32 off, off, 0f3FB8AA3B;", "ex2.approx.ftz.f32 off, off;"]
        joined += [f"fma.rn.f32 two, off, b{i}, two;"]
    return _wait_text(32, "$2", [*joined, "mov.f32 $0, one;", "mov.f32 $1, two;"])


@gluon.constexpr_function
def _drawn_text(PAIRS):
    return f"""{{
        .reg .b32 turn, box;
        and.b32 turn, $1, 1;
        mov.u32 box, trireme_box;
        mad.lo.u32 box, turn, {_box_bytes(PAIRS)}, box;
        ld.shared.b32 $0, [box+{64 * PAIRS}];
        }}"""


@gluon.jit
def _open(PAIRS: gl.constexpr):
    """Turn 0, when this block can be sent to."""
    return gl.inline_asm_elementwise(_open_text(PAIRS), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _opened(turn):
    """The same when all blocks of the cluster can."""
    text: gl.constexpr = "barrier.cluster.wait.aligned; mov.b32 $0, $1;"
    return gl.inline_asm_elementwise(text, "=r,r", [turn], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _await(turn, EARLY: gl.constexpr):
    """The same when the kernel before has ended, where this one comes early."""
    if EARLY:
        text: gl.constexpr = "griddepcontrol.wait; mov.b32 $0, $1;"
        turn = gl.inline_asm_elementwise(text, "=r,r", [turn], dtype=gl.int32, is_pure=False, pack=1)
    return turn


@gluon.jit
def _make_way(turn, EARLY: gl.constexpr):
    """Lets the next kernel come when all clusters have called this, each before it writes its last row: any earlier, and one of the
    next kernel's clusters may find no room until the others are done (softmax in 39.5 µs for 38.6 on an H200)."""
    if EARLY:
        text: gl.constexpr = "griddepcontrol.launch_dependents; mov.b32 $0, $1;"
        gl.inline_asm_elementwise(text, "=r,r", [turn], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _draw(counter, last):
    return gl.inline_asm_elementwise(_draw_text(), "=&r,l,r", [counter, last], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _drawn(turn, PAIRS: gl.constexpr):
    """The ticket that came in a turn whose gate has opened."""
    return gl.inline_asm_elementwise(_drawn_text(PAIRS), "=r,r", [turn], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _send(one, two, turn, ticket, PAIRS: gl.constexpr, WARPS: gl.constexpr):
    inputs = [one, two, turn, ticket]
    gl.inline_asm_elementwise(_send_text(PAIRS, WARPS), "=r,f,f,r,r", inputs, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _join_moments(turn, share):
    both: gl.constexpr = (gl.float32, gl.float32)
    return gl.inline_asm_elementwise(_moments_text(), "=&f,=&f,r,f", [turn, share], dtype=both, is_pure=False, pack=1)


@gluon.jit
def _join_peaks(turn):
    both: gl.constexpr = (gl.float32, gl.float32)
    return gl.inline_asm_elementwise(_peaks_text(), "=&f,=&f,r", [turn], dtype=both, is_pure=False, pack=1)


@gluon.jit
def _packed(one, two):
    """Two floats in a word, which then change their layout together."""
    return gl.inline_asm_elementwise("mov.b64 $0, {$1, $2};", "=l,f,f", [one, two], dtype=gl.int64, is_pure=True, pack=1)


@gluon.jit
def _unpacked(word):
    both: gl.constexpr = (gl.float32, gl.float32)
    return gl.inline_asm_elementwise("mov.b64 {$0, $1}, $2;", "=f,=f,l", [word], dtype=both, is_pure=True, pack=1)


@gluon.jit
def _wide(value):
    """In float32; two of bfloat16 in two instructions, where the compiler takes three."""
    if value.dtype == gl.bfloat16:
        lower: gl.constexpr = "prmt.b32 word, $2, 0, 0x1044; mov.b32 $0, word;"
        upper: gl.constexpr = "prmt.b32 word, $2, 0, 0x3244; mov.b32 $1, word;"
        text: gl.constexpr = "{ .reg .b32 word; " + lower + upper + " }"
        return gl.inline_asm_elementwise(text, "=f,=f,r", [value], dtype=gl.float32, is_pure=True, pack=2)
    return value.to(gl.float32)


@gluon.jit
def _room(source, CHUNKS: gl.constexpr, WARPS: gl.constexpr, LANES: gl.constexpr):
    """Shared memory for the blocks' parts of a row."""
    return gl.allocate_shared_memory(source.dtype.element_ty, [_BLOCKS, CHUNKS * WARPS, LANES], _held_layout(3))


@gluon.jit
def _chunk(room, k, CHUNKS: gl.constexpr, WARPS: gl.constexpr, LAYOUT: gl.constexpr):
    """What the threads of a block take at once, in float32."""
    return _wide(room._reinterpret(room.dtype, [CHUNKS, _BLOCKS, WARPS, room.shape[2]], _held_layout(3)).index(k).load(LAYOUT))


@gluon.jit
def _moments(row, met, CHUNKS: gl.constexpr, LANES: gl.constexpr, LAYOUT: gl.constexpr, WARPS: gl.constexpr):
    """The mean of this block's part, and the sum of squares about it."""
    # Each thread sums up how far elements lie from its first ones, whose outliers then are few against what it sums up.
    first = _chunk(row, 0, CHUNKS, WARPS, LAYOUT)
    total = gl.full((_BLOCKS, WARPS, LANES), 0.0, gl.float32, LAYOUT)
    square = gl.full((_BLOCKS, WARPS, LANES), 0.0, gl.float32, LAYOUT)
    for k in gl.static_range(1, CHUNKS):
        off = _chunk(row, k, CHUNKS, WARPS, LAYOUT) - first
        total += off
        square += off * off
    off = total * (1.0 / CHUNKS)
    square -= total * off
    first += off
    mean = gl.sum(first, 2) * (1.0 / LANES)
    first -= mean[:, :, None]
    met.store(_packed(mean, gl.sum(square + CHUNKS * (first * first), 2)))
    means, squares = _unpacked(met.load(_each_warps_layout(WARPS)))
    mean = gl.sum(means, 1) * (1.0 / WARPS)
    means -= mean[:, None]
    return mean, gl.sum(squares + (CHUNKS * LANES) * (means * means), 1)


@_ClusterKernel
def _norm(
    counter, rows, abreast, x, weight, bias, y, means, scales, length, share, groups, channel, eps,
    CHUNKS: gl.constexpr, VECTOR: gl.constexpr, WARPS: gl.constexpr, EACH: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """norms._layer_norm of rows in parts of `share` elements: CHUNKS times what the block's threads take at once. A part takes one
    weight, with EACH an element; those of a block are the same in every row, so they stay with it"""
    LAYOUT: gl.constexpr = _part_layout(VECTOR, WARPS)
    ONE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    LANES: gl.constexpr = 32 * VECTOR
    SIZE: gl.constexpr = WARPS * LANES
    # Groups of half types as torch normalises them, which hides what is lost where the mean is far from 0 and the rest is not even.
    COARSE: gl.constexpr = x.dtype.element_ty.primitive_bitwidth == 16 and not EACH
    turn = _open(1)
    lane = gl.arange(0, LANES, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    warp = gl.arange(0, WARPS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None] * LANES
    warps = gl.arange(0, CHUNKS * WARPS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None] * LANES
    start = gl.arange(0, _BLOCKS, ONE)[:, None, None] * share
    within, all_within = start + warp + lane, start + warps + lane
    part = gl.arange(0, _BLOCKS, gl.SliceLayout(1, _each_warps_layout(WARPS)))
    held = _room(x, CHUNKS, WARPS, LANES)
    met = gl.allocate_shared_memory(gl.int64, [_BLOCKS, WARPS], _met_layout(2))
    row = gl.program_id(0)
    turn = _await(turn, EARLY)
    async_copy.async_copy_global_to_shared(held, x + row.to(gl.int64) * length + all_within)
    if weight is not None and EACH:
        weights = _room(weight, CHUNKS, WARPS, LANES)
        async_copy.async_copy_global_to_shared(weights, weight + all_within)
    if bias is not None and EACH:
        biases = _room(bias, CHUNKS, WARPS, LANES)
        async_copy.async_copy_global_to_shared(biases, bias + all_within)
    async_copy.commit_group()
    turn = _opened(turn)
    while row < rows:
        place = (row % groups) * (length // channel) + part * share // channel
        shift = (part * 0).to(gl.float32)
        factor = shift + 1.0
        if weight is not None and not EACH:
            factor = gl.load(weight + place).to(gl.float32)
        if bias is not None and not EACH:
            shift = gl.load(bias + place).to(gl.float32)
        ticket = _draw(counter, rows - 1)
        async_copy.wait_group(0)
        mean, square = _moments(held, met, CHUNKS, LANES, LAYOUT, WARPS)
        _send(mean, square, turn, ticket, 1, WARPS)
        mean, square = _join_moments(turn + part * 0, (part * 0 + share).to(gl.float32))
        scale = gl.rsqrt(square / length + eps)
        factor = factor * scale
        if COARSE:
            shift = shift - mean * factor
        middle = gl.convert_layout(mean, ONE)[:, None, None]
        factor = gl.convert_layout(factor, ONE)[:, None, None]
        shift = gl.convert_layout(shift, ONE)[:, None, None]
        target = y + row.to(gl.int64) * length + within
        coming = _drawn(turn, 1) + abreast
        if coming >= rows:
            _make_way(turn, EARLY)
        for k in gl.static_range(CHUNKS):
            value = _chunk(held, k, CHUNKS, WARPS, LAYOUT)
            if not COARSE:
                value -= middle
            value = value * factor + shift
            if weight is not None and EACH:
                value = value * _chunk(weights, k, CHUNKS, WARPS, LAYOUT)
            if bias is not None and EACH:
                value = value + _chunk(biases, k, CHUNKS, WARPS, LAYOUT)
            gl.store(target + k * SIZE, value.to(y.dtype.element_ty))
        gl.store(means + row + part * 0, mean.to(means.dtype.element_ty))
        gl.store(scales + row + part * 0, scale.to(scales.dtype.element_ty))
        row = coming
        if row < rows:
            async_copy.async_copy_global_to_shared(held, x + row.to(gl.int64) * length + all_within)
        async_copy.commit_group()
        turn += 1


@gluon.jit
def _fetch(x, item, strips, arrival, tile):
    """Asks for a strip; each block gets its part."""
    mbarrier.expect(arrival, x.block_type.nbytes // _BLOCKS)
    tma.async_copy_global_to_shared(x, [item // strips, 0, item % strips * _STRIP], arrival, tile)


@_ClusterKernel
def _softmax(
    counter, items, abreast, y, x, strips, y_outer, y_step,
    LOG: gl.constexpr, LINES: gl.constexpr, VECTOR: gl.constexpr, WARPS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """softmax of strips of rows side by side, of which each warp takes LINES elements. What is made of them stays in registers, so
    that the next strip can come into shared memory meanwhile"""
    LAYOUT: gl.constexpr = _strip_layout(VECTOR, WARPS)
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    EACH: gl.constexpr = _lanes_layout(WARPS)
    part = gl.arange(0, _BLOCKS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))[:, None, None, None]
    warp = gl.arange(0, WARPS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))[None, :, None, None]
    line = gl.arange(0, LINES, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))[None, None, :, None]
    line += (part * WARPS + warp) * LINES
    column = gl.arange(0, _STRIP, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))[None, None, None, :]
    targets = line * y_step + column
    lane = gl.arange(0, _STRIP, gl.SliceLayout(0, gl.SliceLayout(1, EACH)))[None, :]
    nought = lane * 0 + gl.arange(0, _BLOCKS, gl.SliceLayout(1, gl.SliceLayout(1, EACH)))[:, None] * 0
    tile = gl.allocate_shared_memory(x.dtype, x.block_shape, x.layout)
    held = tile._reinterpret(x.dtype, [_BLOCKS, WARPS, LINES, _STRIP], _held_layout(4))
    met = gl.allocate_shared_memory(gl.int64, [_BLOCKS, WARPS, _STRIP], _met_layout(3))
    arrival = gl.allocate_shared_memory(gl.int64, [1], _arrival_layout())
    mbarrier.init(arrival, count=1)
    turn = _open(_STRIP)
    item = gl.program_id(0)
    coming = item + abreast
    turn = _await(turn, EARLY)
    _fetch(x, item, strips, arrival, tile)
    turn = _opened(turn)
    while item < items:
        ticket = _draw(counter, items - 1)
        mbarrier.wait(arrival, turn & 1)
        value = _wide(held.load(LAYOUT))
        if coming < items:
            _fetch(x, coming, strips, arrival, tile)
        top = gl.max(value, 2)
        finite = gl.where(top == float("-inf"), 0.0, top)
        power = gl.exp2((value - finite[:, :, None, :]) * _LOG2E)
        met.store(_packed(top, gl.sum(power, 2)))
        tops, totals = _unpacked(met.load(EACH))
        peak = gl.max(tops, 1)
        finite = gl.where(peak == float("-inf"), 0.0, peak)[:, None, :]
        _send(peak, gl.sum(totals * gl.exp2((tops - finite) * _LOG2E), 1), turn, ticket, _STRIP, WARPS)
        peak, total = _join_peaks(turn + nought)
        rest = gl.log2(total) * (1.0 / _LOG2E) if LOG else 1.0 / total
        peak, rest = _unpacked(gl.convert_layout(_packed(peak, rest), ROWS))
        if LOG:
            value = (value - peak[:, None, None, :]) - rest[:, None, None, :]
        else:
            factor = gl.exp2((top - peak[:, None, :]) * _LOG2E) * rest[:, None, :]
            value = power * factor[:, :, None, :]
        if coming >= items:
            _make_way(turn, EARLY)
        target = y + (item // strips).to(gl.int64) * y_outer + item % strips * _STRIP
        gl.store(target + targets, value.to(y.dtype.element_ty))
        item, coming = coming, _drawn(turn, _STRIP) + 2 * abreast
        turn += 1


def _warps(elements: int, bytes_each: int, most: int) -> int:
    """How many warps hold a part of which one takes at most so many elements; 0 if it is not a power of two, or more than fits."""
    if elements & (elements - 1) or elements * bytes_each > _MOST_BYTES:
        return 0
    return max(4, elements // most)


def _aligned(*tensors: torch.Tensor) -> bool:
    return all(x.data_ptr() % 16 == 0 for x in tensors)


def normalise(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, y: torch.Tensor, means: torch.Tensor,
    scales: torch.Tensor, groups: int, channel: int, eps: float,
) -> bool:  # fmt: skip
    """`norms.layer_rows` of a contiguous x; False, and nothing done, if its rows are of other sizes."""
    rows, vector = means.numel(), 16 // x.element_size()
    length, each = x.numel() // rows, groups == channel == 1
    share = length // BLOCKS
    warps = _warps(share, x.element_size(), _WARP_BYTES // x.element_size()) if share * BLOCKS == length else 0
    if x.dtype is torch.float64 or not warps or share < 64 * warps * vector:
        return False
    if not (each or channel % share == 0) or not _aligned(x, y):
        return False
    staying = [z for z in (weight, bias) if z is not None and each]
    if not _aligned(*staying) or any(z.dtype is not x.dtype for z in staying):
        return False
    _norm.over(rows, x, weight, bias, y, means, scales, length, share, groups, channel, float(eps),
               CHUNKS=share // (32 * warps * vector), VECTOR=vector, WARPS=warps, EACH=each, warps=warps)  # fmt: skip
    return True


def soften(x: torch.Tensor, y: torch.Tensor, f: Fold, g: Fold, log: bool) -> bool:
    """softmax of long rows side by side; False, and nothing done, if these are of other sizes."""
    share, strip, vector = f.length // BLOCKS, _STRIP.value, 16 // x.element_size()
    (x_outer, x_inner, x_step), (y_outer, y_inner, y_step) = f.walk, g.walk
    warps = _warps(share * strip, x.element_size(), _WARP_ELEMENTS)
    even = share * BLOCKS == f.length and f.inner % strip == 0 and all(n % 16 == 0 for n in (x_outer, x_step, y_outer, y_step))
    near = x_inner == y_inner == 1 and f.length >= _LEAST_BESIDE and f.length * max(x_step, y_step) < 2**31
    outer = f.rows // f.inner
    if x_step == 0 or (x_outer == 0 and outer > 1):  # the same memory again, which a descriptor may not say
        return False
    if x.dtype is torch.float64 or y.dtype is torch.float64 or not (warps and even and near and _aligned(x, y)):
        return False
    strides, layout = (
        [x_outer or f.length * x_step, x_step, 1],
        _tile_layout(8 * x.element_size()),
    )  # of one slab any stride will do
    described = TensorDescriptor(x, [outer, f.length, f.inner], strides, [1, f.length, strip], layout)
    _softmax.over(f.rows // strip, y, described, f.inner // strip, y_outer, y_step,
                  LOG=log, LINES=share // warps, VECTOR=vector, WARPS=warps, warps=warps)  # fmt: skip
    return True

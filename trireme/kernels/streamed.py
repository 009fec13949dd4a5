"""Products with few rows: a matrix streamed once past them, or each of a batch past its own. Knows how to split the stream over the
chip and to add the parts in a fixed order; which operand is the few-rowed one is `matmul`'s business."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from trireme.kernels import chips, relay, tune
from trireme.kernels.launch import Unsupported, blocks, kernel, lasting, next_power, shared_by
from trireme.kernels.scalar import multiple

_SPLITS_MOST = 16
_ARENA = 1 << 20  # counters set aside for recorded graphs, 4 MiB
_scratch: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
_arenas: dict[int, list[Any]] = {}  # device → counters and how many are given away


@triton.jit
def addend(bias, row, column, rows, n, bias_m, bias_n, beta):
    """β bias; asked for before a sum that leaves room for it, so that nothing waits for it at the end"""
    place = row[:, None].to(tl.int64) * bias_m + column[None, :].to(tl.int64) * bias_n
    return beta * tl.load(bias + place, mask=(row < rows)[:, None] & (column < n)[None, :], other=0.0).to(tl.float32)


@triton.jit
def settle(total, added, parts, counters, y, row, column, rows, n, y_m, y_n, alpha, SPLITS: tl.constexpr):
    """Stores α total + what is added; of several splits the one that arrives last adds all parts, always in the same order. Items
    of a batch, the grid's third number, have their own parts and counters."""
    mask = (row < rows)[:, None] & (column < n)[None, :]
    last = True
    if SPLITS > 1:
        parts += tl.program_id(2).to(tl.int64) * SPLITS * rows * n
        counters += tl.program_id(2) * tl.num_programs(0)
        at = row[:, None] * n + column[None, :]
        tl.store(parts + tl.program_id(1).to(tl.int64) * rows * n + at, total, mask=mask)
        last = relay.arrive(counters + tl.program_id(0)) == SPLITS - 1
    if last:
        if SPLITS > 1:
            total = tl.zeros_like(total)
            at = row[:, None] * n + column[None, :]
            for split in range(SPLITS):
                total += tl.load(parts + tl.cast(split, tl.int64) * rows * n + at, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(counters + tl.program_id(0), 0)
        if added is not None:
            total = total * alpha + added
        to = row[:, None].to(tl.int64) * y_m + column[None, :].to(tl.int64) * y_n
        tl.store(y + to, total.to(y.dtype.element_ty), mask=mask)


@kernel
def _vector(
    x, w, y, bias, parts, counters, n, k, part, x_item, x_k, w_item, w_n, w_k, y_item, y_n, bias_n, alpha, beta,
    N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y = w x for one row, each lane summing its own columns until the end"""
    chips.begin(EARLY, OPEN=False)
    item = tl.program_id(2).to(tl.int64)
    x, w, y = x + item * x_item, w + item * w_item, y + item * y_item
    column = tl.program_id(0) * N + tl.arange(0, N)
    inner = tl.arange(0, K)
    start = tl.program_id(1) * part
    stop = tl.minimum(start + part, k)
    row = tl.arange(0, 1)
    added = None
    if bias is not None:
        added = addend(bias, row, column, 1, n, 0, bias_n, beta)
    base = w + column[:, None].to(tl.int64) * w_n
    total = tl.zeros((N, K), tl.float32)
    for at in range(start, stop, K):
        here = at + inner
        inside = here < k
        weights = tl.load(base + (here * w_k)[None, :], mask=(column < n)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += weights * tl.load(x + here * x_k, mask=inside, other=0.0).to(tl.float32)[None, :]
    settle(tl.sum(total, 1)[None, :], added, parts, counters, y, row, column, 1, n, 0, y_n, alpha, SPLITS)


@kernel
def _tensor(
    x, w, y, bias, parts, counters, rows, n, k, part, x_item, x_m, x_k, w_item, w_n, w_k, y_item, y_m, y_n, bias_m, bias_n,
    alpha, beta, X_COPIED: tl.constexpr, W_COPIED: tl.constexpr, ALONG: tl.constexpr, X_OF: tl.constexpr, W_OF: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """yᵀ = w xᵀ on the tensor cores, the streamed matrix as the tall operand; what is COPIED is a descriptor of all items, w's of
    wᵀ unless it lies ALONG the summed dimension; what is not has lines that begin and end at multiples of X_OF and W_OF"""
    chips.begin(EARLY, OPEN=False)
    item = tl.program_id(2)
    x_m, x_item, x_end = multiple(x_m, X_OF), multiple(x_item, X_OF), multiple(k, X_OF)
    w_item, w_end, columns = multiple(w_item, W_OF), k, n
    if ALONG:
        w_n, w_end = multiple(w_n, W_OF), multiple(k, W_OF)
    else:
        w_k, columns = multiple(w_k, W_OF), multiple(n, W_OF)
    column = tl.program_id(0) * N + tl.arange(0, N)
    row = tl.arange(0, ROWS)
    inner = tl.arange(0, K)
    start = tl.program_id(1) * part
    stop = tl.minimum(start + part, k)
    added = None
    if bias is not None:
        added = addend(bias, row, column, rows, n, bias_m, bias_n, beta)
    total = tl.zeros((N, ROWS), tl.float32)
    if not W_COPIED:
        base = w + item.to(tl.int64) * w_item + column[:, None].to(tl.int64) * w_n
    if not X_COPIED:
        few = x + item.to(tl.int64) * x_item + row[None, :] * x_m
    for at in range(start, stop, K):
        here = at + inner
        if not W_COPIED:
            mask = (column < columns)[:, None] & (here < w_end)[None, :]
            weights = tl.load(base + (here * w_k)[None, :], mask=mask, other=0.0)
        elif ALONG:
            weights = w.load([item * n + tl.program_id(0) * N, at])
        else:
            weights = w.load([item * k + at, tl.program_id(0) * N]).T
        if X_COPIED:
            values = x.load([item * rows, at]).T
        else:
            values = tl.load(few + (here * x_k)[:, None], mask=(row < rows)[None, :] & (here < x_end)[:, None], other=0.0)
        total = tl.dot(weights, values, total, input_precision=PRECISION)
    y += item.to(tl.int64) * y_item
    settle(tl.trans(total), added, parts, counters, y, row, column, rows, n, y_m, y_n, alpha, SPLITS)


def workspace(device: torch.device, parts: int, counters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for partial sums and counters that every use leaves at zero; one per stream, since streams may overlap."""
    index = device.index or 0
    if chips.capturing():
        return torch.empty(parts, dtype=torch.float32, device=device), _recorded_counters(device, counters)
    key = (index, 0 if chips.current().interpreted else chips.current_stream(index))
    known = _scratch.get(key)
    if known is None or known[0].numel() < parts or known[1].numel() < counters:
        # Twice as much each time, since calls that are remembered keep what they were given.
        floats = torch.empty(max(next_power(parts), 1 << 20), dtype=torch.float32, device=device)
        known = _scratch[key] = (floats, torch.zeros(max(next_power(counters), 1 << 14), dtype=torch.int32, device=device))
    if index not in _arenas and not chips.current().interpreted:
        _arenas[index] = [torch.zeros(_ARENA, dtype=torch.int32, device=device), 0]
    lasting(*known)
    return known


def meeting(
    device: torch.device, programs: int, splits: int, numbers: int, dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Memory for so many numbers of each split, and the counters at which splits meet; nothing where nothing is split."""
    if splits == 1:
        return None, None
    parts, counters = workspace(device, splits * numbers * dtype.itemsize // 4, programs)
    return parts.view(dtype), counters


def _recorded_counters(device: torch.device, count: int) -> torch.Tensor:
    """Counters of one recorded call, its own for ever, since graphs may replay side by side; zeroed in the graph when room ends."""
    arena = _arenas.get(device.index or 0)
    if arena is None or arena[1] + count > _ARENA:
        return torch.zeros(count, dtype=torch.int32, device=device)
    start, arena[1] = arena[1], arena[1] + -(-count // 4) * 4
    return arena[0][start : start + count]


def release_counters() -> None:
    """Gives away anew the counters of recorded graphs, none of which may exist any more."""
    for arena in _arenas.values():
        arena[1] = 0


def _config(n: int, k: int, splits: int, warps: int, stages: int, copied: bool = False) -> dict[str, Any]:
    return {"N": n, "K": k, "splits": splits, "warps": warps, "stages": stages} | ({"copied": True} if copied else {})


def _level(tiles: int, k: int, tile_k: int, places: int, most: int) -> int:
    """The number of parts that leaves the least of the last round of programs idle, the smallest of those; none shorter than two
    tiles."""
    most = max(1, min(most, _SPLITS_MOST, k // (2 * tile_k)))
    return max(range(1, most + 1), key=lambda splits: (round(_filled(tiles * splits, places), 2), -splits))


def _filled(programs: int, places: int) -> float:
    """The share of the rounds' places that programs take."""
    return programs / (blocks(programs, places) * places)


def _default(items: int, rows: int, n: int, k: int, along: bool, size: int, copyable: bool) -> dict[str, Any]:
    """`along`: the streamed matrix is contiguous along the summed dimension."""
    chip = chips.current()
    if chip.interpreted:
        return _config(max(16, min(64, next_power(n))), max(16, min(512, next_power(k))), 2 if k > 64 else 1, 4, 1)
    if _goes_by_lanes(items, rows, n, k, along):
        return _by_lanes(n, k, size) if items == 1 else _along_by_lanes(items, n, k) if along else _across_by_lanes(items, n, k)
    room = max(16, next_power(rows))
    if items > 1:
        return _of_batch(items, room, n, k, along, copyable and size == 2)
    if copyable and size == 2:
        return _copied(room, n, k, along)
    splits = next_power(max(1, round(2 * chip.multiprocessors / blocks(n, 64))))
    return _config(64, 64, max(1, min(splits, _SPLITS_MOST, k // 128)), 4, 4)


def _by_lanes(n: int, k: int, size: int) -> dict[str, Any]:
    """One row: 2048 or 4096 elements at once, as much of the summed dimension as there is; more programs where outputs are few."""
    if 32 < k <= 128 and k % 16:  # single elements: 16 columns for one warp, since several would meet in shared memory for each
        return _config(16, next_power(k), 1, 1, 2)
    if k <= 128:
        return _config(2048 // max(16, next_power(k)), max(16, next_power(k)), 1, 4, 2)
    if k < 1024:
        return _config(*((32, 128) if n > 1 << 15 else (16, 256)), 1, 4, 2)
    tile_n, tile_k = (4, 512) if size == 4 or 0 < k % 1024 <= 512 else (2, 1024)
    wanted = 2 * chips.current().multiprocessors // blocks(n, tile_n)
    return _config(tile_n, tile_k, max(1, min(wanted, _SPLITS_MOST, k // (2 * tile_k))), 4, 2)


def _goes_by_lanes(items: int, rows: int, n: int, k: int, along: bool) -> bool:
    """Whether each lane sums its own columns: for one row along the summed dimension; and in a batch where tiles for the tensor
    cores were few or nearly empty (32 x 1 x 2048 x 128 4.5 µs with these, so 3.8) or come element by element (531 x 1 x 1089 x 41
    39 µs, so 18)."""
    if rows > 1:
        return False
    if not along:
        return items > 1 and _crosses_by_lanes(items, n, k)
    few = (k >= 512 and _few_tiles(items, n)) or (k >= 256 and n <= 8)
    return items == 1 or few or (k % 8 > 0 and (k > 32 or (k > 16 and n > 32)))


def _few_tiles(items: int, n: int) -> bool:
    return items * blocks(n, 64) <= chips.current().multiprocessors


def _along_by_lanes(items: int, n: int, k: int) -> dict[str, Any]:
    """How one row of each item is cut along the summed dimension, from 50 shapes on an H200."""
    if k >= 512 and (_few_tiles(items, n) or n <= 8):
        return _config(4, 512, 1, 4, 2)
    if k >= 1024:
        return _config(8, 256, 1, 4, 2)
    tile_k = 256 if k > 256 else 128 if k > 128 else 64 if k > 48 else 16
    return _config(1024 // tile_k, tile_k, 1, 1, 2)


def _crosses_by_lanes(items: int, n: int, k: int) -> bool:
    """The same for one row of a batch across the summed dimension, of which lanes take turns: where few columns or short sums would
    leave tiles nearly empty (3727 x 1 x 4 x 196 took 12.6 µs in these, so 3.6), and where neither descriptors nor whole lines bring
    them (48 x 1 x 1025 x 343 took 21, so 11.7)."""
    even = n % 16 == 0 or (n % 8 == 0 and _worth_copying(items, k, False))
    few = n <= 16 or k <= 32 or (n <= 32 and k <= 128) or _fill_lanes(items, n, k)
    return few or (k > 64 and not even)


def _fill_lanes(items: int, n: int, k: int) -> bool:
    """Whether sums that are not long come in programs enough for each lane to walk them alone."""
    return k <= 128 and items * blocks(n, 128) >= min(8 * k, 512)


def _across_by_lanes(items: int, n: int, k: int) -> dict[str, Any]:
    """How these are cut, from 260 shapes on an H200."""
    width, depth, processors = max(8, next_power(n)), max(2, next_power(k)), chips.current().multiprocessors
    if n <= 32 and k <= 128:
        return _config(width, min(depth, 1024 // width), 1, 1, 2)
    if n <= 16:
        parts = min(3 * processors // items, _SPLITS_MOST, k // 256)
        return _config(width, 2048 // width, max(1, parts), 4, 2)
    if k <= 32 or _fill_lanes(items, n, k):
        tile_n, tile_k = (512, 4) if k <= 8 else (256, 4) if k <= 16 else (128, 16)
        return _config(min(tile_n, width), min(tile_k, depth), 1, 1 if n % 16 == 0 else 2, 2)
    if k < 320 and items * blocks(n, 32) >= 900:
        return _config(32, 32, 1, 1, 2)
    parts = min(4 * processors // (items * blocks(n, 16)), _SPLITS_MOST, k // 384)
    return _config(16, 128, max(1, parts), 4, 2)


def _longest_copied(items: int, k: int, along: bool) -> int:
    """The longest tile that may be copied: across the summed dimension of a batch one that ends with its item."""
    return k & -k if items > 1 and not along else 1 << 30


def _worth_copying(items: int, k: int, along: bool) -> bool:
    return _longest_copied(items, k, along) >= min(64, max(16, next_power(k)))


def _of_batch(items: int, room: int, n: int, k: int, along: bool, copyable: bool) -> dict[str, Any]:
    """How a batch's items are cut, from 350 shapes of 1 to 32 rows on an H200: plain tiles had 0.3 to 1.2 of torch's speed."""
    height, copied = max(16, next_power(n)), copyable and _worth_copying(items, k, along)
    if k > 128:
        return _copied_items(items, room, height, n, k, along) if copied else _plain_items(items, height, n, k, along)
    if not (copied or along) and n % 16 == 0 and height > 32 and 0 < k % 32 <= 16:
        return _config(min(128, height), 16, 1, 4, 4)  # 539 x 32 x 40 x 1408 took 49 µs in tiles of 32, so 38
    # 256 x 32 x 64 x 1024 took 17.9 µs with one stage, so 12.9; 28603 x 4 x 48 x 16 40.5 with four warps, with one 20.0; by
    # pointers 600 x 9 x 77 x 77 8.6 in tiles of 64, so 6.7; 5861 x 4 x 44 x 92 52 in wide ones, so 44.
    tile_k, stages = (64, 2 if k > 32 else 1) if copied else (32, 4) if height > 32 else _tile_of(k)
    tile_n = min(128 if copied else 64, height)
    return _config(tile_n, min(tile_k, max(16, next_power(k))), 1, 1 if height <= 32 else 4, stages, copied)


def _tile_of(k: int) -> tuple[int, int]:
    """How long tiles of a sum are for one warp, and how many are on their way: those of which the last is fuller."""
    return (32, 4) if blocks(k, 32) % 2 else (64, 2) if k <= 96 else (128, 2)


def _copied_items(items: int, room: int, height: int, n: int, k: int, along: bool) -> dict[str, Any]:
    """Long sums of items that descriptors bring."""
    chip, longest = chips.current(), _longest_copied(items, k, along)
    if _fills(n, 128) and _filled(items * blocks(n, 128), chip.multiprocessors) >= 0.8:
        tile_k = min(128 if room == 16 and _fills(k, 128) else 64, longest)
        return _config(128, tile_k, 1, 4, 3 if tile_k == 128 else 4, True)
    tiles = items * blocks(n, 64)
    # Half of the chip alone is faster than all of it by twos: 32 x 16 x 2048 x 128 took 4.8 µs, so 4.5.
    least = 448 if tiles <= 16 else 1024  # shorter parts cost more to join than they save
    parts = max(1, min(chip.multiprocessors // tiles, 4, k // least)) if tiles <= chip.multiprocessors // 3 else 1
    if along and tiles > 3 * chip.multiprocessors and blocks(n, 32) % 2:
        height = min(32, height)  # 357 x 8 x 440 x 152 took 15.3 µs in tiles of 64, so 12.9
    if height < 64:  # 963 x 2 x 792 x 22 took 14.3 µs with four warps, with one 9.4
        tile_k, warps = (128, 2) if tiles <= chip.multiprocessors else (64, 2 if tiles <= 3 * chip.multiprocessors else 1)
        return _config(height, min(tile_k, longest), parts, warps, 3, True)
    if tiles > chip.multiprocessors:
        return _config(64, min(64, longest), 1, 4, 4 if room == 16 else 3, True)
    tile_k = min(256, next_power(k), longest)
    return _config(64, tile_k, parts, 4, min(8, chip.shared_memory // ((64 + room) * tile_k * 2)), True)


def _plain_items(items: int, height: int, n: int, k: int, along: bool) -> dict[str, Any]:
    """Long sums of items by pointers."""
    processors, odd = chips.current().multiprocessors, (k if along else n) % 2
    if odd and (height <= 32 or (not along and n > 64 and k >= 1024)):
        # Elements that come one by one: 24 x 7 x 1001 x 333 took 13.4 µs in tiles of 64, so 8.1; 16 x 30 x 3001 x 130 unshared 41.
        height = min(32, height)
        if items >= 1000:
            return _by_one_warp(height, k)
        parts = 4 * processors // (items * blocks(n, height))
        return _config(height, 256, max(1, min(parts, 4, k // 256)), 4, 3)
    if height <= 64 and items > 3 * processors:  # 402 x 4 x 164 x 45 took 4.5 µs with four warps, so 3.9
        return _config(height, 64, 1, 2, 3) if height == 64 else _by_one_warp(height, k)
    height, tiles = min(64, height), items * blocks(n, 64)
    # 17 x 4 x 2458 x 199 took 17 µs whole, in four parts 10.4; 219 x 24 x 618 x 62 7.6 whole, in two parts 10.5.
    parts = min(3 * processors // tiles, 4, k // 192) if tiles <= processors else min(4 * processors // tiles, k // 1024)
    tile_k, stages = (64, 4) if height == 64 else (128, 3)
    return _config(height, tile_k, max(1, parts), 4, stages)


def _by_one_warp(height: int, k: int) -> dict[str, Any]:
    return _config(height, 32, 1, 1, 4) if k <= 256 and blocks(k, 32) % 2 else _config(height, 64, 1, 1, 3)


def _fills(size: int, tile: int) -> bool:
    """Whether tiles of this size leave hardly more of the last one empty than those of half of it."""
    return blocks(size, tile) * tile <= 1.15 * blocks(size, tile // 2) * tile // 2


def _copied(room: int, n: int, k: int, along: bool) -> dict[str, Any]:
    """How descriptors bring tiles of half types where nothing was measured; from 27 shapes of 4 to 32 rows on an H200, of which
    the best cut is 2 % faster in the mean."""
    chip, tiles = chips.current(), blocks(n, 64)
    if tiles <= chip.multiprocessors:
        # One program a multiprocessor, with as much on its way as the shared memory holds: 32 x 4096 x 6144 took 11.6 µs in 96 of
        # them, 13.4 to 14.0 in two or more a multiprocessor. Parts shorter than 1024 cost more to join than they save.
        tile_k = min(256, max(16, next_power(k)))
        stages = min(8, chip.shared_memory // ((64 + room) * tile_k * 2))
        return _config(64, tile_k, max(1, min(chip.multiprocessors // tiles, 4, k // 1024)), 4, stages, True)
    narrow, wide = (64, 128), (256, 128) if along else (128, 64)
    even, wide_even = (_evenness(blocks(n, a), 3 * (a + room) * b * 2) for a, b in (narrow, wide))
    # Wide tiles read the few rows less often, which pays where narrow ones take several rounds and leave more of the last one idle.
    return _config(*(wide if even < 1 and wide_even >= even else narrow), 1, 4, 3, True)


def _evenness(programs: int, held: int) -> float:
    """1 if programs that hold so many bytes of shared memory lie on the chip at once, else what they fill of their rounds."""
    chip = chips.current()
    places = (chip.shared_memory + 1024) // (held + 1024) * chip.multiprocessors
    return 1.0 if programs <= places else _filled(programs, places) if places else 0.0


def _candidates(items: int, rows: int, n: int, k: int, along: bool, copyable: bool) -> list[dict[str, Any]]:
    """Shapes worth timing; splits follow from how many programs the columns give. `copyable`: descriptors may bring the tiles."""
    if _goes_by_lanes(items, rows, n, k, along):
        shapes = [(2, 1024), (4, 512), (4, 1024), (8, 512), (16, 256), (16, 512), (2, 2048)]
        across = [(8, 128), (16, 64), (16, 128), (32, 32), (32, 128), (64, 16), (128, 16), (256, 4), (512, 4)]
        made = [(a, b, warps, 2, False) for a, b in (shapes if along else across) for warps in ((4, 8) if along else (1, 2, 4))]
    else:
        shapes = [(32, 128), (64, 64), (64, 128), (128, 64), (128, 128)] if along else [(64, 64), (128, 64), (64, 128)]
        made = [(a, b, 4, stages, False) for a, b in shapes for stages in (3, 5)] + [(64, 64, 4, 7, False), (128, 64, 8, 4, False)]
        copies = [(32, 256, 4), (64, 128, 3), (64, 128, 4), (64, 256, 4), (128, 64, 5), (128, 128, 2), (128, 128, 3), (128, 128, 4)]
        copies = [*copies, (256, 128, 3), *([(256, 64, 3), (128, 64, 2), (64, 64, 2)] if items > 1 else [])]
        made += [(a, b, 4, stages, True) for a, b, stages in copies if copyable and b <= _longest_copied(items, k, along)]
    processors, result = chips.current().multiprocessors, []
    for a, b, warps, stages, copied in made:
        tiles = items * blocks(n, a)
        splits = _level(tiles, k, b, 2 * processors, max(1, 2 * processors // tiles))
        counts = [splits, min(2 * splits, _SPLITS_MOST), _level(tiles, k, b, processors, _SPLITS_MOST)]
        if items > 1 and tiles >= 2 * processors:
            counts = [1]  # parts of many items are much memory, and many counters
        elif tiles >= processors // 2:
            counts.append(1)
        result += [_config(a, b, count, warps, stages, copied) for count in dict.fromkeys(counts)]
    return result


def describable(x: torch.Tensor, outer: int, inner: int) -> bool:
    """Whether a descriptor can say where the elements of a matrix lie, which has these dimensions of a tensor."""
    stride = x.stride(outer)
    near = x.stride(inner) == 1 and stride >= x.shape[inner]
    return near and stride * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def one_matrix(x: torch.Tensor, outer: int, inner: int) -> torch.Tensor | None:
    """A batch's matrices, which have these dimensions, as one, if they lie one below the other and a descriptor can say where."""
    height, stride = x.shape[outer], x.stride(outer)
    if not describable(x, outer, inner) or (x.shape[0] > 1 and x.stride(0) != height * stride):
        return None
    return x.as_strided((x.shape[0] * height, x.shape[inner]), (stride, 1))


def in_tiles(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A matrix, to be copied in tiles of so many rows and columns."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


def _lies_along(w: torch.Tensor) -> bool:
    """Whether a matrix [n, k], or each of a batch, is to be read along the summed dimension."""
    return w.stride(-1) == 1 or w.stride(-2) != 1


def streams(w: torch.Tensor) -> bool:
    """Whether one row goes past a matrix [n, k] at the speed of the memory: along the summed dimension always; across it where
    there are columns enough to fill the chip, and tensor cores take them by whole lines."""
    n, k = w.shape
    return _lies_along(w) or (describable(w.t(), 0, 1) and n > 512 and (w.element_size() == 2 or k >= 1024))


def streams_batch(rows: int, w: torch.Tensor) -> bool:
    """Whether few rows of a batch go past its matrices [n, k] as fast as torch's do: unless these have sizes and lines that torch
    takes 16 bytes at once, as descriptors do of whole items only, and the compiler if lines begin at multiples of 16 elements."""
    items, n, k = w.shape
    along = _lies_along(w)
    lines = w if along else w.transpose(1, 2)
    copied = chips.current().descriptors and one_matrix(lines, 1, 2) is not None and _worth_copying(items, k, along)
    if rows == 1 and not along and (n <= 128 or k <= 32) and _crosses_by_lanes(items, n, k):
        return True
    suits_torch = n % 8 == k % 8 == lines.stride(1) % 8 == 0 and k >= 16
    return copied or not suits_torch or lines.stride(1) % 16 == 0


def few_rows(
    x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None, alpha: float, beta: float, precision: str
) -> None:
    """y[item, rows, n] = α x[item, rows, k] w[item, n, k]ᵀ + β bias[rows, n], w read once; all strides are free."""
    (items, rows, k), n = x.shape, w.shape[1]
    x_walk, w_walk, y_walk = ((part.stride(0) if items > 1 else 0, *part.stride()[1:]) for part in (x, w, y))
    if rows == 1:  # any stride will do, but two of 1 would hide which way it lies
        x_walk = (x_walk[0], 0, x_walk[2])
    if max(rows * n, rows * x_walk[1], k * x_walk[2], k * w_walk[2]) >= 2**31:
        raise Unsupported("rows, or elements that are summed, farther apart than 32 bits tell")
    along = _lies_along(w)
    bias_walk = (0, 0) if bias is None else bias.stride()
    by_lanes = _goes_by_lanes(items, rows, n, k, along)
    room = 1 if by_lanes else max(16, next_power(rows))
    copies = chips.current().descriptors and not by_lanes and items * max(n, k) < 2**31
    all_w = one_matrix(w if along else w.transpose(1, 2), 1, 2) if copies else None
    # A copy of rows that are not there takes its time: 4 x 3584 x 4608 8.4 µs with it, 6.9 without.
    all_x = one_matrix(x, 1, 2) if copies and rows == room else None
    longest = _longest_copied(items, k, along)
    x_of = w_of = 1
    if k > 128:  # shorter ones come at once anyway: 21 x 1 x 24 x 7030 took 8.1 µs in pairs, one by one 4.8
        x_of = shared_by(k, *x_walk[:2]) if x_walk[2] == 1 else 1
        w_of = shared_by(k, *w_walk[:2]) if w_walk[2] == 1 else shared_by(n, w_walk[0], w_walk[2]) if w_walk[1] == 1 else 1

    def run(config: dict[str, Any]) -> None:
        tile_n, tile_k, splits = config["N"], config["K"], config["splits"]
        part = blocks(blocks(k, splits), tile_k) * tile_k
        splits = blocks(k, part)
        grid = (blocks(n, tile_n), splits, items)
        parts, counters = workspace(x.device, splits * items * rows * n, items * grid[0]) if splits > 1 else (None, None)
        constants = {"N": tile_n, "K": tile_k, "SPLITS": splits, "warps": config["warps"], "stages": config["stages"]}
        if by_lanes:
            _vector(grid, x, w, y, bias, parts, counters, n, k, part, *x_walk[::2], *w_walk, *y_walk[::2], bias_walk[1], alpha,
                    beta, **constants)  # fmt: skip
            return
        tall = all_w if config.get("copied") and tile_k <= longest else None
        thin = all_x if tall is not None else None
        streamed = w if tall is None else in_tiles(tall, *((tile_n, tile_k) if along else (tile_k, tile_n)))
        few = x if thin is None else in_tiles(thin, room, tile_k)
        _tensor(grid, few, streamed, y, bias, parts, counters, rows, n, k, part, *x_walk, *w_walk, *y_walk, *bias_walk, alpha, beta,
                X_COPIED=thin is not None, W_COPIED=tall is not None, ALONG=along, X_OF=x_of, W_OF=1 if tall is not None else w_of,
                PRECISION=precision, ROWS=room, **constants)  # fmt: skip

    name, shape = f"rows.{room}.{x.element_size()}.{int(along)}", tune.shape_class(n, k)
    if items > 1:
        name, shape = f"{name}.batched.{min(longest, 256)}", tune.shape_class(items, n, k)
    config = tune.remembered(name, shape)
    if config is None:
        default = _default(items, rows, n, k, along, x.element_size(), all_w is not None)
        config = tune.choose(name, shape, default, _candidates(items, rows, n, k, along, all_w is not None), run)
    run(config)

"""How products of few rows are cut: tiles, parts of the sum, warps, and whether descriptors bring them. Knows sizes, the chip and
what was measured on an H200; nothing of tensors or kernels. Shapes are rows x summed elements x columns, after a batch's items."""

from __future__ import annotations

from typing import Any

from trireme.kernels import chips
from trireme.kernels.launch import blocks, next_power

_SPLITS_MOST = 16
_SMALL = [  # tiles, warps and stages that small items of a batch may want
    (16, 32, 1, 2), (16, 64, 2, 3), (16, 128, 2, 3), (32, 32, 1, 2), (32, 32, 2, 3), (32, 64, 4, 3), (32, 128, 2, 4),
    (64, 16, 2, 1), (64, 32, 2, 2), (64, 64, 4, 1), (64, 256, 4, 4), (128, 16, 4, 2),
]  # fmt: skip


def config(n: int, k: int, splits: int, warps: int, stages: int, copied: bool = False) -> dict[str, Any]:
    return {"N": n, "K": k, "splits": splits, "warps": warps, "stages": stages} | ({"copied": True} if copied else {})


def _level(tiles: int, k: int, tile_k: int, places: int, most: int) -> int:
    """The number of parts that leaves the least of the last round of programs idle, the smallest of those; none shorter than two
    tiles."""
    most = max(1, min(most, _SPLITS_MOST, k // (2 * tile_k)))
    return max(range(1, most + 1), key=lambda splits: (round(_filled(tiles * splits, places), 2), -splits))


def _filled(programs: int, places: int) -> float:
    """The share of the rounds' places that programs take."""
    return programs / (blocks(programs, places) * places)


def default(items: int, rows: int, n: int, k: int, along: bool, size: int, copyable: bool) -> dict[str, Any]:
    """`along`: the streamed matrix is contiguous along the summed dimension; `copyable`: descriptors may bring its tiles."""
    chip = chips.current()
    if chip.interpreted:
        return config(max(16, min(64, next_power(n))), max(16, min(512, next_power(k))), 2 if k > 64 else 1, 4, 1)
    if goes_by_lanes(items, rows, n, k, along, size, copyable):
        if rows > 1:
            return _several_by_lanes(items, rows, n, k)
        return _by_lanes(n, k, size) if items == 1 else _along_by_lanes(items, n, k) if along else _across_by_lanes(items, n, k)
    room = max(16, next_power(rows))
    if items > 1:
        return _of_batch(items, room, n, k, along, copyable and size == 2)
    if copyable and size == 2:
        if rows == 1 and along and k > 1600 and 2 * blocks(n, 64) > 5 * chip.multiprocessors:
            return config(64, 64, 1, 4, 4, True)  # 2872 x 35944 took 57 µs in tiles of 128, so 52
        return _copied(room, n, k, along)
    return _plain(n, k, along, size)


def _plain(n: int, k: int, along: bool, size: int) -> dict[str, Any]:
    """One matrix by pointers, whose lines no descriptor takes."""
    processors, tiles = chips.current().multiprocessors, blocks(n, 64)
    if size == 4:
        return config(64, 64, max(1, min(next_power(max(1, round(2 * processors / tiles))), _SPLITS_MOST, k // 128)), 4, 4)
    if tiles <= 40:  # 17 x 1174 x 526 took 7.0 µs in tiles of 64, so 4.2; 16 x 2531 x 1441 17.7 and 7.8
        columns = blocks(n, 32)
        return config(32, 128, max(1, min(4 * processors // columns, 8 if columns > 8 else 12, k // 144)), 4, 2)
    if k >= 8192 or (along and k >= 2048 and tiles > 80):
        # 32 x 18838 x 6842 took 137 µs in tiles of 64 and four parts, in two of these 102; 2 x 4022 x 9401 30.3 in two.
        return config(64, 128, max(1, min(9 * processors // (4 * tiles) if tiles > 80 else 3 * processors // tiles, 8)), 4, 2)
    # 2 x 4625 x 4230 took 18.5 µs with four tiles on their way, with three 15.4 in eight parts; 23 x 4224 x 2364 11.8 and 9.9.
    parts = max(min(4 * processors // tiles, k // 600), min(2 * processors // tiles, 3, k // 200))
    return config(64, 64, max(1, min(parts, 8)), 4, 3)


def _by_lanes(n: int, k: int, size: int) -> dict[str, Any]:
    """One row: 2048 or 4096 elements at once, as much of the summed dimension as there is; more programs where outputs are few."""
    if 32 < k <= 128 and k % 16:  # 33 x 200000 took 10.1 µs in tiles of 64 with one warp, so 6.1; 100 x 50000 3.7 in 128, so 3.0
        return config(64, 16, 1, 2, 2) if k <= 64 else config(64, 32, 1, 4, 2)
    if k <= 128:
        return config(2048 // max(16, next_power(k)), max(16, next_power(k)), 1, 4, 2)
    if k < 1024:  # 727 x 1424 took 2.3 µs in tiles of 256, so 1.9
        return config(*((32, 128) if n > 8192 and k <= 512 else (4, 512) if n <= 3072 and k > 512 else (16, 256)), 1, 4, 2)
    if size == 2 and n <= 640 and k >= 4096:  # 5600 x 360 took 3.7 µs in tiles of 512 and two parts, so 2.2
        tile_n, tile_k, warps = 1, 2048, 8
    elif size == 2 and k >= 8192 and k % 8 == 0:  # 14440 x 2376 took 17.2 µs in tiles of 512, so 15.0
        tile_n, tile_k, warps = 2, 2048, 8
    elif size == 2 and k < 3072 and n > 4096:  # 2560 x 9728 took 12.6 µs in tiles of 512, so 10.8; 1536 x 5888 4.5 and 3.8
        tile_n, tile_k, warps = 16, 256, 4
    elif size == 2 and (n <= 1280 or (k % 8 == 0 and not 0 < k % 1024 <= 512)):
        tile_n, tile_k, warps = 2, 1024, 4
    else:
        tile_n, tile_k, warps = 4, 512, 4
    wanted = 2 * chips.current().multiprocessors // blocks(n, tile_n)
    return config(tile_n, tile_k, max(1, min(wanted, _SPLITS_MOST, k // (2 * tile_k))), warps, 2)


def goes_by_lanes(items: int, rows: int, n: int, k: int, along: bool, size: int, copyable: bool) -> bool:
    """Whether each lane sums its own columns: for one row along the summed dimension; and in a batch where tiles for the tensor
    cores were few or nearly empty (32 x 1 x 2048 x 128 4.5 µs with these, so 3.8) or come element by element (531 x 1 x 1089 x 41
    39 µs, so 18)."""
    if rows > 1:
        return along and size == 2 and not copyable and _suit_lanes(items, rows, n, k)
    if not along:
        return items > 1 and crosses_by_lanes(items, n, k)
    if items == 1:
        return not (copyable and size == 2 and _outgrows_lanes(n, k))
    few = (k >= 512 and _few_tiles(items, n)) or (k >= 256 and n <= 8)
    short = k <= 16 and n > 32  # 6081 x 1 x 4 x 420 took 50 µs in tiles, so 12
    return few or short or (k % 8 > 0 and (k > 32 or (k > 16 and n > 32)))


def _outgrows_lanes(n: int, k: int) -> bool:
    """Whether one row meets a matrix of which a second-level cache holds little but what copies in tiles find there: 1024 x 23296
    took 11.3 µs by lanes, so 7.4; 5312 x 5376 19.8 and 15.2; but 6144 x 2176 4.9, and 5.9 in tiles. Of what exceeds it by far lanes
    read whole tiles as fast: 4096 x 28672 54 to 55 µs, 56 in tiles; but 2880 x 30528 48 and 43."""
    if n * k > 48 << 20:
        return k % 256 > 0
    return n * k >= (14 << 20 if n > 4096 else 22 << 20)


def _suit_lanes(items: int, rows: int, n: int, k: int) -> bool:
    """Whether two to four rows do, past lines whose elements come one by one or by twos, from 90 shapes on an H200: 2 x 3679 x 9316
    took 48 µs in tiles, so 27; 2 x 2 x 3953 x 210 10.9 and 3.9; 18 x 3 x 6353 x 101 20 and 11.8."""
    if rows == 2:  # of even length they begin anywhere, if one matrix has them and no descriptor takes it
        if k % 8 == 4:  # 136 x 2 x 244 x 76 took 4.1 µs by lanes, in tiles 3.6; 3740 x 2 x 340 x 32 29 and 21
            return k >= 1024 or (items == 1 and k > 256)
        if k % 2 == 0 and k % 8 and (items > 3 * chips.current().multiprocessors or (k < 2048 and items * n >= 8192)):
            return False  # 2 x 1010 x 13883 took 12.0 µs by lanes, in tiles 10.2
        return (k % 8 > 0 or items == 1) and k > 192
    small = k > 256 and items * n * k <= 1 << 20  # 5 x 4 x 410 x 423 took 4.4 µs in tiles, so 3.1
    return rows <= 4 and ((k % 2 > 0 and k >= 1536) or (k % 4 > 0 and small))


def _several_by_lanes(items: int, rows: int, n: int, k: int) -> dict[str, Any]:
    """How these are cut."""
    processors = chips.current().multiprocessors
    if k <= 704:
        return config(4, 256, 1, 2, 2)
    if rows > 2 and 2 * items * blocks(n, 8) >= 3 * processors:  # 2 x 4 x 6273 x 2069 took 27.5 µs in tiles of 512, so 24.6
        return config(8, 256, 1, 4, 2)
    parts = min(4 * processors // (items * blocks(n, 4)), 4, k // 1024)  # 2 x 8119 x 405 took 5.8 µs whole, so 5.3
    return config(4, 512, max(1, parts), 4, 2)


def _few_tiles(items: int, n: int) -> bool:
    return items * blocks(n, 64) <= chips.current().multiprocessors


def _along_by_lanes(items: int, n: int, k: int) -> dict[str, Any]:
    """How one row of each item is cut along the summed dimension, from 60 shapes on an H200."""
    if k <= 16:
        return config(min(128, next_power(n)), 4 if k <= 8 else 8, 1, 1 if k <= 8 else 2, 2)
    if k >= 512 and (_few_tiles(items, n) or n <= 8):  # 2 x 1 x 3368 x 3528 took 12.8 µs in tiles of 512, so 10.2
        return config(*((4, 512) if items * n < 4096 else (8, 256)), 1, 4, 2)
    if k >= 1024:
        return config(8, 256, 1, 4, 2)
    tile_k = 256 if k > 256 else 128 if k > 128 else 64 if k > 48 else 16
    tile_n = min(1024 // tile_k, max(2, next_power(n)))  # 2335 x 1 x 41 x 8 took 5.7 µs in tiles of 64, so 2.8
    return config(tile_n, min(1024 // tile_n, max(tile_k, next_power(k))), 1, 1, 2)


def crosses_by_lanes(items: int, n: int, k: int) -> bool:
    """The same for one row of a batch across the summed dimension, of which lanes take turns: where few columns or short sums would
    leave tiles nearly empty (3727 x 1 x 4 x 196 took 12.6 µs in these, so 3.6), where neither descriptors nor whole lines bring
    them (48 x 1 x 1025 x 343 took 21, so 11.7; 2 x 1 x 2909 x 5936 43 and 20), and of whole lines a few (14 x 1 x 6571 x 144 15.4,
    so 8.2)."""
    copied = worth_copying(items, k, False)
    even = n % 8 == k % 8 == 0 and (copied or 3 * items * blocks(n, 64) > chips.current().multiprocessors)
    few = n <= 16 or k <= 32 or (n <= 32 and k <= 128) or _fill_lanes(items, n, k)
    return few or (k > 64 and not even)


def _fill_lanes(items: int, n: int, k: int) -> bool:
    """Whether sums that are not long come in programs enough for each lane to walk them alone."""
    return k <= 128 and items * blocks(n, 128) >= min(8 * k, 512)


def _across_by_lanes(items: int, n: int, k: int) -> dict[str, Any]:
    """How these are cut, from 260 shapes on an H200."""
    width, depth, processors = max(8, next_power(n)), max(2, next_power(k)), chips.current().multiprocessors
    if n <= 32 and k <= 128:  # 19178 x 1 x 88 x 9 took 25.7 µs in tiles of 64, so 16.5
        return config(width, min(depth, 32 if width == 16 and n % 8 else 1024 // width), 1, 1, 2)
    if n <= 16:
        parts = min(4 * processors // items, _SPLITS_MOST, k // 256)
        return config(width, 2048 // width, max(1, parts), 4, 2)
    if k <= 32 or _fill_lanes(items, n, k):
        if n % 8 and 8 < k <= 16:
            # 511 x 1 x 16 x 180 took 4.8 µs with two warps, so 1.9; 14773 x 1 x 12 x 69 19.9 with four, so 11.7.
            return config(256, 4, 1, 4, 2) if n > 128 else config(min(128, width), 8, 1, 1, 2)
        if k > 16 and items * blocks(n, 128) <= 4 * processors:  # 18 x 1 x 32 x 1073 took 2.3 µs in tiles of 128, so 1.4
            return config(min(64, width), min(32, depth), 1, 1, 2)
        tile_n, tile_k = (512, 4) if k <= 8 else (256, 4) if k <= 16 else (128, 16)
        return config(min(tile_n, width), min(tile_k, depth), 1, 1 if n % 8 == 0 else 2, 2)
    if k < 320 and items * blocks(n, 32) >= 900:
        return config(32, 32, 1, 1, 2)
    tile_n = 32 if 2 * items * blocks(n, 32) > processors else 16  # 2 x 1 x 1093 x 6590 took 9.6 µs in tiles of 16, so 7.4
    parts = min(4 * processors // (items * blocks(n, tile_n)), _SPLITS_MOST, k // 384)
    return config(tile_n, 128, max(1, parts), 4, 2)


def longest_copied(items: int, k: int, along: bool) -> int:
    """The longest tile that may be copied: across the summed dimension of a batch one that ends with its item."""
    return k & -k if items > 1 and not along else 1 << 30


def worth_copying(items: int, k: int, along: bool) -> bool:
    return longest_copied(items, k, along) >= min(64, max(16, next_power(k)))


def _of_batch(items: int, room: int, n: int, k: int, along: bool, copyable: bool) -> dict[str, Any]:
    """How a batch's items are cut, from 530 shapes of 1 to 32 rows on an H200: plain tiles had 0.3 to 1.2 of torch's speed."""
    height, copied = max(16, next_power(n)), copyable and worth_copying(items, k, along)
    if k > 128:
        return (_copied_items if copied else _plain_items)(items, room, height, n, k, along)
    if copied and not (k <= 16 and height > 32 and (room > 16 or not along)):
        # 256 x 32 x 64 x 1024 took 17.9 µs with one stage, so 12.9; 28603 x 4 x 48 x 16 40.5 with four warps, with one 20.0; but
        # 156 x 32 x 16 x 7760 took 42, by pointers 31.
        tile_k = min(64, max(16, next_power(k)))
        if n > 128 and not _fills(n, 128):  # 2243 x 32 x 32 x 192 took 22.9 µs in tiles of 128 with one stage, so 15.6
            return config(64, tile_k, 1, 2, 2, True)
        # More on its way of what no cache holds: 41 x 26 x 112 x 6992 took 25.7 µs with two tiles, so 21.7.
        more = along and room > 16 and height > 32 and k > 64 and items * n * k > 18 << 20
        return config(min(128, height), tile_k, 1, 1 if height <= 32 else 4, 3 if more else 2 if k > 16 else 1, True)
    if height <= 32:
        return _by_few_warps(height, k, along)
    if k <= 16:  # 167 x 8 x 16 x 3123 took 15.2 µs with four warps and four stages, so 8.8; 1000 x 32 x 12 x 1000 42 and 38
        if not along and 512 < n <= 768 and room > 16:  # 2268 x 32 x 16 x 592 took 44 µs in tiles of 256, so 36
            return config(64, 16, 1, 2, 2)
        tile_n = 64 if not along and room == 16 else 256 if not along and n > 512 else 128
        return config(min(tile_n, height), 16, 1, 1 if tile_n == 64 else 4, 1)
    return _shallow(items, n, k, along)


def _shallow(items: int, n: int, k: int, along: bool) -> dict[str, Any]:
    """Sums of 17 to 128 elements by pointers, of more than 32 columns."""
    if along:  # 2705 x 32 x 118 x 61 took 36 µs in tiles of 32, so 27; 3000 x 16 x 36 x 100 15.5 and 12.7
        return config(64, 64, 1, 4, 1) if k > 32 else config(64, 16, 1, 2, 1)
    if n % 2 and n > 64:  # 9 x 2 x 70 x 3291 took 5.4 µs in tiles of 128, so 3.6; 185 x 4 x 66 x 199 5.0 and 4.5
        return config(64, 32, 1, 2, 2)
    if items * blocks(n, 128) <= 2 * chips.current().multiprocessors:  # 6 x 8 x 80 x 2746 took 4.5 µs in tiles of 16, so 2.5
        return config(64, min(128, next_power(k)), 1, 4, 2)
    # 539 x 32 x 40 x 1408 took 49 µs in tiles of 32 that are left partly empty, so 38; 61 x 16 x 48 x 1498 6.4 and 5.2. Narrower
    # ones: 3081 x 32 x 68 x 52 21.8 and 19.7; 5861 x 4 x 44 x 92 39 and 27. More on its way of what no cache holds.
    if n <= 64:
        return config(64, 16, 1, 2, 1)
    tile_n = 128 if _fills(n, 128) else 64  # 5531 x 9 x 40 x 144 took 35.0 µs in tiles of 128, so 28.1; 529 x 4 x 84 x 134 9.3, 5.6
    warps = 2 if n <= 128 or tile_n == 64 else 4
    tile_k = 16 if 0 < k % 32 <= 16 else 32
    ahead = 4 if items * n * k > 1 << 24 and k > 2 * tile_k else 2  # 8988 x 18 x 24 x 144 took 55 µs with four, so 42
    return config(tile_n, tile_k, 1, warps, ahead)


def _by_few_warps(height: int, k: int, along: bool) -> dict[str, Any]:
    """Tiles by pointers for one warp or two, of a length that leaves less of the last one empty."""
    if along and 96 < k <= 768 and height == 16:
        # 48497 x 16 x 108 x 4 took 120 µs in tiles of 128 with one warp, so 103; 497 x 16 x 226 x 8 5.5 in tiles of 32, so 3.5;
        # 17472 x 15 x 396 x 14 150 and 112.
        return config(height, 64, 1, 2, 2 if k <= 128 else 3)
    if k > 256:  # 2468 x 32 x 1494 x 4 took 99 µs with one warp, so 88; 1081 x 26 x 486 x 27 40 and 24
        # 430 x 16 x 3052 x 12 took 40.8 µs in tiles of 64, so 32.1.
        return config(height, 32 if k <= 768 else 64 if k < 2048 or height > 16 else 256, 1, 2, 3)
    whole = max(16, next_power(k))
    if along and height == 32 and 32 < k <= 128:  # 3800 x 32 x 110 x 32 took 27 µs with one warp, so 21
        return config(32, whole, 1, 2, 1)
    tile_k = 32 if k > 128 or height == 16 or blocks(k, 32) % 2 else 64 if k <= 96 else 128
    return config(height, min(tile_k, whole), 1, 1, 2)


def _copied_items(items: int, room: int, height: int, n: int, k: int, along: bool) -> dict[str, Any]:
    """Long sums of items that descriptors bring."""
    chip, longest = chips.current(), longest_copied(items, k, along)
    if _fills(n, 128) and _filled(items * blocks(n, 128), chip.multiprocessors) >= 0.8:
        # As much on its way as leaves room for all programs at once: 20 x 23 x 416 x 2800 took 13.5 µs with four tiles, so 9.0.
        ways = [(128, 3)] if room == 16 and longest >= 128 and _fills(k, 128) else []
        ways += [(min(64, longest), stages) for stages in (4, 3, 2)]
        tile_k, stages = _at_once(items * blocks(n, 128), 128, room, ways) or ways[0]
        return config(128, tile_k, 1, 4, stages, True)
    tiles = items * blocks(n, 64)
    # Half of the chip alone is faster than all of it by twos: 32 x 16 x 2048 x 128 took 4.8 µs, so 4.5.
    least = 420 if tiles <= 16 else 700 if tiles <= 24 else 768  # shorter parts cost more to join than they save
    parts = max(1, min(chip.multiprocessors // tiles, 4, k // least)) if tiles <= chip.multiprocessors // 3 else 1
    if k >= 3072 and 20 * tiles <= 9 * chip.multiprocessors:  # 3 x 8 x 8040 x 1040 took 18.0 µs whole, so 13.6
        parts = max(2, parts)
    if along and tiles > 3 * chip.multiprocessors and n <= 512 and blocks(n, 32) % 2:
        height = min(32, height)  # 357 x 8 x 440 x 152 took 15.3 µs in tiles of 64, so 12.9
    if height < 64:
        return _narrow_copied(tiles, height, k, longest)
    if tiles > chip.multiprocessors:
        if k >= 2048 and longest >= 128:  # 2 x 16 x 6640 x 5320 took 43 µs in tiles of 64, so 39
            # 2 x 32 x 5696 x 9152 took 58 µs with four tiles on their way, with three, which leave room for all programs, 52.
            return config(64, 128, 1, 4, 4 if _at_once(tiles, 64, room, [(128, 4)]) else 3, True)
        if k >= 3072 and 10 * tiles <= 13 * chip.multiprocessors:  # 2 x 9 x 7232 x 4800 took 39.5 µs whole, so 34.6
            return config(64, min(64, longest), 3, 4, 3, True)
        # 296 x 4 x 416 x 192 took 12.7 µs with four tiles on their way, which not all programs at once have room for, so 8.9.
        # All of three on their way: 3252 x 29 x 144 x 64 took 28.8 µs with three, 27.4 with more.
        ways = [(min(64, longest), stages) for stages in ((4, 3) if room == 16 else (4,) if along and k <= 192 else (3,))]
        return config(64, min(64, longest), 1, 4, (_at_once(tiles, 64, room, ways) or ways[0])[1], True)
    if longest < 128 or (k < 1280 and not along):  # 2 x 16 x 1856 x 2096 took 7.2 µs by descriptors, so 5.0
        return _plain_items(items, room, height, n, k, along)
    if k < 1024:  # 2 x 15 x 624 x 3024 took 3.8 µs by descriptors, so 3.0; 14 x 8 x 296 x 184 2.7 and 2.0
        return config(64, 64, parts, 4, 4)
    tile_k = min(256, next_power(k), longest)
    return config(64, tile_k, parts, 4, _stages(k, tile_k, room), True)


def _narrow_copied(tiles: int, height: int, k: int, longest: int) -> dict[str, Any]:
    """Few columns of items that descriptors bring."""
    processors = chips.current().multiprocessors
    if tiles <= 3 * processors and k >= 768:
        return _in_narrow_parts(tiles, height, k)
    if height == 32 and k > 256 and tiles > 16 * processors and longest >= 128:
        return config(32, 128, 1, 2, 3, True)  # 6871 x 32 x 408 x 16 took 83 µs in tiles of 64, so 70
    # 963 x 2 x 792 x 22 took 14.3 µs with four warps, with one 9.4; 296 x 4 x 7296 x 8 38.8 in tiles of 64, so 29.
    tile_k = min(128 if tiles <= processors or k >= 1024 else 64, longest)
    return config(height, tile_k, 1, 1 if tiles > 3 * processors and tile_k <= 64 else 2, 3, True)


def _in_narrow_parts(tiles: int, height: int, k: int) -> dict[str, Any]:
    """Few columns in parts, by pointers: 84 x 16 x 6760 x 24 took 25.7 µs by descriptors and whole, so 11.6; 3 x 32 x 10024 x 23
    27.5 and 14.8."""
    processors = chips.current().multiprocessors
    parts = min(8 if tiles <= processors // 3 else 4, 6 * processors // tiles, k // 384)
    return config(height, 64 if height == 32 else 128, parts, 2, 4)


def _stages(k: int, tile_k: int, room: int) -> int:
    """Tiles on their way where a program has its multiprocessor alone, but no more than there are: 16 x 1024 x 1024 took 2.8 µs
    with five of 256, with three 2.5; 23 x 16 x 1408 x 128 4.6 with eight of 128, with four 4.0."""
    return max(2, min(4, blocks(k, tile_k) - 1, chips.current().shared_memory // ((64 + room) * tile_k * 2)))


def _plain_items(items: int, room: int, height: int, n: int, k: int, along: bool) -> dict[str, Any]:
    """Long sums of items by pointers."""
    processors, tiles = chips.current().multiprocessors, items * blocks(n, 64)
    if height <= 64 and items > 3 * processors:
        return _many_items(items, height, n, k, along)
    if (k if along else n) % 2:
        return _few_odd_items(items, height, n, k, along)
    if height < 64 and tiles > processors and k >= 1536:
        # 260 x 8 x 3024 x 32 took 23.2 µs in tiles of 64 with four warps, so 16.8.
        return config(height, 128, 1, 2, 4) if k < 4096 else _in_narrow_parts(tiles, height, k)
    if height < 64:  # 66 x 22 x 1740 x 16 took 5.1 µs whole, in four parts 4.4
        return config(height, 64, max(1, min(3 * processors // tiles, 4, k // 192)), 4, 3)
    if tiles <= processors:
        if k >= 3072 and 2 * tiles > processors and room <= 32:  # 2 x 32 x 7888 x 3152 took 38 µs in tiles of 64, so 30
            return config(64, 256, 1, 4, 4)
        if k >= 4096:
            return config(64, 64, min(2 * processors // tiles, 4), 4, 4)
        if k >= 1280 and 2 * tiles > processors and room == 32:  # 45 x 24 x 2008 x 128 took 6.1 µs in tiles of 64, so 5.7
            return config(64, 128, 1, 4, 4)
        # 7 x 32 x 434 x 1040 took 4.9 µs in two parts, whole 2.9; 2 x 7 x 1888 x 1564 in four 6.2, in two 5.2.
        return config(64, 64, max(1, min(processors // tiles, 4, k // (192 if along else 768))), 4, 4)
    if along and 5 * blocks(n, 32) <= 8 * blocks(n, 64):  # 69 x 2 x 4804 x 77 took 37.7 µs in tiles of 64, so 19.1
        return config(32, 64, max(1, min(6 * processors // (items * blocks(n, 32)), 3, k // 700)), 2, 3)
    if not along and n % 16 == 0 and room == 32 and items * blocks(n, 128) <= processors:
        # One wide tile a multiprocessor: 62 x 32 x 720 x 160 took 4.9 µs in tiles of 64, so 4.5; 70 x 32 x 1880 x 128 10.8, 8.3.
        return config(128, 64, 1, 4, 4) if k < 1536 else config(128, 64, 1, 8, 6)
    if not along and n % 8 and k <= 320 and tiles <= 2 * processors:  # 20 x 4 x 219 x 482 took 5.5 µs in tiles of 128, so 3.6
        return config(32, 128, 1, 4, 2)
    parts, stages = min(6 * processors // tiles, 3, k // 700), 3 if k <= 1024 else 4
    if not along and n > 128 and _fills(n, 128) and (parts <= 1 or n % 8 == 0):
        # 2 x 26 x 2016 x 4432 took 10.0 µs in tiles of 64, so 9.2; 13 x 32 x 368 x 5040 15.7 with three on their way, with two 12.9
        ways = [(32 if k <= 256 else 64, count) for count in (stages, 2)]
        tile_k, stages = _at_once(items * blocks(n, 128), 128, room, ways) or ways[0]
        return config(128, tile_k, 1, 4, stages)
    return config(64, 32 if k <= 256 else 64, max(1, parts), 4, stages)  # 171 x 8 x 156 x 102 5.1 in tiles of 64, so 3.9


def _many_items(items: int, height: int, n: int, k: int, along: bool) -> dict[str, Any]:
    """So many that each needs few warps; elements of odd lines come one by one."""
    odd = (k if along else n) % 2
    if height == 16 and along and 128 < k <= 256 and items > 16 * chips.current().multiprocessors:
        return config(16, 32, 1, 1, 2)  # 12588 x 4 x 134 x 8 took 40.0 µs in tiles of 64 with two warps, so 26.4
    if height == 64:
        if odd and not along:  # 678 x 4 x 868 x 57 took 48 µs in tiles of 64 squared, so 35; 726 x 4 x 132 x 49 8.7 and 6.2
            return config(64 if k <= 512 else 32, 32, 1, 2, 2)
        # 615 x 8 x 326 x 62 took 15.7 µs with two warps, so 10.2; 1161 x 4 x 400 x 48 16.9 with three stages, so 10.8.
        return config(64, 32 if k <= 256 else 64, 1, 4, 3 if along else 2)
    if odd and along and k > 256:
        # 496 x 32 x 681 x 32 took 16.9 µs in tiles of 256, so 11.9; but 505 x 8 x 3041 x 6 46 and 27; 403 x 4 x 3687 x 20 58.6 with
        # four warps, so 49.8.
        return config(height, 128, 1, 4 if height == 32 else 2, 3) if k < 2048 else config(height, 256, 1, 2, 3)
    if odd and k > 1024 and height == 32:  # 429 x 2 x 2264 x 17 took 33.8 µs in tiles of 256, so 28.5
        return config(32, 32 if items >= 1000 else 64, 1, 4, 2 if items >= 1000 else 3)
    return _by_few_warps(height, k, along)


def _few_odd_items(items: int, height: int, n: int, k: int, along: bool) -> dict[str, Any]:
    """Elements that come one by one, of which more programs must ask."""
    processors, tiles = chips.current().multiprocessors, items * blocks(n, 64)
    if along and height > 32 and 5 * blocks(n, 32) <= 8 * blocks(n, 64):  # 290 x 4 x 969 x 84 took 36.8 µs in tiles of 64, so 28.2
        return config(32, 128, max(1, min(4 * processors // (items * blocks(n, 32)), 4, k // 384)), 4, 2)
    if along and height > 32:  # 4 x 8 x 553 x 496 took 4.9 µs in two parts, so 3.8
        return config(64, 64, max(1, min((4 if k >= 1024 else 2) * processors // tiles, 4, k // 112)), 4, 3)
    if height > 32 and tiles > processors and k < 1024:  # 98 x 2 x 474 x 67 took 9.1 µs in tiles of 64 squared, so 6.5
        return config(32, 64, 1, 4, 2)
    # 24 x 7 x 1001 x 333 took 13.4 µs in tiles of 64, so 8.1; 95 x 32 x 1383 x 4 8.7 in tiles of 256, so 6.4.
    height = min(32, height)
    if along and height == 16 and k < 1024:  # 200 x 8 x 473 x 8 took 5.0 µs in tiles of 64, so 3.9; 281 x 9 x 689 x 8 7.2 and 6.5
        return config(16, 256 if k <= 512 else 128, 1 if k <= 512 else max(1, min(5 * processors // items, 4, k // 256)), 2, 3)
    parts = min(4 * processors // (items * blocks(n, height)), 4, k // (192 if along else 240))
    return config(height, 128 if along else 64, max(1, parts), 4, 3)


def _fills(size: int, tile: int) -> bool:
    """Whether tiles of this size leave hardly more of the last one empty than those of half of it."""
    return blocks(size, tile) * tile <= 1.15 * blocks(size, tile // 2) * tile // 2


def _copied(room: int, n: int, k: int, along: bool) -> dict[str, Any]:
    """How descriptors bring tiles of one matrix of half types where nothing was measured; from 230 shapes of 2 to 32 rows on an
    H200."""
    chip, tiles = chips.current(), blocks(n, 64)
    if tiles <= chip.multiprocessors:
        return _few_copied(room, n, k, along)
    if k <= 128:  # 4 x 64 x 21440 took 2.5 µs in tiles of 64 x 128, so 1.9
        return config(128, min(64, max(16, next_power(k))), 1, 4, 2, True)
    if not along and n % 64 and 0 < k % 64 <= 32 and room == 16 and k <= 640:
        return config(128, 32, 1, 4, 4, True)  # 4 x 584 x 34568 took 9.7 µs in tiles of 64, so 8.4
    uneven = n % 64 if not along else k % 16 and k <= 1600
    many = room > 16 and not along and k <= 1600  # of which wide tiles are read less often: 32 x 728 x 27136 took 9.0 µs, so 8.0
    if (uneven or many) and chip.multiprocessors // 2 < blocks(n, 256) <= chip.multiprocessors:
        # Lines of memory that tiles share: 16 x 760 x 31912 took 13.4 µs in tiles of 128, so 11.5.
        return config(256, 64, 1, 4, 4, True)
    if not along and k <= 512 and n % 64 == 0:  # 16 x 384 x 21376 took 4.7 µs in tiles of 128, so 4.3
        return config(64, 64, 1, 4, 4 if tiles <= 2 * chip.multiprocessors else 2, True)
    if k <= 1600:  # 4 x 296 x 23688 took 5.5 µs in tiles of 64 x 128, so 4.4; 8 x 896 x 151936 68 and 66
        if k > 1280 and blocks(n, 128) <= chip.multiprocessors:  # 8 x 1416 x 15416 took 10.7 µs with four on their way, so 10.1
            return config(128, 64, 1, 4, 6, True)
        return config(128, 64, 1, 4, 4 if _at_once(blocks(n, 128), 128, room, [(64, 4)]) else 3, True)
    if not along and n % 64:  # 16 x 2656 x 10328 took 17.5 µs in tiles of 64, so 16.3
        tile_k, stages = _at_once(blocks(n, 128), 128, room, [(64, 6), (64, 4), (64, 3)]) or (64, 2)
        return config(128, tile_k, 1, 4, stages, True)
    narrow, wide = (64, 128), (256, 128) if along else (128, 64)
    if _at_once(tiles, 64, room, [(128, 4)]):
        return config(*narrow, 1, 4, 4, True)  # 32 x 8192 x 10240 took 44.9 µs with three tiles on their way, so 42.3
    even, wide_even = (_evenness(blocks(n, a), 3 * (a + room) * b * 2) for a, b in (narrow, wide))
    # Wide tiles read the few rows less often, which pays where narrow ones take several rounds and leave more of the last one idle.
    return config(*(wide if even < 1 and wide_even >= even else narrow), 1, 4, 3, True)


def _few_copied(room: int, n: int, k: int, along: bool) -> dict[str, Any]:
    """One program a multiprocessor at most, with much on its way: 32 x 4096 x 6144 took 11.6 µs in 96 of them, 13.4 to 14.0 in two
    or more a multiprocessor. Parts of few tiles may be short, but joining costs with every row."""
    processors, tiles, many, tile_k = chips.current().multiprocessors, blocks(n, 64), room > 16, min(256, max(16, next_power(k)))
    if along and k % 16 and 512 < k < 1024 and 0 < k % 128 <= 32:  # 8 x 792 x 5760 took 4.2 µs by descriptors, so 4.0
        return config(64, 64, 1, 4, 6)
    if 128 < k < 1024:  # 32 x 384 x 6272 took 3.3 µs in tiles of 256, so 2.7; 32 x 280 x 7056 4.3 and 3.1
        return config(64, 64 if k <= 320 else 128, 1, 4, 4, True)
    if not along and many and tiles <= 28 and 1248 < k < 1800:  # 30 x 1464 x 1248 took 5.2 µs by descriptors, so 4.2
        return config(64, 64, 3, 4, 3)
    tile_n = 64
    if not along and n % 16 and not many and 44 <= tiles <= 80 and k >= 1400:
        # Lines at odd multiples of 16 bytes: 8 x 2824 x 3432 took 9.1 µs in tiles of 64, so 6.6.
        return config(128, 64, max(1, min(processors // blocks(n, 128), k // 500)), 4, 4, True)
    if tiles <= 8 and k >= 2048:  # 8 x 16384 x 128 took 6.0 µs in tiles of 64 and 8 parts, so 4.5; 32 x 16384 x 128 8.5 and 5.5
        tile_n = 16 if many and n <= 256 else 32
        parts = min(8 if many and (tile_n == 32 or k < 12288) else 16, k // (512 if many else 256))
    elif tiles < 32 and many:  # 32 x 8192 x 1536 took 7.8 µs in four parts, in three 7.1; 25 x 2816 x 1376 5.7 in two, in three 5.0
        parts = min(processors // tiles, 3, k // 700)
    elif tiles < 32:  # 16 x 4096 x 1024 took 5.4 µs in two parts, in four 4.4; 16 x 10112 x 608 6.5 in four, in six 5.6
        parts = min(processors // tiles, 4 if tiles > 12 and k < 12288 else 6, k // 512) if k >= 1400 else 1
    else:
        parts = min(processors // tiles, 3 if many else 4, k // (1024 if tiles < 48 else 1536))
    parts = max(1, parts)
    if along and parts == 2 and tiles >= 48 and k <= 4608:  # 32 x 4096 x 4096 took 7.9 µs by descriptors, so 7.4
        return config(64, 128, 2, 4, 4)
    share = blocks(k, parts)
    if tile_n == 64 and tile_k == 256 and blocks(share, 256) * 256 > 1.06 * blocks(share, 128) * 128:
        tile_k = 128  # parts of as many tiles each: 8 x 3144 x 2640 took 6.6 µs in tiles of 256, so 5.9
    return config(tile_n, tile_k, parts, 4, _stages(k, tile_k, room), True)


def _at_once(programs: int, tile_n: int, room: int, ways: list[tuple[int, int]]) -> tuple[int, int] | None:
    """The first of these lengths of tile and counts of them on their way that leaves room on the chip for all programs at once."""
    return next((way for way in ways if _evenness(programs, way[1] * (tile_n + room) * way[0] * 2) == 1), None)


def _evenness(programs: int, held: int) -> float:
    """1 if programs that hold so many bytes of shared memory lie on the chip at once, else what they fill of their rounds."""
    chip = chips.current()
    places = (chip.shared_memory + 1024) // (held + 1024) * chip.multiprocessors
    return 1.0 if programs <= places else _filled(programs, places) if places else 0.0


def candidates(items: int, rows: int, n: int, k: int, along: bool, size: int, copyable: bool) -> list[dict[str, Any]]:
    """Shapes worth timing; splits follow from how many programs the columns give."""
    if goes_by_lanes(items, rows, n, k, along, size, copyable):
        shapes = [(2, 1024), (4, 512), (4, 1024), (8, 512), (16, 256), (16, 512), (2, 2048)]
        across = [(8, 128), (16, 64), (16, 128), (32, 32), (32, 128), (64, 16), (128, 16), (256, 4), (512, 4)]
        shapes = [*([(4, 256), (8, 256)] if rows > 1 else []), *((a, b) for a, b in shapes if rows * a * b <= 8192)]
        made = [(a, b, warps, 2, False) for a, b in (shapes if along else across) for warps in ((4, 8) if along else (1, 2, 4))]
    else:
        shapes = [(32, 128), (64, 64), (64, 128), (128, 64), (128, 128)] if along else [(64, 64), (128, 64), (64, 128)]
        made = [(a, b, 4, stages, False) for a, b in shapes for stages in (3, 5)] + [(64, 64, 4, 7, False), (128, 64, 8, 4, False)]
        copies = [(32, 256, 4), (64, 128, 3), (64, 128, 4), (64, 256, 4), (128, 64, 5), (128, 128, 2), (128, 128, 3), (128, 128, 4)]
        copies = [*copies, (256, 128, 3), *([(256, 64, 3), (128, 64, 2), (64, 64, 2)] if items > 1 else [])]
        made += [(a, b, 4, stages, True) for a, b, stages in copies if copyable and b <= longest_copied(items, k, along)]
        made += [(*cut, False) for cut in _SMALL] if items > 1 else []
    processors, result = chips.current().multiprocessors, []
    for a, b, warps, stages, copied in made:
        tiles = items * blocks(n, a)
        splits = _level(tiles, k, b, 2 * processors, max(1, 2 * processors // tiles))
        counts = [splits, min(2 * splits, _SPLITS_MOST), _level(tiles, k, b, processors, _SPLITS_MOST)]
        if items > 1 and tiles >= 2 * processors:
            counts = [1]  # parts of many items are much memory, and many counters
        elif tiles >= processors // 2:
            counts.append(1)
        result += [config(a, b, count, warps, stages, copied) for count in dict.fromkeys(counts)]
    return result

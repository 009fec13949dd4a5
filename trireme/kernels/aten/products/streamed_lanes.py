"""Which products of few rows each lane sums for itself, and how those are cut. Knows sizes, the chip and what was measured on an
H200. Shapes are rows x summed elements x columns, after a batch's items."""

from __future__ import annotations

from typing import Any

from trireme.kernels import chips
from trireme.kernels.aten.products.streamed_room import SPLITS_MOST, config, worth_copying
from trireme.kernels.launch import blocks, next_power


def goes_by_lanes(items: int, rows: int, n: int, k: int, along: bool, size: int, copyable: bool) -> bool:
    """Whether each lane sums its own columns: for one row along the summed dimension; and in a batch where tiles for the tensor
    cores were few or nearly empty (32 x 1 x 2048 x 128 4.5 µs with these, so 3.8) or come element by element (531 x 1 x 1089 x 41
    39 µs, so 18)."""
    if rows > 1:
        return along and size == 2 and not copyable and (_handful(rows, n, k) or _suit_lanes(items, rows, n, k))
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


def _handful(rows: int, n: int, k: int) -> bool:
    """Whether two to four rows give so few outputs that tiles for the tensor cores would be nearly empty: 4000 x 2 x 2406 x 2 took
    114 µs in these, so 29; 700 x 3 x 823 x 3 12.5 and 5.0; 9000 x 2 x 97 x 2 21 and 6.8; but 4000 x 4 x 340 x 4 16, by lanes 17."""
    most = 10 if k % 8 == 4 and k < 1024 else 20
    return rows <= 4 and rows * n <= most and k > (32 if k % 2 else 256)


def _few_tiles(items: int, n: int) -> bool:
    return items * blocks(n, 64) <= chips.current().multiprocessors


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


def cut_by_lanes(items: int, rows: int, n: int, k: int, along: bool, size: int) -> dict[str, Any]:
    if rows > 1:
        return _several_rows(items, rows, n, k)
    if items == 1:
        return _one_row(n, k, size)
    return _along_items(items, n, k) if along else _across_items(items, n, k)


def _one_row(n: int, k: int, size: int) -> dict[str, Any]:
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
    return config(tile_n, tile_k, max(1, min(wanted, SPLITS_MOST, k // (2 * tile_k))), warps, 2)


def _several_rows(items: int, rows: int, n: int, k: int) -> dict[str, Any]:
    """How these are cut."""
    processors, tile_n = chips.current().multiprocessors, 2 if n <= 2 else 4
    if k <= 256 and n <= 32:  # 9000 x 2 x 227 x 16 took 46 µs in tiles of 256 with two warps, so 31
        return config(tile_n, 64, 1, 1, 2)
    if k <= 704:  # 4000 x 2 x 339 x 2 took 7.3 µs in tiles of 4, so 6.4
        return config(2, 512, 1, 4, 2) if tile_n == 2 else config(4, 256, 1, 2, 2)
    many = 2 * items * blocks(n, 8) >= 3 * processors
    if rows > 2 and many and not _handful(rows, n, k):  # 2 x 4 x 6273 x 2069 took 27.5 µs in tiles of 512, so 24.6
        return config(8, 256, 1, 4, 2)
    parts = min(4 * processors // (items * blocks(n, 4)), 4, k // 1024)  # 2 x 8119 x 405 took 5.8 µs whole, so 5.3
    return config(tile_n, 512, max(1, parts), 4, 2)


def _along_items(items: int, n: int, k: int) -> dict[str, Any]:
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


def _across_items(items: int, n: int, k: int) -> dict[str, Any]:
    """How these are cut, from 260 shapes on an H200."""
    width, depth, processors = max(8, next_power(n)), max(2, next_power(k)), chips.current().multiprocessors
    if n <= 32 and k <= 128:  # 19178 x 1 x 88 x 9 took 25.7 µs in tiles of 64, so 16.5
        return config(width, min(depth, 32 if width == 16 and n % 8 else 1024 // width), 1, 1, 2)
    if n <= 16:
        parts = min(4 * processors // items, SPLITS_MOST, k // 256)
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
    parts = min(4 * processors // (items * blocks(n, tile_n)), SPLITS_MOST, k // 384)
    return config(tile_n, 128, max(1, parts), 4, 2)

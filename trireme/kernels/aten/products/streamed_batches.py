"""How a batch's products of few rows are cut into tiles for the tensor cores. Knows sizes, the chip and what was measured on an
H200. Shapes are items x rows x summed elements x columns."""

from __future__ import annotations

from typing import Any

from trireme.kernels import chips
from trireme.kernels.aten.products.streamed_room import at_once, config, filled, fills, longest_copied, stages_alone, worth_copying
from trireme.kernels.launch import blocks, next_power


def of_batch(items: int, room: int, n: int, k: int, along: bool, copyable: bool) -> dict[str, Any]:
    """How a batch's items are cut, from 530 shapes of 1 to 32 rows on an H200: plain tiles had 0.3 to 1.2 of torch's speed."""
    height, copied = max(16, next_power(n)), copyable and worth_copying(items, k, along)
    if k > 128:
        return (_copied_items if copied else _plain_items)(items, room, height, n, k, along)
    if copied and not (k <= 16 and height > 32 and (room > 16 or not along)):
        # 256 x 32 x 64 x 1024 took 17.9 µs with one stage, so 12.9; 28603 x 4 x 48 x 16 40.5 with four warps, with one 20.0; but
        # 156 x 32 x 16 x 7760 took 42, by pointers 31.
        tile_k = min(64, max(16, next_power(k)))
        if n > 128 and not fills(n, 128):  # 2243 x 32 x 32 x 192 took 22.9 µs in tiles of 128 with one stage, so 15.6
            return config(64, tile_k, 1, 2, 2, True)
        # More on its way of what no cache holds: 41 x 26 x 112 x 6992 took 25.7 µs with two tiles, so 21.7.
        more = along and room > 16 and height > 32 and k > 64 and items * n * k > 18 << 20
        return config(min(128, height), tile_k, 1, 1 if height <= 32 else 4, 3 if more else 2 if k > 16 else 1, True)
    if height <= 32:
        return _by_few_warps(height, k, along)
    if k <= 16:  # 167 x 8 x 16 x 3123 took 15.2 µs with four warps and four stages, so 8.8; 1000 x 32 x 12 x 1000 42 and 38
        if 128 < n <= 512 and room > 16:  # 6898 x 32 x 16 x 152 took 47 µs in tiles of 128 with four warps, so 36
            return config(64, 16, 1, 1, 1)
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
    tile_n = 128 if fills(n, 128) else 64  # 5531 x 9 x 40 x 144 took 35.0 µs in tiles of 128, so 28.1; 529 x 4 x 84 x 134 9.3, 5.6
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
    if fills(n, 128) and filled(items * blocks(n, 128), chip.multiprocessors) >= 0.8:
        # As much on its way as leaves room for all programs at once: 20 x 23 x 416 x 2800 took 13.5 µs with four tiles, so 9.0.
        ways = [(128, 3)] if room == 16 and longest >= 128 and fills(k, 128) else []
        ways += [(min(64, longest), stages) for stages in (4, 3, 2)]
        tile_k, stages = at_once(items * blocks(n, 128), 128, room, ways) or ways[0]
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
            return config(64, 128, 1, 4, 4 if at_once(tiles, 64, room, [(128, 4)]) else 3, True)
        if k >= 3072 and 10 * tiles <= 13 * chip.multiprocessors:  # 2 x 9 x 7232 x 4800 took 39.5 µs whole, so 34.6
            return config(64, min(64, longest), 3, 4, 3, True)
        # 296 x 4 x 416 x 192 took 12.7 µs with four tiles on their way, which not all programs at once have room for, so 8.9.
        # All of three on their way: 3252 x 29 x 144 x 64 took 28.8 µs with three, 27.4 with more.
        ways = [(min(64, longest), stages) for stages in ((4, 3) if room == 16 else (4,) if along and k <= 192 else (3,))]
        return config(64, min(64, longest), 1, 4, (at_once(tiles, 64, room, ways) or ways[0])[1], True)
    if longest < 128 or (k < 1280 and not along):  # 2 x 16 x 1856 x 2096 took 7.2 µs by descriptors, so 5.0
        return _plain_items(items, room, height, n, k, along)
    if k < 1024:  # 2 x 15 x 624 x 3024 took 3.8 µs by descriptors, so 3.0; 14 x 8 x 296 x 184 2.7 and 2.0
        return config(64, 64, parts, 4, 4)
    tile_k = min(256, next_power(k), longest)
    return config(64, tile_k, parts, 4, stages_alone(k, tile_k, room), True)


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
    if not along and n > 128 and fills(n, 128) and (parts <= 1 or n % 8 == 0):
        # 2 x 26 x 2016 x 4432 took 10.0 µs in tiles of 64, so 9.2; 13 x 32 x 368 x 5040 15.7 with three on their way, with two 12.9
        ways = [(32 if k <= 256 else 64, count) for count in (stages, 2)]
        tile_k, stages = at_once(items * blocks(n, 128), 128, room, ways) or ways[0]
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

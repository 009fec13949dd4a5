"""How products of few rows are cut: tiles, parts of the sum, warps, and whether descriptors bring them. Knows sizes, the chip and
what was measured on an H200; nothing of tensors or kernels. Shapes are rows x summed elements x columns, after a batch's items."""

from __future__ import annotations

from typing import Any

from trireme.kernels import chips
from trireme.kernels.aten.products.streamed_batches import of_batch
from trireme.kernels.aten.products.streamed_lanes import cut_by_lanes, goes_by_lanes
from trireme.kernels.aten.products.streamed_room import SPLITS_MOST, at_once, config, evenness, level, longest_copied, stages_alone
from trireme.kernels.launch import blocks, next_power

_SMALL = [  # tiles, warps and stages that small items of a batch may want
    (16, 32, 1, 2), (16, 64, 2, 3), (16, 128, 2, 3), (32, 32, 1, 2), (32, 32, 2, 3), (32, 64, 4, 3), (32, 128, 2, 4),
    (64, 16, 2, 1), (64, 32, 2, 2), (64, 64, 4, 1), (64, 256, 4, 4), (128, 16, 4, 2),
]  # fmt: skip


def default(items: int, rows: int, n: int, k: int, along: bool, size: int, copyable: bool) -> dict[str, Any]:
    """`along`: the streamed matrix is contiguous along the summed dimension; `copyable`: descriptors may bring its tiles."""
    chip = chips.current()
    if chip.interpreted:
        return config(max(16, min(64, next_power(n))), max(16, min(512, next_power(k))), 2 if k > 64 else 1, 4, 1)
    if goes_by_lanes(items, rows, n, k, along, size, copyable):
        return cut_by_lanes(items, rows, n, k, along, size)
    room = max(16, next_power(rows))
    if items > 1:
        return of_batch(items, room, n, k, along, copyable and size == 2)
    if copyable and size == 2:
        if rows == 1 and along and k > 1600 and 2 * blocks(n, 64) > 5 * chip.multiprocessors:
            return config(64, 64, 1, 4, 4, True)  # 2872 x 35944 took 57 µs in tiles of 128, so 52
        return _copied(room, n, k, along)
    return _plain(room, n, k, along, size)


def _plain(room: int, n: int, k: int, along: bool, size: int) -> dict[str, Any]:
    """One matrix by pointers, whose lines no descriptor takes."""
    processors, tiles = chips.current().multiprocessors, blocks(n, 64)
    if size == 4:
        return config(64, 64, max(1, min(next_power(max(1, round(2 * processors / tiles))), SPLITS_MOST, k // 128)), 4, 4)
    if tiles <= 40:  # 17 x 1174 x 526 took 7.0 µs in tiles of 64, so 4.2; 16 x 2531 x 1441 17.7 and 7.8
        columns = blocks(n, 32)
        return config(32, 128, max(1, min(4 * processors // columns, 8 if columns > 8 else 12, k // 144)), 4, 2)
    if room > 16 and along and k % 2 and k >= 2048:
        # Elements come one by one: 19 x 15843 x 4755 took 167 µs in the tiles below, 137 in four parts of these, 98 in three, which
        # fill the chip twice and no more; 32 x 5811 x 5639 76, in four parts 58, in five, which fill it four times, 50.
        fills = 2 if 3 * tiles <= 2 * processors else 4
        parts = fills * processors // tiles if tiles <= processors else min(4, 6 * processors // tiles)
        return config(64, 64, max(1, parts), 4, 3)
    if k >= 8192 or (along and k >= 2048 and tiles > 80):
        # 32 x 18838 x 6842 took 137 µs in tiles of 64 and four parts, in two of these 102; 2 x 4022 x 9401 30.3 in two.
        return config(64, 128, max(1, min(9 * processors // (4 * tiles) if tiles > 80 else 3 * processors // tiles, 8)), 4, 2)
    # 2 x 4625 x 4230 took 18.5 µs with four tiles on their way, with three 15.4 in eight parts; 23 x 4224 x 2364 11.8 and 9.9.
    parts = max(min(4 * processors // tiles, k // 600), min(2 * processors // tiles, 3, k // 200))
    return config(64, 64, max(1, min(parts, 8)), 4, 3)


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
    if not along and k % 64 == n % 64 == 0 and 512 < k <= 1280 and 2 < tiles / chip.multiprocessors <= 3:
        return config(64, 64, 1, 4, 4, True)  # 14 x 1024 x 21504 took 8.3 µs in tiles of 128, so 7.6
    uneven = n % 64 if not along else k % 16 and k <= 1600
    # Wide tiles are read less often: 32 x 728 x 27136 took 9.0 µs in tiles of 128, so 8.0; 14 x 600 x 28672 8.4 and 7.0.
    many = not along and ((room > 16 and k <= 1600) or (k % 64 and 512 < k < 2048))
    if (uneven or many) and chip.multiprocessors // 2 < blocks(n, 256) <= chip.multiprocessors:
        # Lines of memory that tiles share: 16 x 760 x 31912 took 13.4 µs in tiles of 128, so 11.5.
        return config(256, 64, 1, 4, 4, True)
    if not along and k <= 512 and n % 64 == 0:  # 16 x 384 x 21376 took 4.7 µs in tiles of 128, so 4.3
        return config(64, 64, 1, 4, 4 if tiles <= 2 * chip.multiprocessors else 2, True)
    if k > 1280 and blocks(n, 128) <= chip.multiprocessors and (k <= 1600 or (along and k % 16)):
        # 8 x 1416 x 15416 took 10.7 µs with four on their way, so 10.1; 4 x 2504 x 9000 11.5 in tiles of 64, so 10.1.
        return config(128, 64, 1, 4, 6, True)
    if k <= 1600:  # 4 x 296 x 23688 took 5.5 µs in tiles of 64 x 128, so 4.4; 8 x 896 x 151936 68 and 66
        return config(128, 64, 1, 4, 4 if at_once(blocks(n, 128), 128, room, [(64, 4)]) else 3, True)
    if not along and n % 64:  # 16 x 2656 x 10328 took 17.5 µs in tiles of 64, so 16.3
        tile_k, stages = at_once(blocks(n, 128), 128, room, [(64, 6), (64, 4), (64, 3)]) or (64, 2)
        return config(128, tile_k, 1, 4, stages, True)
    narrow, wide = (64, 128), (256, 128) if along else (128, 64)
    if at_once(tiles, 64, room, [(128, 4)]):
        return config(*narrow, 1, 4, 4, True)  # 32 x 8192 x 10240 took 44.9 µs with three tiles on their way, so 42.3
    even, wide_even = (evenness(blocks(n, a), 3 * (a + room) * b * 2) for a, b in (narrow, wide))
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
    if along and k % 16 == 0 and not many and 256 < n <= 512 and k >= 2048:
        return config(32, 128, 12 if n <= 384 else 8, 4, 4)  # 16 x 3584 x 512 took 4.9 µs by descriptors, so 3.6
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
    return config(tile_n, tile_k, parts, 4, stages_alone(k, tile_k, room), True)


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
        splits = level(tiles, k, b, 2 * processors, max(1, 2 * processors // tiles))
        counts = [splits, min(2 * splits, SPLITS_MOST), level(tiles, k, b, processors, SPLITS_MOST)]
        if items > 1 and tiles >= 2 * processors:
            counts = [1]  # parts of many items are much memory, and many counters
        elif tiles >= processors // 2:
            counts.append(1)
        result += [config(a, b, count, warps, stages, copied) for count in dict.fromkeys(counts)]
    return result

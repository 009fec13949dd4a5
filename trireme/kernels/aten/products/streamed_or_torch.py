"""Which products of few rows are ours: those that an H200 showed to be as fast as torch's. Knows sizes, the chip and how lines lie;
nothing of tensors or kernels. Shapes are rows x summed elements x columns, after a batch's items."""

from __future__ import annotations

from trireme.kernels import chips
from trireme.kernels.aten.products.streamed_lanes import crosses_by_lanes, goes_by_lanes
from trireme.kernels.aten.products.streamed_room import longest_copied, worth_copying
from trireme.kernels.launch import blocks


def ours(items: int, rows: int, n: int, k: int, along: bool, line: int, described: bool, size: int) -> bool:
    """`along`: the streamed matrices are contiguous along the summed dimension; `line`: elements from one of their lines to the
    next; `described`: a descriptor can say where all of them lie; `size`: bytes of an element."""
    if items == 1:
        return _of_one_matrix(rows, n, k, along, line, described, size)
    if rows == 1 and not along and (n <= 128 or k <= 32) and crosses_by_lanes(items, n, k):
        return True
    copyable = described and chips.current().descriptors
    copied = copyable and worth_copying(items, k, along)
    few = rows * n <= 32 and k > 512 if k % 2 else rows * n <= 20 and k >= 512 and not copied
    if along and rows > 1 and few and not goes_by_lanes(items, rows, n, k, along, size, copyable):
        return False  # few outputs in tiles: 700 x 4 x 1155 x 8 took 16 µs, torch 13.4
    if _many_one_by_one(items, rows, n, k, along, line):
        return False
    if not _suits_torch(items, n, k, line):
        return True
    if rows > 16 and k == 8 and n > 2048 and not along:  # 282 x 32 x 8 x 6032 took 70 µs, torch 61
        return False
    # Short sums, and few rows of not many columns, however they lie: of 79 such that had been torch's
    # 77 were as fast or faster, in the mean 1.6 times.
    if k <= (600 if rows <= 16 else 256) or (rows <= 16 and n <= 448 and k <= 2048):
        return True
    # Torch takes 16 bytes at once; descriptors do of whole items only, and the compiler if lines begin at multiples of 16 elements.
    even = line % 16 == 0
    return _of_many_rows(items, rows, n, k, along, even, copied) if rows > 16 else copied or even


def _of_one_matrix(rows: int, n: int, k: int, along: bool, line: int, described: bool, size: int) -> bool:
    """One row goes at the speed of the memory: along the summed dimension always; across it where there are columns enough to fill
    the chip, and tensor cores take them by whole lines."""
    if rows == 1:
        return along or (described and n > 512 and (size == 2 or k >= 1024))
    suits = _suits_torch(1, n, k, line)
    uneven = line % 16 > 0 and suits  # 32 x 4360 x 24056 took 69 µs, torch 53
    if rows > 8 and not along and k % 64 and 512 < k < 1024 and 80 < blocks(n, 256) <= 104 and suits:
        return False  # 25 x 712 x 24576 took 8.5 µs, torch 7.4; 14 x 1000 x 22528 9.6 and 8.1
    if rows <= 16:  # 16 x 16384 x 200 took 7.4 µs, torch 6.0
        few = k >= 12288 and n % 32 and n <= 512
        # 16 x 4488 x 11216 took 30 µs, torch 27; 8 x 1608 x 5888 6.1 and 5.0
        tiles = blocks(n, 64) if k < 1024 else 2 * blocks(n, 64)
        wide = rows > (8 if k < 1024 else 4) and along and tiles > chips.current().multiprocessors
        return not (few or (wide and uneven) or _many_one_by_one(1, rows, n, k, along, line))
    # Long sums, whose parts are much to join: 32 x 16384 x 512 took 7.8 µs, torch 6.9; 29 x 5344 x 616 6.4 and 5.8; past uneven
    # rows shorter ones, too: 31 x 8968 x 1776 11.7 and 9.5.
    least = 8192 if n <= 512 else 4096 if k % 16 else 5248 if n <= 1024 else 9216
    long = 128 < n <= 2048 and k >= least and (n <= 512 or k % 8 == 0)
    return not (long or uneven)


def _of_many_rows(items: int, rows: int, n: int, k: int, along: bool, even: bool, copied: bool) -> bool:
    """Of 17 to 32 rows of items that suit torch."""
    tiles, processors = items * blocks(n, 64), chips.current().multiprocessors
    if not even or k < 2048:
        # 8 x 30 x 1408 x 472 by descriptors took 5.7 µs, torch 4.6; 2 x 32 x 1752 x 3296 by pointers 7.8 and 6.6.
        wide = items <= 3 and k >= 1408 and not copied and 2 * tiles > processors
        return even and not wide
    if not copied:  # 2 x 32 x 4472 x 2784 took 15.8 µs, torch 12.2; 2 x 32 x 5528 x 1888 13.6 and 11.1
        return False
    if n <= 32:  # 113 x 32 x 5328 x 24 took 28.8 µs, torch 21.8
        return 2 * tiles <= processors
    if longest_copied(items, k, along) < 128 and tiles > processors:  # 2 x 32 x 5568 x 6080 took 49 µs, torch 41
        return False
    return rows == 32 or k >= 4096 or tiles <= processors  # rows that no descriptor takes: 2 x 21 x 2288 x 4544 10.4 µs, torch 8.8


def _many_one_by_one(items: int, rows: int, n: int, k: int, along: bool, line: int) -> bool:
    """Whether lines across the summed dimension are odd, so that elements come one by one, and outputs many: past two rows torch
    takes those as fast (2 x 1395 x 13155 20.6 µs, torch 15.7; 4 x 270 x 18527 8.0 and 6.6), but few of them up to seven times as
    slowly."""
    few_rows = rows == 2 or (2 < rows <= 4 and k < 512)
    return few_rows and not along and items <= 3 and n >= 4096 and line % 2 == 1


def _suits_torch(items: int, n: int, k: int, line: int) -> bool:
    """Whether torch takes lines and results 16 bytes at once, and the sums are not few and long, which we do in parts
    (2 x 18 x 6736 x 984 took 11.6 µs, torch 23.6)."""
    in_parts = k >= 2048 and 3 * items * blocks(n, 64) <= chips.current().multiprocessors
    return n % 8 == k % 8 == line % 8 == 0 and not in_parts

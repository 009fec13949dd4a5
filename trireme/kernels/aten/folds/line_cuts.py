"""Where few columns of a matrix are read in lines of its whole rows, for which tiles of columns would be partly empty, and how long
these are. The figures are what sums or maxima took on an H200 in tiles, and so, in µs. Knows sizes, nothing of kernels."""

from __future__ import annotations

import math

from trireme.kernels.aten.folds.cut import MOST_COUNTED, Cut


def pays(cut: Cut) -> bool:
    """Whether few columns, long enough, lie together; `value_cuts` has tiles for some of them all the same."""
    # Joining costs more the more columns: 12 MB took 8.5 for twelve, their own tiles 6.4; but 60 MB 21.4 and 33.6.
    size = cut.length * cut.beside
    few = cut.matrix and 1 < cut.beside < 64 and cut.beside % 16 != 0 and size <= MOST_COUNTED
    if cut.rows > cut.beside:
        return few and _of_several(cut, size)
    return few and size >= 1 << (17 if cut.rows <= 3 else 22)


def _of_several(cut: Cut, size: int) -> bool:
    """The same of several matrices of so many elements each."""
    if cut.itemsize == 8:  # 2000 x 3000 x 5 took 151, so 58; but 2621 x 480 x 5 11.2 and 12.4
        if cut.beside > 16:
            return cut.large and 480 < cut.length <= 560 and math.lcm(cut.beside, 16) <= 512
        return size >= (2000 if cut.beside == 2 else 3000)
    if size >= 8192:  # 1789 x 972 x 13 bfloat16 24.2 and 10
        return True
    if cut.itemsize == 2:  # 1311 x 2033 x 3 10.0 and 4.6; 1777 x 450 x 10 5.2 and 6.3
        return size >= 2560 and cut.beside <= 16 and (cut.beside % 2 == 1 or cut.beside <= 6)
    if cut.itemsize == 4 and 16 < cut.beside <= 32 and cut.even and cut.length <= 192:
        return False  # 4369 x 120 x 24 12.0 and 17.8, 4493 x 140 x 20 12.6 and 17.0
    # 4000 x 500 x 2 floats 8.5 and 5.4; but 2000 x 100 x 20 3.7 and 5.4.
    return size >= (2560 if cut.beside > 16 else 900 if cut.beside == 2 and cut.itemsize == 4 else 1900)


def line(cut: Cut) -> tuple[int, int]:
    """Elements that a program takes at once, and its warps."""
    size = cut.length * cut.beside
    if cut.itemsize == 8 and size < 1 << 17:
        # More warps the more there is: maxima of 449 x 933 x 15 took 32.1 with two, so 11.4; 1398 x 2250 x 2 12.5, with four 11.2.
        return (512, 8 if size >= 6000 else 4) if size >= 3000 else (256, 2)
    if cut.itemsize == 1 and size < 1 << 17:  # maxima of 2047 x 605 x 27 took 15.4 with 1024 by eight, so 11.0
        return (512, 2) if size < 1 << 15 and math.lcm(cut.beside, 16) <= 512 else (1024, 4)
    if size < 1 << 14 and math.lcm(cut.beside, 16) <= 512:
        return 512, 4 if cut.itemsize == 4 else 2  # sums of 500 x 4000 x 2 floats took 4.7 with two, so 3.6
    return (1024 if size < 1 << 17 or cut.itemsize == 8 else 2048), 8

"""How folds to a value, which keep one number for each lane, are cut where they want other tiles than `cut` gives to all kernels.
Each rule stands beside what sums or maxima took on an H200 as `cut` has them, and so, in µs. Knows sizes, nothing of kernels."""

from __future__ import annotations

from trireme.kernels import chips
from trireme.kernels.aten.folds import line_cuts
from trireme.kernels.aten.folds.cut import CHOICE, Cut
from trireme.kernels.launch import blocks, next_power

Choice = tuple[int, ...]  # rows, columns, warps, splits, unroll and stages; nothing where the rules of `cut` do
_SHARED = 1200  # columns below which several programs share each
_BEYOND = 12 << 20  # elements of four bytes of which a cache holds hardly anything until they are read again
_JOINING = {1: 16, 2: 8, 4: 14}  # tiles of elements of so many bytes that are read in the time that joining parts takes
# Of elements of eight bytes in a few columns, up to so many of them: of much, and of what a cache holds.
_MUCH_IN_FEW: dict[int, Choice] = {
    160: (64, 8, 2, 1, 4, 1),  # 3422 x 100 x 18 took 9.4 with half as many columns and one warp, so 8.7
    256: (32, 16, 4, 1, 4, 1),  # 616 x 200 x 50 12.1 and 11.1
    480: (16, 32, 4, 1, 4, 1),  # 700 x 440 x 20 10.5 and 9.1
    1000: (16, 64, 4, 1, 2, 1),  # 340 x 560 x 33 17.0 and 11.3
    4096: (8, 128, 4, 1, 2, 1),  # 218 x 1200 x 24 26.3 and 11.6; 139 x 2500 x 18 29.2 and 13.9
}
_LITTLE_IN_FEW: dict[int, Choice] = {
    160: (16, 32, 2, 1, 2, 1),  # 1966 x 100 x 8 4.4 and 3.4
    480: (8, 64, 2, 1, 2, 1),  # 655 x 300 x 8 4.8 and 3.5
    1600: (8, 128, 4, 1, 2, 1),  # 349 x 562 x 8 4.9 and 3.4
}


def of_values(cut: Cut) -> dict[str, int]:
    """What folds to a value put in the place of the rules; nothing where these do."""
    choice = _chosen(cut)
    return dict(zip(CHOICE, choice, strict=True)) if choice else {}


def in_lines(cut: Cut) -> tuple[int, int] | None:
    """Elements that a program takes at once, and its warps, where these are lines of whole rows of a matrix; nothing for tiles."""
    return line_cuts.line(cut) if line_cuts.pays(cut) and not _chosen(cut) else None


def _chosen(cut: Cut) -> Choice:
    if cut.itemsize == 8:
        return _doubles_in_few(cut) or _doubles_side_by_side(cut) or _doubles_in_rows(cut)
    small = _in_small(cut) or _short_floats(cut)
    if small or line_cuts.pays(cut):
        return small
    if cut.itemsize == 4:
        return _floats_in_rows(cut) or _unshared(cut) or _much(cut)
    if cut.itemsize == 2:
        return _half_pairs(cut) or _long_halves(cut) or _unshared(cut) or _much(cut) or _short_halves(cut)
    return _byte_pairs(cut) or _unshared(cut)


def _in_small(cut: Cut) -> Choice:
    """Of less than eight bytes in many small matrices, or in some thousand columns whose lines begin anywhere: the fewer columns
    there are, the fewer a tile has, and the more of each, so that the chip is full and none is shared, which took 3 µs. Maxima of
    196 x 439 x 17 floats took 5.8, so 3.0; sums of 155 x 211 x 50 bfloat16 5.6 and 2.5; of 33 x 450 x 103 floats 5.4 and 3.1."""
    sixteens = cut.even and cut.common == 1
    most = 256 if cut.itemsize == 4 and cut.common == 2 else 128
    if not cut.across or sixteens or cut.rows < _SHARED or cut.length > 2048 or (cut.beside >= most and cut.even):
        return ()
    if cut.itemsize == 1:
        return _small_bytes(cut)
    if cut.even and cut.beside <= 12 and cut.large and 28 <= cut.length <= 32:
        return 64, 16, 2, 1, 2, 1  # 100488 x 30 x 12 bfloat16 took 31.0, so 24.6; 36961 x 31 x 8 floats 11.0 and 9.2
    if cut.beside <= 8:  # more columns would lie in many matrices: 1857 x 345 x 3 bfloat16 5.8 and 2.6
        if cut.length <= (64 if cut.rows <= 14000 else 100) or cut.length * cut.beside >= 4000:
            return ()
        return (16, 64, 4, 1, 2, 1) if cut.rows <= 14000 or cut.length > 400 else (16, 32, 4, 1, 4, 1)
    if cut.rows <= 14000 and cut.length > 136:
        return 16, 64, 4, 1, 2, 1
    if cut.beside >= most or cut.length <= (48 if cut.itemsize == 2 else 60):
        return ()
    if cut.rows <= 28000:  # sums of 151 x 253 x 93 floats 6.4 and 3.9
        return (32, 32, 4, 1, 2, 1) if cut.itemsize == 2 or cut.beside >= 64 or not cut.large else ()
    return _small_halves(cut) if cut.itemsize == 2 else _small_floats(cut)


def _small_floats(cut: Cut) -> Choice:
    """Of four bytes, in more columns than tiles of 32 are for: 6160 x 200 x 10 took 19.0 in lines, so 12.1; 1997 x 75 x 35 7.4 and
    4.6; 379 x 250 x 130 14.5 and 11.0; 493 x 250 x 100 16.2 and 12.3."""
    size = cut.length * cut.beside
    if cut.length <= 68 or (cut.large and size > 6000 and cut.rows * cut.length <= _BEYOND and line_cuts.pays(cut)):
        return ()
    if cut.rows * cut.length > _BEYOND and cut.length > 100:
        return 32, 16, 4, 1, 4, 1  # 8656 x 137 x 20 29.6 and 26.3
    if cut.beside < 64:  # 5506 x 100 x 43 29.4 and 27.0
        return 64, 8, 2, 1, 4, 1
    if cut.length > 340:
        return ()
    return (64, 8, 2, 1, 4, 1) if cut.length <= 175 or cut.common <= 2 else (32, 32, 4, 1, 2, 1)


def _small_halves(cut: Cut) -> Choice:
    """The same of two bytes: sums of 1198 x 250 x 35 took 9.2 in lines, so 6.4."""
    return (64, 16, 2, 1, 2, 1) if cut.length <= 400 and cut.rows <= 1 << 17 and cut.beside < 64 else ()


def _small_bytes(cut: Cut) -> Choice:
    """Of single bytes: maxima of 9656 x 83 x 34 took 20.0 in lines, so 12.2; of 9300 x 168 x 20 17.4 and 9.6; of 3146 x 200 x 10
    6.4 and 4.1; of 541 x 355 x 17 6.0 and 3.4."""
    large = cut.rows * cut.length > 8 << 20 and cut.length * cut.beside > 4800 and cut.length > 246
    if cut.length <= 24 or (large and (cut.beside <= 32 or cut.rows > 20000) and line_cuts.pays(cut)):
        return ()
    if cut.rows <= 16000:
        return (16, 32, 4, 1, 4, 1) if cut.length > 136 else (32, 16, 4, 1, 4, 1)
    if cut.rows <= 38000 and cut.length > 36 and (cut.beside > 12 or cut.length <= 246):
        return (32, 16, 4, 1, 4, 1) if cut.beside >= 64 or not cut.even or cut.length > 64 else ()
    if cut.beside >= 64:
        return ()
    if cut.length > 246:
        return (16, 32, 4, 1, 4, 1) if cut.beside <= 12 else ()
    # Where a thread may take four or eight bytes at once, short ones are no faster so: 104546 x 51 x 8 13.8 and 19.8.
    return (64, 8, 2, 1, 4, 1) if not cut.even or cut.length > (64 if cut.common == 8 else 48) else ()


def _doubles_in_lines(cut: Cut) -> bool:
    """Whether a few columns of eight bytes do better in lines than in any tile: maxima of 196 x 3500 x 9 took 20.1 in tiles, so
    11.9; of 449 x 933 x 15 32.1 and 11.4; of 389 x 508 x 31 15.1 and 11.6."""
    return (cut.length > 1600 or cut.beside > 12) and line_cuts.pays(cut)


def _doubles_in_few(cut: Cut) -> Choice:
    """Of eight bytes in a few columns, neither short nor very long: small tiles, several on their way."""
    if not cut.across or cut.even or cut.beside >= 64 or cut.rows < 600 or cut.length <= 64 or _doubles_in_lines(cut):
        return ()
    if cut.large and 256 < cut.length <= (416 if cut.rows <= 16000 else 480):
        # 685 x 348 x 26 took 16.1 in tiles of 16, so 13.1; 390 x 470 x 50 22.5 and 20.1. Four at a time only if few are left over:
        # 592 x 400 x 26 12.6 by two, so 11.1.
        return 32, 32, 4, 1, 4 if blocks(cut.length, 32) % 4 < 2 else 2, 1
    if cut.large and cut.length > 1000 and cut.rows > 5400 and cut.beside > 8:
        return 16, 64, 4, 1, 2, 1  # norms of 194 x 1889 x 33 took 34.5 in tiles of eight, so 26.9
    return next((way for longest, way in (_MUCH_IN_FEW if cut.large else _LITTLE_IN_FEW).items() if cut.length <= longest), ())


def _doubles_side_by_side(cut: Cut) -> Choice:
    """Of eight bytes in many columns, or short rows of them in any number."""
    if not cut.across:
        return ()
    if cut.wide:  # 7561 x 64 x 13 took 15.4, so 11.1; 24 x 64 x 4001 12.4 and 8.7
        return (128, 8, 4, 1, 2, 1) if cut.length > 40 and not cut.even else ()
    if cut.beside < 64:
        return ()
    if cut.even:  # maxima of 100 x 40000 took 6.9, so 5.9; norms of 120 x 32016 7.6 and 5.2
        return (32, 8, 2, 1, 1, 3) if cut.many and 64 < cut.length <= 128 and not cut.large else ()
    if cut.length > 256 and 192 <= cut.rows <= 8192:
        # Norms of 16 x 6000 x 65 took 14.7, so 11.0; of 8 x 12000 x 66 15.1 and 11.7; maxima of 6 x 500 x 1001 7.4 and 5.1.
        tiles = blocks(cut.length, 64)
        parts = max(1, min(4 * chips.current().multiprocessors // blocks(cut.rows, 16), tiles // 4))
        return 16, 64, 4, parts, 4 if blocks(tiles, parts) >= 12 else 2, 1
    if 256 < cut.length <= 2048 and cut.rows <= 12800:
        return 32, 64, 4, 1, 1, 1  # maxima of 135 x 700 x 65 16.6 and 11.8, of 165 x 1100 x 65 30.6 and 25.7
    # 65 x 300 x 322 12.3 and 11.0, 3 x 300 x 5001 7.0 and 6.2, 20 x 900 x 1002 36.6 and 35.7.
    return (32, 32, 4, 1, 2, 1) if 160 < cut.length <= 2048 and 8192 <= cut.rows < 32000 else ()


def _doubles_in_rows(cut: Cut) -> Choice:
    """Many even rows, which tiles of whole ones would leave partly empty: 4183 x 1504 took 11.7, so 9.6; 2000 x 3008 10.7 and
    7.9."""
    if cut.across or not cut.even or cut.rows < 8 * chips.current().multiprocessors or not 1024 < cut.length <= 4096:
        return ()
    return (2, 256, 4, 1, 2, 1) if cut.length <= 2048 else (1, 512, 4, 1, 2, 1)


def _short_floats(cut: Cut) -> Choice:
    """Very many short rows of four bytes in lines that begin anywhere, of which a thread had one or several alone: 1871 x 7 x 4001
    took 103.8, so 56.9; 209715 x 20 x 3 23.7 and 16.3; 132395 x 12 x 33 61.4 and 54.5. Or in lines of pairs."""
    if cut.itemsize != 4 or not cut.wide or cut.length < 4:
        return ()
    if cut.even and cut.common == 2:  # 104857 x 20 x 6 18.4 and 15.3, 2827 x 54 x 54 8.1 and 5.8, 419430 x 5 x 6 16.4 and 15.2
        if cut.length > 16:
            return 256, 4, 4, 1, 2, 1
        return (256, 8, 4, 1, 1, 1) if 4 < cut.length <= 8 else ()
    if cut.even:
        return ()
    if cut.length == 4:
        return 256, 4, 4, 1, 1, 1  # 1310720 x 4 x 3 22.9 and 19.3
    return 128, 8, 4, 1, 1 if cut.length <= 8 else 2, 1


def _floats_in_rows(cut: Cut) -> Choice:
    """Many even rows of four bytes that would leave much of a tile of powers of two empty: 8366 x 1504 took 12.0, so 8.7; 4000 x
    3008 10.6 and 8.4."""
    if cut.across or not cut.even or cut.rows < 4000 or not 1024 < cut.length <= 4096:
        return ()
    return (4, 128, 4, 1, 4, 1) if cut.length <= 0.9 * next_power(cut.length) else ()


def _half_pairs(cut: Cut) -> Choice:
    """Tiles of pairs of halves: sums of 5000 x 70 x 70 took 17.2, so 12.1."""
    return (256, 4, 4, 1, 4, 1) if cut.half_pairs else ()


def _long_halves(cut: Cut) -> Choice:
    """Much of two bytes in long rows side by side, for which tiles of 32 are too small: 12000 x 24000 took 163, so 134; 6000 x
    39008 153 and 117. In lines of eights that are too long to be called even, as many parts as fill the chip: 6000 x 20008 79 and
    62."""
    if not (cut.across and cut.large and cut.many and cut.length > 1536):
        return ()
    if cut.even:
        return (64, 16, 2, 4 if cut.rows < 40000 else 2, 1, 3) if cut.rows < 1 << 16 else ()
    parts = round(8 * chips.current().multiprocessors / blocks(cut.rows, 64))
    return (64, 32, 4, max(1, parts), 1, 1) if cut.common == 8 else ()


def _short_halves(cut: Cut) -> Choice:
    """Where very many short rows of two bytes lie side by side, in lines that begin at pairs or anywhere, of which each thread
    would take single elements, or in short lines: a tile that holds them whole."""
    anywhere = cut.common == 1 and not cut.even
    if not cut.wide:
        return ()
    if cut.even and cut.length > 48 and cut.beside <= 32:
        return 32, 64, 2, 1, 1, 1  # means of 26261 x 60 x 16 took 17.7, so 13.9
    if not (anywhere or cut.common == 2) or cut.length <= 4:
        return ()
    if cut.length <= 8:
        return 256, 8, 4, 1, 1, 1  # sums of 46008 x 8 x 26 took 5.4, so 4.0; of 55309 x 7 x 65 31.5 and 16.9
    if cut.length <= 16:
        return 128, 16, 4 if anywhere else 2, 1, 1, 1  # norms of 46008 x 16 x 26 took 14.0, so 8.2
    if anywhere:
        return 128, 8, 4, 1, 2, 1  # of 1935 x 25 x 65 3.5 and 2.7
    if cut.length <= 24:  # means of 23 x 18 x 1870 took 7.0 with two warps, which ask for one element at a time; so 1.9
        return 256, 4, 4, 1, 2, 1
    return 64, 32, 2, 1, 1, 1  # norms of 9000 x 32 x 50 took 7.7, so 6.2


def _much(cut: Cut) -> Choice:
    """Of more than a cache holds in even rows, long and many: what is asked for in registers, for which a way through shared
    memory is too narrow."""
    size = chips.current().fold_tile
    many = cut.even and not cut.across and cut.rows >= 4 * chips.current().multiprocessors
    if not (many and cut.large and size < cut.length <= 4 * size):
        return ()
    if cut.itemsize == 4:
        return 1, 1024, 4, 1, 4, 1  # sums of 4300 x 4112 took 20.2 through shared memory, so 18.0
    # 5000 x 4608 took 11.5, so 7.2; 2400 x 10240 12.8 and 8.2.
    return (4, 256, 4, 1, 4, 1) if cut.length <= 7000 else (4, 512, 8, 1, 2, 1)


def _unshared(cut: Cut) -> Choice:
    """Of rows side by side that the rules would let several programs share, although joining takes longer than reading on: one
    program each; nothing where sharing pays, or is not meant."""
    if not cut.across or cut.splits == 1:
        return ()
    if cut.even:
        m, n, warps, *ahead = cut.way
        return (m, n, warps, 1, *ahead) if _reads_on(cut, blocks(cut.rows, m), blocks(cut.length, n)) else ()
    if cut.beside >= 64 and cut.common == 1 and 256 < cut.length <= 1200 and cut.rows >= 5600 and not cut.many:
        return 32, 64, 4, 1, 2, 1  # more columns than `_in_small` takes; of as many as that, 2 x 600 x 6001 7.4 by five, so 5.3
    return ()


def _reads_on(cut: Cut, tracks: int, tiles: int) -> bool:
    """Whether a program reads all tiles of its rows as soon as several have read and joined their parts, which takes as long as
    some more tiles: sums of 600 x 3072 floats took 6.5 by five, so 2.7; of 2000 x 6000 bfloat16 8.2 by two, so 6.5; but of
    3056 x 1024 3.7 by four and more alone."""
    processors = chips.current().multiprocessors
    shared = blocks(cut.splits * tracks, processors) * blocks(tiles, cut.splits)
    return not cut.large and (tracks > processors or tiles <= shared + _JOINING[cut.itemsize])


def _byte_pairs(cut: Cut) -> Choice:
    """Tiles of pairs of bytes, and of short rows of such whole."""
    if cut.wide and cut.common == 2 and not cut.even and 8 < cut.length <= 16:
        return 128, 16, 4, 1, 1, 1  # whether any of 63550 x 12 x 66 are true took 39.8, so 26.4
    if not cut.byte_pairs:
        return ()
    if cut.length <= 256 and cut.rows >= 60000:  # 2000 x 80 x 130 took 10.1 one by one, so 7.5; 50 x 33 x 2002 3.1 and 2.3
        return 256, 8, 4, 1, 4, 1
    if cut.rows >= 1 << 15:  # 4 x 896 x 9978 took 19.0 one by one, so 14.5; 40 x 600 x 1002 13.3 and 10.2
        return 64, 32, 4, 1, 2, 1
    # 1 x 3000 x 5002 took 11.1 one by one, in three parts 9.3.
    parts = max(1, min(4 * chips.current().multiprocessors // blocks(cut.rows, 32), cut.length // 768))
    return 32, 64, 4, parts, 2, 1

"""Order of tiles: neighbours in time are neighbours in the matrix, so that they share what they read. Knows no operand."""

import triton
import triton.language as tl


@triton.jit
def place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Tile number → row and column of tiles, GROUP rows at a time so that neighbours share what they read."""
    width = GROUP * tiles_n
    first = (tile // width) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    return first + (tile % width) % height, (tile % width) // height

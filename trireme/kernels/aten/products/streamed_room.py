"""What tiles of few rows find on the chip: how many programs lie on it at once, what they leave empty, and which tiles descriptors
may bring. Knows sizes and the chip, nothing of tensors or kernels."""

from __future__ import annotations

from typing import Any

from trireme.kernels import chips
from trireme.kernels.launch import blocks, next_power

SPLITS_MOST = 16


def config(n: int, k: int, splits: int, warps: int, stages: int, copied: bool = False) -> dict[str, Any]:
    return {"N": n, "K": k, "splits": splits, "warps": warps, "stages": stages} | ({"copied": True} if copied else {})


def level(tiles: int, k: int, tile_k: int, places: int, most: int) -> int:
    """The number of parts that leaves the least of the last round of programs idle, the smallest of those; none shorter than two
    tiles."""
    most = max(1, min(most, SPLITS_MOST, k // (2 * tile_k)))
    return max(range(1, most + 1), key=lambda splits: (round(filled(tiles * splits, places), 2), -splits))


def filled(programs: int, places: int) -> float:
    """The share of the rounds' places that programs take."""
    return programs / (blocks(programs, places) * places)


def fills(size: int, tile: int) -> bool:
    """Whether tiles of this size leave hardly more of the last one empty than those of half of it."""
    return blocks(size, tile) * tile <= 1.15 * blocks(size, tile // 2) * tile // 2


def at_once(programs: int, tile_n: int, room: int, ways: list[tuple[int, int]]) -> tuple[int, int] | None:
    """The first of these lengths of tile and counts of them on their way that leaves room on the chip for all programs at once."""
    return next((way for way in ways if evenness(programs, way[1] * (tile_n + room) * way[0] * 2) == 1), None)


def evenness(programs: int, held: int) -> float:
    """1 if programs that hold so many bytes of shared memory lie on the chip at once, else what they fill of their rounds."""
    chip = chips.current()
    places = (chip.shared_memory + 1024) // (held + 1024) * chip.multiprocessors
    return 1.0 if programs <= places else filled(programs, places) if places else 0.0


def stages_alone(k: int, tile_k: int, room: int) -> int:
    """Tiles on their way where a program has its multiprocessor alone, but no more than there are: 16 x 1024 x 1024 took 2.8 µs
    with five of 256, with three 2.5; 23 x 16 x 1408 x 128 4.6 with eight of 128, with four 4.0."""
    return max(2, min(4, blocks(k, tile_k) - 1, chips.current().shared_memory // ((64 + room) * tile_k * 2)))


def longest_copied(items: int, k: int, along: bool) -> int:
    """The longest tile that may be copied: across the summed dimension of a batch one that ends with its item."""
    return k & -k if items > 1 and not along else 1 << 30


def worth_copying(items: int, k: int, along: bool) -> bool:
    return longest_copied(items, k, along) >= min(64, max(16, next_power(k)))

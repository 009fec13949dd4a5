"""Tables of sixteen values for matrices of four bits. Knows numbers; nothing of how they are packed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Code q stands for numbers[q] * unit."""

    numbers: tuple[int, ...]
    unit: float = 1.0


TABLES = {
    "iq4": Table((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)),
    "mxfp4": Table((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), 0.5),
    # The units of the next two give whole numbers of eight bits the smallest mean error: 0.0017 and 0.0011 of the largest value.
    "nf4": Table((-112, -78, -59, -44, -32, -21, -10, 0, 9, 18, 28, 38, 49, 63, 81, 112), 1 / 112.03),
    "fp4": Table((0, 1, 80, 120, 40, 60, 20, 30, 0, -1, -80, -120, -40, -60, -20, -30), 1 / 120),
}
NEAR = 0.005  # how far a value of such a table may be from its own

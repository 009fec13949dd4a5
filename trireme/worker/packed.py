"""One buffer in which a step's columns stand side by side (packed) and go to the device in one copy.

Knows numbers and their places, not what they mean.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trireme.backends import Backend

Column = slice | Tensor  # a part of the packed buffer, or a tensor that found no room there


class Packed:
    """Host staging buffers and one device buffer of int32, filled from the front and sent in one copy."""

    def __init__(self, backend: Backend, size: int, copies: int):
        self.staging = [backend.buffer((size,), torch.int32) for _ in range(copies)]
        on_host = backend.device.type == "cpu"
        self.target = self.staging[0] if on_host else torch.zeros(size, dtype=torch.int32, device=backend.device)
        self.on_host, self.turn, self.used = on_host, 0, 0
        self.host = self.staging[0].numpy()

    def begin(self) -> None:
        if not self.on_host:  # the copy of an earlier step may still be reading its buffer
            self.turn = (self.turn + 1) % len(self.staging)
            self.host = self.staging[self.turn].numpy()
        self.used = 0

    def repeat(self) -> np.ndarray:
        """Begins with what was sent last time, to be changed in place."""
        last, used = self.host, self.used
        self.begin()
        if self.host is not last:
            self.host[:used] = last[:used]
        self.used = used
        return self.host

    def put(self, values: np.ndarray, length: int = 0, fill: int = 0) -> Column:
        """Lays values down, filled up to `length`; they are on the device after `send`."""
        begin, middle = self.used, self.used + len(values)
        end = max(middle, begin + length)
        if end > len(self.host):  # rare: many long prompts were admitted at once, and are copied separately
            return torch.from_numpy(_bits(values)).to(self.target.device)
        self.host[begin:middle] = _bits(values)
        if end > middle:
            self.host[middle:end] = fill
        self.used = -(-end // 4) * 4  # 16-byte alignment
        return slice(begin, end)

    def at(self, column: Column) -> Tensor:
        """A column on the device."""
        return self.target[column] if isinstance(column, slice) else column

    def send(self) -> None:
        if not self.on_host:
            self.target[: self.used].copy_(self.staging[self.turn][: self.used], non_blocking=True)


def _bits(values: np.ndarray) -> np.ndarray:
    """As int32: whole numbers by their value, float32 by its bits."""
    return values.view(np.int32) if values.dtype == np.float32 else values.astype(np.int32, copy=False)

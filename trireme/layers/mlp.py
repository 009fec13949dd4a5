"""Feed-forward layers."""

from __future__ import annotations

from torch import Tensor

from trireme.layers.env import Env
from trireme.layers.linear import Linear
from trireme.layers.module import Module


class GatedMLP(Module):
    """down(activation(gate(x)) * up(x))"""

    def __init__(self, env: Env, size: int, inner: int, activation: str = "silu", bias: bool = False):
        self.env, self.activation = env, activation
        unit = _unit(env, inner)
        self.gate_up = env.new(Linear, size, {"gate_proj": inner, "up_proj": inner}, cut="out", unit=unit, bias=bias)
        self.down = env.new(Linear, inner, {"down_proj": size}, cut="in", unit=unit, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        if self.down.takes_gated:
            return self.down.of_gated(self.gate_up(x), self.activation)
        return self.down(self.gate_up.gated(x, self.activation))


class MLP(Module):
    """down(activation(up(x))), under the names the checkpoint gives the two."""

    def __init__(
        self, env: Env, size: int, inner: int, names: tuple[str, str], activation: str, bias: bool = True, turned: bool = False
    ):
        """turned: the checkpoint stores both matrices as [in, out]"""
        self.env, self.activation = env, activation
        unit = _unit(env, inner)
        self.up = env.new(Linear, size, {names[0]: inner}, cut="out", unit=unit, bias=bias, turned=turned)
        self.down = env.new(Linear, inner, {names[1]: size}, cut="in", unit=unit, bias=bias, turned=turned)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.env.ops.activation(self.up(x), self.activation))


def _unit(env: Env, inner: int) -> int:
    """The inner width is split over ranks in units of this many columns, so that no block of quantized weights is cut. The unit is
    smaller if the shares would become too unequal."""
    size = env.tp.size
    for unit in (256, 32):
        if inner % unit == 0 and (inner // unit % size == 0 or inner // unit >= 4 * size):
            return unit
    return 32 if inner >= 32 * size else 1

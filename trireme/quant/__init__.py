from trireme.quant.base import Dense, Noise, Stored, WeightMethod, decode
from trireme.quant.choose import choose
from trireme.quant.int8 import Int8

__all__ = ["Dense", "Int8", "Noise", "Stored", "WeightMethod", "choose", "decode"]

from trireme.quant.base import DECODED, HOW_ELSE, Dense, Noise, Stored, WeightMethod, decode
from trireme.quant.choose import choose
from trireme.quant.int8 import Int8

__all__ = ["DECODED", "HOW_ELSE", "Dense", "Int8", "Noise", "Stored", "WeightMethod", "choose", "decode"]

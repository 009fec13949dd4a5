from trireme.quant.base import DECODED, HOW_ELSE, Decoded, Dense, Noise, Stack, Stored, WeightMethod, decode, numbers_of
from trireme.quant.choose import choose
from trireme.quant.gguf import check_scales
from trireme.quant.grouped import Composite, Grouped, composite, grouped
from trireme.quant.int8 import Int8

__all__ = [
    "DECODED",
    "HOW_ELSE",
    "Composite",
    "Decoded",
    "Dense",
    "Grouped",
    "Int8",
    "Noise",
    "Stack",
    "Stored",
    "WeightMethod",
    "check_scales",
    "choose",
    "composite",
    "decode",
    "grouped",
    "numbers_of",
]

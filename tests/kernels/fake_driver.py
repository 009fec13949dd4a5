"""A driver's functions as the launch path calls them, for tests that stand in for one on the host."""

from __future__ import annotations

import ctypes
from typing import Any

PLACE, NUMBER = ctypes.c_void_p, ctypes.c_uint
START = ctypes.CFUNCTYPE(ctypes.c_int, PLACE, *[NUMBER] * 7, PLACE, ctypes.POINTER(PLACE), PLACE)


class Attribute(ctypes.Structure):
    """CUDA's launch attribute, as cuda.h lays it out."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_ubyte * 60))


class Configuration(ctypes.Structure):
    """CUDA's launch configuration."""

    _fields_ = (
        ("sizes", NUMBER * 7),
        ("stream", PLACE),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", NUMBER),
    )


EXTENDED_START = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Configuration), PLACE, ctypes.POINTER(PLACE), PLACE)


def address(function: Any) -> int:
    return ctypes.cast(function, PLACE).value or 0

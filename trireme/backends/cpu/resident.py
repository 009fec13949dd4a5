"""Releases pages of library code that only the start of a process uses. Knows mappings, nothing of what is in them.

Importing torch runs through 60 MB of its code to register operators, little of which a step of our own kernels ever needs.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import pathlib
import re

MAPPINGS = pathlib.Path("/proc/self/smaps")  # Linux alone has it
_LARGE = 8 << 20  # bytes of code
_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+)")  # begin, end, rights, offset, device, the file's number


@functools.cache
def forget_code() -> int:
    """Releases the resident code of large libraries, once. Code that runs again is loaded again from the system's file cache.

    Returns how many libraries that were. Code that somebody has changed in memory, as debuggers do, stays.
    """
    try:
        lines = MAPPINGS.read_text().splitlines()
    except OSError:
        return 0
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    begin = end = found = 0
    for line in lines:
        if head := _HEAD.match(line):
            code = head[3] == "r-xp" and head[4] != "0"
            begin, end = (int(head[1], 16), int(head[2], 16)) if code else (0, 0)
        elif line.startswith("Private_Dirty:") and line.split()[1] == "0" and end - begin >= _LARGE:
            found += advise(begin, end - begin, mmap.MADV_DONTNEED) == 0
    return found

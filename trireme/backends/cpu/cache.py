"""A disk cache of packed weights, one file per matrix. Files are mapped, so that processes share their memory.

Knows what identifies a packed matrix and what its file may cost; not how it is packed.
"""

from __future__ import annotations

import json
import mmap
import os
import pathlib
import shutil
import sys
import time
import warnings
import zlib
from hashlib import sha256

import torch

from trireme.backends.cpu import build
from trireme.backends.cpu.weights import PackedWeight

FORMAT = 2  # to be raised when the same checkpoint is decoded to other values, or packed by other rules outside csrc
LIMIT = 16 << 30  # bytes of all files together
LEAST = 1 << 17  # bytes: packing a smaller matrix is about as fast as finding it here
_PAGE = 4096  # the matrix begins on a page of the file
_CHECKSUM = 8


class PackCache:
    """A file is a page or more that say exactly what it is, and the matrix. What is not what was asked for is not there.

    The files used longest ago are removed beyond `limit` bytes, or half of what the disk has free; those of this start never are.
    """

    def __init__(self, folder: pathlib.Path, *, everything: bool = False, limit: int = LIMIT):
        """`everything`: also keeps matrices that are only reordered, which saves a few seconds at most."""
        self.folder, self.everything, self.limit = folder, everything, limit
        self.mapped_bytes = 0
        self._opened, self._failed = time.time(), False

    def read(self, kind: str, rows: int, columns: int, origins: list[str]) -> PackedWeight | None:
        """The packed matrix, mapped; None if it is not here, or not whole."""
        expected = PackedWeight(kind, rows, columns)  # its memory is only reserved until it is written
        head = _head(expected, origins)
        path = self._path(head)
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size != len(head) + _CHECKSUM + expected.nbytes:
                    return None
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            os.utime(path)
        except (OSError, ValueError):
            return None
        data = memoryview(mapped)
        begin = len(head) + _CHECKSUM
        if data[: len(head)] != head or data[len(head) : begin] != _checksum(data[begin:]):
            return None
        self.mapped_bytes += expected.nbytes
        return PackedWeight(kind, rows, columns, _read_only_tensor(mapped, begin))

    def write(self, weight: PackedWeight, origins: list[str]) -> None:
        """Keeps a packed matrix, where there is room. A disk that refuses is reported once and not tried again."""
        if self._failed or weight.nbytes < LEAST:
            return
        head = _head(weight, origins)
        path = self._path(head)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        data = weight.data.numpy().data
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not self._make_room(len(head) + _CHECKSUM + weight.nbytes):
                return
            try:
                with open(partial, "wb") as file:
                    file.write(head + _checksum(data))
                    file.write(data)
                os.replace(partial, path)  # whole or not at all; another process puts the same bytes there
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            self._failed = True
            reason = error.strerror or str(error)
            print(f"trireme: packed weights are not kept in {self.folder}: {reason}. --pack-cache off ends this.", file=sys.stderr)

    def _path(self, head: bytes) -> pathlib.Path:
        return self.folder / f"{sha256(head).hexdigest()[:32]}.packed"

    def _make_room(self, wanted: int) -> bool:
        """Removes the files used longest ago until `wanted` more bytes fit. False where they cannot."""
        files = []
        for entry in os.scandir(self.folder):
            try:
                state = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # removed by another process
                continue
            files.append((state.st_mtime, state.st_size, pathlib.Path(entry.path)))
        kept = sum(size for _, size, _ in files)
        limit = min(self.limit, (kept + shutil.disk_usage(self.folder).free) // 2)
        for used, size, path in sorted(files):
            if kept + wanted <= limit or used >= self._opened:
                break
            path.unlink(missing_ok=True)
            kept -= size
        return kept + wanted <= limit


def _head(weight: PackedWeight, origins: list[str]) -> bytes:
    """All that decides a packed matrix's bytes, as the beginning of its file: whole pages, but for the checksum that follows."""
    facts = {
        "format": FORMAT,
        "kernels": build.library_name(),  # stands for the layout, the machine and so the stored bias: it is a digest of csrc
        "kind": weight.kind,
        "rows": weight.rows,
        "columns": weight.columns,
        "bytes": weight.nbytes,
        "parts": origins,
    }
    text = b"trireme packed weights " + json.dumps(facts).encode() + b"\n"
    return text + b" " * (-(len(text) + _CHECKSUM) % _PAGE)


def _checksum(data: memoryview) -> bytes:
    return f"{zlib.crc32(data):08x}".encode()


def _read_only_tensor(mapped: mmap.mmap, begin: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # as it should be: nothing writes to weights
        return torch.frombuffer(mapped, dtype=torch.uint8, offset=begin)

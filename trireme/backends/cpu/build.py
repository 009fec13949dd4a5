"""Building the C kernels with an ordinary compiler, at install time or on first use. Knows flags and folders, not kernels."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

SOURCES = pathlib.Path(__file__).parent / "csrc"
COMMON = ("-O3", "-std=gnu11", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-Wall", "-Wextra")
PLAIN = ("pool.c", "pack.c", "program.c")
_AVX512 = ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
_ARM = "-march=armv8.2-a+dotprod+fp16"


@dataclass(frozen=True)
class Variant:
    """One instruction set: the file that holds it and the flags it needs. One that fails to compile is left out."""

    name: str
    source: str
    flags: tuple[str, ...]


PORTABLE = Variant("portable", "kernels.c", ("-DISA_PORTABLE",))
VARIANTS = {
    "x86_64": (
        Variant("avx2", "kernels.c", ("-DISA_AVX2", "-mavx2", "-mfma", "-mf16c")),
        Variant("avx512vnni", "kernels.c", ("-DISA_AVX512", *_AVX512)),
        Variant("amx", "amx_kernels.c", ("-DISA_AVX512", *_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16")),
    ),
    "aarch64": (
        Variant("dotprod", "kernels.c", ("-DISA_DOTPROD", _ARM)),
        Variant("i8mm", "kernels.c", ("-DISA_DOTPROD", "-DISA_I8MM", f"{_ARM}+i8mm")),
        Variant("bf16", "kernels.c", ("-DISA_DOTPROD", "-DISA_I8MM", "-DISA_BF16", f"{_ARM}+i8mm+bf16")),
    ),
}


class BuildFailed(Exception):
    """No compiler, or one that refuses the portable sources; the message says which."""


def machine() -> str:
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def compiler() -> str | None:
    """$CC, or the first of cc, gcc and clang that is there."""
    named = os.environ.get("CC")
    return next((found for name in ([named] if named else ["cc", "gcc", "clang"]) if (found := shutil.which(name))), None)


@functools.cache
def library_name(target: str | None = None) -> str:
    """Named after the kind of machine, the sources and the flags, so that a stale build is never loaded."""
    target = target or machine()
    digest = hashlib.sha256(repr((COMMON, PLAIN, PORTABLE, VARIANTS.get(target))).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return f"libtrireme_cpu-{target}-{digest.hexdigest()[:12]}.so"


def find(cache: pathlib.Path) -> pathlib.Path | None:
    """The built library: beside this file (installed) or in `cache`."""
    places = (pathlib.Path(__file__).parent, cache)
    return next((path for place in places if (path := place / library_name()).exists()), None)


def _compile(command: list[str], objects: list[pathlib.Path], folder: pathlib.Path, source: str, name: str, *flags: str) -> bool:
    target = folder / f"{name}.o"
    done = subprocess.run(
        [command[0], *COMMON, *flags, *command[1:], "-c", str(SOURCES / source), "-o", str(target)], capture_output=True, text=True
    )
    if done.returncode == 0:
        objects.append(target)
    elif name in ("portable", "features", *PLAIN):
        raise BuildFailed(f"the compiler {command[0]} failed on {source}: {done.stderr.strip().splitlines()[:1]}")
    return done.returncode == 0


def build(folder: pathlib.Path, command: list[str] | None = None, target: str | None = None) -> pathlib.Path:
    """Compiles everything this machine's kind can have and links it into `folder`; a failed variant is left out.

    `command` is a compiler, with flags that come after ours; `target` a kind of machine other than this one.
    """
    if command is None:
        found = compiler()
        if found is None:
            raise BuildFailed("no C compiler (cc, gcc or clang) was found")
        command = [found]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        place, objects = pathlib.Path(work), list[pathlib.Path]()
        for source in PLAIN:
            _compile(command, objects, place, source, source)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            variants = VARIANTS.get(target or machine(), ())
            made = [
                pool.submit(_compile, command, objects, place, v.source, v.name, f"-DISA={v.name}", *v.flags)
                for v in (PORTABLE, *variants)
            ]
        present = [f"-DHAS_{v.name.upper()}" for v, done in zip((PORTABLE, *variants), made, strict=True) if done.result()]
        _compile(command, objects, place, "features.c", "features", *present)
        linked = place / "library.so"
        done = subprocess.run(
            [*command, "-shared", "-o", str(linked), *map(str, objects), "-lpthread", "-lm"], capture_output=True, text=True
        )
        if done.returncode:
            raise BuildFailed(f"linking failed: {done.stderr.strip().splitlines()[-1:]}")
        final = folder / library_name(target)
        partial = folder / f".{final.name}.{os.getpid()}"
        shutil.copy(linked, partial)
        os.replace(partial, final)  # another process building at the same time puts the same file there
    return final


def ensure(cache: pathlib.Path) -> pathlib.Path:
    """The library's path, built into `cache` first where it is missing."""
    return find(cache) or build(cache)


if __name__ == "__main__":
    print(build(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent))

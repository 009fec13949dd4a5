"""The choice of instruction set on systems other than this one: macOS with its own question, and one that cannot be asked.

No Mac is here: its header and its answers are stood in for, and the code that asks is compiled and run.
"""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from trireme.backends.cpu import build

COMPILER = build.compiler()
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")

SYSCTL = "int sysctlbyname(const char *name, void *value, size_t *size, void *fresh, size_t fresh_size);\n"
PROGRAM = r"""
#include "trireme_cpu.h"
#include <stdio.h>
#include <string.h>

const Kernels kernels_portable = {.name = "portable"}, kernels_dotprod = {.name = "dotprod"};
const Kernels kernels_i8mm = {.name = "i8mm"}, kernels_bf16 = {.name = "bf16"};
int trireme_set_isa(const char *name);
const char *trireme_isa(void);
static const char *known; /* the features of the machine that is stood in for */

int sysctlbyname(const char *name, void *value, size_t *size, void *fresh, size_t fresh_size) {
    if (fresh || fresh_size || *size != sizeof(int) || strncmp(name, "hw.optional.arm.FEAT_", 21)) return -1;
    if (!strstr(known, name + 21)) return -1; /* as an older system, which does not know the name */
    *(int *)value = 1;
    return 0;
}

int main(int count, char **words) {
    known = count > 1 ? words[1] : "";
    if (!trireme_set_isa("auto")) return 1;
    puts(trireme_isa());
    return 0;
}
"""


@pytest.fixture(scope="module", params=["macos", "unknown"])
def chooser(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, pathlib.Path]:
    """A program with the real choice in it, compiled as for the system that is named."""
    assert COMPILER
    folder = tmp_path_factory.mktemp("system")
    (folder / "sys").mkdir()
    (folder / "sys" / "sysctl.h").write_text(SYSCTL)
    (folder / "main.c").write_text(PROGRAM)
    apple = ["-D__APPLE__=1", f"-I{folder}"] if request.param == "macos" else []
    command = [COMPILER, "-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-U__linux__", *apple, f"-I{build.SOURCES}"]
    present = ["-DHAS_DOTPROD", "-DHAS_I8MM", "-DHAS_BF16"]
    sources = [str(folder / "main.c"), str(build.SOURCES / "features.c")]
    subprocess.run([*command, *present, *sources, "-o", str(folder / "choose")], check=True)
    return str(request.param), folder / "choose"


@pytest.mark.parametrize(
    ("features", "chosen"),
    [
        ("", "portable"),
        ("FP16", "portable"),
        ("FP16 DotProd", "dotprod"),  # an M1
        ("FP16 DotProd I8MM", "i8mm"),
        ("FP16 DotProd I8MM BF16", "bf16"),  # from an M2 on
    ],
)
def test_the_best_that_the_system_names_is_chosen(chooser: tuple[str, pathlib.Path], features: str, chosen: str) -> None:
    system, program = chooser
    done = subprocess.run([program, features], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (chosen if system == "macos" else "portable")

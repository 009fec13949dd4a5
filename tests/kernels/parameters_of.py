"""Prints what a kernel with descriptors takes on Hopper, by the compiler's assembly and by `launch`: `python parameters_of.py`.

A process of its own, because Triton decides once whether it interprets.
"""

from __future__ import annotations

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trireme.kernels import launch
from trireme.kernels.aten.products import matmul

CONSTANTS = {"A_TURNED": False, "B_TURNED": True, "PRECISION": "ieee", "BIAS": 1, "M": 128, "N": 128, "K": 64, "GROUP": 8}
CONSTANTS |= {"HALVES": False, "EARLY": True, "bias_n": 1}
SIGNATURE = {"a": "tensordesc<bf16[128,64]>", "b": "tensordesc<bf16[128,64]>", "c": "tensordesc<bf16[128,128]>", "bias": "*bf16"}
SIGNATURE |= dict.fromkeys(("batch", "m", "n", "k"), "i32") | {"bias_m": "i64", "alpha": "fp32", "beta": "fp32"}
LETTERS = {".align 64 .b8": "m", ".u32": "i", ".u64": "i", ".f32": "f"}


def main() -> None:
    jit = matmul._descriptor_tiles.jit
    signature = {name: SIGNATURE.get(name, "constexpr") for name in jit.arg_names}
    constants = {(jit.arg_names.index(name),): value for name, value in CONSTANTS.items()}
    options = {"num_warps": 8, "num_stages": 3}
    built = triton.compile(ASTSource(jit, signature, constants, {}), target=GPUTarget("cuda", 90, 32), options=options)
    head = built.asm["ptx"].split(".entry")[1].split(")")[0]
    kinds = [kind.strip() for kind in re.findall(r"\.param (.*?) ?\S+_param_\d+", head)]
    print("".join("p" if ".ptr" in kind else LETTERS[kind] for kind in kinds))
    letters, forms = launch._kinds(built)
    print((letters or "").replace("-", ""), len(forms))


if __name__ == "__main__":
    main()

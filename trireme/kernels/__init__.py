"""Torch's operators in Triton, on any chip that has Triton. Stands alone: knows torch and triton, nothing of the engine.

from trireme import kernels
with kernels.use(exclude=["mm"]):
    ...  # torch's operators inside are ours
"""

from trireme.kernels.registry import OPERATORS, describe, disable, enable, enabled, only_enable, use
from trireme.kernels.steps.fused import gelu_and_mul, rotary_embedding, silu_and_mul, skip_layer_norm, skip_rms_norm

__all__ = [
    "OPERATORS",
    "describe",
    "disable",
    "enable",
    "enabled",
    "gelu_and_mul",
    "only_enable",
    "rotary_embedding",
    "silu_and_mul",
    "skip_layer_norm",
    "skip_rms_norm",
    "use",
]

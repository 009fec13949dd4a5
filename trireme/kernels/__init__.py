"""Triton kernels in two rooms. `steps` is the engine's: what a model's step launches. `aten` stands in for torch's operators:
`with kernels.use(exclude=["mm"]): ...` makes them ours. Knows torch and triton, nothing of the engine. The operators are
imported when one of these names is first asked for."""

from typing import Any

_REGISTRY = ("OPERATORS", "describe", "disable", "enable", "enabled", "only_enable", "register", "use")
_FUSED = ("gelu_and_mul", "rotary_embedding", "silu_and_mul", "skip_layer_norm", "skip_rms_norm")
__all__ = sorted((*_REGISTRY, *_FUSED))


def __getattr__(name: str) -> Any:
    if name in _REGISTRY:
        from trireme.kernels.aten import registry

        return getattr(registry, name)
    if name in _FUSED:
        from trireme.kernels import fused

        return getattr(fused, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

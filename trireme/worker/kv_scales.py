"""What keys and values are kept as, and the scales that a checkpoint brings for them, cut for this rank.

Knows tensors and settings; nothing of slots or steps.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trireme.backends import Backend
from trireme.config import Config
from trireme.errors import BadCheckpoint, BadConfig, UnsupportedModel
from trireme.hub.kv_scales import places, zero_point
from trireme.hub.weights import Weight
from trireme.models import is_left_out, leaves_out_of
from trireme.ops import CacheSpec
from trireme.parallel import Group
from trireme.quant import decode
from trireme.worker.load import Loaded

_WITHOUT = "use --kv-dtype plain, or fetch the model again"
_FLOATS = ("F64", "F32", "F16", "BF16")
_LARGE_BIAS = 32.0  # keys without one have numbers up to about 20
Factors = tuple[Tensor, Tensor]  # of keys and of values: [heads of this rank] float32


@dataclass(frozen=True)
class Keeping:
    """The kind of KV, and the scales of the layers that have some, by the keys of their caches."""

    kind: str
    factors: Mapping[int, Factors] = field(default_factory=dict)
    said: str = ""  # for people; "" for the activations' own type

    def of(self, key: int, backend: Backend) -> Factors | None:
        """A layer's scales, on the device."""
        found = self.factors.get(key)
        return (found[0].to(backend.device), found[1].to(backend.device)) if found else None


def keeping(config: Config, loaded: Loaded, backend: Backend, group: Group) -> Keeping:
    """What the user asks for; with `auto`, what the checkpoint asks for, if the backend keeps it."""
    checkpoint, kind = loaded.checkpoint, config.cache.kv_dtype
    asked = checkpoint.kv_asked
    if kind == "auto":
        kind = asked.kind if asked.kind in backend.kv_kinds else "plain"
        missed = asked.other or (asked.kind if kind == "plain" else "")
        if missed and backend.rank == 0:
            print(
                f"trireme: {checkpoint.path.name} asks for keys and values in {missed}, which {backend.name} does not keep; they "
                "stay in the activations' type.",
                file=sys.stderr,
                flush=True,
            )
    if kind not in backend.kv_kinds:
        raise BadConfig(f"The backend {backend.name} keeps no {kind} KV.", "use --kv-dtype auto")
    if kind != "plain" and backend.rank == 0 and not config.model.random_weights:
        _warn_of_bias(loaded, kind)
    # Without settings that say so, eight bits with scales are fp8. What was measured for another kind is of no use.
    meant = asked.kind or ("" if asked.other else "fp8")
    if config.model.random_weights or kind != meant:
        return Keeping(kind, {}, "" if kind == "plain" else kind)
    factors = _Scales(loaded, group).read()
    layers = len(_caches(loaded))
    some = "" if len(factors) == layers else f" for {len(factors)} of {layers} layers"
    return Keeping(kind, factors, f"{kind}, with the checkpoint's scales{some}" if factors else kind)


def _warn_of_bias(loaded: Loaded, kind: str) -> None:
    """A large bias in a few numbers of all keys makes their scale so coarse that the other numbers are lost."""
    entries = loaded.checkpoint.entries()
    biases = [entry for name, entry in entries.items() if name.endswith("k_proj.bias") and isinstance(entry, Weight)]
    largest = max((float(decode(bias, torch.float32).abs().max()) for bias in biases), default=0.0)
    if largest > _LARGE_BIAS:
        print(
            f"trireme: {loaded.checkpoint.path.name} adds up to {largest:.0f} to its keys; KV in {kind} makes the answers of such "
            "models worse, or noise. Fix: --kv-dtype plain",
            file=sys.stderr,
            flush=True,
        )


def same_form(old: Keeping, new: Keeping) -> None:
    """Refuses what cannot take the place of the scales in use."""
    if old.kind != new.kind or old.factors.keys() != new.factors.keys():
        raise BadCheckpoint(
            f"Its keys and values are kept otherwise ({new.said or 'plain'}, not {old.said or 'plain'}).",
            "start a server for this model",
        )


class _Scales:
    """Finds and reads the scales of all layers."""

    def __init__(self, loaded: Loaded, group: Group):
        self.loaded, self.group, self.tensors = loaded, group, loaded.checkpoint.kv_scales()
        self.used: set[str] = set()

    def read(self) -> dict[int, Factors]:
        found = {}
        for key, (path, spec) in _caches(self.loaded).items():
            k, v = (self._find(path, side) for side in "kv")
            if (k is None) != (v is None):
                there = k or v
                assert there is not None
                raise BadCheckpoint(f"{self._path}: {there.name} has no partner: scales come for keys and for values.", _WITHOUT)
            if k is not None and v is not None:
                found[key] = self._values(k, spec), self._values(v, spec)
        self._check_rest()
        return found

    @property
    def _path(self) -> str:
        return str(self.loaded.checkpoint.path)

    def _find(self, path: str, side: str) -> Weight | None:
        known = places(path, side)
        self.used |= {*known, *map(zero_point, known)}
        name = next((name for name in known if name in self.tensors), None)
        if name is None:
            return None
        zero = self.tensors.get(zero_point(name))
        if zero is not None and zero.mapped().any():
            raise UnsupportedModel(f"{self._path}: {zero.name} is not zero; only scales are read, no zero points.", _WITHOUT)
        return self.tensors[name]

    def _values(self, weight: Weight, spec: CacheSpec) -> Tensor:
        """A scale for each head of this rank."""
        own, heads = spec.k[0], self.loaded.cfg.heads
        whole, cut = (own, slice(None)) if self.group.size == 1 else (heads.num_kv, self.group.heads(heads.num, heads.num_kv)[1])
        shape, fits = tuple(n for n in weight.shape if n != 1), len(range(whole)[cut]) == own
        if not (shape == () or (shape == (whole,) and fits)) or weight.kind not in _FLOATS:
            raise BadCheckpoint(
                f"{self._path}: {weight.name} is {weight.kind} of shape {list(weight.shape)}; a scale for keys or values is one "
                f"float, or one for each of {whole} heads.",
                _WITHOUT,
            )
        values = decode(weight, torch.float32).reshape(-1)
        if not (values.isfinite() & (values > 0)).all():
            raise BadCheckpoint(f"{self._path}: {weight.name} is not above zero and finite.", _WITHOUT)
        return (values[cut] if shape else values.expand(own)).contiguous()

    def _check_rest(self) -> None:
        """Refuses scales of layers that are not there."""
        leaves_out = leaves_out_of(type(self.loaded.model), self.loaded.cfg.raw)
        rest = [name for name in self.tensors if name not in self.used and not is_left_out(name, leaves_out)]
        if rest:
            raise UnsupportedModel(f"{self._path}: {rest[0]} belongs to no layer that keeps keys and values.", _WITHOUT)


def _caches(loaded: Loaded) -> dict[int, tuple[str, CacheSpec]]:
    """The path and spec of each layer that keeps keys and values, by its cache's key; of layers that share one, the first."""
    found: dict[int, tuple[str, CacheSpec]] = {}
    for path, module in loaded.model.walk():
        for key, spec in getattr(module, "cache_specs", dict)().items():
            if isinstance(spec, CacheSpec):
                found.setdefault(key, (path, spec))
    return found

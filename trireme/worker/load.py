"""From a checkpoint to a model on a device: configuration and weights.

Knows files and sizes; nothing of steps or requests.
"""

from __future__ import annotations

import pathlib
import sys
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trireme.backends import Backend
from trireme.config import Config
from trireme.errors import BadCheckpoint, BadConfig, UnsupportedModel
from trireme.hub.checkpoint import Checkpoint
from trireme.hub.holding import LEAST, holding, size
from trireme.hub.storage import check_storage
from trireme.layers import Env, Head, Module
from trireme.models import ModelConfig, check_fields, compare, is_left_out, leaves_out_of, model_class, refuse_strays
from trireme.parallel import Mesh
from trireme.quant import DECODED, HOW_ELSE, Noise, Stored

Report = Callable[[str, float], None]  # (phase, share done)


@dataclass
class Loaded:
    model: Module
    cfg: ModelConfig
    dtype: torch.dtype
    max_model_len: int
    weight_bytes: int
    checkpoint: Checkpoint
    asked: dict[str, tuple[int, ...]]  # names and shapes of the tensors that the layers have read
    holding: str = ""  # text for people: what the checkpoint holds


def load_model(config: Config, path: pathlib.Path, backend: Backend, mesh: Mesh, report: Report) -> Loaded:
    """Builds the model for this rank and pulls its weights."""
    checkpoint = Checkpoint.open(path, read_pickle)
    model, cfg, env = build_model(config, checkpoint, backend, mesh)
    names = 1 if config.model.random_weights else max(len(checkpoint.names()), 1)
    asked: dict[str, tuple[int, ...]] = {}

    def read(name: str, shape: tuple[int, ...]) -> Stored:
        asked[name] = shape
        report("weights", min(len(asked) / names, 1.0))
        return Noise(name, shape) if config.model.random_weights else stored_tensor(checkpoint, name, shape)

    with torch.inference_mode():
        model.load(read)
    if not config.model.random_weights:
        left_out = check_strays(checkpoint, model, cfg, asked_by_any(checkpoint, backend, mesh))
        if left_out and backend.rank == 0:
            print(f"trireme: {checkpoint.path.name} has tensors that are left out: {left_out}.", file=sys.stderr, flush=True)
    report("weights", 1.0)
    held = "random" if config.model.random_weights else holding(checkpoint.entries().values())
    return Loaded(model, cfg, env.dtype, env.max_len, weight_bytes(model), checkpoint, asked, held)


_ILL_FORMED = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)


def build_model(config: Config, checkpoint: Checkpoint, backend: Backend, mesh: Mesh) -> tuple[Module, ModelConfig, Env]:
    """The model of a checkpoint's config, still without weights. What is not understood of the config or the storage is refused."""
    try:
        model, cfg, env = _build(config, checkpoint, backend, mesh)
    except _ILL_FORMED as error:
        # A config may have any value where a number is expected, so every exception here is reported as an error of the config.
        cause = f"{checkpoint.path}: the config makes no sense ({type(error).__name__}: {str(error).partition(chr(10))[0][:200]})."
        raise BadCheckpoint(cause, "check config.json, or fetch the model again") from error
    if not config.model.random_weights:
        leaves_out = leaves_out_of(type(model), cfg.raw)
        wanted = {name: entry for name, entry in checkpoint.entries().items() if not is_left_out(name, leaves_out)}
        check_storage(checkpoint.path, wanted, checkpoint.config, DECODED)
    return model, cfg, env


def _build(config: Config, checkpoint: Checkpoint, backend: Backend, mesh: Mesh) -> tuple[Module, ModelConfig, Env]:
    raw = checkpoint.config
    cls = model_class(raw)
    cfg = cls.config(raw)
    check_fields(checkpoint.path, cls, cfg.raw or raw)
    if mesh.tp.size > cfg.heads.num:
        heads = cfg.heads.num
        raise BadConfig(f"tp is {mesh.tp.size}; the model has {heads} attention heads to share.", f"use --tp {heads} or less")
    dtype = backend.dtype(config.model.dtype, _stored_dtype(raw))
    env = Env(backend, dtype, mesh, config.model.quantize, model_length(cfg, config.model.max_model_len))
    return cls(env, cfg), cfg, env


def check_strays(checkpoint: Checkpoint, model: Module, cfg: ModelConfig, asked: Collection[str]) -> str:
    """Refuses tensors that the loaded model does not use, except those that its class ignores, which are reported."""
    tied = {f"{path}.weight" for path, part in model.walk() if isinstance(part, Head) and part.tied() is not None}
    left_out, strays = compare(checkpoint.entries(), tied | set(asked), leaves_out_of(type(model), cfg.raw))
    refuse_strays(checkpoint.path, type(model), strays)
    return ", ".join(f"{what} ({count} tensors)" for what, count in left_out.items())


def asked_by_any(checkpoint: Checkpoint, backend: Backend, mesh: Mesh) -> Collection[str]:
    """The names that a leaf of any rank has asked for."""
    groups = [group for group in (mesh.tp, mesh.pp, mesh.ep) if group.size > 1]
    if not groups:
        return checkpoint.asked
    names = checkpoint.names()
    asked = torch.tensor([float(name in checkpoint.asked) for name in names], device=backend.device)
    for group in groups:  # one axis after the other: then it is known of all ranks
        asked = group.comm.all_reduce(asked)
    return {name for name, ranks in zip(names, asked.tolist(), strict=True) if ranks}


def read_pickle(path: pathlib.Path) -> dict[str, tuple[str, np.ndarray]]:
    """The tensors of a .bin file: (kind, bits) by name. Only tensors are unpickled, never code."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # a broken or hostile pickle may raise anything; torch's message would advise to trust it
        raise BadCheckpoint(f"{path} is damaged, or holds more than tensors.", "use a safetensors copy of the model") from None
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise BadCheckpoint(f"{path} holds something else than named tensors.", "use a safetensors copy of the model")
    return {name: _bits(path, name, value.contiguous()) for name, value in found.items()}


def _bits(path: pathlib.Path, name: str, value: torch.Tensor) -> tuple[str, np.ndarray]:
    kind = _KINDS.get(value.dtype)
    if kind is None:
        raise UnsupportedModel(f"{path}: {name} is {value.dtype}.", "use a safetensors copy of the model")
    bits = {"BF16": torch.uint16, "F8_E4M3": torch.uint8, "F8_E5M2": torch.uint8}.get(kind, value.dtype)
    return kind, value.view(bits).numpy()


_KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def stored_tensor(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Stored:
    """The tensor that a layer asks for. Refuses it if it does not agree with the config."""
    weight = checkpoint.weight(name)
    if weight.kind not in DECODED:
        raise UnsupportedModel(f"{checkpoint.path}: {name} is stored as {weight.kind}, which is not decoded here.", HOW_ELSE)
    if tuple(weight.shape) != shape:
        raise BadCheckpoint(
            f"{checkpoint.path}: the tensor {name} has shape {list(weight.shape)}; the config calls for {list(shape)}.",
            "the file and its config do not belong together; fetch the model again",
        )
    return weight


def _stored_dtype(raw: dict[str, Any]) -> torch.dtype:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def model_length(cfg: ModelConfig, wanted: int | None) -> int:
    """The longest sequence: what the user asks for, up to the limit of the model's positions."""
    if wanted is None:
        return cfg.max_positions
    factor = float(cfg.rope.get("factor") or 1.0) if cfg.rope else 1.0
    limit = int(cfg.max_positions * max(factor, 1.0)) if cfg.rope else wanted
    if wanted > limit:
        raise BadConfig(f"max_model_len is {wanted}; the model's positions end at {limit}.", f"use --max-model-len {limit} or less")
    return wanted


def weight_bytes(model: Module) -> int:
    """Bytes of all weights of a model, shared ones once."""
    return sum(size for size, _ in weights_of(model).values())


def kept_as(model: Module) -> str:
    """How the weights are kept, the form of most bytes first: such as "packed (4.37 GB), dense (1.05 GB)"."""
    sizes: Counter[str] = Counter()
    for count, title in weights_of(model).values():
        sizes[title] += count
    said = [(title, count) for title, count in sizes.most_common() if count >= LEAST * sizes.total()]
    return ", ".join(f"{title} ({size(count)})" for title, count in said)


def weights_of(model: Module) -> dict[int, tuple[int, str]]:
    """(bytes, how they are kept) of each weight, shared ones once."""
    seen: dict[int, tuple[int, str]] = {}
    for _, module in model.walk():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor):
            seen[id(weight)] = weight.numel() * weight.element_size(), "dense"
        elif weight is not None:
            seen[id(weight)] = weight.num_bytes(), getattr(weight, "title", "a form of its own")
    return seen

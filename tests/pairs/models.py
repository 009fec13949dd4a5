"""The tiny models that the pairs run on, in every form a file may have, and copies with weights as a method keeps them.

Knows files and weight methods; nothing of requests.
"""

from __future__ import annotations

import functools
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import gguf
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.hub import gguf_writer
from tests.quant.packers import FORMATS
from tests.serve.tiny_server_model import write_tokenizer
from trireme.backends import open_backend
from trireme.config import DeviceOptions
from trireme.hub.checkpoint import Checkpoint
from trireme.quant import choose

LENGTH = 64  # of a sequence, at most
END = 0  # the token that ends an answer
_SIZES: dict[str, Any] = {
    "vocab_size": 257,  # a prime: no number of ranks divides it
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": None,
}
_GEMMA3 = {"head_dim": 16, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # transformers' config class, and what differs
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", _GEMMA3),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4, "seq_length": LENGTH}),
}


def write_model(family: str, folder: pathlib.Path) -> pathlib.Path:
    name, changes = FAMILIES[family]
    tiny_models.build(name, _SIZES | changes, seed=5).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def _write_gguf(kind: str, path: pathlib.Path, file: pathlib.Path) -> None:
    """A llama's folder as one GGUF file, with matrices of that kind."""
    stored, vocabulary = {}, json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]
    for name, values in load_file(path / "model.safetensors").items():
        own = kind if values.dim() == 2 else "F32"
        data = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[own])
        for ours, theirs in _GGUF_NAMES.items():
            name = name.replace(ours, theirs)
        stored[name] = (own, tuple(values.shape), data.tobytes())
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__)[:-1], "th"]  # a tokenizer with no merges would be refused
    metadata = {
        "llama.block_count": _SIZES["num_hidden_layers"],
        "llama.context_length": LENGTH,
        "llama.embedding_length": _SIZES["hidden_size"],
        "llama.feed_forward_length": _SIZES["intermediate_size"],
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.eos_token_id": END,
    }
    gguf_writer.write(file, gguf_writer.llama_metadata(**metadata), stored)


_GGUF_NAMES = {
    "model.layers": "blk",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_",
    "mlp.": "ffn_",
    "_proj": "",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
}


def _write_published(name: str, path: pathlib.Path, folder: pathlib.Path) -> None:
    """A model whose layers' matrices are in a published format: other numbers than its own, about as large."""
    tensors: dict[str, Tensor] = {}
    for number, (place, values) in enumerate(sorted(load_file(path / "model.safetensors").items())):
        if place.endswith("_proj.weight"):
            packed, meant = FORMATS[name][0](*values.shape)
            larger = values.std() / meant.std() * (1 + 0.02 * number)  # the packers draw the same numbers for each
            scales = {end for end in packed if end in _SCALES and packed[end].element_size() > 1}  # in bytes they have no room
            ours = {end: tensor * larger.to(tensor.dtype) if end in scales else tensor for end, tensor in packed.items()}
            tensors |= {place.removesuffix(".weight") + end: tensor.clone() for end, tensor in ours.items()}
        else:
            tensors[place] = values
    for file in path.glob("*.json"):
        shutil.copy(file, folder)
    save_file(tensors, folder / "model.safetensors")


def _write_halves(dtype: torch.dtype, path: pathlib.Path, folder: pathlib.Path) -> None:
    """A model whose matrices are stored as halves."""
    stored = load_file(path / "model.safetensors")
    for file in path.glob("*.json"):
        shutil.copy(file, folder)
    save_file({name: t.to(dtype) if t.dim() == 2 else t for name, t in stored.items()}, folder / "model.safetensors")


def _write_kv_scales(path: pathlib.Path, folder: pathlib.Path) -> None:
    """A model with scales for keys and values in fp8, one for each head."""
    for file in path.glob("*.json"):
        shutil.copy(file, folder)
    tensors = load_file(path / "model.safetensors")
    for layer in range(_SIZES["num_hidden_layers"]):
        for side, scales in (("k", [0.011, 0.017]), ("v", [0.003, 0.0021])):
            tensors[f"model.layers.{layer}.self_attn.{side}_scale"] = torch.tensor(scales) * (1 + 0.3 * layer)
    save_file(tensors, folder / "model.safetensors")


_SCALES = (".scales", ".weight_scale", ".weight_scale_inv")

# By a form's name: writes the model in a folder, in that form, into another.
FORMS: dict[str, Callable[[pathlib.Path, pathlib.Path], None]] = {
    **{name: functools.partial(_write_published, name) for name in FORMATS},
    **{name: functools.partial(_write_halves, getattr(torch, name)) for name in ("float16", "bfloat16")},
    "kv scales": _write_kv_scales,
    **{kind: lambda path, folder, kind=kind: _write_gguf(kind, path, folder / "model.gguf") for kind in ("Q4_0", "Q8_0")},
}


def _write_unpacked(backend: str, quantize: str, dtype: torch.dtype, path: pathlib.Path, folder: pathlib.Path) -> None:
    """A model whose matrices hold, as floats, what this backend's weight method keeps of them beside activations of that type."""
    checkpoint, device = Checkpoint.open(path), open_backend(DeviceOptions(backend=backend, pack_cache="off"), 0)
    tensors = {}
    for name in checkpoint.names():
        stored = checkpoint.weight(name)
        values = torch.from_numpy(stored.raw())
        if len(stored.shape) == 2:
            method = choose(quantize, [stored], device.methods).load([stored], None, dtype, device.device)
            values = method.embed(device.ops, torch.arange(stored.shape[0], device=device.device))
        tensors[name] = values.float().cpu().clone()
    for file in path.glob("*.json"):
        shutil.copy(file, folder)
    save_file(tensors, folder / "model.safetensors")


class Forms:
    """The model of one family in all its forms, each written when it is first asked for."""

    def __init__(self, family: str, folder: pathlib.Path):
        self.family, self.folder = family, folder
        self.plain = write_model(family, folder / "safetensors")

    def stored(self, form: str) -> pathlib.Path:
        """As this kind of file; "" is the plain one."""
        return self._made(form, FORMS[form]) if form else self.plain

    def unpacked(self, backend: str, quantize: str, dtype: str) -> pathlib.Path:
        """The floats that are left of it by a backend's weight method. GPUs have methods beside halves alone."""
        dtype = dtype if backend == "cuda" else "float32"
        return self._made(
            f"{backend}-{quantize}-{dtype}", functools.partial(_write_unpacked, backend, quantize, getattr(torch, dtype))
        )

    def _made(self, name: str, write: Callable[[pathlib.Path, pathlib.Path], None]) -> pathlib.Path:
        folder = self.folder / name
        if not folder.exists():
            folder.mkdir()
            write(self.plain, folder)
        return folder

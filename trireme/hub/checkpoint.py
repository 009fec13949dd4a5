"""One interface to a model's files of any format: its settings, and its tensors under their Hugging Face names.

Knows files and names. It decodes no values, and reads pickles only through a `torch_loader` that the caller passes.
"""

from __future__ import annotations

import difflib
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trireme.errors import BadCheckpoint, ModelNotFound
from trireme.hub.catalogue import recommended_sampling
from trireme.hub.composite import Composite
from trireme.hub.gguf import GgufFile, read_gguf
from trireme.hub.gguf_models import config_of, generation_of, weights_of
from trireme.hub.kv_scales import Asked, asked, is_of_kv, is_scale
from trireme.hub.llama2c import llama2c_files, read_llama2c
from trireme.hub.safetensors import read_safetensors
from trireme.hub.schemes import join
from trireme.hub.storage import SECTIONS
from trireme.hub.weights import Weight

MAX_JSON = 64 * 2**20
# A pickle's tensors by name, each as (kind, numpy array that holds its bits)
TorchLoader = Callable[[pathlib.Path], dict[str, tuple[str, np.ndarray]]]


class Checkpoint:
    """Settings and tensors of one model. Tensors stay on disk until a leaf reads its slice."""

    def __init__(
        self,
        path: pathlib.Path,
        config: dict[str, Any],
        weights: dict[str, Weight],
        generation: dict[str, Any] | None = None,
        bin_files: list[pathlib.Path] | None = None,
        torch_loader: TorchLoader | None = None,
        source: GgufFile | None = None,
    ) -> None:
        """`source` is kept alive, so that another caller who opens the same file gets it without reading it again."""
        self.path, self.config, self.generation, self.source = path, config, generation or {}, source
        self.bin_files, self._torch_loader = bin_files or [], torch_loader
        self._weights = weights
        self._joined: dict[str, Weight | Composite] | None = None
        self.asked: set[str] = set()  # names, as in the file, of the tensors that were asked for

    @classmethod
    def open(cls, path: str | pathlib.Path, torch_loader: TorchLoader | None = None) -> Checkpoint:
        """A folder or a .gguf file. Pickled tensors (*.bin) are read only through `torch_loader`."""
        path = pathlib.Path(path)
        gguf = gguf_file(path)
        if gguf:
            file = read_gguf(gguf)
            config = config_of(file)
            generation = {**recommended_sampling(gguf.name), **generation_of(file)}
            return cls(gguf, config, weights_of(file, config), generation, source=file)
        llama2c = llama2c_files(path)
        if llama2c:
            return cls(path, *read_llama2c(llama2c[0]))
        if not path.is_dir():
            raise ModelNotFound(f"{path} is no model folder and no .gguf file.", "check the path, or see `trireme models`")
        config = read_json(path / "config.json")
        generation = read_json(path / "generation_config.json") if (path / "generation_config.json").exists() else {}
        weights, bin_files = _read_tensors(path)
        return cls(path, config, weights, generation, bin_files, torch_loader)

    def names(self) -> list[str]:
        return list(self._loaded())

    def entries(self) -> Mapping[str, Weight | Composite]:
        """Every tensor by its name. Tensors that together make a quantized matrix are one entry with the matrix's name."""
        return self._loaded()

    @property
    def quantization(self) -> dict[str, Any]:
        """The part of the config that describes how weights are quantized."""
        return next((found for name in SECTIONS if isinstance(found := self.config.get(name), dict)), {})

    @property
    def kv_asked(self) -> Asked:
        """The kind of KV that the checkpoint asks for."""
        beside = self.path / "hf_quant_config.json"  # where ModelOpt says it, besides or instead of the config
        found = asked(self.quantization)
        if not any(found) and beside.is_file():
            said = read_json(beside).get("quantization")
            return asked(said if isinstance(said, dict) else {})
        return found

    def kv_scales(self) -> dict[str, Weight]:
        """The tensors that say how keys and values are kept in fewer bits. `entries` is without them."""
        return {name: weight for name, weight in self._stored().items() if is_of_kv(name) and is_scale(name)}

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def weight(self, name: str) -> Weight | Composite:
        """The tensor of that name. In a checkpoint without a head, names may lack the first word (`model.`, `transformer.`)."""
        found = self._find(name)
        if found is None:
            near = difflib.get_close_matches(name, self.names(), n=3, cutoff=0.5)
            raise BadCheckpoint(
                f"{self.path} has no tensor {name}{'; nearest are ' + ', '.join(near) if near else ''}.",
                "check that all files of the model are there and of one model",
            )
        self.asked.add(found.name)
        return found

    def eos_token_ids(self) -> list[int]:
        """The tokens that end an answer."""
        for source in (self.generation, self.config):
            found = source.get("eos_token_id")
            ids = [i for i in (found if isinstance(found, list) else [found]) if type(i) is int]
            if ids:
                return ids
        return []

    def _find(self, name: str) -> Weight | Composite | None:
        weights = self._loaded()
        return weights.get(name) or weights.get(name.partition(".")[2])

    def _loaded(self) -> dict[str, Weight | Composite]:
        if self._joined is None:
            self._joined = join(self._stored(), self.quantization)
        return self._joined

    def _stored(self) -> dict[str, Weight]:
        if not self.bin_files and not self._weights:  # checked late: a model of random weights needs only its config
            raise BadCheckpoint(f"{self.path} has a config.json and no weights.", "fetch its *.safetensors files")
        if self.bin_files and not self._weights:
            if self._torch_loader is None:
                raise BadCheckpoint(f"{self.path} has only pickled tensors (*.bin).", "convert the model to safetensors")
            for file in self.bin_files:
                found = self._torch_loader(file)
                self._weights |= {name: Weight(name, kind, values) for name, (kind, values) in found.items()}
        return self._weights


def gguf_file(path: pathlib.Path) -> pathlib.Path | None:
    """The GGUF file that `path` means: itself, or the only one (or the first of a split set) in the folder."""
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFound(f"There is no file {path}.", "check the path, or see `trireme models`")
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(path.glob("*.gguf"))
    firsts = [file for file in found if "-00001-of-" in file.name]
    if len(firsts) == 1 or len(found) == 1:
        return (firsts or found)[0]
    if found:
        raise BadCheckpoint(f"{path} has {len(found)} GGUF files.", f"name one of them, such as {found[0]}")
    return None


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object from a file of sane size."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise BadCheckpoint(f"{path} is larger than {MAX_JSON} bytes.", "fetch the file again")
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise BadCheckpoint(f"Cannot read {path}: {error.strerror}.", "check that all files of the model are there") from None
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path} is not JSON: {str(error)[:100]}.", "fetch the file again") from None
    if not isinstance(found, dict):
        raise BadCheckpoint(f"{path} holds no JSON object.", "fetch the file again")
    return found


def _read_tensors(folder: pathlib.Path) -> tuple[dict[str, Weight], list[pathlib.Path]]:
    """All safetensors of the folder, by its index where it has one; else the names of its pickles."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return _read_indexed(folder, index), []
    single = folder / "model.safetensors"
    files = [single] if single.exists() else sorted(f for f in folder.glob("*.safetensors") if not f.name.startswith("adapter"))
    if files:
        weights: dict[str, Weight] = {}
        for file in files:
            weights |= read_safetensors(file)
        return weights, []
    bin_index = folder / "pytorch_model.bin.index.json"
    names = {_plain_name(bin_index, name) for name in _weight_map(bin_index).values()} if bin_index.exists() else set()
    bin_files = [folder / name for name in sorted(names)] or sorted(folder.glob("pytorch_model*.bin"))
    return {}, bin_files


def _read_indexed(folder: pathlib.Path, index: pathlib.Path) -> dict[str, Weight]:
    places = {name: _plain_name(index, file) for name, file in _weight_map(index).items()}
    files: dict[str, dict[str, Weight]] = {}
    for file in sorted(set(places.values())):
        if not (folder / file).exists():
            raise BadCheckpoint(f"{folder / file} is missing, though {index.name} names it.", "fetch all files of the model")
        files[file] = read_safetensors(folder / file)
    for name, file in places.items():
        if name not in files[file]:
            raise BadCheckpoint(f"{folder / file} has no tensor {name}, though {index.name} says so.", "fetch all files anew")
    return {name: files[file][name] for name, file in places.items()}


def _weight_map(index: pathlib.Path) -> dict[str, str]:
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise BadCheckpoint(f"{index} has no weight_map of names to files.", "fetch the file again")
    return found


def _plain_name(index: pathlib.Path, file: str) -> str:
    if pathlib.PurePath(file).name != file or file in ("", ".", "..") or "\\" in file or "\0" in file:
        raise BadCheckpoint(f"{index} names the file {file[:100]!r}, which is outside its folder.", "fetch the file again")
    return file

"""Scales that a checkpoint brings for keys and values: read under every name, cut for ranks, used by whatever keeps KV."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import tiny_models
import torch
from drive import Drive, Run, ThreadGroup
from safetensors.torch import load_file, save_file
from tiny_models import LENGTH, prompt
from torch import Tensor

from trireme.backends import reason_against
from trireme.config import resolve
from trireme.errors import TriremeError
from trireme.hub.kv_scales import asked
from trireme.ops import KVCache
from trireme.worker.worker import LocalWorker

LAYERS, HEADS, NEW = 3, 2, 12
# Without graphs, because the logits of recorded steps are not seen.
OPTIONS: dict[str, Any] = {"dtype": "float32", "quantize": "none", "max_step_tokens": 24, "graphs": False, "max_model_len": LENGTH}
NEAR = 2e-3  # mean error of the logits, of their mean size: the order of sums moves a number to the next code now and then
BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(reason_against(name) is not None, reason=str(reason_against(name))))
    for name in ("reference", "cpu")
]


def scheme(type_: str = "float", **more: Any) -> dict[str, Any]:
    settings = {"num_bits": 8, "type": type_, "dynamic": False, "symmetric": True} | more
    return {"quant_method": "compressed-tensors", "kv_cache_scheme": settings}


@dataclass
class Form:
    """How a checkpoint says it: its settings, the names of a layer's scales, and whether each head has its own."""

    settings: dict[str, Any]
    names: tuple[str, str]
    per_head: bool = False
    kind: str = "fp8"
    shape: tuple[int, ...] = ()
    beside: bool = False  # settings in ModelOpt's file, not in the config


FORMS = {
    "compressed-tensors": Form(scheme(strategy="tensor"), ("k_scale", "v_scale"), shape=(1,)),
    "compressed-tensors, heads": Form(scheme(strategy="attn_head"), ("k_scale", "v_scale"), True, shape=(HEADS, 1, 1)),
    "ModelOpt": Form({"kv_cache_quant_algo": "FP8"}, ("k_proj.k_scale", "v_proj.v_scale"), beside=True),
    "Quark": Form(scheme(), ("k_proj.output_scale", "v_proj.output_scale")),
    "int8": Form(scheme("int"), ("k_scale", "v_scale"), kind="int8", shape=(1,)),
    "int8, heads": Form(scheme("int"), ("k_scale", "v_scale"), True, kind="int8", shape=(HEADS,)),
}
MAIN = ("compressed-tensors, heads", "int8, heads")  # what takes a way of its own


def scales_of(form: Form) -> list[tuple[Tensor, Tensor]]:
    """By layer, of keys and values; of each head or the same of all. The smallest cut off some numbers."""
    most = 448 if form.kind == "fp8" else 127
    made = []
    for layer in range(LAYERS):
        steps = torch.arange(HEADS) if form.per_head else torch.zeros(HEADS)
        made.append(((0.9 + 0.31 * layer + 0.47 * steps) / most, (0.07 + 0.013 * layer + 0.04 * steps) / most))
    return made


def write(
    source: pathlib.Path, folder: pathlib.Path, form: Form, change: Callable[[dict[str, Tensor]], None] | None = None
) -> None:
    tensors = load_file(source / "model.safetensors")
    for layer, pair in enumerate(scales_of(form)):
        for name, values in zip(form.names, pair, strict=False):
            place = f"model.layers.{layer}.self_attn.{name}"
            tensors[place] = (values if form.per_head else values[:1]).reshape(form.shape).clone()
    if change:
        change(tensors)
    folder.mkdir(exist_ok=True)
    shutil.copy(source / "config.json", folder)
    if form.beside:
        (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": form.settings}))
    elif form.settings:
        config = json.loads((folder / "config.json").read_text()) | {"quantization_config": form.settings}
        (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("plain")
    tiny_models.build("Qwen3Config", tiny_models._BASE | {"head_dim": 40}, seed=3).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def folders(source: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    made = {}
    for name, form in FORMS.items():
        made[name] = tmp_path_factory.mktemp("scaled")
        write(source, made[name], form)
    return made


def rounded(x: Tensor, scale: Tensor, kind: str) -> Tensor:
    """What is left of x [tokens, heads, numbers] beside these scales, worked out here once more."""
    ratio = x / scale.view(1, -1, 1)
    if kind == "int8":
        return ratio.round().clamp(-128, 127) * scale.view(1, -1, 1)
    return ratio.clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale.view(1, -1, 1)


class Expected:
    """The logits of a model that keeps floats, where each key and value is rounded before it is kept."""

    def __init__(self, source: pathlib.Path):
        self.source, self.drives = source, dict[str, Drive]()

    def logits(self, form: Form, tokens: list[int]) -> Tensor:
        name = repr(form)
        if name not in self.drives:
            drive = Drive(self.source, **OPTIONS | {"page_size": 0, "prefix_cache": False, "max_step_tokens": LENGTH})
            for cache, scales in zip(drive.runner.caches.values(), scales_of(form), strict=True):
                self._round(cache, scales, form.kind)
            self.drives[name] = drive
        drive = self.drives[name]
        run = drive.run(f"{len(drive.runs)}", tokens, max_tokens=1)
        return torch.stack([run.logits[i] for i in range(len(tokens))])

    @staticmethod
    def _round(cache: KVCache, scales: tuple[Tensor, Tensor], kind: str) -> None:
        put = cache.put

        def rounding(k: Tensor, v: Tensor, slots: Tensor) -> None:
            put(rounded(k, scales[0], kind), rounded(v, scales[1], kind), slots)

        cache.put = rounding  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def expected(source: pathlib.Path) -> Iterator[Expected]:
    yield Expected(source)


def answered(drive: Drive, asked: dict[str, list[int]]) -> dict[str, tuple[Run, list[int]]]:
    for name, tokens in asked.items():
        drive.add(name, tokens, max_tokens=NEW)
    found = drive.finish()
    return {name: (found[name], tokens) for name, tokens in asked.items()}


def check(runs: dict[str, tuple[Run, list[int]]], form: Form, expected: Expected) -> None:
    for name, (run, tokens) in runs.items():
        wanted = expected.logits(form, [*tokens, *run.tokens[:-1]])
        assert len(run.tokens) == NEW and len(run.logits) >= NEW
        errors = [(run.logits[i] - wanted[i]).abs().mean() for i in run.logits if i < len(wanted)]
        assert float(torch.stack(errors).mean() / wanted.abs().mean()) < NEAR, name


@pytest.mark.parametrize("page_size", [16, 1, 0])
@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_and_prefixes(folders: dict[str, pathlib.Path], expected: Expected, backend: str, name: str, page_size: int) -> None:
    drive = Drive(folders[name], **OPTIONS | {"backend": backend, "page_size": page_size, "kv_tokens": 4 * LENGTH})
    assert drive.worker.ready.kv == f"{FORMS[name].kind}, with the checkpoint's scales"
    common = prompt(33, 1)
    runs = answered(drive, {"first": [*common, *prompt(7, 2)], "beside": prompt(3, 3)})
    runs |= answered(drive, {"again": [*common, *prompt(9, 4)]})
    assert runs["again"][0].cached == {0: 0, 16: 32, 1: 33}[page_size]
    check(runs, FORMS[name], expected)


@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("backend", BACKENDS)
def test_pauses(folders: dict[str, pathlib.Path], expected: Expected, backend: str, name: str) -> None:
    settings = {"backend": backend, "page_size": 4, "kv_tokens": 64, "max_model_len": 64, "policy": "aggressive"}
    drive = Drive(folders[name], **OPTIONS | settings)
    runs = answered(drive, {f"{i}": prompt(18 + i, i) for i in range(3)})
    assert drive.scheduler.stats().preemptions > 0
    check(runs, FORMS[name], expected)


@pytest.mark.parametrize("name", ["compressed-tensors", "ModelOpt", "Quark", "int8"])
def test_other_names(folders: dict[str, pathlib.Path], expected: Expected, name: str) -> None:
    check(answered(Drive(folders[name], **OPTIONS), {"a": prompt(20, 1)}), FORMS[name], expected)


@pytest.mark.parametrize("name", MAIN)
def test_scales_matter(folders: dict[str, pathlib.Path], source: pathlib.Path, expected: Expected, name: str) -> None:
    """Without them, and with the kind alone, logits are further off than any test here allows."""
    form = FORMS[name]
    runs = answered(Drive(source, **OPTIONS, kv_dtype=form.kind), {"a": prompt(20, 1)})
    with pytest.raises(AssertionError, match="a"):
        check(runs, form, expected)


@pytest.mark.parametrize("name", [*MAIN, "ModelOpt"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks(
    folders: dict[str, pathlib.Path], expected: Expected, monkeypatch: pytest.MonkeyPatch, backend: str, name: str
) -> None:
    settings = OPTIONS | {"max_running": 4, "backend": backend, "kv_tokens": 2 * LENGTH}
    ranks = ThreadGroup(resolve(settings | {"tp": 2}, environ={}), folders[name], monkeypatch)
    try:
        for rank, worker in enumerate(ranks.workers):
            for cache, pair in zip(worker.runner.caches.values(), scales_of(FORMS[name]), strict=True):
                assert [x.tolist() for x in cache.factors] == [x[rank : rank + 1].tolist() for x in pair]
        check(
            answered(Drive(folders[name], worker=ranks, **settings), {"a": prompt(40, 1), "b": prompt(5, 2)}), FORMS[name], expected
        )
    finally:
        ranks.close()


@pytest.mark.parametrize("name", MAIN)
def test_recorded_steps(folders: dict[str, pathlib.Path], name: str) -> None:
    if reason_against("cpu"):
        pytest.skip(str(reason_against("cpu")))
    ways = []
    for graphs in (True, False):
        drive = Drive(folders[name], full=False, **OPTIONS | {"backend": "cpu", "graphs": graphs})
        ways.append([run.tokens for run, _ in answered(drive, {"a": prompt(40, 1), "b": prompt(5, 2)}).values()])
    assert ways[0] == ways[1]


# --- what the settings say --------------------------------------------------------------------------------------------------


def test_what_a_checkpoint_asks_for() -> None:
    assert asked({}) == asked({"kv_cache_scheme": None, "kv_cache_quant_algo": None}) == ("", "")
    assert asked({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}) == ("fp8", "")
    assert asked({"kv_cache_quant_algo": "fp8"}) == ("fp8", "")
    assert asked({"kv_cache_quant_algo": "NVFP4"}) == ("", "NVFP4")
    assert asked(scheme(num_bits=4)) == ("", "float in 4 bits")
    assert asked(scheme(dynamic=True)).other and asked(scheme("int", symmetric=False)).other


def opened(source: pathlib.Path, folder: pathlib.Path, form: Form, **settings: Any) -> Drive:
    write(source, folder, form)
    return Drive(folder, **OPTIONS | settings)


def test_scales_that_nothing_asks_for(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """They are of use only to who chooses fp8."""
    form = Form({}, ("attn.k_scale", "attn.v_scale"))
    drive = opened(source, tmp_path, form)
    assert drive.worker.ready.kv == "" and drive.runner.caches[0].kind == "plain"
    assert Drive(tmp_path, **OPTIONS, kv_dtype="fp8").worker.ready.kv == "fp8, with the checkpoint's scales"
    scaled_itself = Drive(tmp_path, **OPTIONS, kv_dtype="int8")
    assert scaled_itself.worker.ready.kv == "int8" and scaled_itself.runner.caches[0].factors is None


def test_the_user_decides(folders: dict[str, pathlib.Path]) -> None:
    assert Drive(folders["ModelOpt"], **OPTIONS, kv_dtype="plain").runner.caches[0].kind == "plain"
    assert Drive(folders["int8"], **OPTIONS, kv_dtype="fp8").worker.ready.kv == "fp8"  # those scales are of whole numbers


def test_kinds_that_are_not_kept(source: pathlib.Path, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    form = Form({"kv_cache_quant_algo": "NVFP4"}, ("k_proj.k_scale", "v_proj.v_scale"), beside=True)
    assert opened(source, tmp_path, form).runner.caches[0].kind == "plain"
    assert "asks for keys and values in NVFP4, which reference does not keep" in capfd.readouterr().err


def test_one_scale_for_both(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for layer in (0, 2):  # a layer without scales keeps its numbers as they are
            tensors[f"model.layers.{layer}.self_attn.kv_scale"] = torch.tensor(0.02 + layer, dtype=torch.bfloat16)

    write(source, tmp_path, Form(scheme(), ()), change)
    drive = Drive(tmp_path, **OPTIONS)
    assert drive.worker.ready.kv == "fp8, with the checkpoint's scales for 2 of 3 layers"
    caches = drive.runner.caches
    assert caches[1].factors is None and torch.equal(*caches[0].factors)
    assert caches[2].factors[0].tolist() == [2.015625] * 2


# --- what is refused --------------------------------------------------------------------------------------------------------

_NAME = "model.layers.1.self_attn.k_scale"
BROKEN: dict[str, tuple[str, Tensor]] = {
    "no number": (_NAME, torch.tensor([float("nan")])),
    "zero": (_NAME, torch.tensor([0.0])),
    "below zero": (_NAME, torch.tensor([-1.0])),
    "endless": (_NAME, torch.tensor([float("inf")])),
    "three heads": (_NAME, torch.ones(3)),
    "one for each number": (_NAME, torch.ones(HEADS, 40)),
    "whole": (_NAME, torch.ones(1, dtype=torch.int32)),
    "one of the heads": (_NAME, torch.tensor([0.1, float("nan")])),
    "zero point": ("model.layers.1.self_attn.v_zero_point", torch.ones(1)),
    "of no layer": ("model.layers.7.self_attn.k_scale", torch.ones(1)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_refused_by_name(source: pathlib.Path, tmp_path: pathlib.Path, name: str) -> None:
    place, tensor = BROKEN[name]
    write(source, tmp_path, FORMS["compressed-tensors"], lambda tensors: tensors.update({place: tensor}))
    with pytest.raises(TriremeError) as caught:
        Drive(tmp_path, **OPTIONS)
    assert place in str(caught.value) and "\n" not in str(caught.value)
    Drive(tmp_path, **OPTIONS, kv_dtype="plain")  # where they are not used, they are not read


def test_keys_without_values(source: pathlib.Path, tmp_path: pathlib.Path) -> None:
    write(source, tmp_path, FORMS["compressed-tensors"], lambda tensors: tensors.pop("model.layers.1.self_attn.v_scale"))
    with pytest.raises(TriremeError, match=rf"{_NAME} has no partner"):
        Drive(tmp_path, **OPTIONS)


# --- other weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_reloaded_scales(source: pathlib.Path, tmp_path: pathlib.Path, backend: str) -> None:
    form, twice = FORMS["compressed-tensors"], tmp_path / "twice"
    write(source, tmp_path, form)
    write(source, twice, form, lambda tensors: tensors.update({n: 2 * x for n, x in tensors.items() if n.endswith("_scale")}))
    write(source, tmp_path / "without", Form({}, ()))
    worker = LocalWorker(resolve(OPTIONS | {"backend": backend}, environ={}), tmp_path)
    factors = worker.runner.caches[0].factors
    assert "kept otherwise" in worker.reload(tmp_path / "without")
    assert worker.reload(twice) == ""
    assert worker.runner.caches[0].factors is factors and factors[0].tolist() == (2 * scales_of(form)[0][0]).tolist()


@pytest.mark.parametrize("largest", [8.0, 80.0])
def test_a_large_bias_of_keys_is_told(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str], largest: float) -> None:
    folder = tiny_models.save("qwen2", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.bias"][3] = -largest
    save_file(tensors, folder / "model.safetensors")
    for kind, told in (("plain", False), ("int8", largest > 32)):
        Drive(folder, **OPTIONS, kv_dtype=kind)
        assert ("adds up to 80 to its keys" in capfd.readouterr().err) is told

"""What is not understood ends the loading in one line: storage, tensors and settings that no layer would use."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from drive import Drive, ThreadComm, ThreadGroup
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.hub.gguf_writer import llama_metadata, llama_tensors, random_tensor, write
from tests.serve.tiny_server_model import write_tiny
from trireme.backends.reference import Reference
from trireme.cli.main import main
from trireme.config import DeviceOptions, resolve
from trireme.errors import BadCheckpoint, TriremeError, UnsupportedModel
from trireme.hub.checkpoint import Checkpoint
from trireme.hub.weights import Weight
from trireme.llm import LLM
from trireme.models import MODELS
from trireme.models.llama import Llama
from trireme.parallel import Group, Mesh
from trireme.worker.load import asked_by_any

BACKENDS = ("reference", "cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_models.save("llama2", tmp_path_factory.mktemp("llama2"))


@pytest.fixture
def folder(saved: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(saved, tmp_path / "model"))


def set_config(folder: pathlib.Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


def set_tensors(folder: pathlib.Path, change: Callable[[str, Tensor], dict[str, Tensor]]) -> None:
    """Puts what `change` gives in the place of each tensor."""
    tensors: dict[str, Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        tensors |= change(name, value)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def run(path: pathlib.Path, backend: str) -> None:
    Drive(path, full=False, backend=backend, kv_tokens=32, max_model_len=32).run("a", [1, 2, 3], max_tokens=1)


def refusal(path: pathlib.Path, backend: str, kind: type[TriremeError] = UnsupportedModel) -> str:
    with pytest.raises(kind) as caught:
        run(path, backend)
    assert "\n" not in str(caught.value) and caught.value.fix
    return str(caught.value)


def as_bare_fp8(name: str, value: Tensor) -> dict[str, Tensor]:
    if not name.endswith("_proj.weight"):
        return {name: value}
    return {name: value.to(torch.float8_e4m3fn)}


def as_int8_without_scales(name: str, value: Tensor) -> dict[str, Tensor]:
    if not name.endswith("_proj.weight"):
        return {name: value}
    scale = value.abs().amax(1, keepdim=True) / 127
    return {name: (value / scale).round().to(torch.int8), f"{name}_zero_point": scale}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("change", "format"), [(as_bare_fp8, "fp8"), (as_int8_without_scales, "compressed-tensors")])
@pytest.mark.parametrize("said", [True, False])
def test_quantized_weights_that_are_not_read(folder: pathlib.Path, backend: str, change: Any, format: str, said: bool) -> None:
    """Whether the config says so or not."""
    set_tensors(folder, change)
    if said:
        set_config(folder, quantization_config={"quant_method": format})
    refused = refusal(folder, backend)
    assert format in refused and "_proj.weight" in refused


# What is left of a matrix of [rows, columns] in formats that are read, without the tensor that is named; and in some that are not.
REMAINS: dict[str, tuple[str, Callable[[int, int], dict[str, Tensor]]]] = {
    "GPTQ": (
        "_proj.scales",
        lambda n, k: {"qweight": torch.ones(k // 8, n, dtype=torch.int32), "qzeros": torch.ones(1, n // 8, dtype=torch.int32)},
    ),
    "AWQ": (
        "_proj.scales",
        lambda n, k: {"qweight": torch.ones(k, n // 8, dtype=torch.int32), "qzeros": torch.ones(1, n // 8, dtype=torch.int32)},
    ),
    "compressed-tensors": ("_proj.weight_shape", lambda n, k: {"weight_packed": torch.ones(n, k // 8, dtype=torch.int32)}),
    "MXFP4": ("_proj.weight_scales", lambda n, k: {"weight_blocks": torch.ones(n, k // 32, 16, dtype=torch.uint8)}),
    "bitsandbytes": (
        "bitsandbytes",
        lambda n, k: {"weight": torch.ones(n * k // 2, 1, dtype=torch.uint8), "weight.absmax": torch.ones(n)},
    ),
    "MLX": (
        "MLX",
        lambda n, k: {"weight": torch.ones(n, k // 8, dtype=torch.uint32), "scales": torch.ones(n, 1), "biases": torch.ones(n, 1)},
    ),
    "unknown": ("unknown", lambda n, k: {"weight": torch.ones(n, k, dtype=torch.int16), "weight_scale_2": torch.ones(())}),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", REMAINS)
def test_formats_of_which_something_is_missing(folder: pathlib.Path, backend: str, format: str) -> None:
    said, remains = REMAINS[format]

    def change(name: str, value: Tensor) -> dict[str, Tensor]:
        if not name.endswith("_proj.weight"):
            return {name: value}
        rows, columns = value.shape
        return {f"{name.removesuffix('weight')}{end}": tensor for end, tensor in remains(rows, columns).items()}

    set_tensors(folder, change)
    refused = refusal(folder, backend, BadCheckpoint if said.startswith("_proj") else UnsupportedModel)
    assert said in refused and "_proj." in refused


@pytest.mark.parametrize("backend", BACKENDS)
def test_whole_numbers_are_no_values(folder: pathlib.Path, backend: str) -> None:
    """A norm or a table of tokens as much as a matrix."""
    for part in ("model.norm", "embed_tokens"):
        set_tensors(folder, lambda name, value, part=part: {name: value.to(torch.int16) if part in name else value})
        assert "I16" in refusal(folder, backend)


def test_whole_numbers_that_nobody_reads_are_passed_over(folder: pathlib.Path) -> None:
    """Beside pickled weights there are often counters and masks."""
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    tensors["model.embeddings.position_ids"] = torch.arange(8).reshape(1, 8)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    run(folder, "reference")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(torch.float8_e4m3fn)
    torch.save(tensors, folder / "pytorch_model.bin")
    assert "fp8" in refusal(folder, "reference")


def with_biases(folder: pathlib.Path) -> pathlib.Path:
    """A Llama whose config does not mention the biases that lie beside its weights."""
    tiny_models.save("llama-biased", folder)
    set_config(folder, attention_bias=False, mlp_bias=False)
    return folder


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_that_nobody_reads(tmp_path: pathlib.Path, backend: str) -> None:
    said = refusal(with_biases(tmp_path), backend)
    assert "class Llama does not use" in said and ".bias" in said and "like them" in said


def test_what_is_harmless_beside_the_weights(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A table of rotations, a tied head stored twice, the head of another task: the last one is named."""
    tiny_models.save("llama3", tmp_path)
    size = (tiny_models.VOCAB, 48)
    more = {"lm_head.weight": torch.zeros(size), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save_file(load_file(tmp_path / "model.safetensors") | more, tmp_path / "model.safetensors")
    run(tmp_path, "reference")
    assert "left out" not in capfd.readouterr().err
    more |= {"v_head.summary.weight": torch.zeros(1, 48)}
    save_file(load_file(tmp_path / "model.safetensors") | more, tmp_path / "model.safetensors")
    run(tmp_path, "reference")
    assert "left out: heads of other tasks (1 tensors)" in capfd.readouterr().err


def test_a_head_that_is_not_tied_is_no_second_copy(tmp_path: pathlib.Path) -> None:
    tiny_models.save("llama3", tmp_path)
    more = {"embed_out.weight": torch.zeros(4, 48)}
    save_file(load_file(tmp_path / "model.safetensors") | more, tmp_path / "model.safetensors")
    assert "embed_out.weight" in refusal(tmp_path, "reference")


def test_every_rank_says_the_same(folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve({"backend": "reference", "tp": 2, "kv_tokens": 32, "max_model_len": 32}, environ={})
    ThreadGroup(config, folder, monkeypatch).close()
    with pytest.raises(UnsupportedModel, match="does not use"):
        ThreadGroup(config, with_biases(tmp_path / "biased"), monkeypatch)


def test_what_any_rank_asked_for_is_used() -> None:
    """Ranks may share the tensors out, as they do with experts."""
    boards: list[Any] = [None, None]
    barrier = threading.Barrier(2, timeout=30)

    def asked_by(rank: int) -> set[str]:
        weights = {name: Weight(name, "F32", np.zeros(1, np.float32)) for name in ("first", "second", "third")}
        checkpoint = Checkpoint(pathlib.Path("folder"), {}, weights)
        checkpoint.weight(("first", "second")[rank])
        return set(
            asked_by_any(checkpoint, Reference(DeviceOptions()), Mesh(tp=Group(rank, 2, ThreadComm(rank, 2, boards, barrier))))
        )

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(asked_by, range(2))) == [{"first", "second"}] * 2


def test_what_lies_packed_on_disk_counts_as_asked_for(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("TRIREME_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        Drive(folder, full=False, backend="cpu", pack_cache="on", quantize="int8", kv_tokens=32, max_model_len=32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_setting_that_nobody_reads(folder: pathlib.Path, backend: str) -> None:
    set_config(folder, final_logit_softcapping=30.0)
    assert "final_logit_softcapping to 30.0" in refusal(folder, backend)


@pytest.mark.parametrize(
    ("metadata", "tensors", "said"),
    [
        ({"llama.expert_count": 8}, {}, "num_local_experts to 8"),
        ({"llama.logit_scale": 0.5}, {}, "logit_scale"),
        ({"llama.attention.causal": False}, {}, "is_causal"),
        ({"llama.attention.value_length": 4}, {}, "v_head_dim"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.rope.scaling.yarn_log_multiplier": 0.1}, {},
         "rope_scaling.yarn_log_multiplier"),
        ({}, {"blk.0.attn_output.bias": random_tensor("F32", 32)}, "model.layers.0.self_attn.o_proj.bias"),
        ({}, {"blk.0.ffn_gate_inp.weight": random_tensor("F32", 8, 32)}, "blk.0.ffn_gate_inp.weight"),
        ({}, {"rope_factors_long.weight": random_tensor("F32", 4)}, "rope_factors_long.weight"),
    ],
)  # fmt: skip
def test_gguf_files_as_much(tmp_path: pathlib.Path, metadata: dict, tensors: dict, said: str) -> None:
    for backend in BACKENDS:
        file = write(tmp_path / "model.gguf", llama_metadata(**metadata), llama_tensors() | tensors)
        assert said in refusal(file, backend)


def test_gguf_files_that_are_understood(tmp_path: pathlib.Path) -> None:
    neutral = {
        "llama.rope.dimension_count": 8,
        "llama.expert_count": 0,
        "llama.attention.value_length": 8,
        "llama.attention.key_length": 8,
    }
    run(write(tmp_path / "model.gguf", llama_metadata(**neutral), llama_tensors()), "reference")
    part = write(tmp_path / "part.gguf", llama_metadata(**{"llama.rope.dimension_count": 4}), llama_tensors())
    assert Checkpoint.open(part).config["partial_rotary_factor"] == 0.5  # rope turns half of each head
    run(part, "reference")


# --- as a user meets it ---------------------------------------------------------------------------------------------------------


def test_the_doctor_reads_no_weights(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Weight, "raw", lambda self: pytest.fail(f"{self.name} was read"))
    assert main(["doctor", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "class Llama" in said and "F32 (30 tensors)" in said and "every setting and tensor" in said
    for family in ("gemma3", "bloom", "qwen2-window", "llama-dynamic"):
        assert main(["doctor", str(tiny_models.save(family, tmp_path / family))]) == 0
    assert main(["doctor", str(with_biases(tmp_path / "biased"))]) == UnsupportedModel.exit_code
    assert ".bias" in capsys.readouterr().err
    set_tensors(folder, as_bare_fp8)
    assert main(["doctor", str(folder)]) == UnsupportedModel.exit_code
    assert "fp8" in capsys.readouterr().err
    file = write(tmp_path / "model.gguf", llama_metadata(**{"llama.expert_count": 8}), llama_tensors())
    assert main(["doctor", str(file)]) == UnsupportedModel.exit_code
    assert "num_local_experts" in capsys.readouterr().err
    set_tensors(tmp_path / "gemma3", lambda name, value: {} if "layers.1.mlp.up" in name else {name: value})
    assert main(["doctor", str(tmp_path / "gemma3")]) == BadCheckpoint.exit_code
    assert "no tensor model.layers.1.mlp.up_proj.weight" in capsys.readouterr().err


def as_int8(name: str, value: Tensor) -> dict[str, Tensor]:
    if not name.endswith("_proj.weight"):
        return {name: value}
    scale = value.abs().amax(1, keepdim=True) / 127
    return {name: (value / scale).round().to(torch.int8), f"{name}_scale": scale}


class Curious(Llama):
    """A plug-in's class that looks at a value while it loads, and leaves something out."""

    looks = False

    @staticmethod
    def leaves_out(raw: dict[str, Any]) -> dict[str, tuple[str, ...]]:
        return {"a tower": ("tower.*",)}

    def load(self, read: Any, path: str = "") -> None:
        super().load(read, path)
        assert not self.looks or self.model.norm.weight.sum().item()


def test_the_doctor_tries_every_kind_of_model(folder: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Quantized ones that are read, those of plug-ins, and those that cannot be tried without values."""
    set_tensors(folder, as_int8)
    set_tensors(folder, lambda name, value: {name: value} | ({"tower.first.weight": value.clone()} if "norm" in name else {}))
    assert main(["doctor", str(folder)]) == UnsupportedModel.exit_code
    assert "tower.first.weight" in capsys.readouterr().err
    monkeypatch.setitem(MODELS, "LlamaForCausalLM", Curious)
    assert main(["doctor", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "a tower (1 tensors)" in said and "I8C (21 tensors)" in said and "every setting and tensor" in said
    monkeypatch.setattr(Curious, "looks", True)
    assert main(["doctor", str(folder)]) == 0
    assert "Curious needs values to load" in capsys.readouterr().out


def bare_fp8(folder: pathlib.Path) -> None:
    set_tensors(folder, as_bare_fp8)


def a_stray_tensor(folder: pathlib.Path) -> None:
    set_tensors(
        folder, lambda name, value: {name: value, **({"model.norm.bias": value.clone()} if name == "model.norm.weight" else {})}
    )


def a_setting(folder: pathlib.Path) -> None:
    set_config(folder, final_logit_softcapping=30.0)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (bare_fp8, "fp8"),
        pytest.param(a_stray_tensor, "model.norm.bias", marks=pytest.mark.wide),
        pytest.param(a_setting, "final_logit_softcapping", marks=pytest.mark.wide),
    ],
)
def test_the_offline_api_and_the_server_say_it_too(
    spoil: Callable[[pathlib.Path], None], said: str, tmp_path: pathlib.Path
) -> None:
    folder = write_tiny(tmp_path / "model")
    spoil(folder)
    with pytest.raises(UnsupportedModel, match=said):
        LLM(str(folder), backend="reference")
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "trireme", "serve", str(folder), "--backend", "reference", "--uds", f"{tmp_path}/s.sock"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == UnsupportedModel.exit_code and said in done.stderr.strip().splitlines()[-1], done.stderr

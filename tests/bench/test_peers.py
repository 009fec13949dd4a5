"""`bench peers`: the files made for peers hold the same weights, and engines are started, asked in turns and compared."""

from __future__ import annotations

import io
import pathlib
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hub.gguf_writer import gguf_bytes, llama_metadata, random_tensor
from rich.console import Console
from safetensors.torch import load_file

from trireme.bench import peers
from trireme.bench.peer_files import float_folder, q4_0_blocks, q8_0_blocks, requantized
from trireme.bench.peers import Figures, Peer, measure, ratios
from trireme.errors import BadConfig
from trireme.hub.checkpoint import Checkpoint
from trireme.hub.gguf import read_gguf
from trireme.quant import decode
from trireme.quant.gguf import decode_blocks


def test_blocks_are_within_half_a_step() -> None:
    weight = torch.randn(6, 96, generator=torch.Generator().manual_seed(3))
    weight[2, 32:64] = 0
    largest = weight.reshape(-1, 32).abs().amax(1, keepdim=True)
    for kind, make, step in (("Q8_0", q8_0_blocks, largest / 127), ("Q4_0", q4_0_blocks, largest / 8)):
        back = decode_blocks(kind, torch.from_numpy(make(weight))).reshape(6, 96)
        error = (back - weight).reshape(-1, 32).abs()
        bound = step * (0.51 if kind == "Q8_0" else 1.01)  # Q4_0 has no +8: the far end is cut to 7
        assert (error <= bound + 1e-3 * largest).all(), kind


def llama_file(path: pathlib.Path) -> pathlib.Path:
    """A llama of one layer in Q4_1, its embeddings in Q8_0, with scales that are numbers."""
    shapes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    shapes |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
    tensors = {"token_embd.weight": blocks("Q8_0", 6, 32), "output_norm.weight": random_tensor("F32", 32)}
    for name, shape in shapes.items():
        tensors[f"blk.0.{name}.weight"] = blocks("Q4_1", *shape)
    for name in ("attn_norm", "ffn_norm"):
        tensors[f"blk.0.{name}.weight"] = random_tensor("F32", 32)
    path.write_bytes(gguf_bytes(llama_metadata(), tensors))
    return path


def blocks(kind: str, rows: int, columns: int) -> tuple[str, tuple[int, ...], bytes]:
    dice, count = np.random.default_rng(rows), rows * columns // 32
    halves = dice.normal(0.1, 0.02, (count, 1 if kind == "Q8_0" else 2)).astype("<f2").view(np.uint8)
    numbers = dice.integers(0, 256, (count, 32 if kind == "Q8_0" else 16), dtype=np.uint8)
    return kind, (rows, columns), np.concatenate([halves, numbers], 1).tobytes()


def test_a_requantized_file_has_the_same_metadata_and_nearly_the_same_weights(tmp_path: pathlib.Path) -> None:
    source = llama_file(tmp_path / "source.gguf")
    old, new = read_gguf(source), read_gguf(requantized(source, "Q8_0", tmp_path / "made" / "new.gguf"))
    assert repr(old.metadata) == repr(new.metadata)
    assert list(old.tensors) == list(new.tensors)
    for name, before in old.tensors.items():
        after = new.tensors[name]
        assert after.kind == {"Q4_1": "Q8_0"}.get(before.kind, before.kind) and after.shape == before.shape
        torch.testing.assert_close(decode(after, torch.float32), decode(before, torch.float32), atol=0.02, rtol=0)


def test_the_float_folder_is_the_checkpoint(tmp_path: pathlib.Path) -> None:
    source = llama_file(tmp_path / "source.gguf")
    folder, checkpoint = float_folder(source, tmp_path / "floats"), Checkpoint.open(source)
    written = load_file(folder / "model.safetensors")
    assert set(written) == set(checkpoint.names())
    for name, weight in written.items():
        assert torch.equal(weight, decode(checkpoint.weight(name), torch.float32)), name
    assert Checkpoint.open(folder).config["hidden_size"] == 32


FAKE = """
import sys

from answering import serve

class Fake:
    def prefill(self, prompt): return len(prompt) / 100
    def decode(self, prompts, steps): return len(prompts) * steps / float(sys.argv[3])

print("chatter that is no answer")
if sys.argv[3] == "50" and "plain" not in sys.argv:
    sys.exit("cannot run so")
serve(Fake())
"""


@pytest.fixture
def fakes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> list[Peer]:
    shutil.copy(peers.SCRIPTS / "answering.py", tmp_path)
    for name in ("trireme", "other"):
        (tmp_path / f"with_{name}.py").write_text(FAKE)
    monkeypatch.setattr(peers, "SCRIPTS", tmp_path)
    return [Peer("trireme a", "4", "", tmp_path, ["200"]), Peer("other b", "4", "", tmp_path, ["50"], ["plain"])]


def test_engines_are_asked_and_compared(fakes: list[Peer]) -> None:
    figures = measure(fakes, ["decode 8", "prefill 512"], 1, 2, Console(file=io.StringIO()))
    assert [round(f.tokens_per_second["decode 8"]) for f in figures] == [200, 50]
    assert [round(f.tokens_per_second["prefill 512"]) for f in figures] == [100, 100]
    assert [bool(f.note) for f in figures] == [False, True], "the second started only with its fallback"
    assert all(f.peak_bytes > 1 << 20 and f.start_seconds > 0 for f in figures)
    found = ratios(figures, ["decode 8", "prefill 512"])
    four = found["4 bits: ours/theirs"]
    assert four["decode 8"] == pytest.approx(4.0) and four["prefill 512"] == pytest.approx(1.0)


def test_an_engine_that_cannot_start_is_left_out(fakes: list[Peer]) -> None:
    fakes[1].fallback = []
    said = io.StringIO()
    figures = measure(fakes, ["decode 1"], 1, 1, Console(file=said, width=200))
    assert [f.name for f in figures] == ["trireme a"], said.getvalue()
    assert "cannot run so" in said.getvalue()


def test_bits_without_a_peer_have_no_ratio() -> None:
    assert ratios([Figures(name="trireme int8", bits="8", tokens_per_second={"decode 1": 1.0})], ["decode 1"]) == {}


def test_nothing_is_fetched_without_leave(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setenv("TRIREME_CACHE", str(tmp_path))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "")
    with pytest.raises(BadConfig, match="not wanted"):
        peers._environment("vllm", peers.Console())
    assert "vllm" in asked[0] and not list(tmp_path.iterdir())


def test_an_environment_must_name_an_engine() -> None:
    with pytest.raises(BadConfig):
        peers._pair("nobody=/tmp")
    assert peers._pair("vllm=folder") == ("vllm", "folder")

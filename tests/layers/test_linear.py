"""Linear layers and embeddings: what each rank reads, and that the ranks' parts make the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.pytorch_utils import Conv1D

from trireme.backends import open_backend
from trireme.config import DeviceOptions
from trireme.errors import BadConfig, UnsupportedModel
from trireme.hub.weights import Weight
from trireme.layers import MLP, Embedding, Env, GatedMLP, Head, Linear, Module, Rows
from trireme.parallel import Group, Mesh

BACKEND = open_backend(DeviceOptions(backend="reference"))
NUMBERS = np.random.default_rng(1)
STORED: dict[str, np.ndarray] = {}
TURNED = ("c_fc.weight", "c_fc.bias", "c_proj.weight", "c_proj.bias")


def read(name: str, shape: tuple[int, ...]) -> Weight:
    """The same numbers for the same name, whoever reads."""
    if name not in STORED:
        STORED[name] = NUMBERS.standard_normal(shape).astype(np.float32)
    assert STORED[name].shape == shape
    return Weight(name, "F32", STORED[name])


class Sum:
    """Stands for the other ranks: keeps what this one brings to a sum or lays side by side."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        return x


def build(layer: type[Module], size: int, *args: Any, path: str = "home.own", **kwargs: Any) -> list[Any]:
    ranks = []
    for rank in range(size):
        env = Env(BACKEND, mesh=Mesh(tp=Group(rank, size, Sum())))  # type: ignore[arg-type]
        ranks.append(env.new(layer, *args, **kwargs))
        ranks[-1].load(read, path)
    return ranks


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_cut_by_input_sums_to_the_whole(size: int, bias: bool) -> None:
    x = torch.randn(4, 70)
    ranks = build(Linear, size, 70, {f"o_proj_{bias}": 9}, cut="in", bias=bias)
    parts = [rank(x[:, rank.columns]) for rank in ranks]
    weight = torch.from_numpy(STORED[f"home.o_proj_{bias}.weight"])
    exact = x @ weight.T + (torch.from_numpy(STORED["home.o_proj_True.bias"]) if bias else 0.0)
    torch.testing.assert_close(sum(parts), exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_cut_by_output_lies_side_by_side(size: int) -> None:
    x = torch.randn(4, 24)
    ranks = build(Linear, size, 24, {"a": 50, "b": 30}, cut="out", unit=5, bias=True)
    for i, name in enumerate("ab"):
        exact = x @ torch.from_numpy(STORED[f"home.{name}.weight"]).T + torch.from_numpy(STORED[f"home.{name}.bias"])
        found = torch.cat([rank.split(x)[i] for rank in ranks], -1)
        torch.testing.assert_close(found, exact, atol=1e-4, rtol=1e-4)


def test_chosen_rows_in_their_order() -> None:
    x, rows = torch.randn(3, 8), np.array([7, 0, 3])
    (layer,) = build(Linear, 1, 8, [Rows("mixed", 10, rows), Rows("mixed", 10, slice(4, 6))])
    weight = torch.from_numpy(STORED["home.mixed.weight"])
    torch.testing.assert_close(layer(x), x @ weight[[7, 0, 3, 4, 5]].T)
    assert layer.widths == [3, 2]


@pytest.mark.parametrize("size", [1, 3])
def test_matrices_stored_in_the_other_order(size: int) -> None:
    """As GPT-2 has them, beside the layer of transformers that computes with them so."""
    x, theirs = torch.randn(4, 24), Conv1D(48, 24)
    STORED["home.c_attn.weight"] = theirs.weight.detach().numpy()
    STORED["home.c_attn.bias"] = np.zeros(48, np.float32)
    rows = [Rows("c_attn", 48, slice(16 * i, 16 * i + 16)) for i in range(3)]  # q, k and v
    for layer in build(Linear, 1, 24, rows, cut="out", bias=True, turned=True):
        torch.testing.assert_close(layer(x), theirs(x), atol=1e-5, rtol=1e-5)
    chosen = [5, 40, 2]
    (layer,) = build(Linear, 1, 24, [Rows("c_attn", 48, np.array(chosen))], turned=True)
    torch.testing.assert_close(layer(x), theirs(x)[:, chosen], atol=1e-5, rtol=1e-5)
    ranks = build(Linear, size, 24, {"c_attn": 48}, cut="in", turned=True)
    torch.testing.assert_close(sum(rank(x[:, rank.columns]) for rank in ranks), theirs(x), atol=1e-5, rtol=1e-5)
    parts = build(MLP, size, 24, 64, ("c_fc", "c_proj"), "relu", turned=True, path="mlp")
    up, up_bias, down, down_bias = (torch.from_numpy(STORED[f"mlp.{name}"]) for name in TURNED)
    torch.testing.assert_close(sum(part(x) for part in parts), (x @ up + up_bias).relu() @ down + down_bias, atol=1e-3, rtol=1e-4)
    with pytest.raises(UnsupportedModel, match=r"home\.c_attn\.weight .*Q8_0"):
        Linear(Env(BACKEND), 64, {"c_attn": 32}, turned=True).load(
            lambda name, _: Weight(name, "Q8_0", np.zeros((64, 34), "u1")), "home.own"
        )


@pytest.mark.parametrize("size", [2, 3])
def test_embedding_and_head(size: int) -> None:
    ids, x = torch.tensor([0, 52, 17, 30], dtype=torch.int32), torch.randn(3, 6)
    ranks = build(Embedding, size, 53, 6, path="embed")
    table = torch.from_numpy(STORED["embed.weight"])
    torch.testing.assert_close(sum(rank(ids) for rank in ranks), table[ids.long()])
    heads = build(Head, size, 53, 6, path="embed")
    torch.testing.assert_close(torch.cat([head(x) for head in heads], -1), x @ table.T)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("inner", [96, 50, 1536])
def test_feed_forward_is_the_same_on_any_number_of_ranks(size: int, inner: int) -> None:
    x = torch.randn(4, 10)
    ranks = build(GatedMLP, size, 10, inner, path=f"mlp{inner}")
    w = {name: torch.from_numpy(STORED[f"mlp{inner}.{name}.weight"]) for name in ("gate_proj", "up_proj", "down_proj")}
    exact = (torch.nn.functional.silu(x @ w["gate_proj"].T) * (x @ w["up_proj"].T)) @ w["down_proj"].T
    torch.testing.assert_close(sum(rank(x) for rank in ranks), exact, atol=1e-3, rtol=1e-4)
    plain = build(MLP, size, 10, inner, ("up", "down"), "gelu", path=f"plain{inner}")
    w = {name: torch.from_numpy(STORED[f"plain{inner}.{name}"]) for name in ("up.weight", "up.bias", "down.weight", "down.bias")}
    inside = torch.nn.functional.gelu(x @ w["up.weight"].T + w["up.bias"])
    torch.testing.assert_close(sum(rank(x) for rank in plain), inside @ w["down.weight"].T + w["down.bias"], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(("inner", "size"), [(1536, 2), (1536, 3), (8960, 2), (8960, 4), (5632, 3), (2048, 8)])
def test_feed_forward_cuts_on_blocks(inner: int, size: int) -> None:
    """The widths of real models are cut between blocks of 256 quantized values, in near equal shares."""
    spans = [GatedMLP(Env(BACKEND, mesh=Mesh(tp=Group(rank, size, Sum()))), 8, inner).down.columns for rank in range(size)]  # type: ignore[arg-type]
    assert all(span.start % 256 == 0 for span in spans) and spans[-1].stop == inner
    widths = [span.stop - span.start for span in spans]
    assert max(widths) <= 1.25 * inner / size


def test_unknown_weight_method_is_refused() -> None:
    layer = Env(BACKEND, quantize="int5").new(Linear, 8, {"a4": 4})
    with pytest.raises(BadConfig, match="int5"):
        layer.load(read, "home.own")


def test_int8_is_near() -> None:
    x = torch.randn(5, 256)
    layer = Env(BACKEND, quantize="int8").new(Linear, 256, {"wide8": 40, "more8": 8}, bias=True)
    layer.load(read, "home.own")
    w = torch.cat([torch.from_numpy(STORED[f"home.{name}.weight"]) for name in ("wide8", "more8")])
    b = torch.cat([torch.from_numpy(STORED[f"home.{name}.bias"]) for name in ("wide8", "more8")])
    exact = x @ w.T + b
    assert float((layer(x) - exact).abs().max()) < 0.02 * float(exact.abs().max())
    assert layer.weight.num_bytes() == 48 * 256 + 4 * 48 + 4 * 48  # codes, scales, bias

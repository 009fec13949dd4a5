"""Hooks on intermediate values: the right tensors, by path and by pattern, and nothing left behind."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import tiny_models
import torch
from drive import Drive
from tiny_models import LENGTH, prompt

from trireme.backends import reason_against
from trireme.errors import BadRequest
from trireme.worker.capture import Tap

PROMPT = prompt(14, 2)


@pytest.fixture(scope="module", params=["llama3", "gemma3", "bloom"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def drive(family: str, tmp_path_factory: pytest.TempPathFactory) -> Drive:
    return Drive(tiny_models.save(family, tmp_path_factory.mktemp(family)), max_model_len=LENGTH, prefix_cache=False)


def paths(family: str) -> tuple[str, str, str]:
    """(attention of layer 1, all feed-forwards, the first block)"""
    if family == "bloom":
        return "transformer.h.1.self_attention", "transformer.h.*.mlp", "transformer.h.0"
    return "model.layers.1.self_attn", "model.layers.*.mlp", "model.layers.0"


def hooked(family: str) -> dict[str, torch.Tensor]:
    """The same values out of transformers."""
    model, values, handles = tiny_models.model(family), {}, []
    wanted = [name for name, _ in model.named_modules() if name.endswith(("self_attn", "self_attention", ".mlp"))]
    for name in wanted:

        def keep(module: Any, args: Any, out: Any, name: str = name) -> None:
            values[name] = (out[0] if isinstance(out, tuple) else out).detach()[0]

        handles.append(model.get_submodule(name).register_forward_hook(keep))
    with torch.no_grad():
        model(torch.tensor([PROMPT]))
    for handle in handles:
        handle.remove()
    return values


def everything(drive: Drive) -> dict[str, int]:
    return {path: id(module) for path, module in drive.worker.model.walk()}


def test_values_are_those_of_transformers(drive: Drive, family: str) -> None:
    attention, feed_forward, _ = paths(family)
    with drive.worker.capture(attention, feed_forward) as values:
        drive.run("a", PROMPT, max_tokens=1)
    exact = hooked(family)
    assert len(values) > 2
    for path, found in values.items():
        assert len(found) == 1  # one step
        if family == "bloom":  # transformers adds the residual inside these two
            continue
        scale = float(exact[path].abs().max())
        torch.testing.assert_close(found[0], exact[path], atol=1e-4 * scale, rtol=0)


def test_one_tensor_per_step(drive: Drive, family: str) -> None:
    attention, _, block = paths(family)
    with drive.worker.capture(attention, block) as values:
        drive.run("steps", PROMPT, max_tokens=4)
    assert set(values) == {attention, block}
    assert [len(x) for x in values[attention]] == [len(x) for x in values[block]] == [len(PROMPT), 1, 1, 1]


def test_patterns_choose_the_layers(drive: Drive, family: str) -> None:
    _, feed_forward, _ = paths(family)
    with drive.worker.capture(feed_forward) as values:
        pass
    layers = sum(1 for path in everything(drive) if path.endswith(".mlp"))
    assert len(values) == layers > 1 and all(path.endswith(".mlp") for path in values)
    assert all(found == [] for found in values.values())


def test_the_hand_run_value(drive: Drive, family: str) -> None:
    """The head's output is the logits; a parent and its child can be looked at together."""
    _, feed_forward, block = paths(family)
    with drive.worker.capture("lm_head", block, feed_forward) as values:
        run = drive.run("head", PROMPT, max_tokens=1)
    torch.testing.assert_close(values["lm_head"][0], torch.stack([run.logits[i] for i in range(len(PROMPT))]))
    inner = values[feed_forward.replace("*", "0")][0]
    if family != "gemma3":  # a block gives (what its feed-forward put out, residual); Gemma norms it once more
        torch.testing.assert_close(values[block][0], inner)


def test_projections_are_layers_too(drive: Drive, family: str) -> None:
    attention, feed_forward, _ = paths(family)
    with drive.worker.capture(f"{attention}.*", f"{feed_forward}.down") as values:
        drive.run("inner", PROMPT, max_tokens=1)
    assert f"{attention}.qkv" in values and f"{attention}.out" in values
    assert all(len(found) == 1 for found in values.values())


def test_everything_is_put_back(drive: Drive, family: str) -> None:
    before, expected = everything(drive), drive.run("before", PROMPT, max_tokens=5).tokens
    attention, feed_forward, block = paths(family)
    with drive.worker.capture(attention, feed_forward, block, "lm_head"):
        assert any(isinstance(module, Tap) for _, module in drive.worker.model.walk())
        assert drive.run("during", PROMPT, max_tokens=5).tokens == expected
    with pytest.raises(ZeroDivisionError), drive.worker.capture(block, feed_forward):
        raise ZeroDivisionError
    assert everything(drive) == before and not drive.worker.runner.eager
    assert drive.run("after", PROMPT, max_tokens=5).tokens == expected


def test_values_are_copies(drive: Drive, family: str) -> None:
    """What was captured does not change when later steps reuse the memory."""
    attention, _, _ = paths(family)
    with drive.worker.capture(attention) as values:
        drive.run("one", PROMPT, max_tokens=1)
        kept = values[attention][0].clone()
        drive.run("two", prompt(14, 9), max_tokens=3)
    assert torch.equal(values[attention][0], kept)


def test_no_such_layer_is_one_line(drive: Drive, family: str) -> None:
    before = everything(drive)
    with pytest.raises(BadRequest, match=r"No layer at 'model\.layers\.99"), drive.worker.capture("lm_head", "model.layers.99.mlp"):
        pass
    assert everything(drive) == before


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_every_layer_is_seen_on_other_backends(backend: str, tmp_path: pathlib.Path) -> None:
    """Fused steps come apart where somebody looks: the same layers, the same values."""
    reason = reason_against(backend)
    if reason:
        pytest.skip(f"{backend}: {reason}")
    tiny_models.save("qwen3", tmp_path)
    seen = []
    for name in ("reference", backend):
        drive = Drive(tmp_path, backend=name, dtype="float32", max_model_len=LENGTH)
        with drive.worker.capture("model.*", "lm_head") as values:
            drive.run("a", PROMPT, max_tokens=3)
        seen.append(values)
    for path, exact in seen[0].items():
        assert len(seen[1][path]) == len(exact), path
        for a, b in zip(seen[1][path], exact, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4 * float(b.abs().max()), rtol=0)

"""Every model family against transformers on random weights, in every way of running it."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import tiny_models
import torch
from drive import Drive, Run, ThreadGroup
from tiny_models import FAMILIES, LENGTH, prompt

from trireme.backends import reason_against
from trireme.config import resolve

NUM_NEW = 10
TOLERANCE = 1e-4  # of the largest logit
PROMPT = prompt(45, seed=1)  # longer than every window, and than what length-dependent rope was made for


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    return {family: tiny_models.save(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


@pytest.fixture(scope="session")
def expected() -> dict[tuple[str, int], Any]:
    return {}


def check(run: Run, family: str, tokens: list[int], known: dict, seed: int = 1, every: bool = True) -> None:
    """The run's tokens, and its logits at every position it computed, are those of transformers."""
    if (family, seed) not in known:
        known[family, seed] = tiny_models.reference(family, tokens, NUM_NEW)
    answer, logits = known[family, seed]
    assert run.tokens == answer
    assert not every or sorted(run.logits) == list(range(len(logits)))
    scale = logits.abs().max()
    worst = max(float((run.logits[at].cpu() - logits[at]).abs().max() / scale) for at in run.logits)
    assert worst <= TOLERANCE


WAYS: dict[str, dict[str, Any]] = {
    "one shot, pages of 16": {"page_size": 16},
    "chunks of 7, token by token KV": {"page_size": 1, "max_step_tokens": 7},
    "chunks of 1, pages of 4": {"page_size": 4, "max_step_tokens": 1},
    "static KV": {"page_size": 0, "kv_tokens": 3 * LENGTH},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", WAYS)
def test_alone(family: str, way: str, folders: dict, expected: dict) -> None:
    drive = Drive(folders[family], max_model_len=LENGTH, **WAYS[way])
    check(drive.run("a", PROMPT, max_tokens=NUM_NEW), family, PROMPT, expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [pytest.param(1, marks=pytest.mark.wide), 4, pytest.param(0, marks=pytest.mark.wide)])
def test_batched_with_others(family: str, page_size: int, folders: dict, expected: dict) -> None:
    drive = Drive(folders[family], max_model_len=LENGTH, page_size=page_size, kv_tokens=6 * LENGTH, max_step_tokens=29)
    prompts = {seed: prompt(length, seed) for seed, length in ((2, 3), (1, 45), (3, 1), (4, 30))}
    for seed, tokens in prompts.items():
        drive.add(str(seed), tokens, max_tokens=NUM_NEW)
        drive.engine.step()  # the next one comes while this one is under way
    runs = drive.finish()
    for seed, tokens in prompts.items():
        # what the first steps brought is not in `runs` as progress: logits alone are compared in full
        answer, logits = expected.setdefault((family, seed), tiny_models.reference(family, tokens, NUM_NEW))
        worst = max(float((runs[str(seed)].logits[at] - logits[at]).abs().max()) for at in range(len(logits)))
        assert worst <= TOLERANCE * float(logits.abs().max())
        assert answer[-len(runs[str(seed)].tokens) :] == runs[str(seed)].tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [1, pytest.param(4, marks=pytest.mark.wide)])
def test_prefix_hit(family: str, page_size: int, folders: dict, expected: dict) -> None:
    drive = Drive(folders[family], max_model_len=LENGTH, page_size=page_size)
    drive.run("first", [*PROMPT[:33], 7, 8, 9], max_tokens=3)
    half = drive.run("half", PROMPT, max_tokens=NUM_NEW)
    whole = drive.run("whole", PROMPT, max_tokens=NUM_NEW)
    if family == "llama-dynamic":  # a key's angle depends on the prompt it stands in: nothing may be shared
        assert not drive.worker.ready.shares_prefixes and half.cached == whole.cached == 0
    else:
        assert half.cached == 33 // page_size * page_size and whole.cached == 44 // page_size * page_size
        assert min(half.logits) == half.cached and min(whole.logits) == whole.cached
    check(half, family, PROMPT, expected, every=False)
    check(whole, family, PROMPT, expected, every=False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [pytest.param(1, marks=pytest.mark.wide), 4])
def test_paused_and_recovered(family: str, page_size: int, folders: dict, expected: dict) -> None:
    drive = Drive(
        folders[family], max_model_len=60, page_size=page_size, kv_tokens=100, policy="aggressive", prefix_cache=page_size == 1
    )
    prompts = {1: PROMPT, 5: prompt(45, 5), 6: prompt(20, 6)}
    for seed, tokens in prompts.items():
        drive.add(str(seed), tokens, max_tokens=NUM_NEW)
    runs = drive.finish()
    assert drive.scheduler.stats().preemptions > 0
    for seed, tokens in prompts.items():
        check(runs[str(seed)], family, tokens, expected, seed, every=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_what_generate_gives(family: str, folders: dict) -> None:
    short = prompt(9, 7)
    run = Drive(folders[family], max_model_len=LENGTH).run("a", short, max_tokens=NUM_NEW)
    with torch.no_grad():
        out = tiny_models.model(family).generate(torch.tensor([short]), max_new_tokens=NUM_NEW, do_sample=False)
    assert run.tokens == out[0, len(short) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.wide), 3, pytest.param(4, marks=pytest.mark.wide)])
def test_tensor_parallel(family: str, ranks: int, folders: dict, expected: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"max_model_len": LENGTH, "tp": ranks, "page_size": 4, "max_running": 8, "max_step_tokens": 20}
    group = ThreadGroup(resolve({"backend": "reference", **settings}, environ={}), folders[family], monkeypatch)
    try:
        run = Drive(folders[family], worker=group, **settings).run("a", PROMPT, max_tokens=NUM_NEW)
    finally:
        group.close()
    check(run, family, PROMPT, expected)


def _older_spelling(family: str, raw: dict[str, Any]) -> dict[str, Any]:
    """The config as files from before rope_parameters and layer_types have it."""
    rope = raw.pop("rope_parameters")
    kinds = raw.pop("layer_types", None)
    if family == "gemma3":
        local = rope["sliding_attention"]["rope_theta"]
        raw |= {"sliding_window_pattern": kinds.index("full_attention") + 1, "rope_local_base_freq": local}
        return raw | {"rope_theta": rope["full_attention"]["rope_theta"]}
    theta = rope.pop("rope_theta")
    return raw | {"rope_theta": theta} | ({"rope_scaling": rope} if len(rope) > 1 else {})


@pytest.mark.parametrize("family", ["llama3", "llama-linear", "llama-yarn", "mistral", "qwen2", "qwen2-window", "gemma3"])
def test_older_spellings_of_the_config(family: str, tmp_path: pathlib.Path, folders: dict, expected: dict) -> None:
    for file in folders[family].iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    raw = json.loads((folders[family] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(_older_spelling(family, raw)))
    run = Drive(tmp_path, max_model_len=LENGTH).run("a", PROMPT, max_tokens=NUM_NEW)
    check(run, family, PROMPT, expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_on_other_backends(family: str, backend: str, folders: dict, expected: dict) -> None:
    """Chunks, decodes and neighbours at once, in float32; then the same tokens from captured steps."""
    reason = reason_against(backend)
    if reason:
        pytest.skip(f"{backend}: {reason}")
    settings: dict[str, Any] = {"backend": backend, "dtype": "float32", "max_model_len": LENGTH, "max_step_tokens": 20}
    prompts = {1: PROMPT, 2: prompt(3, 2), 4: prompt(30, 4)}
    for graphs in (False, True):
        drive = Drive(folders[family], full=False, page_size=4, graphs=graphs, **settings)
        for seed, tokens in prompts.items():
            drive.add(str(seed), tokens, max_tokens=NUM_NEW)
        runs = drive.finish()
        for seed, tokens in prompts.items():
            if graphs:  # a replayed step passes no layer, so there are no logits to be seen
                assert runs[str(seed)].tokens == expected[family, seed][0]
            else:
                check(runs[str(seed)], family, tokens, expected, seed, every=False)


def test_sharded_checkpoint(tmp_path: pathlib.Path, expected: dict) -> None:
    tiny_models.save("qwen3", tmp_path, shard="60KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    run = Drive(tmp_path, max_model_len=LENGTH).run("a", PROMPT, max_tokens=NUM_NEW)
    check(run, "qwen3", PROMPT, expected)

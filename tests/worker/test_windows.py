"""Layers that see the last tokens keep only those: the same answers from less memory, with prefix hits and pauses as before."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import tiny_models
from drive import Drive, ThreadGroup
from tiny_models import LENGTH, prompt

from trireme.backends.base import Backend
from trireme.backends.reference import Reference
from trireme.config import resolve
from trireme.errors import OutOfMemory
from trireme.worker import room
from trireme.worker.worker import LocalWorker

WINDOW = 9
NEW = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_models.save("gemma3", tmp_path_factory.mktemp("gemma3"))


def opened(folder: pathlib.Path, windows: str = "on", **settings: Any) -> Drive:
    settings = {"max_model_len": LENGTH, "dtype": "float32", "page_size": 4, "max_step_tokens": 24} | settings
    return Drive(folder, full=False, kv_windows=windows, **settings)


def answers(drive: Drive, prompts: list[list[int]]) -> list[list[int]]:
    for i, tokens in enumerate(prompts):
        drive.add(f"{i}", tokens, max_tokens=NEW)
    return [run.tokens for run in drive.finish().values()]


PROMPTS = [prompt(length, length) for length in (1, 8, 20, 60, 41, 90)]


@pytest.mark.parametrize("page_size", [1, 4, 16, 0])
@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.wide), "cpu"])
def test_windows_answer_as_all_does(folder: pathlib.Path, backend: str, page_size: int) -> None:
    whole, kept = (opened(folder, windows, backend=backend, page_size=page_size) for windows in ("off", "on"))
    bands = kept.worker.ready.bands
    assert [band.keep for band in bands] == ([0, WINDOW] if page_size else [0])
    assert answers(kept, PROMPTS) == answers(whole, PROMPTS)


def test_ranks_agree(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both keep windows where one of them is short of memory."""
    settings: dict[str, Any] = {
        "max_model_len": LENGTH,
        "max_running": 2,
        "dtype": "float32",
        "page_size": 4,
        "max_step_tokens": 24,
    }
    whole = opened(folder, "off", max_running=2)
    monkeypatch.setattr(Reference, "kv_budget", lambda self, fraction: (300 - 180 * self.rank) * 512)
    config = resolve(settings | {"tp": 2, "backend": "reference"}, environ={})
    ranks = ThreadGroup(config, folder, monkeypatch)
    try:
        assert [[band.keep for band in rank.ready.bands] for rank in ranks.workers] == [[0, WINDOW]] * 2
        # The one that is not short has room for tails too: 32 pages are for two rows and a step.
        assert ranks.workers[0].ready.bands[1].num_pages > 32
        ranks.ready = min((rank.ready for rank in ranks.workers), key=lambda ready: ready.num_pages)
        kept = Drive(folder, full=False, worker=ranks, **settings)
        assert answers(kept, PROMPTS) == answers(whole, PROMPTS)
    finally:
        ranks.close()


def test_a_row_keeps_its_window_alone(folder: pathlib.Path) -> None:
    drive = opened(folder, max_running=1, prefix_cache=False)
    drive.add("a", prompt(40, 1), max_tokens=NEW)
    (band,), most = drive.scheduler.memory.windows.bands, 0
    while drive.scheduler.has_work():
        drive.step()
        most = max(most, int(band.held[0]))
    assert most <= (24 + WINDOW + 2 * 4) // 4 + 1
    assert len(band.pool) == band.size.num_pages


def test_prefixes_are_found_where_tails_are(folder: pathlib.Path) -> None:
    """The end of a prompt and of an answer can be resumed, and a prompt that branches off goes on from the page before."""
    whole, kept = (opened(folder, windows) for windows in ("off", "on"))
    common = prompt(50, 1)
    first = kept.run("a", common + prompt(10, 2), max_tokens=NEW).tokens
    follows = [common + prompt(10, 2) + first + prompt(5, 3), common + prompt(10, 4), common + prompt(12, 5), common + prompt(9, 6)]
    hits = [kept.run(f"{i}", tokens, max_tokens=NEW) for i, tokens in enumerate(follows)]
    whole.run("a", common + prompt(10, 2), max_tokens=NEW)
    for i, tokens in enumerate(follows):
        assert hits[i].tokens == whole.run(f"{i}", tokens, max_tokens=NEW).tokens, i
    assert [run.cached for run in hits] == [88, 48, 48, 48]
    assert kept.worker.ready.shares_prefixes


def test_pauses_go_on_from_their_tails(folder: pathlib.Path) -> None:
    tight = {"kv_tokens": 160, "max_model_len": 100, "policy": "aggressive"}
    whole, kept = opened(folder, "off", max_model_len=100), opened(folder, **tight)
    prompts = [prompt(45, 1), prompt(20, 2), prompt(30, 3)]
    assert answers(kept, prompts) == answers(whole, prompts)
    stats = kept.scheduler.stats()
    assert stats.preemptions > 0
    computed_anew = stats.tokens_scheduled - sum(map(len, prompts)) - 3 * NEW
    assert computed_anew < 45, "paused rows did not go on from where they were"


def test_memory_is_divided_where_it_is_short(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers of 2 x 2 heads of 16: 1024 bytes a token, 256 in the one that keeps all."""

    def made(budget: int, windows: str = "auto", **settings: Any) -> LocalWorker:
        monkeypatch.setattr(Reference, "kv_budget", lambda self, fraction: budget)
        return opened(folder, windows, max_running=4, max_step_tokens=16, **settings).worker

    assert Reference.kv_default_tokens is Backend.kv_default_tokens
    ample = made(LENGTH * 4 * 1024).ready  # as many tokens as four rows may ever have
    assert [band.keep for band in ample.bands] == [0] and ample.num_pages == LENGTH
    short = made(LENGTH * 2 * 1024).ready
    assert [band.keep for band in short.bands] == [0, WINDOW] and short.num_pages == LENGTH
    assert short.kv_bytes <= LENGTH * 2 * 1024
    assert [band.keep for band in made(LENGTH * 2 * 1024, "off").ready.bands] == [0]
    # What is asked for is had by leaving out what no layer reads.
    asked = made(LENGTH * 2 * 1024, kv_tokens=400).ready
    assert asked.num_pages == 100 and len(asked.bands) == 2
    with pytest.raises(OutOfMemory):
        made(LENGTH * 2 * 1024, "off", kv_tokens=400)
    with pytest.raises(OutOfMemory):  # not even one row's window and steps fit beside the rest
        made(40 * 1024)


def test_what_full_layers_leave_is_for_tails(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they have all that may be asked for: as many hits as without windows kept alone."""
    budget, prompts = LENGTH * 3 * 1024 // 2, [prompt(21, seed) for seed in range(9)]
    monkeypatch.setattr(Reference, "kv_budget", lambda self, fraction: budget)
    cached, rooms = [], []
    for windows in ("off", "auto"):
        drive = opened(folder, windows, max_running=2, max_step_tokens=16)
        rooms.append(drive.worker.ready)
        for turn in range(2):
            runs = [drive.run(f"{turn}.{i}", tokens, max_tokens=2) for i, tokens in enumerate(prompts)]
        cached.append([run.cached for run in runs])
    assert cached == [[20] * 9] * 2
    full, window = rooms[1].bands
    assert full.num_pages * 4 == 2 * LENGTH and window.num_pages <= full.num_pages
    assert 0.95 * budget < rooms[1].kv_bytes <= budget


def test_windows_save_memory_where_it_was_not_asked_for(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tokens set, or without need: what two rows and a step use, 52 slots each and 24."""
    assert opened(folder, max_running=2).worker.ready.bands[1].num_pages == 32
    assert opened(folder, max_running=2, kv_tokens=1024).worker.ready.bands[1].num_pages == 32
    monkeypatch.setattr(Reference, "kv_budget", lambda self, fraction: 800 * 1024)
    asked = opened(folder, "auto", max_running=2, kv_tokens=1024).worker.ready
    assert asked.num_pages == 256 and asked.bands[1].num_pages == 32


def test_tails_of_several_windows() -> None:
    """In memory of any size: no more than there is, nothing left that is of use, and nothing given that is of none."""
    config = resolve({"backend": "reference", "max_running": 3, "max_step_tokens": 16}, environ={})
    small, large, chunked = room.Window(9), room.Window(40), room.Window(20, chunked=True)
    cases = [{room.WHOLE: 7, small: 30, large: 10, chunked: 4}, {room.WHOLE: 0, small: 10, large: 5}, {room.WHOLE: 8, large: 8}]
    for per_token in cases:
        each, divided = sum(per_token.values()), 0
        for budget in range(100 * each, 384 * each, 5 * each + 3):
            needs = room._Needs(budget, per_token, 128, 3 * 128, 4, config)
            split = room._split(needs)
            if not split:
                continue
            divided += 1
            tails = room._with_tails(needs, split)
            left = budget - sum(slots * per_token[window] for window, slots in tails.items())
            enough = all(tails[window] == tails[room.WHOLE] for window in needs.windows)
            assert left >= 0 and (enough or left < each), (budget, split, tails)
            assert list(tails) == list(split) and max(tails.values()) == tails[room.WHOLE]
            assert tails[room.WHOLE] == split[room.WHOLE]
        assert divided > 10


def test_nothing_of_a_window_is_left_behind(folder: pathlib.Path) -> None:
    """Requests that come, end and are aborted at any moment: the books balance after each step, and at the end all is free."""
    drive = opened(folder, kv_tokens=200, max_running=4, policy="aggressive", page_size=2)
    for i in range(24):
        tokens = prompt(30, i % 3)[: 5 + i] + prompt(1 + i % 7, i)
        drive.add(f"{i}", tokens, max_tokens=1 + 3 * i % 40)
        for _ in range(i % 5):
            drive.step()
        if i % 4 == 3:
            drive.scheduler.abort(f"{i - 2}")
    drive.finish()
    windows = drive.scheduler.memory.windows
    drive.scheduler.memory.tails.forget(list(drive.scheduler.memory.tails.by_page))
    assert all(len(band.pool) == band.size.num_pages for band in windows.bands)

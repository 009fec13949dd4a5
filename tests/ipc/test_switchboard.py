"""The switchboard and its channels: any cut of the bytes, backlogs that grow nobody else's wait, losses told once."""

from __future__ import annotations

import os
import pathlib
import stat
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme import errors
from trireme.ipc.channel import Channel, ChannelClosed, Frames, frame, pair
from trireme.ipc.serving import Abort, Alive, Ask, Forget, Problem, Said, Taken, ToRouter
from trireme.ipc.switchboard import Switchboard, connect_to, listen_at

MESSAGES = [Ask(1), Abort(["a/0", "b/1"]), Ask(2), Abort([str(i) for i in range(300)]), Ask(3)]


@given(st.lists(st.integers(1, 700), min_size=1, max_size=60))
def test_messages_come_whole_however_the_bytes_are_cut(cuts: list[int]) -> None:
    stream = b"".join(map(frame, MESSAGES))
    frames: Frames = Frames(ToRouter)
    got, start, turn = [], 0, 0
    while start < len(stream):
        size = cuts[turn % len(cuts)]
        got += frames.feed(stream[start : start + size])
        start, turn = start + size, turn + 1
    assert got == MESSAGES


@given(st.binary(min_size=4, max_size=200))
def test_noise_never_becomes_anything_but_a_closed_channel(noise: bytes) -> None:
    frames: Frames = Frames(ToRouter)
    try:
        messages = frames.feed(noise)
    except ChannelClosed:
        return
    assert not messages or noise[0] < len(noise)


def _joined(board: Switchboard) -> tuple[Channel, Channel, list, list]:
    ours, theirs = pair()
    near, far = Channel(ours, ToRouter), Channel(theirs, ToRouter)
    heard: list = []
    gone: list = []
    board.join(near, heard.append, gone.append)
    return near, far, heard, gone


def test_a_peer_that_does_not_read_costs_its_backlog_and_no_time() -> None:
    board = Switchboard(max_backlog=1 << 20)
    lazy, _far, _, gone = _joined(board)
    _, busy, heard, _ = _joined(board)
    filler = Forget(["x" * 1000] * 100)
    for number in range(5):
        board.post(lazy, filler)
        busy.send(Ask(number))
        board.turn(0.0)
    assert heard == [Ask(n) for n in range(5)] and not gone
    for _ in range(20):
        board.post(lazy, filler)
    board.turn(0.0)
    assert len(gone) == 1 and "behind" in gone[0]
    board.turn(0.0)
    assert len(gone) == 1


def test_a_backlog_is_sent_on_when_the_peer_reads() -> None:
    board = Switchboard()
    lazy, far, _, _ = _joined(board)
    sent = [Abort(["y" * 1000] * 200, "stop") for _ in range(20)]  # type: ignore[arg-type]
    for message in sent:
        board.post(lazy, message)
    assert lazy.backlog
    got = []
    while len(got) < len(sent):
        board.turn(0.0)
        while (message := far.receive(timeout=0)) is not None:
            got.append(message)
    assert len(got) == 20 and lazy.backlog == 0


def test_whoever_talks_without_end_is_interrupted() -> None:
    board = Switchboard()
    _, talker, heard, _ = _joined(board)
    _, other, said, _ = _joined(board)
    number = 40_000
    talker.post(Abort(["x" * 60_000]))
    for count in range(number):
        talker.post(Ask(count))
    other.post(Ask(7))
    board.turn(0.0)
    assert len(heard) < number and said == [Ask(7)]
    while len(heard) < number + 1:
        talker.flush()
        board.turn(10.0)
    assert heard[1:] == [Ask(count) for count in range(number)]


def test_a_loss_is_told_once_and_posting_to_the_lost_is_harmless() -> None:
    board = Switchboard()
    near, far, _, gone = _joined(board)
    far.close()
    board.turn(1.0)
    board.post(near, Alive(1))
    board.turn(0.0)
    assert len(gone) == 1


def test_sockets_are_private() -> None:
    with tempfile.TemporaryDirectory(prefix="tri-") as folder:
        path = os.path.join(folder, "a.sock")
        for _ in range(2):  # the second time over what the first has left
            with listen_at(path) as listener:
                assert stat.S_IMODE(pathlib.Path(path).stat().st_mode) == 0o600
                connect_to(path).close()
                listener.accept()[0].close()
        with pytest.raises(OSError):
            connect_to(os.path.join(folder, "b.sock"))


def test_problems_keep_their_kind() -> None:
    for error in (errors.BadRequest("a", "b", "n"), errors.Unavailable("c", "d"), errors.WorkerDied("e")):
        again = Problem.of(error).error()
        assert (
            type(again) is type(error)
            and str(again) == str(error)
            and getattr(again, "param", None) == getattr(error, "param", None)
        )
    assert isinstance(Problem("os", "x").error(), errors.WorkerDied)


def test_said_and_taken_survive_the_wire() -> None:
    for message, family in ((Said([]), Said | Taken), (Taken("k/0"), Said | Taken)):
        frames: Frames = Frames(family)
        assert frames.feed(frame(message)) == [message]

"""Channels: whole messages over a stream, deadlines, and a clear end."""

import threading

import msgspec
import pytest

from trireme.ipc.channel import MAX_FRAME, Channel, ChannelClosed, pair
from trireme.ipc.messages import Admit, FromWorker, Plan, Ready, RowNote, Sampled, Stop, ToWorker
from trireme.types import SamplingParams, TokenLogprobs


def joined() -> tuple[Channel, Channel]:
    a, b = pair()
    return Channel(a, FromWorker), Channel(b, ToWorker)


PLAN = Plan(3, [1], [Admit(0, bytes(8), 2, SamplingParams(seed=1), 7, [2])], [0, 0], [4, 9], [0], [0], [2], [1], [True])


def test_messages_arrive_whole_and_typed() -> None:
    ours, theirs = joined()
    ours.send(PLAN)
    ours.send(Stop())
    assert theirs.receive() == PLAN
    assert isinstance(theirs.receive(), Stop)
    answer = Sampled(3, [11], [RowNote(0, [TokenLogprobs(11, -0.5, 1, [(11, -0.5)])])])
    theirs.send(answer)
    assert ours.receive() == answer


def test_timeout_gives_none() -> None:
    ours, _theirs = joined()
    assert ours.receive(timeout=0.01) is None


def test_large_message_across_a_small_socket_buffer() -> None:
    ours, theirs = joined()
    big = msgspec.structs.replace(PLAN, page_ids=list(range(1_000_000)), page_rows=[0] * 1_000_000)
    sender = threading.Thread(target=ours.send, args=(big,))
    sender.start()
    assert theirs.receive() == big
    sender.join()


def test_closed_other_side() -> None:
    ours, theirs = joined()
    theirs.close()
    with pytest.raises(ChannelClosed):
        ours.receive()
    with pytest.raises(ChannelClosed):
        for _ in range(100):
            ours.send(PLAN)


def test_frame_beyond_the_limit_is_refused_before_it_is_read() -> None:
    a, b = pair()
    b.sendall((MAX_FRAME + 1).to_bytes(4, "little"))
    with pytest.raises(ChannelClosed, match="bytes"):
        Channel(a, FromWorker).receive()


def test_wrong_message_is_refused() -> None:
    a, b = pair()
    Channel(b, ToWorker).send(Stop())
    with pytest.raises(ChannelClosed, match="none"):
        Channel(a, Ready | Sampled).receive()

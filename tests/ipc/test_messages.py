"""The messages between scheduler and workers: nothing is said that the other side does not read."""

from __future__ import annotations

import pathlib
import re

import msgspec
import pytest

import trireme
from trireme.ipc.messages import Admit, BandSize, Beat, Failed, Fork, Phase, Plan, Ready, Reload, Reloaded, RowNote, Sampled, Start

HOME = pathlib.Path(trireme.__file__).parent
WORKER, OTHERS = ("worker",), ("sched", "serve", "worker/group.py", "llm.py")
READ_BY = dict.fromkeys((Admit, Fork, Plan, Start, Reload), WORKER)
READ_BY |= dict.fromkeys((RowNote, Sampled, Ready, BandSize, Beat, Failed, Phase, Reloaded), OTHERS)


def source(places: tuple[str, ...]) -> str:
    files = [file for place in places for file in ([HOME / place] if place.endswith(".py") else (HOME / place).rglob("*.py"))]
    return "\n".join(file.read_text() for file in files)


@pytest.mark.parametrize("message", READ_BY, ids=lambda message: message.__name__)
def test_every_field_is_read(message: type[msgspec.Struct]) -> None:
    text = source(READ_BY[message])
    unread = [field for field in message.__struct_fields__ if not re.search(rf"\.{field}\b(?!\s*=[^=]|\()", text)]
    assert not unread, f"nobody reads {', '.join(unread)} of {message.__name__}"

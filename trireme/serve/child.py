"""How a child of the supervisor starts and ends: its channel, its settings, its final error message. Knows no role."""

from __future__ import annotations

import gc
import socket
import sys
import traceback
from collections.abc import Callable

from trireme.config import Config, from_groups
from trireme.errors import TriremeError, WorkerDied
from trireme.hub.tokenizer import NoTokenizer, Tokenizer
from trireme.ipc.channel import Channel, ChannelClosed
from trireme.ipc.lifeline import prepare_child, tie_to_parent
from trireme.ipc.messages import Failed
from trireme.ipc.serving import Begin, ToChild

Role = Callable[[Begin, Config, Channel], None]


def run_child(role: Role) -> None:
    """The main of a child: `python -m module DESCRIPTOR PARENT ROLE`. Errors are sent to the supervisor in one line."""
    prepare_child()
    tie_to_parent(int(sys.argv[2]))
    control: Channel = Channel(socket.socket(fileno=int(sys.argv[1])), ToChild)
    try:
        begin = control.receive(timeout=60)
        assert isinstance(begin, Begin), f"expected Begin, got {begin!r}"
        role(begin, from_groups(begin.config), control)
    except ChannelClosed:
        pass
    except TriremeError as error:
        _tell(control, Failed(str(error), error.exit_code))
        sys.exit(error.exit_code)
    except Exception as error:
        line = f"The {begin.name if begin else 'child'} process failed: {type(error).__name__}: {error}"
        _tell(control, Failed(line, WorkerDied.exit_code, traceback.format_exc()))
        sys.exit(WorkerDied.exit_code)


def _tell(control: Channel, failed: Failed) -> None:
    try:
        control.send(failed)
    except (ChannelClosed, OSError):
        print(failed.line, file=sys.stderr)


def settle_memory() -> None:
    """Excludes the objects made at start-up (modules, vocabularies) from garbage collection, because they are never freed."""
    gc.collect()
    gc.freeze()


def open_tokenizer(path: str, config: Config) -> Tokenizer | None:
    """The model's tokenizer; None where the model comes without one, for prompts of token ids alone."""
    try:
        return Tokenizer.open(path, config.model.chat_template)
    except NoTokenizer:
        return None
    except TriremeError:
        if config.model.random_weights:
            return None
        raise

"""The detokenizer process: tokens in from the router, text out to the HTTP process that asked, stop strings back to the router.

Knows text and tokens; nothing of HTTP, and nothing of how the tokens were made. Text goes straight to the HTTP process and
not back through the router, so that it does not slow the router's loop.
"""

from __future__ import annotations

import os
import time
import traceback
from typing import Any

from trireme.hub.tokenizer import Tokenizer
from trireme.ipc.channel import Channel
from trireme.ipc.messages import Stop
from trireme.ipc.serving import (
    ROUTER_SOCKET,
    Abort,
    Alive,
    Follow,
    Forget,
    Gain,
    Gained,
    Hello,
    RouterToDetokenizer,
    Said,
    ToDetokenizer,
    Welcome,
)
from trireme.ipc.switchboard import Switchboard, connect_to
from trireme.serve.answers import SequenceText
from trireme.types import FinishReason, Progress

BEAT_SECONDS = 0.5
RETRY_SECONDS = 0.1  # between attempts to reach a router that is not up yet


class DetokenizerLoop:
    def __init__(self, name: str, folder: str, control: Channel, listener: Any, tokenizer: Tokenizer | None):
        self._name, self._folder, self._control, self._listener, self._tokenizer = name, folder, control, listener, tokenizer
        self.board = Switchboard()
        self._router: Channel | None = None
        self._clients: dict[str, Channel] = {}
        self._texts: dict[str, tuple[str, SequenceText]] = {}  # request -> (HTTP process, its text)
        self._ending, self._beaten = False, 0.0

    def run(self) -> None:
        """Serves until told to stop."""
        self.board.watch(self._listener, self._accept)
        self.board.join(self._control, self._commanded, lambda reason: self._end())
        while not self._ending:
            if self._router is None:
                self._reach_router()
            self.board.turn(BEAT_SECONDS if self._router else RETRY_SECONDS)
            now = time.monotonic()
            if now - self._beaten >= BEAT_SECONDS:
                self._beaten = now
                self.board.post(self._control, Alive(len(self._texts)))

    def _end(self) -> None:
        self._ending = True

    def _commanded(self, message: Any) -> None:
        if isinstance(message, Stop):
            self._end()

    # ---- the router

    def _reach_router(self) -> None:
        try:
            connection = connect_to(os.path.join(self._folder, ROUTER_SOCKET))
        except OSError:
            return
        self._router = Channel(connection, RouterToDetokenizer)
        self.board.join(self._router, self._heard, lambda reason: self._lose_router())
        self.board.post(self._router, Hello(self._name))

    def _lose_router(self) -> None:
        self._router = None
        self._texts.clear()  # the HTTP processes have lost the router too, and have ended their streams

    def _heard(self, message: Any) -> None:
        if isinstance(message, Gained):
            self._speak(message.progress)
        elif isinstance(message, Follow):
            for id in message.ids:
                self._texts[id] = (message.client, SequenceText(message.rules, self._tokenizer))
        elif isinstance(message, Forget):
            for id in message.ids:
                self._texts.pop(id, None)

    def _speak(self, gained: list[Progress]) -> None:
        """Sends each HTTP process its new text in one message."""
        said: dict[str, list[Gain]] = {}
        over: list[str] = []  # ended here, unknown to the router: a stop string was met, or the text failed
        for progress in gained:
            if progress.id not in self._texts:
                continue  # a step that was in flight when the request ended
            client, text = self._texts[progress.id]
            gain = _gain_or_error(text, progress)
            said.setdefault(client, []).append(gain)
            if gain.finish is not None:
                del self._texts[progress.id]
                if progress.finish is None:
                    over.append(progress.id)
        for client, gains in said.items():
            if client in self._clients:
                self.board.post(self._clients[client], Said(gains))
        if over and self._router is not None:
            self.board.post(self._router, Abort(over, FinishReason.STOP))

    # ---- HTTP processes

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        channel: Channel = Channel(connection, ToDetokenizer)
        name: list[str] = []

        def heard(message: Hello) -> None:
            name.append(message.name)
            self._clients[message.name] = channel
            self.board.post(channel, Welcome())

        def gone(reason: str) -> None:
            if name and self._clients.get(name[0]) is channel:
                del self._clients[name[0]]

        self.board.join(channel, heard, gone)


def _gain_or_error(text: SequenceText, progress: Progress) -> Gain:
    """If the text of a sequence cannot be made, only that sequence fails; the process goes on."""
    try:
        return text.take(progress)
    except Exception as error:
        traceback.print_exc()
        reason = f"the text could not be made: {type(error).__name__}"
        return Gain(id=progress.id, text="", tokens=progress.tokens, finish=FinishReason.ERROR, error=reason)

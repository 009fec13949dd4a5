"""An HTTP process: the app in uvicorn on the inherited listening socket, its client, its heartbeat. Knows no route.

The app is given as a function, so that nothing here depends on the API.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from trireme.config import Config
from trireme.ipc.async_channel import AsyncChannel
from trireme.ipc.channel import Channel
from trireme.ipc.messages import Stop
from trireme.ipc.serving import Alive, Begin, Standing, ToChild
from trireme.serve.child import open_tokenizer, run_child, settle_memory
from trireme.serve.client import Client, Context
from trireme.serve.patience import PatientProtocol

try:
    from uvloop import run as run_loop
except ImportError:  # uvloop is optional; without it the server is a little slower
    from asyncio import run as run_loop  # type: ignore[assignment]

BEAT_SECONDS = 0.5
KEEP_ALIVE_SECONDS = 60
LAST_SECONDS = 5  # time for open responses to finish when the process is told to stop

CreateApp = Callable[[Context], Any]


class _Server(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes the connections of clients that do not read even the error. Otherwise uvicorn would log a traceback for each."""
        asyncio.get_running_loop().call_later(LAST_SECONDS - 1, self._cut)
        await super().shutdown(sockets)

    def _cut(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the supervisor, which sends Stop."""
        yield


def serve_http(create_app: CreateApp) -> None:
    """The main of an HTTP process."""
    run_child(lambda begin, config, control: run_loop(_serve(begin, config, control, create_app)))


async def _serve(begin: Begin, config: Config, control: Channel, create_app: CreateApp) -> None:
    client = Client(begin, config, open_tokenizer(begin.path, config))
    server = _Server(_settings(create_app(Context(client, config.serve, config)), config))

    def commanded(message: Any) -> None:
        if isinstance(message, Standing):
            client.stand(message)
            if message.name == "draining":
                channel.post(_alive(client))
        elif isinstance(message, Stop):
            client.end()
            server.should_exit = True

    early = []
    while (message := control.receive(timeout=0)) is not None:
        early.append(message)
    channel = await AsyncChannel.adopt(control.socket, ToChild, commanded, lambda: os._exit(0))
    for message in early:
        commanded(message)
    tasks = [asyncio.create_task(client.run()), asyncio.create_task(_beat(channel, client))]
    listener = socket.socket(fileno=begin.listener)
    listener.setblocking(False)
    settle_memory()
    await server.serve(sockets=[listener])
    for task in tasks:
        task.cancel()
    os._exit(0)  # the end of the channel no longer needs handling


async def _beat(channel: AsyncChannel, client: Client) -> None:
    """Sends heartbeats from the event loop itself, so that a loop that hangs sends none."""
    while True:
        channel.post(_alive(client))
        await asyncio.sleep(BEAT_SECONDS)


def _alive(client: Client) -> Alive:
    return Alive(client.num_open, client.state().name == "draining")


def _settings(app: Any, config: Config) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="none",
        http=PatientProtocol,
        lifespan="auto",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=LAST_SECONDS,
        ssl_certfile=config.serve.tls_cert,
        ssl_keyfile=config.serve.tls_key,
    )

"""The mains of the router and the detokenizer: `python -m trireme.serve.launch DESCRIPTOR PARENT ROLE`, started by the supervisor.

Knows how to make what the two processes need. Imports no torch: the ranks do.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable

from trireme.config import Config
from trireme.ipc.channel import Channel
from trireme.ipc.serving import DETOKENIZER_SOCKET, ROUTER_SOCKET, Begin
from trireme.ipc.switchboard import listen_at
from trireme.serve.child import open_tokenizer, run_child, settle_memory
from trireme.serve.detokenizer import DetokenizerLoop
from trireme.serve.peers import DETOKENIZER
from trireme.serve.router import Router
from trireme.worker.group import RankGroup


def run_router(begin: Begin, config: Config, control: Channel) -> None:
    def open_ranks(path: pathlib.Path, report: Callable[[str, float], None]) -> RankGroup:
        return RankGroup(config, path, report, config.serve.heartbeat_timeout, begin.folder)

    listener = listen_at(os.path.join(begin.folder, ROUTER_SOCKET))
    router = Router(config, control, listener, open_ranks, pathlib.Path(begin.path))
    settle_memory()
    router.run()


def run_detokenizer(begin: Begin, config: Config, control: Channel) -> None:
    listener = listen_at(os.path.join(begin.folder, DETOKENIZER_SOCKET))
    tokenizer = open_tokenizer(begin.path, config)
    if tokenizer is None:
        text = f"trireme: {begin.path} has no tokenizer: the server takes and gives token ids alone (prompt, return_token_ids)."
        print(f"{text} Fix: fetch the model's tokenizer files.", file=sys.stderr, flush=True)
    loop = DetokenizerLoop(begin.name, begin.folder, control, listener, tokenizer)
    settle_memory()
    loop.run()


def run_role(begin: Begin, config: Config, control: Channel) -> None:
    (run_detokenizer if begin.name.startswith(DETOKENIZER) else run_router)(begin, config, control)


if __name__ == "__main__":
    run_child(run_role)

"""`trireme chat`: a conversation in the terminal. Streams, keeps the history, takes /commands."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from typing import Any

import msgspec

from trireme.command.fetch import fetched
from trireme.command.flags import add_sampling, add_settings, config_from, sampling_from
from trireme.command.startup import phases, uncollected
from trireme.errors import BadRequest, TriremeError
from trireme.types import SamplingParams

HELP = """/help            this
/clear           forget the conversation
/system TEXT     give the model a standing instruction, and begin anew
/retry           answer the last message once more
/set NAME VALUE  change a sampling parameter: temperature, top_p, max_tokens, seed, ...
/stats           tokens and speed of the last answer
/save FILE       write the conversation as JSON
/load FILE       read one back
/exit            leave (or ^D)
End a line with \\ to go on in the next one; ^C stops an answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", help="a standing instruction for the model")
    add_sampling(parser)
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    config = fetched(config_from(args))
    with uncollected(), phases() as report:
        from trireme.command.early import open_llm

        llm = open_llm(config, report)
    with llm:
        sampling = sampling_from(args, llm.default_sampling(max_tokens=1024))
        ready = llm.worker.ready
        name = pathlib.Path(config.model.model).stem
        print(f"{name} on {ready.backend} ({ready.dtype}), context {ready.max_model_len}. /help for help.")
        Conversation(llm, sampling, args.system).talk()
    return 0


class Conversation:
    def __init__(self, llm: Any, sampling: SamplingParams, system: str | None):
        self.llm, self.sampling = llm, sampling
        self.messages: list[dict[str, str]] = []
        self.stats = "nothing was said yet"
        self.instruct(system)

    def instruct(self, system: str | None) -> None:
        self.messages = [{"role": "system", "content": system}] if system else []

    def talk(self) -> None:
        """Until the user leaves."""
        while True:
            try:
                line = _read()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                continue
            if line in ("/exit", "/quit"):
                return
            if line.startswith("/"):
                self.command(*line[1:].split(maxsplit=1))
            elif line:
                self.messages.append({"role": "user", "content": line})
                self.answer()

    def command(self, name: str = "help", argument: str = "") -> None:
        """A /command; what is wrong with it is said, never raised."""
        try:
            if name == "help":
                print(HELP)
            elif name == "clear":
                self.instruct(next((m["content"] for m in self.messages if m["role"] == "system"), None))
            elif name == "system":
                self.instruct(argument)
            elif name == "retry":
                self.retry()
            elif name == "set":
                self.set(*argument.split(maxsplit=1))
            elif name == "stats":
                print(self.stats)
            elif name == "save":
                pathlib.Path(argument).expanduser().write_text(json.dumps(self.messages, indent=1, ensure_ascii=False))
            elif name == "load":
                self.messages = _conversation(pathlib.Path(argument).expanduser())
            else:
                print(f"/{name} is no command; /help lists them")
        except (TriremeError, OSError, msgspec.MsgspecError, TypeError, ValueError) as error:
            print(f"/{name}: {error}")

    def retry(self) -> None:
        while self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages or self.messages[-1]["role"] != "user":
            raise BadRequest("There is no message to answer.")
        self.answer()

    def set(self, name: str = "", value: str = "") -> None:
        names = SamplingParams.__struct_fields__
        if not value:
            raise BadRequest("It takes a name and a value.", "say, for example, /set temperature 0.7")
        if name not in names:
            raise BadRequest(f"There is no sampling parameter {name[:40]!r}.", f"use one of {', '.join(names)}")
        from trireme.api.transport.mistakes import expected_at, shortened

        expected = expected_at(SamplingParams, name)
        written_as_json = expected.startswith(("a list", "an object"))
        try:
            given = msgspec.json.decode(value) if written_as_json else value
            changed = msgspec.convert({**{f: getattr(self.sampling, f) for f in names}, name: given}, SamplingParams, strict=False)
        except (msgspec.MsgspecError, RecursionError):
            cause = f"{name} is {shortened(value)!r}; it must be {expected}."
            raise BadRequest(cause, "write it as JSON" if written_as_json else "") from None
        changed.check(self.llm.worker.ready.vocab_size)
        self.sampling = changed

    def answer(self) -> None:
        """Streams the answer to what was said; ^C stops it and keeps what is there."""
        said, count, begun, first = "", 0, time.monotonic(), 0.0
        try:
            for piece in self.llm.stream_chat(self.messages, self.sampling):
                first = first or time.monotonic()
                print(piece.text, end="", flush=True)
                said, count = said + piece.text, count + len(piece.token_ids)
        except KeyboardInterrupt:
            pass
        except TriremeError as error:
            print(f"[{error}]", end="")
        print()
        self.messages.append({"role": "assistant", "content": said})
        if first:
            took = max(time.monotonic() - first, 1e-9)
            self.stats = f"{count} tokens, {max(count - 1, 0) / took:.1f} a second, the first after {first - begun:.2f} s"


def _conversation(path: pathlib.Path) -> list[dict[str, str]]:
    """What /save wrote."""
    try:
        messages = msgspec.json.decode(path.read_bytes(), type=list[dict[str, str]])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        messages = [{}]
    if not all({"role", "content"} <= set(message) for message in messages):
        raise BadRequest(f"{path} holds no conversation.", "give a file that /save wrote")
    return messages


def _read() -> str:
    """One message of the user; a trailing backslash goes on in the next line."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  line editing and history
    lines = [input("> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(". "))
    return "\n".join(lines).strip()

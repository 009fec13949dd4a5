"""`trireme chat`: a conversation in the terminal. Streams, keeps the history, takes /commands."""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from typing import Any

import msgspec

from trireme.cli.terminal import Terminal
from trireme.command.fetch import fetched
from trireme.command.flags import add_model, add_sampling, add_settings, config_from, sampling_from
from trireme.command.startup import phases, uncollected
from trireme.errors import BadRequest, TriremeError
from trireme.types import FinishReason, SamplingParams

HELP = """/help            this
/clear           forget the conversation
/system TEXT     give the model a standing instruction, and begin anew
/retry           answer the last message once more
/more            go on with an answer that was cut
/set NAME VALUE  change a sampling parameter: temperature, top_p, max_tokens, seed, ...; alone, it shows them
/stats           tokens and speed of the last answer
/save FILE       write the conversation as JSON
/load FILE       read one back
/exit            leave (or ^D)
What you paste is one message. End a line with \\ to go on in the next one, or write many lines between \"\"\" and \"\"\".
Tab completes commands and files; ^C stops an answer."""
COMMANDS = tuple(line[1:].split()[0] for line in HELP.splitlines() if line.startswith("/"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--system", help="a standing instruction for the model")
    add_sampling(parser)
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    sampling_from(args, SamplingParams())  # reports a mistake before the model is loaded
    config = fetched(config_from(args))
    with uncollected(), phases() as report:
        from trireme.command.early import open_llm

        llm = open_llm(config, report, chats=True)
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
        self.terminal = Terminal(COMMANDS, SamplingParams.__struct_fields__)
        self.kept = ""  # a message that could not be sent; it returns to the input
        self.instruct(system)

    def instruct(self, system: str | None) -> None:
        self.messages = [{"role": "system", "content": system}] if system else []

    def talk(self) -> None:
        """Runs until the user leaves."""
        while True:
            kept, self.kept = self.kept, ""
            try:
                line, is_command = self.terminal.read(kept)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                continue
            if is_command and line in ("/exit", "/quit"):
                return
            if is_command:
                self.command(*line[1:].split(maxsplit=1))
            elif line:
                self.ask(line)

    def command(self, name: str = "help", argument: str = "") -> None:
        """Runs a /command. Errors are printed, never raised."""
        try:
            if name == "help":
                print(HELP)
            elif name == "clear":
                self.instruct(next((m["content"] for m in self.messages if m["role"] == "system"), None))
                print("The conversation is forgotten.")
            elif name == "system":
                self.instruct(argument)
                print("The conversation begins anew, " + ("with this instruction." if argument else "without an instruction."))
            elif name == "retry":
                self.retry()
            elif name == "more":
                self.more()
            elif name == "set":
                self.set(*argument.split(maxsplit=1))
            elif name == "stats":
                print(self.stats)
            elif name == "save":
                file = _file(name, argument)
                file.write_text(json.dumps(self.messages, indent=1, ensure_ascii=False))
                print(f"{len(self.messages)} messages are written to {file}.")
            elif name == "load":
                file = _file(name, argument)
                self.messages = _conversation(file)
                print(f"{len(self.messages)} messages are read from {file}; the conversation goes on from there.")
            else:
                print(f'/{name} is no command; /help lists them. Write a message that begins with / between """ and """.')
        except (TriremeError, OSError, msgspec.MsgspecError, TypeError, ValueError) as error:
            print(f"/{name}: {error}")

    def retry(self) -> None:
        while self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages or self.messages[-1]["role"] != "user":
            raise BadRequest("There is no message to answer.")
        self.answer()

    def more(self) -> None:
        """Continues the last answer."""
        if not self.messages or self.messages[-1]["role"] != "assistant" or not self.messages[-1]["content"]:
            raise BadRequest("There is no answer to go on with.")
        self.answer(self.messages.pop()["content"])

    def ask(self, text: str) -> None:
        """Answers a message if it fits in the context. Otherwise the message returns to the input."""
        self.messages.append({"role": "user", "content": text})
        try:
            excess = self._excess(self.messages)
            if excess and not self._leave_out():
                self.messages.pop()
                self.kept = text
                print(f"The message was not sent: the conversation would have {excess} tokens too many. Shorten it, or /clear.")
                return
        except TriremeError as error:
            self.messages.pop()
            self.kept = text
            print(f"[{error}]")
            return
        self.answer()

    def _excess(self, messages: list[dict[str, str]]) -> int:
        """How many tokens a conversation has beyond the most that still leaves room for an answer."""
        return max(len(self.llm.chat_tokens(messages)) + 1 - self.llm.scheduler.capacity.longest, 0)

    def _leave_out(self) -> bool:
        """Offers to leave out the oldest messages that do not fit. Returns whether the user agreed and whether that is enough."""
        first = next((number for number, message in enumerate(self.messages) if message["role"] != "system"), 0)
        ends = [n for n in range(first + 1, len(self.messages)) if self.messages[n]["role"] == "user"]
        for end in ends:
            shorter = self.messages[:first] + self.messages[end:]
            if not self._excess(shorter):
                question = f"The conversation does not fit into the context. Leave out the {end - first} oldest messages?"
                if not self.terminal.confirms(question):
                    return False
                self.messages = shorter
                return True
        return False

    def set(self, name: str = "", value: str = "") -> None:
        names = SamplingParams.__struct_fields__
        if name and name not in names:
            raise BadRequest(f"There is no sampling parameter {name[:40]!r}.", f"use one of {', '.join(names)}")
        if not value:
            for shown in [name] if name else names:
                print(f"{shown:<20} {msgspec.json.encode(getattr(self.sampling, shown)).decode()}")
            return
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

    def answer(self, said: str = "") -> None:
        """Streams the answer to what was said, or the rest of one that begins with `said`; ^C stops it and keeps what is there."""
        count, begun, first, finish = 0, time.monotonic(), 0.0, None
        try:
            if said:
                begun_answer = [*self.messages, {"role": "assistant", "content": said}]
                tokens = self.llm.chat_tokens(begun_answer, continued=True, add_generation_prompt=False)
            else:
                tokens = self.llm.chat_tokens(self.messages)
            for piece in self.llm.stream(tokens, self.sampling):
                first = first or time.monotonic()
                print(piece.text, end="", flush=True)
                said, count, finish = said + piece.text, count + len(piece.token_ids), piece.finish_reason
        except KeyboardInterrupt:
            pass
        except TriremeError as error:
            print(f"[{error}]", end="")
        print()
        self.messages.append({"role": "assistant", "content": said})
        if first:
            took = max(time.monotonic() - first, 1e-9)
            if finish is FinishReason.LENGTH:
                print(f"[cut after {count} tokens: /more goes on; /set max_tokens NUMBER allows longer answers]")
            self.stats = f"{count} tokens, {max(count - 1, 0) / took:.1f} a second, the first after {first - begun:.2f} s"


def _conversation(path: pathlib.Path) -> list[dict[str, str]]:
    """Reads a conversation that /save wrote."""
    try:
        messages = msgspec.json.decode(path.read_bytes(), type=list[dict[str, str]])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        messages = [{}]
    if not all({"role", "content"} <= set(message) for message in messages):
        raise BadRequest(f"{path} holds no conversation.", "give a file that /save wrote")
    return messages


def _file(command: str, argument: str) -> pathlib.Path:
    if not argument:
        raise BadRequest("It takes the name of a file.", f"say, for example, /{command} talk.json")
    return pathlib.Path(argument.strip()).expanduser()

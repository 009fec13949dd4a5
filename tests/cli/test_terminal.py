"""The terminal of a chat, in a terminal: what is pasted, typed and completed, as messages."""

from __future__ import annotations

import json
import os
import pathlib
import pty
import re
import select
import subprocess
import sys
import time

import pytest

from tests.serve.tiny_server_model import write_tiny
from trireme.cli.chat import COMMANDS
from trireme.cli.terminal import completions

READ = """
import json, pathlib, sys
from trireme.cli.terminal import Terminal
terminal = Terminal(("set", "stats", "save", "load"), ("temperature", "top_p"), pathlib.Path(sys.argv[1]))
kept = ""
while True:
    typed = terminal.read(kept)
    kept = "kept words" if typed.text == "keep" else ""
    print(json.dumps(["typed", *typed]))
"""
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class Screen:
    """A program in a terminal of its own."""

    def __init__(self, *command: str, **environ: str):
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1", **environ}
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        self.shown = ""

    def until(self, pattern: str) -> re.Match[str]:
        """Reads until this is shown; what comes after it is for the next time."""
        deadline = time.monotonic() + 90
        while not (found := re.search(pattern, self.shown)):
            assert time.monotonic() < deadline, f"never shown: {pattern!r} in {self.shown!r}"
            if select.select([self.master], [], [], 0.2)[0]:
                self.shown += os.read(self.master, 65536).decode(errors="replace")
        self.shown = self.shown[found.end() :]
        return found

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def typed(self, text: str) -> list[object]:
        """What the reader makes of these keys."""
        self.until("> ")
        self.type(text)
        return json.loads(self.until(r'\["typed".*?\]\r?\n')[0])[1:]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


def test_what_is_typed_and_pasted_becomes_messages(tmp_path: pathlib.Path) -> None:
    screen = Screen(sys.executable, "-c", READ, str(tmp_path / "history"))
    try:
        assert screen.typed("\x1b[200~one\ntwo\nthree\x1b[201~\r") == ["one\ntwo\nthree", False]
        assert screen.typed('"""first\r/second\r"""\r') == ["first\n/second", False]
        assert screen.typed('"""one line"""\r') == ["one line", False]
        assert screen.typed("a\\\rb\r") == ["a\nb", False]
        assert screen.typed("/sta\t\r") == ["/stats", True]
        assert screen.typed("/set temp\t0.5\r") == ["/set temperature 0.5", True]
        (tmp_path / "a talk.json").touch()
        assert screen.typed(f"/load {tmp_path}/hist\t\r") == [f"/load {tmp_path}/history", True]
        assert screen.typed(f"/load {tmp_path}/a t\t\r") == [f"/load {tmp_path}/a talk.json", True], "a name with a space"
        assert screen.typed("keep\r") == ["keep", False]
        assert screen.typed(" and more\r") == ["kept words and more", False], "a kept message stands in the input"
        assert screen.typed("\x1b[A\x1b[A\r") == ["keep", False]
    finally:
        screen.close()
    assert (tmp_path / "history").stat().st_mode & 0o077 == 0
    again = Screen(sys.executable, "-c", READ, str(tmp_path / "history"))
    try:
        assert again.typed("\x1b[A\r") == ["keep", False], "the history outlives the program"
    finally:
        again.close()


def test_completions() -> None:
    assert completions("hello", "hello", COMMANDS, ()) == []
    assert completions("/s", "/s", COMMANDS, ()) == ["/system ", "/set ", "/stats ", "/save "]
    assert completions("/set top", "top", COMMANDS, ("top_k", "top_p", "seed")) == ["top_k ", "top_p "]
    assert completions("/set top_k 1", "1", COMMANDS, ("top_k",)) == []


def test_a_conversation_with_a_model(tmp_path: pathlib.Path) -> None:
    """Everything that a user can do, in the real command: each message gets four tokens, and 63 fit in all."""
    model = write_tiny(tmp_path / "tiny", context=64, chat_template=TEMPLATE)
    command = [sys.executable, "-m", "trireme", "chat", str(model), "--backend", "reference"]
    command += ["--max-tokens", "4", "--temperature", "0"]
    (tmp_path / "chat-history").write_text('"from yesterday"\n')
    screen = Screen(*command, TRIREME_CACHE=str(tmp_path))

    def say(keys: str, *shown: str) -> None:
        screen.until("> ")
        screen.type(keys)
        for pattern in shown:
            screen.until(pattern)

    try:
        screen.until("/help for help")
        say("\x1b[200~ab\ncd\x1b[201~\r", r"cut after 4 tokens: /more goes on")
        say('"""ef\r/gh\r"""\r', "cut after 4 tokens")
        say(f"/sav\t{tmp_path}/first.json\r", "4 messages are written")
        say("/more\r", "cut after 4 tokens")
        say("/set max_t\t2\r")
        say("/set max_tokens\r", r"max_tokens +2\r")
        say("/system\r", "begins anew, without an instruction")
        say("/system Be brief.\r", "begins anew, with this instruction")
        say(f"/load {tmp_path}/fir\t\r", "4 messages are read")
        say("/retry\r", "cut after 2 tokens")
        say(f"/save {tmp_path}/second.json\r", "4 messages are written")
        say("/clear\r", "is forgotten")
        say("\x1b[A" * 13 + "\r", "from yesterday", "cut after 2 tokens")
        say("x" * 50 + "\r", "Leave out the 2 oldest messages")
        screen.type("n\r")
        screen.until("was not sent")
        say("\r", "Leave out the 2 oldest messages")  # the message stands in the input again
        screen.type("y\r")
        screen.until("cut after 2 tokens")
        say("y" * 70 + "\r", "tokens too many. Shorten it, or /clear")
        say("\x15/stats\r", "2 tokens, ")
        say(f"/save {tmp_path}/third.json\r", "2 messages are written")
        say("/exit\r")
        assert screen.process.wait(60) == 0
    finally:
        screen.close()
    first, second, third = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("first", "second", "third"))
    assert [message["content"] for message in first if message["role"] == "user"] == ["ab\ncd", "ef\n/gh"]
    assert second[:3] == first[:3] and first[3]["content"].startswith(second[3]["content"])
    assert third[0] == {"role": "user", "content": "x" * 50}
    history = [json.loads(line) for line in (tmp_path / "chat-history").read_text().splitlines()]
    assert history[0] == "from yesterday" and "ab\ncd" in history and '"""ef\n/gh\n"""' in history


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ("generate x --top-p 3", "top_p is 3.0; it must lie between 0.0 and 1.0. Fix: give another --top-p"),
        ("chat --max-tokens -3", "max_tokens is -3; it must lie between 0 and 2147483648. Fix: give another --max-tokens"),
        ("generate -", "The prompt is empty. Fix: give some text to continue"),
    ],
)
def test_arguments_are_checked_before_a_model_is_looked_for(args: str, told: str) -> None:
    command = [sys.executable, "-m", "trireme", *args.split(), "--model", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    assert (done.returncode, done.stderr) == (2, f"trireme: {told}\n")


def test_a_model_that_cannot_chat_is_refused_at_the_start(tmp_path: pathlib.Path) -> None:
    model = write_tiny(tmp_path / "tiny")
    done = subprocess.run([sys.executable, "-m", "trireme", "chat", str(model)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("trireme: tiny has no chat template: it continues text. Fix: ")

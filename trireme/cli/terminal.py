"""The terminal of a chat: what a user types, as whole messages and commands. Knows lines, keys and files; nothing of models."""

from __future__ import annotations

import glob
import json
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

from trireme.config import cache_folder

BLOCK = '"""'
MOST_KEPT = 1000  # entries in the history
FILE_COMMANDS = ("load", "save")


class Typed(NamedTuple):
    """One message or one /command."""

    text: str
    is_command: bool


class Terminal:
    """Reads messages. On a terminal it has line editing, a history in a file, and Tab completion for commands and files."""

    def __init__(self, commands: Sequence[str], names: Sequence[str], history: pathlib.Path | None = None):
        """`names`: the names that /set accepts."""
        self._commands, self._names = commands, names
        self._history = history or cache_folder() / "chat-history"
        self.has_keyboard = sys.stdin.isatty()
        self._readline = _line_editing(self._complete) if self.has_keyboard else None
        if self._readline is not None:
            self._recall(self._readline)

    def read(self, kept: str = "") -> Typed:
        """Reads one message. `kept` is already in the input. Pasted text is one message, however many lines it has.

        A backslash at the end goes on in the next line; three quotation marks begin and end a message of many lines.
        """
        lines = [self._line("> ", kept)]
        if lines[0].startswith(BLOCK):
            return Typed(self._block(lines), False)
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line(". "))
        text = "\n".join(lines).strip()
        self._remember(text)
        return Typed(text, text.startswith("/") and "\n" not in text)

    def confirms(self, question: str) -> bool:
        """Whether the user says yes. Without a terminal the answer is no."""
        return self.has_keyboard and self._line(f"{question} [y/N] ").strip().lower() in ("y", "yes")

    def _block(self, lines: list[str]) -> str:
        """Reads lines until three quotation marks end the message."""
        while (len(lines) == 1 and len(lines[0]) < 2 * len(BLOCK)) or not lines[-1].rstrip().endswith(BLOCK):
            lines.append(self._line(". "))
        text = "\n".join(lines).rstrip()
        self._remember(text)
        return text[len(BLOCK) : -len(BLOCK)].strip()

    def _line(self, prompt: str, kept: str = "") -> str:
        if self._readline is None:
            return input(prompt)
        self._readline.set_startup_hook((lambda: self._readline.insert_text(kept)) if kept else None)  # type: ignore[union-attr]
        try:
            return input(prompt)
        finally:
            self._readline.set_startup_hook(None)

    def _recall(self, readline: ModuleType) -> None:
        """Loads the history of earlier conversations for the arrow keys."""
        try:
            entries = [json.loads(line) for line in self._history.read_text().splitlines()[-MOST_KEPT:]]
        except (OSError, ValueError):
            return
        for entry in entries:
            if isinstance(entry, str):
                readline.add_history(entry)

    def _remember(self, text: str) -> None:
        """Adds a message to the history. Only the owner can read its file. If the disk is full, the chat continues."""
        if self._readline is None or not text:
            return
        self._readline.add_history(text)
        try:
            self._history.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(self._history, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600), "a") as file:
                file.write(json.dumps(text) + "\n")
        except OSError:
            pass

    def _complete(self, word: str, state: int) -> str | None:
        line = self._readline.get_line_buffer() if self._readline is not None else word
        found = completions(line, word, self._commands, self._names)
        return found[state] if state < len(found) else None


def completions(line: str, word: str, commands: Sequence[str], names: Sequence[str]) -> list[str]:
    """What Tab offers for the last word of a line: commands, names that /set takes, files."""
    command, space, _ = line.partition(" ")
    if not line.startswith("/"):
        return []
    if not space:
        return [f"/{name} " for name in commands if f"/{name}".startswith(word)]
    if command == "/set":
        return [f"{name} " for name in names if name.startswith(word)] if line.count(" ") == 1 else []
    if command[1:] in FILE_COMMANDS:
        typed = line.partition(" ")[2]
        begun = os.path.expanduser(typed)
        kept = len(begun) - len(word) if word != typed else 0  # of a name with spaces, Tab replaces only the last word
        found = sorted(glob.glob(glob.escape(begun) + "*"))
        return [f"{path}/"[kept:] if os.path.isdir(path) else path[kept:] for path in found]
    return []


def _line_editing(complete: Callable[[str, int], str | None]) -> ModuleType | None:
    try:
        import readline
    except ImportError:  # some builds of Python lack readline; typing works without it
        return None
    readline.set_auto_history(False)
    readline.set_completer(complete)
    readline.set_completer_delims(" ")
    readline.parse_and_bind("bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete")
    readline.parse_and_bind("set enable-bracketed-paste on")  # line breaks in pasted text do not send the message
    return readline

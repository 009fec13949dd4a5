"""argparse that answers a mistake with one line: what is wrong, and what was probably meant. Knows flags; nothing of commands."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import NoReturn

_CHOICE = re.compile(r"(?P<what>.*)invalid choice: '(?P<given>[^']*)' \(choose from (?P<known>.*)\)")


FEW = 6  # the most choices that fit in one line


class Defaults(argparse.HelpFormatter):
    """Adds a flag's default to its help if the help does not mention it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        tells = not isinstance(action.default, bool) and action.default not in (None, "", argparse.SUPPRESS)
        if not tells or "[" in text or action.default == []:
            return text
        default = " ".join(map(str, action.default)) if isinstance(action.default, list) else "%(default)s"
        return f"{text} [{default}]".strip()


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {self._cause(message)} Fix: {self._fix(message)}\n")

    def _cause(self, message: str) -> str:
        choice = _CHOICE.fullmatch(message)
        if choice:
            message = f"{choice['what']}there is no {choice['given']!r}"
        return f"{message[:1].upper()}{message[1:300]}."

    def _fix(self, message: str) -> str:
        choice = _CHOICE.fullmatch(message)
        if choice:
            known = re.findall(r"[^', ]+", choice["known"])
            listed = f"use one of: {', '.join(known)}"
            return listed if len(known) <= FEW else _meant(choice["given"], known) or listed
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        meant = _meant(unknown[1], self._option_string_actions) if unknown else ""
        return meant or f"see `{self.prog} --help`"


def _meant(given: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(given, list(known), n=1)
    return f"did you mean {near[0]}?" if near else ""

"""The output at a server's start: phases with their times, as bars on a terminal and plain lines elsewhere. Knows no process."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class Display:
    """Shows phases one after the other: each is shown while it lasts, and then leaves one line with its time."""

    def __init__(self, stream: Any = None):
        self._stream = stream or sys.stderr
        self._begun = time.monotonic()
        self._phase, self._phase_begun = "", self._begun
        self._bar: Progress | None = None
        if self._stream.isatty():
            columns = (TextColumn("{task.description:>12}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(file=self._stream), transient=True)
            self._task = self._bar.add_task("", total=1.0)
            self._bar.start()

    def phase(self, name: str, share: float = 0.0) -> None:
        """Shows the current phase and its progress."""
        if name != self._phase:
            self._finish_phase()
            self._phase, self._phase_begun = name, time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, description=name, completed=share, total=1.0 if share else None)

    def line(self, text: str) -> None:
        """Prints a line that stays."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def done(self, text: str) -> None:
        """Ends the start; the last line shows its total time."""
        self._finish_phase()
        self.close()
        self.line(f"{text} ({time.monotonic() - self._begun:.1f} s)")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _finish_phase(self) -> None:
        if self._phase:
            self.line(f"{self._phase:>12}  {time.monotonic() - self._phase_begun:.2f} s")
        self._phase = ""

"""What the chip's clock and power did while something ran, as nvidia-smi tells it. Knows a command's output; nothing of engines."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass

EVERY_MS = 50
SETTLING = 0.2  # seconds at the beginning of a measurement in which the clock still follows what was before
COMMAND = ("nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant,clocks_event_reasons.sw_power_cap")
FORM = ("--format=csv,noheader,nounits", "--id=0", f"--loop-ms={EVERY_MS}")


@dataclass(frozen=True)
class Sample:
    """One line of it: when, megahertz, watts, and whether its power held the chip back."""

    at: float
    clock: float
    power: float
    limited: bool


def parsed(line: str, at: float) -> Sample | None:
    """A line as a sample; None for anything else, such as an older driver's complaint about a field."""
    parts = [part.strip() for part in line.split(",")]
    try:
        clock, power = float(parts[0]), float(parts[1])
        return Sample(at, clock, power, parts[2] == "Active")
    except (ValueError, IndexError):
        return None


class Clocks:
    """Watches the first GPU while it is entered. Where nvidia-smi is missing it has seen nothing."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Clocks:
        if shutil.which(COMMAND[0]):
            streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdout": subprocess.PIPE}
            self._process = subprocess.Popen([*COMMAND, *FORM], text=True, **streams)  # type: ignore[call-overload]
            self._thread = threading.Thread(target=self._read, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)
            self._thread.join(10)

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            sample = parsed(line, time.perf_counter())
            if sample is not None:
                self.samples.append(sample)

    def since(self, begun: float) -> str:
        """The median clock and power from then to now, and whether power was the limit; "" if nothing was seen."""
        seen = [sample for sample in self.samples if sample.at >= begun + SETTLING]
        if not seen:
            return ""
        clock, power = (statistics.median(getattr(sample, name) for sample in seen) for name in ("clock", "power"))
        share = sum(sample.limited for sample in seen) / len(seen)
        return f"{clock:,.0f} MHz, {power:.0f} W" + (f", limited by power {share:.0%} of the time" if share else "")

"""Records a GPU's clock and power during a measurement, using nvidia-smi. Knows a command's output; nothing of engines."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass

EVERY_MS = 50
SETTLING = 0.2  # seconds at the beginning of a measurement that are left out, because the clock has not settled yet
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
    """Parses a line as a sample. Returns None for any other line, such as an older driver's message about an unknown field."""
    parts = [part.strip() for part in line.split(",")]
    try:
        clock, power = float(parts[0]), float(parts[1])
        return Sample(at, clock, power, parts[2] == "Active")
    except (ValueError, IndexError):
        return None


class Clocks:
    """Records the first GPU inside a `with` block. Without nvidia-smi it records nothing."""

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
        """The median clock and power since then, and whether power was the limit. Empty if there are no samples."""
        seen = [sample for sample in self.samples if sample.at >= begun + SETTLING]
        if not seen:
            return ""
        clock, power = (statistics.median(getattr(sample, name) for sample in seen) for name in ("clock", "power"))
        share = sum(sample.limited for sample in seen) / len(seen)
        return f"{clock:,.0f} MHz, {power:.0f} W" + (f", limited by power {share:.0%} of the time" if share else "")

"""The peer's side of `trireme bench peers`: answers measurements asked as JSON lines. Runs in environments without trireme.

Knows the questions; each engine answers them in a script beside this one.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
from typing import Protocol

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what a library prints goes to the log and does not mix with the answers


class Engine(Protocol):
    """An engine with its model loaded."""

    def prefill(self, prompt: list[int]) -> float:
        """Seconds until the first token after a prompt."""
        ...

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """The seconds for `steps` steps after the prompts. Each step makes one token for each prompt."""
        ...


def say(**values: object) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()


def draw(count: int, length: int, seed: int) -> list[list[int]]:
    """Makes prompts that are in no cache."""
    dice = random.Random(seed)
    return [[dice.randrange(100, 40_000) for _ in range(length)] for _ in range(count)]


def serve(engine: Engine) -> None:
    """Generates one token, reports it, and then answers questions until there are no more."""
    engine.prefill(draw(1, 16, 0)[0])
    say(first=True)
    for number, line in enumerate(sys.stdin, 1):
        question = json.loads(line)
        begun = os.times()
        prompts = draw(question["streams"], question["prompt"], number)
        steps = question["steps"]
        seconds = engine.decode(prompts, steps) if steps else engine.prefill(prompts[0])
        ended = os.times()
        say(seconds=seconds, cpu=ended.user + ended.system - begun.user - begun.system, rss=peak_bytes())


def peak_bytes() -> int:
    """The most memory this program held. What getrusage says on Linux begins with the size of the process that started it."""
    if os.path.exists("/proc/self/status"):
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

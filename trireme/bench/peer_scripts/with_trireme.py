"""This engine's offline API, started as the command line does it: `with_trireme.py MODEL THREADS QUANTIZE`."""

from __future__ import annotations

import sys
import time
from typing import Any

from answering import serve

from trireme.command.early import open_llm
from trireme.command.startup import uncollected
from trireme.config import resolve
from trireme.types import SamplingParams
from trireme.worker.worker import LocalWorker


class Trireme:
    def __init__(self, model: str, threads: int, quantize: str):
        # the prefix cache is off, because the peers keep nothing of earlier prompts
        settings = {"model": model, "quantize": quantize, "backend": "cpu", "threads": threads, "prefix_cache": False}
        with uncollected():
            self.llm = open_llm(resolve(settings), lambda name, share: None)

    def prefill(self, prompt: list[int]) -> float:
        begun = time.perf_counter()
        self._run([prompt], 1)
        return time.perf_counter() - begun

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Measures from the launch of the first step in which every stream decodes to the last answer."""
        assert isinstance(self.llm.worker, LocalWorker)
        runner, begun = self.llm.worker.runner, 0.0
        launch = runner.launch

        def watched(plan: Any) -> None:
            nonlocal begun
            if not begun and len(plan.counts) == len(prompts) and set(plan.counts) == {1}:
                begun = time.perf_counter()
            launch(plan)

        runner.launch = watched  # type: ignore[method-assign]
        try:
            self._run(prompts, steps + 1)
        finally:
            runner.launch = launch  # type: ignore[method-assign]
        return time.perf_counter() - begun

    def _run(self, prompts: list[list[int]], tokens: int) -> None:
        self.llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))


serve(Trireme(sys.argv[1], int(sys.argv[2]), sys.argv[3]))

"""vLLM's CPU build, offline: `with_vllm.py FOLDER THREADS TYPE`."""

from __future__ import annotations

import os
import sys
import time

from answering import serve

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="2", OMP_NUM_THREADS=sys.argv[2])
from vllm import LLM, SamplingParams


class Vllm:
    def __init__(self, folder: str):
        self.llm = LLM(folder, dtype=sys.argv[3], skip_tokenizer_init=True, enable_prefix_caching=False, max_model_len=4096)

    def prefill(self, prompt: list[int]) -> float:
        return self._run([prompt], 1)

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """The total time without the time to the first tokens."""
        first = self._run(prompts, 1)
        return self._run(prompts, steps + 1) - first

    def _run(self, prompts: list[list[int]], tokens: int) -> float:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return time.perf_counter() - begun


serve(Vllm(sys.argv[1]))

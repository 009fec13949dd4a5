"""transformers with its own cache: `with_transformers.py FOLDER THREADS`."""

from __future__ import annotations

import sys
import time

import torch
from answering import serve
from transformers import AutoModelForCausalLM


class Transformers:
    def __init__(self, folder: str, threads: int):
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> float:
        begun = time.perf_counter()
        self.model(input_ids=torch.tensor([prompt]), use_cache=True, logits_to_keep=1).logits.argmax(-1).tolist()
        return time.perf_counter() - begun

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], steps: int) -> float:
        made = self.model(input_ids=torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        ids, begun = made.logits.argmax(-1), time.perf_counter()
        for _ in range(steps):
            made = self.model(input_ids=ids, past_key_values=made.past_key_values, use_cache=True, logits_to_keep=1)
            ids = made.logits.argmax(-1)
        return time.perf_counter() - begun


serve(Transformers(sys.argv[1], int(sys.argv[2])))

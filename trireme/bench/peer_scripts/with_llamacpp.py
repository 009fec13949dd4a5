"""llama.cpp through llama-cpp-python's plain C calls: `with_llamacpp.py MODEL.gguf THREADS [plain]`."""

from __future__ import annotations

import sys
import time

import llama_cpp as c
import numpy as np
from answering import serve

MICRO_BATCH = 512  # llama.cpp's own default


class LlamaCpp:
    def __init__(self, path: str, threads: int, plain: bool):
        c.llama_backend_init()
        params = c.llama_model_default_params()
        params.use_extra_bufts = not plain
        self.model = c.llama_model_load_from_file(path.encode(), params)
        self.threads = threads
        self.vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))

    def context(self, tokens: int, streams: int) -> c.llama_context_p:
        params = c.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = tokens * streams + 256, 2048, MICRO_BATCH
        params.n_seq_max, params.kv_unified = streams, True
        params.n_threads = params.n_threads_batch = self.threads
        return c.llama_init_from_model(self.model, params)

    def prefill(self, prompt: list[int]) -> float:
        context = self.context(len(prompt), 1)
        begun = time.perf_counter()
        run(context, [prompt], [0])
        self.best(context, 1)
        seconds = time.perf_counter() - begun
        c.llama_free(context)
        return seconds

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        context = self.context(len(prompts[0]) + steps + 1, len(prompts))
        run(context, prompts, [0] * len(prompts))
        ids, begun = self.best(context, len(prompts)), time.perf_counter()
        for step in range(steps):
            run(context, [[token] for token in ids], [len(prompts[0]) + step] * len(prompts))
            ids = self.best(context, len(prompts))
        seconds = time.perf_counter() - begun
        c.llama_free(context)
        return seconds

    def best(self, context: c.llama_context_p, streams: int) -> list[int]:
        """The likeliest next token of each stream, from the logits of the last token it added."""
        logits = [np.ctypeslib.as_array(c.llama_get_logits_ith(context, i - streams), (self.vocab,)) for i in range(streams)]
        return [int(row.argmax()) for row in logits]


def run(context: c.llama_context_p, tokens: list[list[int]], starts: list[int]) -> None:
    """Computes each stream's new tokens. Only the last token of each stream gives logits."""
    flat = [(s, starts[s] + i, t, i == len(part) - 1) for s, part in enumerate(tokens) for i, t in enumerate(part)]
    batch = c.llama_batch_init(len(flat), 0, 1)
    batch.n_tokens = len(flat)
    for i, (stream, position, token, last) in enumerate(flat):
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, last
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, stream
    if c.llama_decode(context, batch):
        raise RuntimeError("llama_decode failed")
    c.llama_batch_free(batch)


serve(LlamaCpp(sys.argv[1], int(sys.argv[2]), "plain" in sys.argv[3:]))

"""What one rank has opened: a backend, a model, its KV pool, and the runner that does steps. Knows nothing of requests or text.

Steps are launched and collected at the runner itself; here is what happens before, between and beside them.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch
from torch import Tensor

from trireme import host
from trireme.backends import open_backend
from trireme.config import Config
from trireme.errors import BadConfig, TriremeError
from trireme.hub.checkpoint import Checkpoint
from trireme.hub.grammar import GrammarTokens
from trireme.hub.tokenizer import Tokenizer
from trireme.ipc.messages import ONE_STATE, Admit, BandSize, Plan, Ready
from trireme.ops import KVCache, States
from trireme.parallel import Group, Mesh
from trireme.types import SamplingParams
from trireme.worker.capture import capture
from trireme.worker.grammar import Grammars
from trireme.worker.kv_scales import Factors, keeping, same_form
from trireme.worker.load import Report, build_model, kept_as, load_model, read_pickle, stored_tensor
from trireme.worker.reload import like, take
from trireme.worker.room import make_room
from trireme.worker.runner import Caches, Runner
from trireme.worker.sampler import Sampler
from trireme.worker.tables import Tables

MOST_REHEARSED = 16  # the most sequences of a step that is captured before it is needed
LONGEST_REHEARSAL = 0.5  # seconds: if a step takes longer, capturing it early would delay requests too much


class LocalWorker:
    """A model opened in this process; `runner` does its steps."""

    def __init__(
        self, config: Config, path: pathlib.Path, rank: int = 0, store: str = "", report: Report = lambda name, share: None
    ):
        threads = config.device.threads or min(torch.get_num_threads(), host.cores())
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        backend = open_backend(config.device, rank)
        size = config.device.tp
        mesh = Mesh(tp=Group(rank, size, backend.comm(rank, size, store)) if size > 1 else Group())
        loaded = load_model(config, path, backend, mesh, report)
        self._keeping = keeping(config, loaded, backend, mesh.tp)
        room = make_room(config, loaded, backend, mesh.tp, self._keeping.kind)
        report("kv cache", 0.0)
        max_rows = config.schedule.max_running
        caches: Caches = {key: States.allocate(spec, room.num_states, backend.zeros) for key, spec in room.states.items()}
        for key, spec in room.caches.items():
            band = room.bands[room.band_of[key]]
            slots = (band.num_pages + 1) * band.page_size  # one page more, for the padding of captured steps
            factors = self._keeping.of(key, backend)
            caches[key] = dataclasses.replace(backend.cache(spec, slots, loaded.dtype), band=room.band_of[key], factors=factors)
        tables = Tables(backend, max_rows, room.max_model_len, room.bands, config.schedule.max_step_tokens, room.num_kept)
        self.grammars = Grammars(lambda: _grammar_tokens(path, loaded.cfg.vocab), loaded.cfg.vocab)
        sampler = Sampler(backend.ops, tables, max_rows, self.grammars)
        self.model, self.backend, self._config, self._loaded, self._mesh = loaded.model, backend, config, loaded, mesh
        self.runner = Runner(loaded.model, backend, caches, tables, sampler, max_rows)
        self.size = size
        self._chores = self._later()
        report("first step", 0.0)
        token_seconds = self._warm_up()
        report("first step", 1.0)
        self.ready = Ready(
            num_pages=room.bands[0].num_pages if room.caches or room.states else 0,
            page_size=room.bands[0].page_size,
            max_model_len=room.max_model_len,
            vocab_size=loaded.cfg.vocab,
            shares_prefixes=bool(getattr(loaded.model, "shares_prefixes", True)) and room.num_kept != 0,
            depth=backend.depth,
            backend=backend.name,
            dtype=str(loaded.dtype).removeprefix("torch."),
            weight_bytes=loaded.weight_bytes,
            kv_bytes=room.num_bytes,
            workspace_bytes=backend.workspace_bytes(),
            taken_bytes=max(backend.held_bytes() - loaded.weight_bytes - room.num_bytes, 0),
            bands=room.bands if room.num_kept is None else [*room.bands, BandSize(ONE_STATE, room.num_kept, 1)],
            token_seconds=token_seconds,
            whole_prompts=bool(getattr(loaded.model, "whole_prompts", False)),
            weights=f"{loaded.holding}; kept {kept_as(loaded.model)} on {backend.name}",
            kv=self._keeping.said,
        )

    def _warm_up(self) -> float:
        """Computes one token, so that no request has to wait for kernels to be built and a step to be recorded; then once more,
        and returns how long that took."""
        admit = Admit(row=0, tokens=bytes(4), num_prompt=1, sampling=SamplingParams(temperature=0.0), seed=0)
        one = Plan(0, [], [admit], page_rows=[], page_ids=[], rows=[0], starts=[0], counts=[1], logits=[1], samples=[True])
        again = msgspec.structs.replace(one, step=1, admit=[])
        one.page_bands = list(range(len(self.runner.tables.page_tables)))
        one.page_rows = one.page_ids = [0] * len(one.page_bands)
        for plan in (one, again):
            begun = time.monotonic()
            self.runner.launch(plan)
            self.runner.collect()
        return time.monotonic() - begun

    def reload(self, path: pathlib.Path) -> str:
        """Replaces the weights. If the new ones do not fit, returns the reason in one line. No step may be in flight."""
        loaded = self._loaded
        try:
            if self._config.model.random_weights:
                raise BadConfig("The served weights are random.", "serve a model's own weights to reload them")
            new = Checkpoint.open(path, read_pickle)
            like(loaded, new, build_model(self._config, new, self.backend, self._mesh)[1])
            found = keeping(self._config, dataclasses.replace(loaded, checkpoint=new), self.backend, self._mesh.tp)
            same_form(self._keeping, found)
        except TriremeError as error:
            return str(error)
        if not take(self.model, lambda name, shape: stored_tensor(new, name, shape)):
            self.runner.forget()
        for key in found.factors:
            self._rescale(key, found.factors[key])
        self._keeping, loaded.checkpoint = found, new
        self._warm_up()
        return ""

    def _rescale(self, key: int, factors: Factors) -> None:
        """Gives a cache new scales in the place of the old ones, whose addresses captured steps hold."""
        cache = self.runner.caches[key]
        assert isinstance(cache, KVCache) and cache.factors
        for old, new in zip(cache.factors, factors, strict=True):
            old.copy_(new)

    def rest(self) -> bool:
        """Does one piece of work in advance while no plan comes; returns whether there may be more."""
        return next(self._chores, False)

    def _later(self) -> Iterator[bool]:
        self.grammars.warm_up()
        yield True
        # Not with several ranks, which would have to do this at the same time, nor on a device, where capture works differently.
        alone = self.size == 1 and self.backend.depth == 1
        for counts, mode in itertools.product(self._rehearsed() if alone else [], ("greedy", "random")):
            begun = time.monotonic()
            self.runner.rehearse(counts, mode)
            if time.monotonic() - begun > LONGEST_REHEARSAL:
                return
            yield True

    def _rehearsed(self) -> list[list[int]]:
        """The steps worth recording before they are wanted, as the tokens of each sequence: decodes, and a prompt beside them."""
        sizes = [size for size in self.runner.graph_sizes if size <= MOST_REHEARSED]
        batches = [size for size in self.backend.graph_batches if size in sizes and self.runner.graph_tokens]
        return sorted([[1] * size for size in sizes] + [[2] + [1] * (size - 1) for size in batches], key=len)

    @contextmanager
    def capture(self, *paths: str) -> Iterator[dict[str, list[Tensor]]]:
        """The outputs of the layers at these paths, one tensor per step, while the block lasts."""
        self.runner.eager = True
        try:
            with capture(self.model, paths) as values:
                yield values
        finally:
            self.runner.eager = False

    def close(self) -> None:
        """Does nothing: everything ends with the process."""


def _grammar_tokens(path: pathlib.Path, width: int) -> GrammarTokens:
    return GrammarTokens(Tokenizer.open(path), Checkpoint.open(path).eos_token_ids(), width)

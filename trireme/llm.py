"""The offline API: the whole engine in this process. `LLM("smollm2").generate("Once upon a time")`.

The same scheduler, worker and loop as the server, without channels. Knows text and progress bars; nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import queue
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from trireme.config import Config, resolve
from trireme.errors import BadConfig, BadRequest, TriremeError
from trireme.hub.advice import chat_advice
from trireme.hub.checkpoint import Checkpoint
from trireme.hub.resolve import resolve_model
from trireme.hub.tokenizer import Tokenizer
from trireme.sched.capacity import Capacity
from trireme.sched.engine import Engine
from trireme.sched.scheduler import Scheduler
from trireme.serve.answers import LocalAnswer, Piece
from trireme.serve.child import open_tokenizer
from trireme.serve.loop import EngineLoop
from trireme.types import Output, Progress, SamplingParams
from trireme.worker.group import RankGroup, open_ranks
from trireme.worker.runner import Runner
from trireme.worker.worker import LocalWorker

BREATH = 5e-5  # seconds to pause between two new answers, so that the engine's thread can run when many end together
SHOWN_TOGETHER = 32  # the progress bar is updated once per so many steps of a sequence
Prompt = str | list[int] | dict[str, Any]  # {"prompt": text} and {"prompt_token_ids": ids} say the same
Messages = list[dict[str, Any]]


class LLM:
    """A model, loaded and ready. Every setting of `trireme.config` may be given by name: `LLM("model", page_size=1, tp=2)`."""

    def __init__(
        self,
        model: str | None = None,
        *,
        config: Config | None = None,
        report: Callable | None = None,
        tokenizer: Tokenizer | None = None,
        **settings: Any,
    ):
        """`tokenizer`: the model's tokenizer, if the caller has already loaded it."""
        self.config = config or resolve({"model": model, **settings})
        report = report or (lambda name, share: None)
        self.path = resolve_model(self.config.model.model)
        checkpoint = Checkpoint.open(self.path)
        self.tokenizer = tokenizer or open_tokenizer(str(self.path), self.config)
        self.generation = checkpoint.generation
        self.eos_token_ids = checkpoint.eos_token_ids()
        self.worker: LocalWorker | RankGroup
        runs: Runner | RankGroup  # launches and collects the steps
        if self.config.device.tp == 1:
            self.worker = LocalWorker(self.config, self.path, report=report)
            runs = self.worker.runner
        else:
            runs = self.worker = open_ranks(self.config, self.path, report)
        self.scheduler = Scheduler(self.config.schedule, Capacity.of(self.worker.ready, self.config.cache))
        self._loop = EngineLoop(Engine(self.scheduler, runs))
        self._ids = itertools.count()
        # A full garbage collection would visit all loaded objects and delay a token by 0.1 s. Skipped if it is disabled.
        self._froze = gc.isenabled()
        if self._froze:
            gc.freeze()

    # --- generating -----------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Output]:
        """Continues each prompt (text or token ids), all of them together. One answer per prompt, in their order."""
        listed: list[Any] = [prompts] if _is_prompt(prompts) else list(prompts)
        return self._answer_all([self._tokens(prompt) for prompt in listed], sampling, progress)

    def chat(
        self,
        conversations: str | Messages | Sequence[str | Messages],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        **template: Any,
    ) -> list[Output]:
        """Answers each conversation, a list of {"role", "content"} or one message's text, by the model's own chat template."""
        one = isinstance(conversations, str) or (bool(conversations) and isinstance(conversations[0], dict))
        listed = [conversations] if one else conversations
        return self._answer_all([(None, self.chat_tokens(c, **template)) for c in listed], sampling, progress)  # type: ignore[arg-type]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[Piece]:
        """Continues one prompt, piece by piece. Leaving the iterator early ends the request."""
        return self._stream(*self._tokens(prompt), sampling)

    def stream_chat(self, messages: str | Messages, sampling: SamplingParams | None = None, **template: Any) -> Iterator[Piece]:
        """Answers a conversation, piece by piece."""
        return self._stream(None, self.chat_tokens(messages, **template), sampling)

    async def agenerate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Output:
        """As `generate` for one prompt, for asyncio; many may run at once."""
        answer = self._open(*self._tokens(prompt), sampling)
        async for _ in self._pieces(answer):
            pass
        return answer.output()

    def astream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> AsyncIterator[Piece]:
        """As `stream`, for asyncio."""
        return self._pieces(self._open(*self._tokens(prompt), sampling))

    def chat_tokens(self, messages: str | Messages, **template: Any) -> list[int]:
        """The prompt of a conversation."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not messages or not all(isinstance(message, dict) and "role" in message for message in messages):
            fix = 'write [{"role": "user", "content": "..."}]'
            raise BadRequest("A conversation is a text or a list of messages.", fix, "messages")
        if self.tokenizer is None:
            raise BadRequest("This model has no tokenizer, so no chat template.", "give token ids to generate()")
        return self.tokenizer.encode_chat(messages, **template)

    # --- looking inside -------------------------------------------------------------------------------------------------------

    @contextmanager
    def capture(self, *paths: str) -> Iterator[dict[str, list[Tensor]]]:
        """The outputs of the layers at these paths, e.g. "model.layers.3.self_attn" or "model.layers.*.mlp", step by step."""
        if not isinstance(self.worker, LocalWorker):
            raise BadConfig("Layers can be captured only in a worker of this process.", "use tp=1")
        held = self.worker.capture(*paths)
        values: list[dict[str, list[Tensor]]] = []
        self._loop.call(lambda: values.append(held.__enter__()))
        try:
            yield values[0]
        finally:
            self._loop.call(lambda: held.__exit__(None, None, None))

    def default_sampling(self, **changes: Any) -> SamplingParams:
        """The sampling that the model's makers recommend, with your changes. Without any, the temperature is below 1."""
        return SamplingParams(**{**chat_advice(self.generation, self.config.model.default_sampling)[0], **changes})

    def close(self) -> None:
        """Ends the loop and its workers."""
        self._loop.close()
        self.worker.close()
        if self._froze:
            gc.unfreeze()  # so that the model's objects and their device memory can be freed
            self._froze = False

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the way of a request -------------------------------------------------------------------------------------------------

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        plain: Any = prompt
        if isinstance(prompt, dict):
            given = [prompt[name] for name in ("prompt_token_ids", "prompt") if prompt.get(name) is not None]
            if not given:
                fix = 'write a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'
                raise BadRequest(f"A prompt has the fields {', '.join(map(repr, prompt)) or 'none'}.", fix, "prompt")
            plain = given[0]
        if not isinstance(plain, str):
            self._check_ids(plain)
            return None, list(plain)
        if self.tokenizer is None:
            raise BadRequest("This model has no tokenizer.", "give token ids instead of text", "prompt")
        return plain, self.tokenizer.encode(plain)

    def _check_ids(self, ids: list[int]) -> None:
        vocab = self.worker.ready.vocab_size
        whole = set(map(type, ids)) <= {int, bool}  # a prompt may have many thousands
        if not whole or (ids and not 0 <= min(ids) <= max(ids) < vocab):
            raise BadRequest(f"A prompt of token ids takes whole numbers from 0 to {vocab - 1}.", "check the ids", "prompt")

    def _open(self, prompt: str | None, tokens: list[int], sampling: SamplingParams | None) -> LocalAnswer:
        sampling = sampling or SamplingParams()
        sampling.check(self.worker.ready.vocab_size)
        if self.tokenizer is None and (sampling.stop or sampling.grammar is not None):
            field = "stop" if sampling.stop else "grammar"
            raise BadRequest(f"This model has no tokenizer, so {field} means nothing to it.", "leave it out", field)
        return LocalAnswer(f"offline-{next(self._ids)}", prompt, tokens, sampling, self.tokenizer)

    def _submit(self, answer: LocalAnswer, deliver: Callable[[Progress | TriremeError], Any]) -> None:
        self._loop.submit((answer.requests(self.eos_token_ids), deliver))

    def _take(self, answer: LocalAnswer, item: Progress | TriremeError) -> Piece | None:
        """Adds progress to the answer. If a stop string ends the sequence here, the scheduler is told to end the request."""
        if isinstance(item, TriremeError):
            raise item
        piece = answer.take(item)
        if piece is not None and piece.finish_reason is not None and item.finish is None:
            self._loop.abort(item.id, piece.finish_reason)
        return piece

    def _abandon(self, answer: LocalAnswer) -> None:
        for id in answer.unfinished():
            self._loop.abort(id)

    def _answer_all(self, prompts: list, sampling: Any, progress: bool) -> list[Output]:
        wanted = list(sampling) if isinstance(sampling, list | tuple) else [sampling] * len(prompts)
        if len(wanted) != len(prompts):
            raise BadRequest(f"{len(prompts)} prompts, but {len(wanted)} sampling parameters.", "give one, or one per prompt")
        inbox: queue.SimpleQueue[tuple[LocalAnswer, Progress | TriremeError]] = queue.SimpleQueue()
        answers = [self._open(text, ids, params) for (text, ids), params in zip(prompts, wanted, strict=True)]
        unsent, under_way = deque(answers), 0
        try:
            with _bar(len(answers), progress) as advance:
                while unsent or under_way:
                    under_way += self._submit_some(unsent, under_way, inbox.put, progress)
                    answer, item = inbox.get()
                    piece = self._take(answer, item)
                    finished = piece is not None and piece.finish_reason is not None and answer.done
                    under_way -= answer.sampling.num_sequences if finished else 0
                    advance(finished, len(piece.token_ids) if piece else 0)
                    if finished and inbox.qsize() < under_way:
                        time.sleep(BREATH)
        except BaseException:
            for answer in answers:
                self._abandon(answer)
            raise
        return [answer.output() for answer in answers]

    def _submit_some(self, unsent: deque[LocalAnswer], under_way: int, put: Callable[..., Any], watched: bool) -> int:
        """Submits waiting answers for the same step, up to half of the queue; returns the number of their sequences."""
        most, orders, added = max(self.config.schedule.max_waiting // 2, 1), [], 0
        while unsent and (under_way + added + unsent[0].sampling.num_sequences <= most or not under_way + added):
            answer = unsent.popleft()
            orders.append((answer.requests(self.eos_token_ids), _together(answer, put, watched)))
            added += answer.sampling.num_sequences
        if orders:
            self._loop.submit(*orders)
        return added

    def _stream(self, prompt: str | None, tokens: list[int], sampling: SamplingParams | None) -> Iterator[Piece]:
        answer = self._open(prompt, tokens, sampling)
        inbox: queue.SimpleQueue[Progress | TriremeError] = queue.SimpleQueue()
        self._submit(answer, inbox.put)
        try:
            while not answer.done:
                piece = self._take(answer, inbox.get())
                if piece is not None:
                    yield piece
        finally:
            self._abandon(answer)

    async def _pieces(self, answer: LocalAnswer) -> AsyncIterator[Piece]:
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue()  # type: ignore[var-annotated]
        self._submit(answer, lambda item: loop.call_soon_threadsafe(inbox.put_nowait, item))
        try:
            while not answer.done:
                piece = self._take(answer, await inbox.get())
                if piece is not None:
                    yield piece
        finally:
            self._abandon(answer)


def _together(
    answer: LocalAnswer, put: Callable[[tuple[LocalAnswer, Progress | TriremeError]], Any], watched: bool
) -> Callable[..., None]:
    """Passes an answer's progress on in larger pieces, because waking another thread at every step of hundreds of sequences would
    slow the steps down. If the request has stop strings, each token is passed on at once."""
    held: dict[str, Progress] = {}
    enough = 1 if answer.sampling.stop else SHOWN_TOGETHER if watched else sys.maxsize

    def deliver(item: Progress | TriremeError) -> None:
        if isinstance(item, TriremeError):
            return put((answer, item))
        so_far = held.setdefault(item.id, item)
        if so_far is not item:
            _add(so_far, item)
        if item.finish is not None or len(so_far.tokens) >= enough:
            put((answer, held.pop(item.id)))

    return deliver


def _add(so_far: Progress, item: Progress) -> None:
    """Merges the progress of a later step into a sequence's progress."""
    so_far.tokens += item.tokens
    if item.logprobs is not None:
        so_far.logprobs = so_far.logprobs or []
        so_far.logprobs += item.logprobs
    if item.prompt_logprobs is not None:
        so_far.prompt_logprobs = item.prompt_logprobs
    so_far.finish, so_far.error = item.finish, item.error
    so_far.cached_tokens = max(so_far.cached_tokens, item.cached_tokens)


def _is_prompt(prompts: Any) -> bool:
    return isinstance(prompts, str | dict) or (bool(prompts) and isinstance(prompts[0], int))


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Callable[[bool, int], None]]:
    """A progress bar with tokens per second, if it is wanted and the output is a terminal."""
    if not (shown and sys.stderr.isatty()):
        yield lambda finished, tokens: None
        return
    from rich import progress as progress_bar  # imported only when shown, because it would delay every start
    from rich.console import Console

    text = progress_bar.TextColumn("{task.fields[tokens]} tokens")
    columns = (progress_bar.BarColumn(), progress_bar.MofNCompleteColumn(), text, progress_bar.TimeElapsedColumn())
    with progress_bar.Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task, made = progress.add_task("", total=total, tokens=0), 0

        def advance(finished: bool, tokens: int) -> None:
            nonlocal made
            made += tokens
            progress.update(task, advance=int(finished), tokens=made)

        yield advance

"""From progress to answers: tokens become text, stop strings end sequences, n sequences become one output.

Knows text and tokens; nothing of HTTP, and nothing of how the tokens were made.
"""

from __future__ import annotations

import random

import msgspec

from trireme.hub.detokenizer import Detokenizer
from trireme.hub.tokenizer import Tokenizer
from trireme.ipc.serving import Gain
from trireme.types import Completion, FinishReason, Output, Progress, Request, SamplingParams, TextRules, TokenLogprobs


class Piece(msgspec.Struct, kw_only=True):
    """What one sequence of an answer gained: new text, new tokens; the last piece carries the finish reason."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None


class SequenceText:
    """One sequence's tokens as they become text. A stop string ends it before the scheduler knows."""

    def __init__(self, rules: TextRules, tokenizer: Tokenizer | None):
        self.rules = rules
        self._text = _detokenizer(tokenizer, rules)

    def take(self, progress: Progress) -> Gain:
        """The text that this progress makes final. Tokens sampled after a stop string are left out."""
        finish, fresh, tokens, logprobs = progress.finish, "", progress.tokens, progress.logprobs
        if self._text is not None:
            fresh, taken = self._push(self._visible(progress))
            if self._text.stopped:
                finish = FinishReason.STOP
                tokens, logprobs = tokens[:taken], logprobs and logprobs[:taken]
            elif finish is not None:
                fresh += self._text.flush()
        return Gain(
            id=progress.id,
            text=fresh,
            tokens=tokens,
            finish=finish,
            logprobs=logprobs,
            error=progress.error,
            cached_tokens=progress.cached_tokens,
            prompt_logprobs=progress.prompt_logprobs,
        )

    def _push(self, tokens: list[int]) -> tuple[str, int]:
        """The text of these tokens, and how many of them there are up to the end of a stop string."""
        assert self._text is not None
        if not self.rules.stop:
            return self._text.push(tokens), len(tokens)
        parts = []
        for token in tokens:
            parts.append(self._text.push([token]))
            if self._text.stopped:
                break
        return "".join(parts), len(parts)

    def _visible(self, progress: Progress) -> list[int]:
        """The tokens that belong to the text: a stop token that ended the sequence does not."""
        ended = progress.finish is FinishReason.STOP and progress.tokens
        hidden = ended and not self.rules.include_stop and progress.tokens[-1] in self.rules.stop_token_ids
        return progress.tokens[:-1] if hidden else progress.tokens


class Answer:
    """The answer to one prompt, as it grows. One request per sequence; the first leads, the others share its prompt's KV.

    `key` names its requests in the scheduler, where ids of clients' own making could clash.
    """

    def __init__(self, id: str, prompt: str | None, tokens: list[int], sampling: SamplingParams, key: str | None = None):
        self.id, self.prompt, self.tokens, self.sampling, self.key = id, prompt, tokens, sampling, key or id
        self.completions = [Completion(index=i, token_ids=[]) for i in range(sampling.num_sequences)]
        self._parts: list[list[str]] = [[] for _ in self.completions]  # pieces of each text, joined when the whole text is needed
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.cached_tokens = 0
        self._num_open = len(self.completions)  # sequences that still run

    def requests(self, eos_token_ids: list[int], *, salt: str = "", priority: int = 0) -> list[Request]:
        """The requests for the scheduler, one per sequence. Each has its own seed, derived from the seed that was asked for."""
        seed = self.sampling.seed if self.sampling.seed is not None else random.getrandbits(63)
        requests = []
        for completion in self.completions:
            sampling = msgspec.structs.replace(self.sampling, seed=(seed + completion.index) % 2**63)
            if self._ranks and sampling.logprobs is None:
                sampling = msgspec.structs.replace(sampling, logprobs=0)
            if completion.index and sampling.prompt_logprobs is not None:
                sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
            requests.append(
                Request(
                    id=self.request_id(completion.index),
                    tokens=self.tokens,
                    sampling=sampling,
                    eos_token_ids=eos_token_ids,
                    salt=salt,
                    priority=priority,
                )
            )
        return requests

    def request_id(self, index: int) -> str:
        return f"{self.key}/{index}"

    @property
    def _ranks(self) -> bool:
        """Whether the sequences are to be compared by likelihood."""
        return self.sampling.num_sequences > self.sampling.n

    def add(self, gain: Gain) -> Piece | None:
        """Adds a gain to its sequence. Returns None if the sequence has ended: steps in flight may still answer."""
        index = int(gain.id.rpartition("/")[2])
        completion = self.completions[index]
        if completion.finish_reason is not None:
            return None
        if gain.prompt_logprobs is not None:
            self.prompt_logprobs = gain.prompt_logprobs
        self.cached_tokens = max(self.cached_tokens, gain.cached_tokens)
        self._extend(completion, gain)
        return Piece(
            index=index,
            text=gain.text,
            token_ids=gain.tokens,
            logprobs=gain.logprobs if self.sampling.logprobs is not None else None,
            finish_reason=gain.finish,
            error=gain.error,
        )

    def _extend(self, completion: Completion, gain: Gain) -> None:
        self._parts[completion.index].append(gain.text)
        completion.token_ids += gain.tokens
        if gain.finish is not None:
            completion.text = "".join(self._parts[completion.index])
            completion.finish_reason, completion.error = gain.finish, gain.error
            self._num_open -= 1
        if gain.logprobs:
            completion.logprobs = completion.logprobs or []
            completion.logprobs += gain.logprobs
            completion.cumulative_logprob = sum((p.logprob for p in gain.logprobs), completion.cumulative_logprob or 0.0)

    def unfinished(self) -> list[str]:
        """The requests that still run."""
        return [self.request_id(c.index) for c in self.completions if c.finish_reason is None]

    @property
    def done(self) -> bool:
        return self._num_open == 0

    def output(self) -> Output:
        """The whole answer; with best_of, only the n sequences that are likeliest per token."""
        completions = self.completions
        for completion in completions:
            if completion.finish_reason is None:
                completion.text = "".join(self._parts[completion.index])
        if self._ranks:
            likely = sorted(completions, key=lambda c: -(c.cumulative_logprob or 0.0) / max(len(c.token_ids), 1))
            completions = likely[: self.sampling.n]
            for index, completion in enumerate(completions):
                completion.index = index
                if self.sampling.logprobs is None:
                    completion.logprobs = None
        return Output(
            id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.tokens,
            completions=completions,
            prompt_logprobs=self.prompt_logprobs,
            cached_tokens=self.cached_tokens,
        )


class LocalAnswer(Answer):
    """An answer whose text is made in this process."""

    def __init__(self, id: str, prompt: str | None, tokens: list[int], sampling: SamplingParams, tokenizer: Tokenizer | None):
        super().__init__(id, prompt, tokens, sampling)
        self._texts = [SequenceText(sampling.text, tokenizer) for _ in self.completions]

    def take(self, progress: Progress) -> Piece | None:
        """Adds progress to the answer, with its tokens turned into text."""
        index = int(progress.id.rpartition("/")[2])
        ended = self.completions[index].finish_reason is not None
        return None if ended else self.add(self._texts[index].take(progress))


def _detokenizer(tokenizer: Tokenizer | None, rules: TextRules) -> Detokenizer | None:
    """None without a tokenizer: models with random weights return only token ids."""
    if tokenizer is None:
        return None
    return Detokenizer(tokenizer, stop=rules.stop, include_stop=rules.include_stop, skip_special_tokens=rules.skip_special_tokens)

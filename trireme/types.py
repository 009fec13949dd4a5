"""The types that API, scheduler and workers share: requests, sampling parameters, outputs. Knows no tensors and no HTTP."""

from __future__ import annotations

import enum
import math

import msgspec

from trireme.errors import BadRequest

MAX_N = 128
MAX_LOGPROBS = 64
MAX_STOP_STRINGS = 64
MAX_GRAMMAR = 256 << 10  # characters
MAX_LIST = 4096  # token ids in any one list or map of a request
NOTHING_TO_CHOOSE = "the model gave no finite logits for this request"  # a row's error
GRAMMAR_TOO_COSTLY = "the grammar became too costly to follow"  # how a row's error begins


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"
    ERROR = "error"


class Draw(msgspec.Struct, kw_only=True):
    """The parameters by which kernels draw a token, as a client may send them; None means the model's recommended value. The APIs'
    requests inherit these fields, `ops.choosing` has a column for each, and SamplingParams has them with their defaults."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


DRAWN = Draw.__struct_fields__


class TextRules(msgspec.Struct, array_like=True, frozen=True):
    """How tokens become the text of an answer, and where the text ends."""

    stop: list[str] = []
    include_stop: bool = False
    skip_special_tokens: bool = True
    stop_token_ids: list[int] = []


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen. The defaults sample from the model's own distribution."""

    max_tokens: int | None = 256  # None: until the context is full
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram: int = 0  # 0: off
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    banned_token_ids: list[int] = []
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop: bool = False  # keep the stop string in the text
    ignore_eos: bool = False
    seed: int | None = None  # None: drawn at submission
    n: int = 1
    best_of: int | None = None  # sample this many, return the n likeliest
    logprobs: int | None = None  # alternatives per output token; 0: only the chosen token's own
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    grammar: str | None = None  # what the text must obey, as llguidance writes it

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def num_sequences(self) -> int:
        return self.best_of or self.n

    @property
    def text(self) -> TextRules:
        """The parameters that concern only the text."""
        return TextRules(self.stop, self.include_stop, self.skip_special_tokens, self.stop_token_ids)

    def check(self, vocab_size: int) -> None:
        """Refuses every value outside its bounds, naming the field."""
        self.check_fields()
        self.check_ids(vocab_size)

    def check_fields(self) -> None:
        """Checks everything that can be checked without knowing the model."""
        for name, low, high in _BOUNDS:
            value = getattr(self, name)
            if value is not None:
                _within(name, value, low, high)
        if self.best_of is not None and self.best_of < self.n:
            raise BadRequest(f"best_of is {self.best_of}, below n, which is {self.n}.", "raise best_of or lower n", "best_of")
        if len(self.stop) > MAX_STOP_STRINGS or any(not s or len(s) > 1024 for s in self.stop):
            raise BadRequest(f"stop takes at most {MAX_STOP_STRINGS} strings of 1 to 1024 characters.", param="stop")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequest(f"min_tokens is {self.min_tokens}, above max_tokens, {self.max_tokens}.", param="min_tokens")
        if self.grammar is not None and len(self.grammar) > MAX_GRAMMAR:
            cause = f"The grammar has {len(self.grammar)} characters; at most {MAX_GRAMMAR} are taken."
            raise BadRequest(cause, "make the schema smaller", "grammar")
        for name in _LISTS:
            if (ids := getattr(self, name)) is not None and len(ids) > MAX_LIST:
                raise BadRequest(f"{name} has {len(ids)} entries; at most {MAX_LIST} are taken.", param=name)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise BadRequest("allowed_token_ids is empty: no token could be chosen.", param="allowed_token_ids")
        for bias in self.logit_bias.values():
            _within("logit_bias", bias, -100.0, 100.0)

    def check_ids(self, vocab_size: int) -> None:
        """Refuses token ids that the vocabulary does not have."""
        for name in _LISTS:
            for token in getattr(self, name) or ():
                if not 0 <= token < vocab_size:
                    raise BadRequest(f"{name} names token {token}; the vocabulary has {vocab_size} tokens.", param=name)


_LISTS = ("allowed_token_ids", "banned_token_ids", "stop_token_ids", "logit_bias")


_BOUNDS: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 0, 2**31),
    ("min_tokens", 0, 2**31),
    ("temperature", 0.0, 100.0),
    ("top_k", -1, 2**31),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.01, 100.0),
    ("no_repeat_ngram", 0, 64),
    ("seed", -(2**63), 2**63 - 1),
    ("n", 1, MAX_N),
    ("best_of", 1, MAX_N),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)


def _within(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not math.isfinite(value) or not low <= value <= high:
        raise BadRequest(f"{name} is {value}; it must lie between {low} and {high}.", param=name)


class Request(msgspec.Struct, kw_only=True):
    """One sequence to be continued, as the scheduler takes it. `n` sequences are `n` requests of one prompt."""

    id: str
    tokens: list[int]
    sampling: SamplingParams
    eos_token_ids: list[int] = []
    salt: str = ""  # tenants with different salts never share cached pages
    priority: int = 0  # lower goes first
    arrival: float = 0.0
    keys: list[int] | None = None  # what the prefix cache compares instead of the tokens; None: the tokens


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """The chosen token's log-probability and rank, and the likeliest alternatives, best first."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = []


class Progress(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):  # made by the thousand, never in a cycle
    """What one request gained in one step; the last one carries the finish reason."""

    id: str
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache


class Completion(msgspec.Struct, kw_only=True):
    """One finished (or growing) sequence of an answer."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None


class Output(msgspec.Struct, kw_only=True):
    """The answer to one prompt."""

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

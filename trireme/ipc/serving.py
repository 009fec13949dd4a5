"""The messages between the server's processes: HTTP, router, detokenizer, supervisor. No tensors, no HTTP.

HTTP -> router         Hello, Submit, Abort, Ask, Renew   router -> HTTP         Welcome, Taken, Lost, Told, Crowd, Renewed
router -> detokenizer  Welcome, Follow, Gained, Forget    detokenizer -> router  Hello, Abort (a stop string was met)
detokenizer -> HTTP    Welcome, Said                      HTTP -> detokenizer    Hello
child -> supervisor    Alive, Standing, Serves, Failed    supervisor -> child    Begin, Standing, Drain, Stop
"""

from __future__ import annotations

from typing import Any

import msgspec

from trireme import errors
from trireme.errors import BadRequest, TriremeError, WorkerDied
from trireme.ipc.messages import Failed, Ready, Stop
from trireme.types import FinishReason, Progress, Request, TextRules, TokenLogprobs


class Problem(msgspec.Struct, array_like=True):
    """An error of the family in trireme/errors.py, on its way to another process."""

    kind: str
    cause: str
    fix: str = ""
    param: str | None = None

    @classmethod
    def of(cls, error: TriremeError) -> Problem:
        return cls(type(error).__name__, error.cause, error.fix, getattr(error, "param", None))

    def error(self) -> TriremeError:
        kind = getattr(errors, self.kind, WorkerDied)
        return BadRequest(self.cause, self.fix, self.param) if kind is BadRequest else kind(self.cause, self.fix)


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """The first message on a channel: who speaks."""

    name: str


class Welcome(msgspec.Struct, array_like=True, tag="welcome"):
    """The answer to Hello: from now on messages for that name find their way."""


class Submit(msgspec.Struct, array_like=True, tag="submit"):
    """The requests of one answer, all or none of which are taken."""

    requests: list[Request]


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    """These requests are over, whatever is in flight for them."""

    ids: list[str]
    reason: FinishReason = FinishReason.ABORT


class Ask(msgspec.Struct, array_like=True, tag="ask"):
    """A question for the router's numbers."""

    number: int


class Told(msgspec.Struct, array_like=True, tag="told"):
    """The answer to Ask."""

    number: int
    stats: dict[str, Any]


class Renew(msgspec.Struct, array_like=True, tag="renew"):
    """An operator wants the weights of this folder served from now on."""

    number: int
    path: str
    seconds: float  # that answers under way get to finish with the old weights


class Renewed(msgspec.Struct, array_like=True, tag="renewed"):
    """The answer to Renew: which version of the weights is served, and why not the new one if that failed."""

    number: int
    version: int
    problem: Problem | None = None


class Serves(msgspec.Struct, array_like=True, tag="serves"):
    """The router to the supervisor: from now on processes are started with the model at this path."""

    path: str


class Taken(msgspec.Struct, array_like=True, tag="taken"):
    """A submission is in the queue; named by its first request."""

    id: str


class Lost(msgspec.Struct, array_like=True, tag="lost"):
    """These requests were refused, or cannot go on."""

    ids: list[str]
    problem: Problem


class Crowd(msgspec.Struct, array_like=True, tag="crowd"):
    """Whether the queue is full: while it is, HTTP processes refuse by themselves, before any work."""

    waiting: int
    full: bool


class Follow(msgspec.Struct, array_like=True, tag="follow"):
    """These requests' tokens are to become text for this HTTP process."""

    client: str
    ids: list[str]
    rules: TextRules


class Gained(msgspec.Struct, array_like=True, tag="gained"):
    """What requests gained in a step, as tokens."""

    progress: list[Progress]


class Forget(msgspec.Struct, array_like=True, tag="forget"):
    """Nobody waits for these requests' text any more."""

    ids: list[str]


class Gain(msgspec.Struct, array_like=True):
    """What one sequence gained, as text and tokens."""

    id: str
    text: str
    tokens: list[int]
    finish: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Said(msgspec.Struct, array_like=True, tag="said"):
    """Text for the streams of one HTTP process."""

    gains: list[Gain]


class Begin(msgspec.Struct, array_like=True, tag="begin"):
    """The first message to a child of the supervisor: its name, its settings, and where the others are."""

    name: str
    config: dict[str, dict[str, Any]]  # group -> setting -> value
    path: str  # of the model, already on this machine
    model: str  # its name in the API
    folder: str  # where the sockets lie
    listener: int = -1  # the descriptor of the API's listening socket, for HTTP processes


class Alive(msgspec.Struct, array_like=True, tag="alive"):
    """A sign of life from a process's own loop, and how many requests it has in hand."""

    active: int
    drains: bool = False  # it has heard that nothing new is to be taken
    ages: dict[str, float] = {}  # of processes it looks after itself: seconds since their last sign of life


class Standing(msgspec.Struct, array_like=True, tag="standing"):
    """Where the engine stands (from the router), or the whole server (from the supervisor)."""

    name: str  # starting, ready, draining, failed, sleeping
    phase: str = ""
    share: float = 0.0
    reason: str = ""
    ready: Ready | None = None  # the workers' numbers, once known
    ages: dict[str, float] = {}
    hung: bool = False


class Drain(msgspec.Struct, array_like=True, tag="drain"):
    """Take nothing new; finish what runs."""


ROUTER_SOCKET, DETOKENIZER_SOCKET = "router.sock", "detokenizer.sock"

ToRouter = Hello | Submit | Abort | Ask | Renew
FromRouter = Welcome | Taken | Lost | Told | Crowd | Renewed
ToDetokenizer = Hello
RouterToDetokenizer = Welcome | Follow | Gained | Forget
FromDetokenizer = Welcome | Said
ToChild = Begin | Standing | Drain | Stop
FromChild = Alive | Standing | Serves | Failed

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
    """The answer to Hello: from now on messages for that name are delivered."""


class Submit(msgspec.Struct, array_like=True, tag="submit"):
    """The requests of one answer. Either all of them are accepted or none."""

    requests: list[Request]


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    """Ends these requests, even with steps in flight."""

    ids: list[str]
    reason: FinishReason = FinishReason.ABORT


class Ask(msgspec.Struct, array_like=True, tag="ask"):
    """Asks for the router's statistics."""

    number: int


class Told(msgspec.Struct, array_like=True, tag="told"):
    """The answer to Ask."""

    number: int
    stats: dict[str, Any]


class Renew(msgspec.Struct, array_like=True, tag="renew"):
    """An operator's request to serve the weights of this folder from now on."""

    number: int
    path: str
    seconds: float  # how long running answers may take to finish with the old weights


class Renewed(msgspec.Struct, array_like=True, tag="renewed"):
    """The answer to Renew: the served version of the weights and, if the reload failed, the reason."""

    number: int
    version: int
    problem: Problem | None = None


class Serves(msgspec.Struct, array_like=True, tag="serves"):
    """The router tells the supervisor to start processes with the model at this path from now on."""

    path: str


class Taken(msgspec.Struct, array_like=True, tag="taken"):
    """A submission is in the queue. It is named by its first request."""

    id: str


class Lost(msgspec.Struct, array_like=True, tag="lost"):
    """These requests were refused, or cannot go on."""

    ids: list[str]
    problem: Problem


class Crowd(msgspec.Struct, array_like=True, tag="crowd"):
    """Whether the queue is full. While it is, HTTP processes refuse requests themselves, before any work is done."""

    waiting: int
    full: bool


class Follow(msgspec.Struct, array_like=True, tag="follow"):
    """The detokenizer is to turn these requests' tokens into text for this HTTP process."""

    client: str
    ids: list[str]
    rules: TextRules


class Gained(msgspec.Struct, array_like=True, tag="gained"):
    """The tokens that requests gained in a step."""

    progress: list[Progress]


class Forget(msgspec.Struct, array_like=True, tag="forget"):
    """The text of these requests is no longer needed."""

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
    """New text for the streams of one HTTP process."""

    gains: list[Gain]


class Begin(msgspec.Struct, array_like=True, tag="begin"):
    """The first message to a child of the supervisor: its name, its settings, and where it finds the other processes."""

    name: str
    config: dict[str, dict[str, Any]]  # group -> setting -> value
    path: str  # of the model, already on this machine
    model: str  # its name in the API
    folder: str  # where the sockets lie
    listener: int = -1  # for HTTP processes: the descriptor of the API's listening socket


class Alive(msgspec.Struct, array_like=True, tag="alive"):
    """A heartbeat from a process's own loop, and how many requests it is serving."""

    active: int
    drains: bool = False  # it knows of the drain and takes nothing new
    ages: dict[str, float] = {}  # of the processes it watches itself: seconds since their last heartbeat


class Standing(msgspec.Struct, array_like=True, tag="standing"):
    """The state of the engine (from the router), or of the whole server (from the supervisor)."""

    name: str  # starting, ready, draining, failed, sleeping
    phase: str = ""
    share: float = 0.0
    reason: str = ""
    ready: Ready | None = None  # the workers' sizes, once known
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

"""The errors that a user can cause: one family, where each class has a cause, a fix and an exit code of its own."""


class TriremeError(Exception):
    """An error that the user can fix. It is shown as one line, `cause. Fix: ...`, never as a traceback."""

    exit_code = 1

    def __init__(self, cause: str, fix: str = ""):
        super().__init__(cause)
        self.cause, self.fix = cause, fix

    def __str__(self) -> str:
        return f"{self.cause} Fix: {self.fix}" if self.fix else self.cause


class BadRequest(TriremeError):
    """A request that cannot be served as asked; `param` names the field at fault. A 400 at the API."""

    exit_code = 2

    def __init__(self, cause: str, fix: str = "", param: str | None = None):
        super().__init__(cause, fix)
        self.param = param


class BadConfig(TriremeError):
    """A setting that is unknown, unused, or impossible on this machine."""

    exit_code = 3


class ModelNotFound(TriremeError):
    """There is no model of that name on this machine, and none can be downloaded."""

    exit_code = 4


class BadCheckpoint(TriremeError):
    """A file that is truncated, mutated or inconsistent; a tensor that is missing or misshapen."""

    exit_code = 5


class UnsupportedModel(TriremeError):
    """An architecture, tensor type or tokenizer kind that is not known here."""

    exit_code = 6


class FetchFailed(TriremeError):
    """The registry or hub is out of reach, or what it sent is not what was promised."""

    exit_code = 7


class DiskFull(TriremeError):
    """There is no space, or no permission, to write what was downloaded."""

    exit_code = 8


class OutOfMemory(TriremeError):
    """Weights or KV cache do not fit; the message carries the arithmetic."""

    exit_code = 9


class WorkerDied(TriremeError):
    """A worker process ended or stopped answering."""

    exit_code = 10


class BackendUnavailable(TriremeError):
    """The requested backend cannot run on this machine."""

    exit_code = 11


class Overloaded(TriremeError):
    """The queue is full. A 503 at the API, with the advice to come back later."""

    exit_code = 12


class Unavailable(Overloaded):
    """The server is starting, draining or restarting. Always a 503 at the API."""

    exit_code = 13

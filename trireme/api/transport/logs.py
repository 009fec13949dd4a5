"""Log lines of the HTTP processes: one line each, as text or JSON. Knows the fields of a line; what is logged is others' choice."""

from __future__ import annotations

import logging
import sys
import time

import msgspec

_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime", "taskName"}


class _Lines(logging.Formatter):
    """time level logger message key=value ..."""

    def __init__(self, as_json: bool):
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        fields = {name: value for name, value in record.__dict__.items() if name not in _STANDARD and value is not None}
        trace = self.formatException(record.exc_info) if record.exc_info else None
        if self._as_json:
            line = {"time": stamp, "level": record.levelname, "logger": record.name, "message": record.getMessage(), **fields}
            if trace:
                line["traceback"] = trace
            return msgspec.json.encode(line, enc_hook=repr).decode()
        words = " ".join(f"{name}={value!r}" if isinstance(value, str) else f"{name}={value}" for name, value in fields.items())
        line_text = f"{stamp} {record.levelname:<7} {record.name} {record.getMessage()} {words}".rstrip()
        return f"{line_text}\n{trace}" if trace else line_text


def set_up_logs(log_format: str, level: str = "info") -> None:
    """Sends this package's log to standard error, unless the process has already configured logging."""
    logger = logging.getLogger("trireme")
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines(log_format == "json"))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False

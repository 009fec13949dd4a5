"""Trace context: `traceparent` is read and carried into logs; with --otlp-endpoint each request becomes an OpenTelemetry span.

Knows the W3C header and, only when asked for, the OpenTelemetry packages.
"""

from __future__ import annotations

import importlib
import re
import secrets
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from trireme.errors import BadConfig

_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


class Trace:
    """The ids of one request in a trace."""

    def __init__(self, trace_id: str, span: Any = None):
        self.trace_id, self._span = trace_id, span

    def note(self, **attributes: str | int | float) -> None:
        """Adds facts to the span: counts and names, never text."""
        if self._span is not None:
            for name, value in attributes.items():
                self._span.set_attribute(name.replace("__", "."), value)

    def finish(self, status: int) -> None:
        self.note(http__response__status_code=status)


class Tracer:
    """Creates the traces of one HTTP process."""

    def __init__(self, endpoint: str | None = None):
        self._tracer: Any = None
        self._propagate: Any = None
        if endpoint:
            self._tracer, self._propagate = _open_telemetry(endpoint)

    @contextmanager
    def span(self, headers: dict[bytes, bytes], scope: MutableMapping[str, Any]) -> Iterator[Trace]:
        match = _TRACEPARENT.fullmatch(headers.get(b"traceparent", b""))
        if self._tracer is None:
            yield Trace(match[1].decode() if match else secrets.token_hex(16))
            return
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        parent = self._propagate.extract(carrier)
        with self._tracer.start_as_current_span(f"{scope['method']} {scope['path'][:80]}", context=parent) as span:
            yield Trace(f"{span.get_span_context().trace_id:032x}", span)


def _open_telemetry(endpoint: str) -> tuple[Any, Any]:
    try:
        trace = importlib.import_module("opentelemetry.trace")
        propagate = importlib.import_module("opentelemetry.propagate")
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        resources = importlib.import_module("opentelemetry.sdk.resources")
        otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError:
        packages = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        raise BadConfig("--otlp-endpoint needs OpenTelemetry.", f"pip install {packages}") from None
    provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": "trireme"}))
    provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter(endpoint=endpoint)))
    trace.set_tracer_provider(provider)
    return trace.get_tracer("trireme.api"), propagate

"""A collector for OTLP over HTTP, as small as it gets: it keeps the spans that are sent to it."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class ReceivedSpan:
    """One span; ids are the bytes in hexadecimal, times are nanoseconds since 1970."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    service: str
    attributes: Mapping[str, Any]
    links: tuple[str, ...]
    events: tuple[str, ...]
    is_error: bool


class Collector:
    """What came so far."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._changed = threading.Condition()
        self._spans: list[ReceivedSpan] = []

    @property
    def spans(self) -> list[ReceivedSpan]:
        """All spans, in the order in which they came."""
        with self._changed:
            return list(self._spans)

    def wait_for(self, enough: Callable[[list[ReceivedSpan]], bool], timeout_s: float = 30.0) -> list[ReceivedSpan]:
        """Wait until `enough` says so of all spans that came, and give them."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not enough(self._spans):
                if not self._changed.wait(deadline - time.monotonic()):
                    raise AssertionError(
                        f"not enough spans after {timeout_s:g} s: "
                        f"{[(span.name, span.trace_id[-8:]) for span in self._spans]}"
                    )
            return list(self._spans)

    def add(self, spans: list[ReceivedSpan]) -> None:
        """Take spans in."""
        with self._changed:
            self._spans += spans
            self._changed.notify_all()


@contextmanager
def running_collector() -> Iterator[Collector]:
    """Run a collector on a port of the system's choice."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            kind = self.headers["Content-Type"]
            collector.add(_read(kind, body))
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_address[1]}/v1/traces")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _read(kind: str, body: bytes) -> list[ReceivedSpan]:
    # JSON is tritonserver's way, protobuf that of OpenTelemetry in Python.
    return _read_json(json.loads(body)) if "json" in kind else _read_protobuf(body)


def _read_protobuf(body: bytes) -> list[ReceivedSpan]:
    return [
        ReceivedSpan(
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            service=_values(resource.resource.attributes).get("service.name", ""),
            attributes=_values(span.attributes),
            links=tuple(link.span_id.hex() for link in span.links),
            events=tuple(event.name for event in span.events),
            is_error=span.status.code == 2,
        )
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _values(attributes: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value") or "string_value") for item in attributes}


def _read_json(message: dict[str, Any]) -> list[ReceivedSpan]:
    return [
        ReceivedSpan(
            name=span["name"],
            trace_id=span["traceId"],
            span_id=span["spanId"],
            parent_id=span.get("parentSpanId", ""),
            start_ns=int(span["startTimeUnixNano"]),
            end_ns=int(span["endTimeUnixNano"]),
            service=_json_values(resource["resource"]).get("service.name", ""),
            attributes=_json_values(span),
            links=tuple(link["spanId"] for link in span.get("links", [])),
            events=tuple(event["name"] for event in span.get("events", [])),
            is_error=span.get("status", {}).get("code") == 2,
        )
        for resource in message["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def _json_values(holder: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of something; integers are text there."""
    return {item["key"]: next(iter(item["value"].values())) for item in holder.get("attributes", [])}

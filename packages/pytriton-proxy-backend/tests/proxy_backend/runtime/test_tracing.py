"""The spans of a batch: which there are, whose children they are, what they say, and when they begin and end."""

from __future__ import annotations

import time
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pytriton.proxy_backend.model import ModelSpec
from pytriton.proxy_backend.wire.batch import BatchReader

pytest.importorskip("opentelemetry.sdk.trace")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from pytriton.proxy_backend.runtime import tracing
from pytriton.proxy_backend.runtime.execution import Execution
from pytriton.proxy_backend.runtime.tracing import Spans, TracedExecution, make_traced_execution

MODEL = ModelSpec(name="classify", version=3, inputs=(), outputs=(), batching=True, max_batch_size=8)
NAMES = {"triton.model_name": "classify", "triton.model_version": 3}
TRACES = [f"{number:032x}" for number in (1, 2)]


def parent(number: int) -> str:
    return f"00-{TRACES[number]}-{number + 1:016x}-01"


class Traced:
    """A batch of four requests, of which the second and the last are traced, and its spans."""

    def __init__(self, golden: ModuleType, stamps: tuple[int, int]) -> None:
        requests = [
            golden.Request(1, id="zero"),
            golden.Request(2, id="one", parameters={"traceparent": parent(0)}),
            golden.Request(1, parameters={"traceparent": "no context"}),
            golden.Request(1, parameters={"traceparent": parent(1)}),
        ]
        raw = golden.batch_record(7, requests, [golden.Tensor("x", 2, [5], bytes(5))], stamps)
        self.batch = BatchReader(True).read(np.frombuffer(raw, np.uint8), raw, 0, 7)
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")
        contexts = [tracing._context_of(self.batch, index) for index in range(4)]
        assert [context is not None for context in contexts] == [False, True, False, True]
        service: Any = SimpleNamespace(model=MODEL)
        self.spans = Spans(self.tracer, service, self.batch, contexts)

    def ended(self) -> list[Any]:
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> list[Any]:
        """Return the spans of a name, in the order of their traces."""
        found = [span for span in self.ended() if span.name == name]
        return sorted(found, key=lambda span: span.context.trace_id)


@pytest.fixture
def traced(golden: ModuleType) -> Traced:
    now = time.monotonic_ns()
    return Traced(golden, (now - 3_000_000_000, now - 1_000_000_000))


def test_who_is_whose_child(traced: Traced) -> None:
    spans = traced.spans
    spans.call()
    assert [span is not None for span in spans.of_requests] == [False, True, False, True]
    assert get_current_span(spans.current) is spans.of_requests[1]
    assert traced.ended() == []
    spans.called()
    assert [span.name for span in traced.ended()] == ["proxy_inference_callable"] * 2
    spans.called()
    spans.end()
    assert len(traced.ended()) == 5
    proxies, [batch] = traced.named("pytriton.proxy"), traced.named("pytriton.batch")
    callables = traced.named("proxy_inference_callable")
    # Each inside of the span that its caller, or Triton, has named.
    assert [(span.parent.trace_id, span.parent.span_id) for span in proxies] == [(1, 1), (2, 2)]
    assert [span.kind for span in proxies] == [SpanKind.CONSUMER] * 2
    assert [dict(span.attributes) for span in proxies] == [{**NAMES, "triton.request_id": "one"}, NAMES]
    # The batch is the first traced request's, with a link to the other.
    assert batch.parent == proxies[0].context
    assert [link.context for link in batch.links] == [proxies[1].context]
    assert dict(batch.attributes) == {
        **NAMES, "pytriton.batch.requests": 4, "pytriton.batch.rows": 5, "pytriton.batch.input_bytes": 5,
    }  # fmt: skip
    assert [span.parent for span in callables] == [batch.context, proxies[1].context]
    assert [[link.context for link in span.links] for span in callables] == [[], [batch.context]]
    assert {span.status.status_code for span in traced.ended()} == {StatusCode.UNSET}


def test_when_they_begin_and_end(traced: Traced) -> None:
    traced.spans.call()
    now = time.time_ns()
    traced.spans.end()
    for seconds, name in ((3, "pytriton.proxy"), (1, "pytriton.batch"), (0, "proxy_inference_callable")):
        for span in traced.named(name):
            # The clocks may differ by what this machine needs to read them.
            assert abs(now - seconds * 1_000_000_000 - span.start_time) < 600_000_000_000
            assert span.end_time >= now
    proxy, batch = (traced.named(name)[0] for name in ("pytriton.proxy", "pytriton.batch"))
    assert batch.start_time - proxy.start_time == 2_000_000_000


def test_without_stamps_they_begin_now(golden: ModuleType) -> None:
    before = time.time_ns()
    traced = Traced(golden, (0, 0))
    traced.spans.call()
    traced.spans.end()
    assert all(span.start_time >= before for span in traced.ended())


def test_an_error_of_the_callable_is_that_of_all(traced: Traced) -> None:
    traced.spans.call()
    traced.spans.fail(ValueError("so"))
    traced.spans.end()
    for span in traced.ended():
        assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "ValueError: so")
    assert [[event.name for event in span.events] for span in traced.named("pytriton.batch")] == [["exception"]]
    assert not any(span.events for span in traced.named("pytriton.proxy"))


def test_an_error_of_one_request_is_its_own(traced: Traced) -> None:
    traced.spans.call()
    # Nobody traces the first one.
    traced.spans.fail_one(0, KeyError("untraced"))
    traced.spans.fail_one(3, ValueError("mine"))
    traced.spans.fail(RuntimeError("all others"))
    traced.spans.end()
    first, last = traced.named("pytriton.proxy")
    assert (first.status.description, last.status.description) == ("RuntimeError: all others", "ValueError: mine")
    assert [[event.name for event in span.events] for span in (first, last)] == [[], ["exception"]]
    assert last.events[0].attributes["exception.message"] == "mine"
    codes = [span.status.status_code for span in traced.named("proxy_inference_callable")]
    assert codes == [StatusCode.ERROR, StatusCode.UNSET]


def test_an_error_without_a_text_ends_nothing(traced: Traced) -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    traced.spans.call()
    traced.spans.fail(Silent())
    traced.spans.end()
    [batch] = traced.named("pytriton.batch")
    assert batch.status.status_code is StatusCode.ERROR
    assert batch.status.description.startswith("Silent: ")


def test_batches_that_nobody_traces_have_none(golden: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(Execution, "__init__", lambda self, service, batch: made.append(type(self)))
    monkeypatch.setattr(TracedExecution, "__init__", lambda self, service, batch, spans: made.append(type(self)))
    service: Any = SimpleNamespace(model=MODEL)
    raw = golden.batch_record(7, [golden.Request(parameters={"traceparent": "no context"})])
    batch = BatchReader(True).read(np.frombuffer(raw, np.uint8), raw, 0, 7)
    for _ in range(2):
        make_traced_execution(service, batch, None)
        assert batch.metadata.is_untraced is True
    traced = Traced(golden, (0, 0))
    make_traced_execution(service, traced.batch, traced.tracer)
    assert traced.batch.metadata.is_untraced is False
    assert made == [Execution, Execution, TracedExecution]


def test_the_clocks_are_read_again_where_another_thread_ran_between(monkeypatch: pytest.MonkeyPatch) -> None:
    for gap, offset in ((20_000, 1_000_000 - 10_100), (20_001, 3_000_000 - 50_020)):
        clock, wall = iter([100, 100 + gap, 50_000, 50_040]), iter([1_000_000, 3_000_000])
        monkeypatch.setattr(tracing, "monotonic_ns", lambda clock=clock: next(clock))
        monkeypatch.setattr(tracing, "time_ns", lambda wall=wall: next(wall))
        assert tracing._clock_offset_ns() == offset

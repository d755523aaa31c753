"""The span of a call: only where the process has OpenTelemetry set up, which each test does in a process of its own."""

import subprocess
import sys
import textwrap

SET_UP = """
import asyncio
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pytriton.client._core.requests import check_call
from pytriton.client._core.startup import Target
from pytriton.client._core.telemetry import in_context_of_caller, trace_call

exporter = InMemorySpanExporter()
target = Target("http://localhost:8000", "AddSub", "2")

def call(**headers):
    return check_call([1], {}, None, headers)

def set_up():
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return trace.get_tracer("caller")

def id_of(span, bits=64):
    return format(span.span_id if bits == 64 else span.trace_id, "016x" if bits == 64 else "032x")
"""


def run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SET_UP + textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_clients_do_not_import_it() -> None:
    code = (
        "import sys; from pytriton.client import *; ModelClient('localhost', 'm').close(); "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_a_provider_nothing_is_made() -> None:
    run(
        """
        plain = call()
        with trace_call(plain, target) as sent:
            assert sent is plain
        function = lambda: 1
        assert in_context_of_caller(function) is function
        # One that is set later is found.
        set_up()
        with trace_call(plain, target) as sent:
            assert list(sent.headers) == ["traceparent"]
        """
    )


def test_the_context_of_the_span_is_sent() -> None:
    run(
        """
        with set_up().start_as_current_span("caller") as caller:
            plain = call(other="x")
            with trace_call(plain, target) as sent:
                pass
        assert plain.headers == {"other": "x"} and sent.inputs is plain.inputs
        span = exporter.get_finished_spans()[0]
        assert span.name == "pytriton.client" and span.kind is trace.SpanKind.CLIENT
        assert span.parent.span_id == caller.get_span_context().span_id
        assert set(sent.headers) == {"other", "traceparent"}
        # The flags at its end are those of the SDK in use.
        expected = f"00-{id_of(span.context, 128)}-{id_of(span.context)}-"
        assert sent.headers["traceparent"].startswith(expected)
        assert dict(span.attributes) == {
            "triton.model_name": "AddSub", "triton.model_version": "2", "server.address": "http://localhost:8000",
        }
        """
    )


def test_the_context_of_a_span_that_is_not_sampled_is_not_sent() -> None:
    run(
        """
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(0.0)))
        trace.set_tracer_provider(provider)
        with trace_call(call(other="x"), target) as sent:
            assert sent.headers == {"other": "x"}
        # What the caller gives is the caller's.
        with trace_call(call(traceparent="00-1-2-00"), target) as sent:
            assert sent.headers == {"traceparent": "00-1-2-00"}
        """
    )


def test_a_context_that_the_caller_gives_has_the_last_word() -> None:
    run(
        """
        set_up()
        plain = call(TraceParent="mine")
        with trace_call(plain, target) as sent:
            assert sent.headers == {"TraceParent": "mine"}
        """
    )


def test_how_calls_end() -> None:
    run(
        """
        set_up()
        for error, is_error in (
            (None, False), (ValueError("bad"), True), (asyncio.CancelledError(), False), (GeneratorExit(), False),
        ):
            exporter.clear()
            try:
                with trace_call(call(), target):
                    if error is not None:
                        raise error
            except BaseException as raised:
                assert raised is error
            [span] = exporter.get_finished_spans()
            assert (span.status.status_code is trace.StatusCode.ERROR) == is_error, error
            assert len(span.events) == is_error
        """
    )


def test_a_thread_goes_on_with_the_trace_of_the_caller() -> None:
    run(
        """
        import threading

        def work():
            with trace_call(call(), target):
                pass

        with set_up().start_as_current_span("caller") as caller:
            thread = threading.Thread(target=in_context_of_caller(work))
        thread.start()
        thread.join()
        [span] = [span for span in exporter.get_finished_spans() if span.name == "pytriton.client"]
        assert span.parent.span_id == caller.get_span_context().span_id
        """
    )

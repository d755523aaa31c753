"""`pytriton.proxy.telemetry`: what it makes of its arguments, and what it costs where it is not used."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Span, Tracer

from pytriton.proxy import telemetry, tracers
from pytriton.proxy.telemetry import (
    TracableModel,
    build_proxy_tracer_from_triton_config,
    end_span,
    get_span_dict,
    get_telemetry_tracer,
    parse_trace_config,
    raise_if_no_telemetry,
    start_span_from_remote,
    start_span_from_span,
    traced_span,
)
from pytriton.proxy.types import Request

URL = "http://127.0.0.1:4318/v1/traces"
CONFIG = ["mode=opentelemetry", f"opentelemetry,url={URL}"]
TRACE, PARENT = f"{0xABC:032x}", f"{0xDEF:016x}"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=value"}


class Recorder:
    """A tracer and what it has recorded."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer: Tracer = self.provider.get_tracer("test")

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._exporter.get_finished_spans()}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """A recorder whose tracer is that of this process for one test."""
    recorder = Recorder()
    monkeypatch.setattr(tracers, "_chosen", recorder.tracer)
    yield recorder
    recorder.provider.shutdown()


@pytest.fixture
def request_span(recorder: Recorder) -> Iterator[Span]:
    span = recorder.tracer.start_span("request")
    yield span
    span.end()


def run(code: str) -> None:
    """Runs code in a process of its own: what it does to the process is for good."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def parent_of(span: ReadableSpan) -> str | None:
    return None if span.parent is None else f"{span.parent.span_id:016x}"


def id_of(span: Span) -> str:
    return f"{span.get_span_context().span_id:016x}"


# ---- without OpenTelemetry -------------------------------------------------------------------------------------------


def test_nothing_is_imported_before_it_is_used() -> None:
    run(
        """
        import sys
        import pytriton.proxy.telemetry, pytriton.proxy.types, pytriton.proxy_backend
        assert not [name for name in sys.modules if name.startswith("opentelemetry")]
        assert pytriton.proxy.telemetry.get_telemetry_tracer() is None
        request = pytriton.proxy.types.Request({})
        with request.traced_span("nothing") as span:
            assert span is None
        assert not [name for name in sys.modules if name.startswith("opentelemetry")]
        """
    )


def test_what_needs_it_says_what_to_install() -> None:
    run(
        """
        import sys
        sys.modules["opentelemetry"] = None
        from pytriton.proxy import telemetry
        config = ["mode=opentelemetry", "opentelemetry,url=http://x"]
        for call in (
            telemetry.raise_if_no_telemetry,
            lambda: telemetry.build_proxy_tracer_from_triton_config(config),
            lambda: telemetry.parse_trace_config(config),
            lambda: telemetry.start_span_from_remote({}, "x"),
            lambda: telemetry.TracableModel().configure_tracing(config),
        ):
            try:
                call()
            except ImportError as error:
                assert "pip install 'pytriton-server[telemetry]'" in str(error), error
            else:
                raise AssertionError(call)
        telemetry.end_span(None)
        assert telemetry.get_span_dict(None) == {}
        """
    )


# ---- which tracer ----------------------------------------------------------------------------------------------------


def test_the_tracer_is_set_once() -> None:
    run(
        """
        from opentelemetry.sdk.trace import TracerProvider
        from pytriton.proxy.telemetry import get_telemetry_tracer, set_telemetry_tracer
        tracer = TracerProvider().get_tracer("mine")
        set_telemetry_tracer(tracer)
        assert get_telemetry_tracer() is tracer
        try:
            set_telemetry_tracer(tracer)
        except ValueError as error:
            assert "is set already" in str(error)
        else:
            raise AssertionError
        assert get_telemetry_tracer() is tracer
        """
    )


def test_the_order_of_tracers() -> None:
    run(
        """
        import contextvars
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from pytriton.proxy.telemetry import get_telemetry_tracer, set_telemetry_tracer
        from pytriton.proxy.tracers import use_worker_tracer

        assert get_telemetry_tracer() is None
        trace.set_tracer_provider(TracerProvider())
        provided = get_telemetry_tracer()
        assert provided is not None and get_telemetry_tracer() is provided

        workers = TracerProvider().get_tracer("of a worker")
        context = contextvars.copy_context()
        context.run(use_worker_tracer, workers)
        assert context.run(get_telemetry_tracer) is workers
        assert get_telemetry_tracer() is provided

        chosen = TracerProvider().get_tracer("chosen")
        set_telemetry_tracer(chosen)
        assert context.run(get_telemetry_tracer) is chosen and get_telemetry_tracer() is chosen
        """
    )


# ---- trace_config ----------------------------------------------------------------------------------------------------


def test_parse_trace_config() -> None:
    url, resource = parse_trace_config(
        [
            "rate=1",
            "level=TIMESTAMPS",
            *CONFIG,
            "opentelemetry,resource=service.name=mine",
            "opentelemetry,resource=a=b=c",
        ]
    )
    assert url == URL
    assert resource.attributes["service.name"] == "mine"
    assert resource.attributes["a"] == "b=c"


def test_the_service_is_called_as_triton_calls_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_trace_config(CONFIG)[1].attributes["service.name"] == "triton-inference-server"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "from-the-environment")
    assert parse_trace_config(CONFIG)[1].attributes["service.name"] == "from-the-environment"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "Only opentelemetry mode is supported"),
        (["mode=triton", *CONFIG[1:]], "Only opentelemetry mode is supported"),
        (["mode=opentelemetry", "rate=1"], "opentelemetry,url="),
        (["mode=opentelemetry", "opentelemetry,url="], "opentelemetry,url="),
        ([*CONFIG, "opentelemetry,resource"], "<setting>=<value>"),
        ([*CONFIG, "opentelemetry,resource=name"], "<name>=<value>"),
        ([*CONFIG, "opentelemetry,bsp_max_queue_size=-1"], "whole number"),
    ],
)
def test_what_trace_config_must_be(config: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_trace_config(config)
    with pytest.raises(ValueError, match=message):
        build_proxy_tracer_from_triton_config(config)


def test_a_tracer_of_a_trace_config() -> None:
    raise_if_no_telemetry()
    run(
        f"""
        from pytriton.proxy.telemetry import TracableModel, build_proxy_tracer_from_triton_config
        from pytriton.proxy.types import Request
        config = {[*CONFIG, "opentelemetry,bsp_max_queue_size=64", "opentelemetry,bsp_max_export_batch_size=8"]!r}
        span = build_proxy_tracer_from_triton_config(config).start_span("never ended, never sent")
        assert span.is_recording() and span.resource.attributes["service.name"] == "triton-inference-server"
        model = TracableModel()
        model.configure_tracing(config)
        [child] = model.start_requests_spans([Request({{}}, span=span)], "child")
        assert child.parent.span_id == span.context.span_id
        """
    )


# ---- spans -----------------------------------------------------------------------------------------------------------


def test_a_span_travels_as_a_dictionary(recorder: Recorder) -> None:
    remote = start_span_from_remote(HEADERS, "here")
    carried = get_span_dict(remote)
    assert carried == {"traceparent": f"00-{TRACE}-{id_of(remote)}-01", "tracestate": "vendor=value"}
    end_span(remote)
    assert parent_of(recorder.spans["here"]) == PARENT


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": "nonsense"}])
def test_without_a_context_a_trace_begins(headers: dict[str, str] | None, recorder: Recorder) -> None:
    end_span(start_span_from_remote(headers, "here"))
    assert recorder.spans["here"].parent is None


def test_without_a_tracer_the_context_goes_on() -> None:
    run(
        f"""
        from pytriton.proxy.telemetry import end_span, get_span_dict, start_span_from_remote, start_span_from_span
        span = start_span_from_remote({HEADERS!r}, "x")
        assert not span.is_recording()
        assert get_span_dict(start_span_from_span(span, "y")) == {HEADERS!r}
        end_span(span, ValueError("nothing to record"))
        """
    )


def test_children(recorder: Recorder, request_span: Span) -> None:
    child = start_span_from_span(request_span, "child")
    end_span(start_span_from_span(child, "grandchild"))
    end_span(child)
    assert parent_of(recorder.spans["child"]) == id_of(request_span)
    assert parent_of(recorder.spans["grandchild"]) == id_of(child)


@pytest.mark.parametrize(
    ("error", "description"), [(ValueError("bad"), "bad"), ("in words", "in words"), (KeyError(), "KeyError")]
)
def test_the_end_with_an_error(error: BaseException | str, description: str, recorder: Recorder) -> None:
    end_span(recorder.tracer.start_span("failed"), error)
    span = recorder.spans["failed"]
    assert not span.status.is_ok
    assert span.status.description == description
    assert [event.name for event in span.events] == (["exception"] if isinstance(error, BaseException) else [])


def test_traced_span(recorder: Recorder, request_span: Span) -> None:
    request = Request({}, span=request_span)
    other_span = recorder.tracer.start_span("other request")
    with traced_span(request, "outer", attributes={"a": 1}) as outer:
        assert outer is not None
        with (
            request.traced_span("inner"),
            recorder.tracer.start_as_current_span("of a library"),
            # Not inside of what is open for another request.
            traced_span(Request({}, span=other_span), "of another"),
        ):
            pass
    with traced_span(request, "next"):
        pass
    spans = recorder.spans
    assert parent_of(spans["outer"]) == parent_of(spans["next"]) == id_of(request_span)
    assert parent_of(spans["inner"]) == id_of(outer)
    inner_context = spans["inner"].get_span_context()
    assert inner_context is not None
    assert parent_of(spans["of a library"]) == f"{inner_context.span_id:016x}"
    assert parent_of(spans["of another"]) == id_of(other_span)
    assert dict(spans["outer"].attributes or {}) == {"a": 1}
    other_span.end()


def test_traced_span_ends_with_its_error(recorder: Recorder, request_span: Span) -> None:
    request = Request({}, span=request_span)
    with pytest.raises(ValueError, match="bad"), request.traced_span("failed"):
        raise ValueError("bad")
    assert not recorder.spans["failed"].status.is_ok


def test_a_request_that_is_not_traced(recorder: Recorder) -> None:
    with Request({}).traced_span("nothing") as span:
        assert span is None
    assert not recorder.spans


def test_tracable_model(recorder: Recorder, request_span: Span) -> None:
    own = Recorder()
    requests = [Request({}, span=request_span), Request({})]
    for model in (TracableModel(own.tracer), TracableModel()):
        spans = model.start_requests_spans(requests, "work")
        assert spans[1] is None
        model.end_requests_spans(spans, "no luck")
    for made in (own, recorder):
        assert parent_of(made.spans["work"]) == id_of(request_span)
        assert made.spans["work"].status.description == "no luck"


def test_exports_are_what_the_module_has() -> None:
    public = {
        name
        for name, value in vars(telemetry).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == telemetry.__name__
    }
    assert public == set(telemetry.__all__)


def test_the_tracer_in_use_is_that_of_the_process(recorder: Recorder) -> None:
    assert get_telemetry_tracer() is recorder.tracer

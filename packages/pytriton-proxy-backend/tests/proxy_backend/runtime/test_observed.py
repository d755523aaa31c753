"""What a worker says of its requests: trace context, access log, OpenTelemetry's instruments."""

from __future__ import annotations

import json
import logging
import sys
import types
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pytriton.proxy_backend.model import ModelSpec
from pytriton.proxy_backend.runtime import access, meters
from pytriton.proxy_backend.runtime.access import Access, is_wanted, log_access
from pytriton.proxy_backend.runtime.meters import Meters, find_meters
from pytriton.proxy_backend.runtime.trace_context import read_carrier, read_ids
from pytriton.proxy_backend.wire.batch import Batch, BatchReader

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
MODEL = ModelSpec(name="classify", version=3, inputs=(), outputs=(), batching=True, max_batch_size=8)


def batch_of(golden: ModuleType, *requests: Any) -> Batch:
    raw = golden.batch_record(7, requests)
    return BatchReader(True).read(np.frombuffer(raw, np.uint8), raw, 0, 7)


@pytest.mark.parametrize(
    ("text", "parameters", "carrier"),
    [
        ("", {}, {}),
        (json.dumps({"traceparent": PARENT}), {}, {"traceparent": PARENT}),
        # Triton's own span counts, and of its form the headers alone.
        (
            json.dumps({"traceparent": PARENT, "other": "x", "tracestate": 5}),
            {"traceparent": "no"},
            {"traceparent": PARENT},
        ),
        (json.dumps({"tracestate": "a=b"}), {"traceparent": PARENT}, {"tracestate": "a=b"}),
        ("no JSON", {"traceparent": PARENT}, {}),
        (json.dumps([PARENT]), {}, {}),
        ("", {"TraceParent": PARENT, "TraceState": "a=b", "x": "y"}, {"traceparent": PARENT, "tracestate": "a=b"}),
        ("", {"traceparent": 7}, {"traceparent": "7"}),
    ],
)
def test_where_a_trace_context_comes_from(
    golden: ModuleType, text: str, parameters: dict[str, Any], carrier: dict[str, str]
) -> None:
    other = golden.Request(id="other")
    batch = batch_of(golden, other, golden.Request(trace_context=text, parameters=parameters))
    assert read_carrier(batch, 1) == carrier
    assert read_ids(batch, 1) == ((TRACE, SPAN) if carrier.get("traceparent") == PARENT else None)
    assert read_carrier(batch, 0) == {}
    assert read_ids(batch, 0) is None


@pytest.mark.parametrize(
    ("parent", "is_good"),
    [
        (f"cc-{TRACE}-{SPAN}-00", True),
        (f"ff-{TRACE}-{SPAN}-00", False),
        (f"00-{'0' * 32}-{SPAN}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{SPAN}-01", False),
        (f"00-{TRACE}-{SPAN}-01-more", False),
        (f"00-{TRACE}-{SPAN}", False),
    ],
)
def test_which_ids_are_ids(golden: ModuleType, parent: str, is_good: bool) -> None:
    batch = batch_of(golden, golden.Request(parameters={"traceparent": parent}))
    assert read_ids(batch, 0) == ((TRACE, SPAN) if is_good else None)


# ---- the access log ------------------------------------------------------------------------------------------------


class Kept(logging.Handler):
    """Keeps records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler, logger = Kept(), access.logger
    before = logger.propagate, logger.level
    access.pass_on_records(handler)
    yield handler
    logger.removeHandler(handler)
    logger.propagate, logger.level = before


@pytest.mark.parametrize(("text", "wanted"), [(None, False), ("", False), ("0", False), ("1", True), ("yes", True)])
def test_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch, text: str | None, wanted: bool) -> None:
    monkeypatch.delenv("PYTRITON_ACCESS_LOG", raising=False)
    if text is not None:
        monkeypatch.setenv("PYTRITON_ACCESS_LOG", text)
    assert is_wanted() is wanted


def test_records_have_their_fields_twice(kept: Kept) -> None:
    assert access.logger.name == access.ACCESS_LOGGER == "pytriton.access"
    assert access.logger.propagate is False
    log_access({"model": "m", "rows": 2})
    [record] = kept.records
    assert (record.levelno, json.loads(record.getMessage())) == (logging.INFO, {"model": "m", "rows": 2})
    assert (vars(record)["model"], vars(record)["rows"]) == ("m", 2)


def test_each_request_has_one_record(golden: ModuleType, kept: Kept) -> None:
    requests = [
        golden.Request(2, id="first"),
        golden.Request(1, id="second", parameters={"traceparent": PARENT}),
        golden.Request(1),
        golden.Request(1),
    ]
    of_batch = Access(MODEL, batch_of(golden, *requests))
    of_batch.fail(1, "callable")
    of_batch.fail(1, "later")
    of_batch.end(ended=[1])
    # It has ended already.
    of_batch.end(ended=[1, 0])
    assert len(kept.records) == 2
    of_batch.end("lost")
    of_batch.end("again")
    found = [json.loads(record.getMessage()) for record in kept.records]
    for fields in found:
        duration = fields.pop("duration_ms")
        assert 0 <= duration < 600_000
        assert duration == round(duration, 3)
    same = {"model": "classify", "version": 3, "batch": 4}
    assert found == [
        {**same, "request_id": "second", "rows": 1, "trace_id": TRACE, "span_id": SPAN, "outcome": "callable"},
        {**same, "request_id": "first", "rows": 2, "outcome": "ok"},
        {**same, "request_id": "", "rows": 1, "outcome": "lost"},
        {**same, "request_id": "", "rows": 1, "outcome": "lost"},
    ]


def test_how_long_a_request_took(golden: ModuleType, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1_000_000_000, 1_002_500_400])
    monkeypatch.setattr(access, "monotonic_ns", lambda: next(clock))
    Access(MODEL, batch_of(golden, golden.Request())).end()
    assert vars(kept.records[0])["duration_ms"] == 2.5


# ---- OpenTelemetry -------------------------------------------------------------------------------------------------


class Instrument:
    """One that notes what it is given."""

    def __init__(self, *about: Any) -> None:
        self.about = about
        self.noted: list[tuple[Any, dict[str, Any]]] = []

    def add(self, value: Any, attributes: dict[str, Any]) -> None:
        self.noted.append((value, attributes))

    record = add


class Meter:
    """Makes instruments, with buckets or, as before OpenTelemetry 1.30, without."""

    def __init__(self, *, has_buckets: bool = True) -> None:
        self.made: dict[str, Instrument] = {}
        self.buckets: dict[str, tuple[float, ...]] = {}
        self._has_buckets = has_buckets

    def create_counter(self, name: str, unit: str, description: str) -> Instrument:
        assert description
        return self.made.setdefault(name, Instrument(unit))

    def create_histogram(self, name: str, unit: str, description: str, **more: Any) -> Instrument:
        if more:
            if not self._has_buckets:
                raise TypeError("unexpected keyword argument")
            self.buckets[name] = more.pop("explicit_bucket_boundaries_advisory")
            assert not more
        return self.create_counter(name, unit, description)


SAME = {"triton.model_name": "classify", "triton.model_version": 3}


@pytest.mark.parametrize("has_buckets", [True, False])
def test_what_is_recorded(has_buckets: bool) -> None:
    meter = Meter(has_buckets=has_buckets)
    of_model = Meters(meter, MODEL)
    assert {name: instrument.about for name, instrument in meter.made.items()} == {
        **{f"pytriton.{name}": ("{request}",) for name in ("requests", "failed_requests", "cancelled_requests")},
        "pytriton.batch.rows": ("{row}",),
        **dict.fromkeys(
            ["pytriton.callable.duration", "pytriton.first_response.duration", "pytriton.queue.duration"], ("s",)
        ),
    }
    of_model.add_call(2, 5, 3_000_000_000, 500_000_000)
    of_model.add_call(1, 1, None, 1_000_000_000)
    of_model.add_first_response(250_000_000)
    of_model.add_failed("callable", 4)
    of_model.add_cancelled()
    assert {name: instrument.noted for name, instrument in meter.made.items()} == {
        "pytriton.requests": [(2, SAME), (1, SAME)],
        "pytriton.batch.rows": [(5, SAME), (1, SAME)],
        "pytriton.callable.duration": [(pytest.approx(0.5), SAME), (pytest.approx(1), SAME)],
        "pytriton.queue.duration": [(pytest.approx(3), SAME)],
        "pytriton.first_response.duration": [(pytest.approx(0.25), SAME)],
        "pytriton.failed_requests": [(4, {**SAME, "error.type": "callable"})],
        "pytriton.cancelled_requests": [(1, SAME)],
    }
    if has_buckets:
        seconds = meter.buckets["pytriton.callable.duration"]
        assert seconds == tuple(0.00025 * 2**exponent for exponent in range(20))
        assert meter.buckets == {
            "pytriton.batch.rows": tuple(2.0**exponent for exponent in range(13)),
            **dict.fromkeys(
                ["pytriton.callable.duration", "pytriton.first_response.duration", "pytriton.queue.duration"], seconds
            ),
        }


def test_there_is_a_meter_once_somebody_has_set_one_up(monkeypatch: pytest.MonkeyPatch) -> None:
    module = meters._METRICS
    monkeypatch.setitem(sys.modules, module, None)
    assert find_meters(MODEL) is None
    # Another thread is importing it.
    half = types.ModuleType(module)
    monkeypatch.setitem(sys.modules, module, half)
    assert find_meters(MODEL) is None

    asked = []

    class Provider:
        def get_meter(self, name: str) -> Meter:
            asked.append(name)
            return Meter()

    class Standin(Provider):
        __module__ = f"{module}._internal"

    for provider, is_used in ((Standin(), False), (None, False), (Provider(), True)):
        half.get_meter_provider = lambda provider=provider: provider  # type: ignore[attr-defined]
        assert isinstance(find_meters(MODEL), Meters) is is_used
    assert asked == ["pytriton"]

"""Which failures of a callable are written to the log."""

from __future__ import annotations

import asyncio
import sys
import types

import pytest

from pytriton.proxy_backend.errors import OutputError
from pytriton.proxy_backend.runtime import failures
from pytriton.proxy_backend.runtime.failures import FailureLog, failed_as, kind_of, named
from pytriton.proxy_backend.wire.layout import ErrorCode


def raised(text: str, kind: type[Exception] = ValueError) -> Exception:
    try:
        raise kind(text)
    except Exception as error:
        return error


def raised_elsewhere() -> Exception:
    try:
        return ValueError(1 // 0)
    except ZeroDivisionError as error:
        return error


def test_a_kind_that_goes_on_is_told_of_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(failures, "monotonic", lambda: now[0])
    log = FailureLog()
    told = [log.admit(kind_of(raised(str(number)))) for number in range(25)]
    assert told == [""] * 10 + [None] * 15
    # Another type, and another place, are of other kinds.
    assert log.admit(kind_of(raised("text", KeyError))) == ""
    assert log.admit(kind_of(raised_elsewhere())) == ""
    # And so are errors of other outputs.
    assert len({kind_of(OutputError(name, model_name="m", output_name=name)) for name in ("x", "y", "y")}) == 2
    now[0] += 10
    assert log.admit(kind_of(raised("later"))) == " (15 of this kind were left out)"
    assert log.admit(kind_of(raised("later"))) is None
    now[0] += 1000
    assert log.admit(kind_of(raised("much later"))) == " (1 of this kind were left out)"
    # What came rarely may come as often as ever in the next period.
    rare = [log.admit("rare") for _ in range(3)]
    now[0] += 10
    assert rare + [log.admit("rare") for _ in range(11)] == [""] * 13 + [None]


def test_kinds_without_end_take_no_memory_without_end() -> None:
    log = FailureLog()
    for number in range(1000):
        assert log.admit(kind_of(raised("text", type(f"Error{number}", (Exception,), {})))) == ""
    assert len(log._kinds) <= 256


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (["a"], "request a"),
        (["a", ""], "requests a, without id"),
        (["x\nERROR forged"], r"request x\nERROR forged"),
        ([str(number) for number in range(20)], "requests 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"),
    ],
)
def test_requests_are_named(ids: list[str], told: str) -> None:
    assert named(ids, len(ids)) == told


def test_a_failure_while_another_thread_imports_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failed_as(asyncio.CancelledError())[1] is ErrorCode.CANCELLED
    for module in (None, types.ModuleType("asyncio")):
        monkeypatch.setitem(sys.modules, "asyncio", module)
        assert failed_as(ValueError("wrong"))[:2] == ("callable", ErrorCode.INTERNAL)

"""Tracebacks of user code begin where that begins."""

from __future__ import annotations

import asyncio
import builtins
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

import pytriton
from pytriton.proxy_backend.runtime import texts
from pytriton.proxy_backend.runtime.texts import format_trace, told_trace


def helper() -> None:
    raise ValueError("not this one")


def called_from(file: str) -> Callable[[], None]:
    """Return a function in a file that calls `helper`."""
    names: dict[str, Any] = {"helper": helper}
    exec(compile("def call():\n    helper()", file, "exec"), names)
    call: Callable[[], None] = names["call"]
    return call


BETWEEN = (
    f"{os.path.dirname(texts.__file__)}/made.py", f"{pytriton.__path__[0]}/elsewhere/made.py",
    "/any/site-packages/wrapt/made.py", "<frozen importlib>",
    os.path.join(os.path.dirname(os.__file__), "asyncio", "made.py"),
)  # fmt: skip


def chained() -> None:
    try:
        helper()
    except ValueError as error:
        raise RuntimeError("so this one neither") from error


def in_a_loop() -> None:
    async def run() -> None:
        helper()

    asyncio.run(run())


def caught(function: Callable[[], Any]) -> BaseException:
    """Return what a function raises, with its frames alone."""
    try:
        function()
    except Exception as error:
        trace = error.__traceback__
        return error.with_traceback(None if trace is None else trace.tb_next)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("tell", [format_trace, told_trace])
@pytest.mark.parametrize("function", [helper, in_a_loop, *map(called_from, BETWEEN)])
def test_frames_before_the_user_are_left_out(function: Callable[[], Any], tell: Callable[[BaseException], str]) -> None:
    text = tell(caught(function))
    places = [line for line in text.splitlines() if line.lstrip().startswith("File ")]
    assert places
    assert all(__file__ in place for place in (places[0], places[-1]))
    assert text.rstrip().endswith("ValueError: not this one")


def test_frames_behind_the_user_stay() -> None:
    """Also of libraries that are installed beside the server."""
    text = format_trace(caught(called_from("/any/site-packages/torch/made.py")))
    assert "torch/made.py" in text


def test_the_errors_behind_it_stay() -> None:
    text = format_trace(caught(chained))
    assert "ValueError: not this one" in text
    assert text.index("The above exception was the direct cause") < text.index("RuntimeError: so this one neither")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with Python 3.11")
def test_the_errors_of_a_group_begin_where_the_user_does() -> None:
    def raise_group() -> None:
        raise vars(builtins)["ExceptionGroup"]("both", [caught(called_from(BETWEEN[0]))])

    text = format_trace(caught(raise_group))
    assert "ValueError: not this one" in text
    assert BETWEEN[0] not in text


def test_what_a_caller_wrote_begins_no_line() -> None:
    def forged() -> None:
        try:
            raise ValueError("one\nERROR forged")
        except ValueError as error:
            raise RuntimeError("two\nERROR forged, too") from error

    lines = told_trace(caught(forged)).splitlines()
    assert {"    ERROR forged", "    ERROR forged, too"} <= set(lines)
    assert not any(line.startswith("ERROR") for line in lines)


def test_what_has_no_frame_of_a_user_is_whole() -> None:
    error = caught(lambda: json.loads("{"))
    trace = error.__traceback__
    assert trace is not None
    assert "decoder.py" in format_trace(error.with_traceback(trace.tb_next))
    assert format_trace(error.with_traceback(None)).startswith("json.decoder.JSONDecodeError")

"""The declarations of Triton's C API against the library, and what is said of a library that does not fit."""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytriton.inprocess.capi import c_types, functions
from pytriton.inprocess.capi.api import Api, load_api
from pytriton.inprocess.capi.enums import DataType
from pytriton.inprocess.capi.errors import (
    CancelledError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    TimedOutError,
    TritonError,
    UnavailableError,
    UnknownError,
    UnsupportedError,
    error_class,
)
from pytriton.proxy_backend.wire.layout import ErrorCode
from pytriton.server.tritonserver.version import read_server_version

DECLARED = {*functions.CALLS, *functions.SHORT_CALLS, *functions.VALUES}


@pytest.fixture(scope="module")
def api() -> Api:
    return load_api()


def test_functions_are_those_of_the_library(api: Api) -> None:
    assert {name for name in DECLARED if not hasattr(api.library.handle, name)} == set()
    assert len(DECLARED) == len(functions.CALLS) + len(functions.SHORT_CALLS) + len(functions.VALUES)


def test_functions_are_those_that_are_called() -> None:
    """What is declared and not called would only be one more thing that a newer Triton may lack."""
    package = Path(functions.__file__).parents[1]
    sources = [path.read_text() for path in package.rglob("*.py") if path != Path(functions.__file__)]
    # A call, or the name of a function that is looked up.
    called = {name for source in sources for name in re.findall(r'[."](TRITONSERVER_\w+)(?=["(,])', source)}

    assert called - DECLARED == {"TRITONSERVER_ApiVersion"}
    assert DECLARED - called == set()


def test_library_is_loaded_once(api: Api) -> None:
    assert load_api() is api


@pytest.mark.parametrize("table", ["CALLS", "SHORT_CALLS", "VALUES"])
def test_missing_functions_are_named_where_they_are_called(
    table: str, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(getattr(functions, table), "TRITONSERVER_OfTheFuture", (ctypes.c_int,))

    other = Api(api.library)
    with pytest.raises(InternalError, match="ValueError: still works"):
        other.check(other.new_error(ValueError("still works")))
    version = re.escape(read_server_version(api.library.binary))
    with pytest.raises(
        UnsupportedError, match=rf"TRITONSERVER_OfTheFuture in .* is version {version}, .* 1\.34"
    ) as caught:
        other.TRITONSERVER_OfTheFuture(1)

    assert caught.value.expected == "TRITONSERVER_OfTheFuture"
    # What has been declared before has nothing of it.
    declared: Any = api.TRITONSERVER_ServerOptionsNew
    assert declared.errcheck.__self__ is api


def test_undeclared_function_is_an_error(api: Api) -> None:
    with pytest.raises(AttributeError, match="TRITONSERVER_Nothing"):
        _ = api.TRITONSERVER_Nothing


def test_handle_of_another_kind_is_refused(api: Api) -> None:
    options = c_types.ServerOptionsHandle()
    api.TRITONSERVER_ServerOptionsNew(ctypes.byref(options))
    try:
        with pytest.raises(ctypes.ArgumentError):
            api.TRITONSERVER_ServerStop(options)
    finally:
        api.TRITONSERVER_ServerOptionsDelete(options)


def test_enumerations_are_those_of_the_library(api: Api) -> None:
    function = api.library.handle["TRITONSERVER_DataTypeString"]
    function.restype = ctypes.c_char_p
    names = {kind: function(kind).decode() for kind in DataType}

    assert names.pop(DataType.INVALID) == "<invalid>"
    assert names == {kind: kind.name for kind in DataType if kind is not DataType.INVALID}


@pytest.mark.parametrize("code", ErrorCode)
def test_errors_go_through_triton_and_back(api: Api, code: ErrorCode) -> None:
    raised = error_class(code)("text with ä and \0")

    with pytest.raises(error_class(code)) as caught:
        api.check(api.new_error(raised))

    assert type(caught.value) is error_class(code)
    assert str(caught.value) == "text with ä and \\0"


def test_exceptions_of_others_are_internal_errors(api: Api) -> None:
    with pytest.raises(InternalError, match="ValueError: wrong"):
        api.check(api.new_error(ValueError("wrong")))
    api.check(None)


def test_classes_of_errors() -> None:
    assert error_class(99) is UnknownError
    assert issubclass(TimedOutError, (UnavailableError, TimeoutError))
    assert len({error_class(code) for code in ErrorCode}) == len(ErrorCode)
    assert error_class(ErrorCode.CANCELLED) is CancelledError


@pytest.mark.parametrize("cls", [TritonError, NotFoundError, InvalidArgumentError, TimedOutError])
def test_errors_carry_facts_and_survive_pickling(cls: type[TritonError]) -> None:
    error = cls("the text", "a detail", expected=1, received=2, where="model 'm'")

    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is cls
    assert (str(copy), copy.message, copy.args) == ("the text", "the text", ("the text", "a detail"))
    assert (copy.expected, copy.received, copy.where) == (1, 2, "model 'm'")


def fake_server(folder: Path, *, library: bool) -> Path:
    (folder / "bin").mkdir()
    (folder / "bin" / "tritonserver").touch(0o755)
    (folder / "lib").mkdir()
    if library:
        (folder / "lib" / "libtritonserver.so").write_bytes(b"no library at all")
    return folder


@pytest.mark.parametrize(
    ("library", "complaint"), [(False, "Expected libtritonserver.so"), (True, "Cannot load")], ids=["none", "broken"]
)
def test_server_without_a_usable_library_is_named(tmp_path: Path, library: bool, complaint: str) -> None:
    folder = fake_server(tmp_path, library=library)
    code = """
from pytriton import inprocess
try:
    inprocess.Server().start()
except inprocess.UnsupportedError as error:
    print(error)
"""

    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTRITON_TRITONSERVER_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout

    assert complaint in out
    assert str(folder) in out

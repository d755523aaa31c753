"""Parameters of loads, repositories and metrics, as objects of the C API."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from pytriton.inprocess.capi.api import Api
from pytriton.inprocess.capi.c_types import ParameterHandle
from pytriton.inprocess.capi.enums import ParameterType

Parameter: TypeAlias = str | int | bool | bytes


@contextlib.contextmanager
def c_parameters(api: Api, parameters: Mapping[str, Parameter]) -> Iterator[tuple[Any, int]]:
    """Make the parameter objects of the C API, yield their array (`None` if empty) and number, and delete them."""
    handles: list[ParameterHandle] = []
    # Triton does not copy these values.
    kept: list[Any] = []
    try:
        for key, value in parameters.items():
            handles.append(_make(api, key.encode(), value, kept))
        array = (ParameterHandle * len(handles))(*handles) if handles else None
        yield array, len(handles)
    finally:
        for handle in handles:
            api.TRITONSERVER_ParameterDelete(handle)


def _make(api: Api, key: bytes, value: Parameter, kept: list[Any]) -> ParameterHandle:
    made: ParameterHandle
    if isinstance(value, bytes):
        # ctypes appends a zero byte, so an empty value has an address, too.
        buffer = ctypes.create_string_buffer(value)
        kept.append(buffer)
        made = api.TRITONSERVER_ParameterBytesNew(key, buffer, len(value))
    elif isinstance(value, str):
        made = api.TRITONSERVER_ParameterNew(key, ParameterType.STRING, value.encode())
    elif isinstance(value, bool):
        made = api.TRITONSERVER_ParameterNew(key, ParameterType.BOOL, ctypes.byref(ctypes.c_bool(value)))
    else:
        made = api.TRITONSERVER_ParameterNew(key, ParameterType.INT, ctypes.byref(ctypes.c_int64(value)))
    return made

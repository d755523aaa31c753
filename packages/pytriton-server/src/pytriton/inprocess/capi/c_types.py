"""The types of Triton's C API: numbers, opaque pointers, and the functions that Triton calls.

Every opaque pointer is a class of its own, so that handing a request to a function that wants a response is an
`ctypes.ArgumentError` and not a crash. Callbacks get pointers as integers (`None` for a null pointer), which is
cheaper, and which all functions accept for any pointer.
"""

from __future__ import annotations

from ctypes import (
    CFUNCTYPE,
    POINTER,
    c_bool,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

INT = c_int
BOOL = c_bool
DOUBLE = c_double
INT32 = c_int32
INT64 = c_int64
UINT32 = c_uint32
UINT64 = c_uint64
SIZE = c_size_t
STRING = c_char_p
"""Zero-terminated UTF-8 text, as `bytes`."""
ADDRESS = c_void_p
"""Memory of any kind."""
ENUM = c_int


def out(kind: Any) -> Any:
    """Return the type of an argument that the function writes to, or of an array that it reads."""
    return POINTER(kind)


class ErrorHandle(c_void_p):
    """`TRITONSERVER_Error*`."""


class InferenceRequestHandle(c_void_p):
    """`TRITONSERVER_InferenceRequest*`."""


class InferenceTraceHandle(c_void_p):
    """`TRITONSERVER_InferenceTrace*`."""


class MessageHandle(c_void_p):
    """`TRITONSERVER_Message*`."""


class MetricsHandle(c_void_p):
    """`TRITONSERVER_Metrics*`."""


class ParameterHandle(c_void_p):
    """`TRITONSERVER_Parameter*`."""


class ResponseAllocatorHandle(c_void_p):
    """`TRITONSERVER_ResponseAllocator*`."""


class ServerHandle(c_void_p):
    """`TRITONSERVER_Server*`."""


class ServerOptionsHandle(c_void_p):
    """`TRITONSERVER_ServerOptions*`."""


class MetricHandle(c_void_p):
    """`TRITONSERVER_Metric*`."""


class MetricFamilyHandle(c_void_p):
    """`TRITONSERVER_MetricFamily*`."""


class MetricArgsHandle(c_void_p):
    """`TRITONSERVER_MetricArgs*`."""


ResponseAllocatorAllocCallback = CFUNCTYPE(
    c_void_p, c_void_p, STRING, SIZE, ENUM, INT64, c_void_p, out(c_void_p), out(c_void_p), out(ENUM), out(INT64)
)
ResponseAllocatorReleaseCallback = CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_void_p, SIZE, ENUM, INT64)
ResponseAllocatorStartCallback = CFUNCTYPE(c_void_p, c_void_p, c_void_p)
InferenceTraceActivityCallback = CFUNCTYPE(None, c_void_p, ENUM, UINT64, c_void_p)
InferenceTraceTensorActivityCallback = CFUNCTYPE(
    None, c_void_p, ENUM, STRING, ENUM, c_void_p, SIZE, out(INT64), UINT64, ENUM, INT64, c_void_p
)
InferenceTraceReleaseCallback = CFUNCTYPE(None, c_void_p, c_void_p)

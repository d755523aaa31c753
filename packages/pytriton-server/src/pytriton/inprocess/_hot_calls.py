"""The functions of the C API that every inference calls, declared once more for speed.

Those of `Api` check every pointer's type and turn errors into exceptions by a function in Python. Here pointers are
plain addresses, and a result that is not `None` is an error, to be given to `check`. That halves the cost of a call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, Final

from pytriton.inprocess._api import Api

__all__ = ["HotCalls"]

_Function = Callable[..., int | None]

# As in `_functions`, but for the types: the first ones are called without the GIL.
_CALLS: Final[dict[str, tuple[Any, ...]]] = {
    "InferenceRequestDelete": (c_void_p,),
    "InferenceRequestNew": (c_void_p, c_void_p, c_char_p, c_int64),
    "InferenceResponseDelete": (c_void_p,),
    "ServerInferAsync": (c_void_p, c_void_p, c_void_p),
}
_SHORT_CALLS: Final[dict[str, tuple[Any, ...]]] = {
    "InferenceRequestAddInput": (c_void_p, c_char_p, c_int, c_void_p, c_uint64),
    "InferenceRequestAppendInputData": (c_void_p, c_char_p, c_void_p, c_size_t, c_int, c_int64),
    "InferenceRequestSetReleaseCallback": (c_void_p, c_void_p, c_void_p),
    "InferenceRequestSetResponseCallback": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    "InferenceResponseError": (c_void_p,),
    "InferenceResponseModel": (c_void_p, c_void_p, c_void_p),
    "InferenceResponseOutput": (c_void_p, c_uint32, *[c_void_p] * 9),
    "InferenceResponseOutputCount": (c_void_p, c_void_p),
    "InferenceResponseParameterCount": (c_void_p, c_void_p),
}


class HotCalls:
    """The functions, as attributes without the `TRITONSERVER_` of their names.

    Args:
        api: All functions.
    """

    InferenceRequestAddInput: _Function
    InferenceRequestAppendInputData: _Function
    InferenceRequestDelete: _Function
    InferenceRequestNew: _Function
    InferenceRequestSetReleaseCallback: _Function
    InferenceRequestSetResponseCallback: _Function
    InferenceResponseDelete: _Function
    InferenceResponseError: _Function
    InferenceResponseModel: _Function
    InferenceResponseOutput: _Function
    InferenceResponseOutputCount: _Function
    InferenceResponseParameterCount: _Function
    ServerInferAsync: _Function

    def __init__(self, api: Api) -> None:
        self.check = api.check
        library = api.library.handle
        keeping_gil = ctypes.PyDLL(str(api.library.path), handle=library._handle)
        for source, table in ((library, _CALLS), (keeping_gil, _SHORT_CALLS)):
            for name, argtypes in table.items():
                # By index: every time a function object of its own.
                function = source[f"TRITONSERVER_{name}"]
                function.argtypes = list(argtypes)
                function.restype = c_void_p
                setattr(self, name, function)

"""Parameters, headers and options of calls, and their checks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, get_args

import numpy as np
import numpy.typing as npt

from ..exceptions import PyTritonClientValueError
from .deadline import check_timeout

ParameterValue = str | int | float | bool

# What a call takes as parameters and headers. An array is for a model with an input of that name; to type checkers it
# also lets a dictionary of arrays stand for all inputs: infer_sample(**arrays).
Parameters = Mapping[str, ParameterValue] | npt.NDArray[Any] | None
Headers = Mapping[str, str | int | bool] | npt.NDArray[Any] | None

Casting = Literal["safe", "same_kind"]
"""How an array becomes one of the declared dtype, in the words of numpy."""

# These parameters have a meaning in the protocol; tritonclient takes them as arguments.
_OPTIONS: dict[str, tuple[type, ...]] = {
    "priority": (int,),
    "timeout": (int,),
    "sequence_id": (int, str),
    "sequence_start": (bool,),
    "sequence_end": (bool,),
}
_RESERVED = ("headers", "binary_data_output")
_RESERVED_PREFIX = "triton_"
# The transports set these headers. A second one could make the server read the request in another way.
_RESERVED_HEADERS = (
    "accept-encoding",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "host",
    "inference-header-content-length",
    "te",
    "transfer-encoding",
)
# Beyond it, servers with nghttp2 (the guard's front end for gRPC is one) end the connection, with all calls on it.
_LONGEST_HEADER = 64 << 10
_HEADER_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_TEXT_RULE = "that UTF-8 can encode, without NUL"


@dataclass(frozen=True)
class CallOptions:
    """What a view of a client adds to each of its calls."""

    timeout_s: float | None = None  # how long a call may take, in seconds; ``None`` leaves that to the client
    request_id: str | None = None  # the id of its requests; ``None`` gives each one of its own
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)  # custom request parameters
    # Parameters with a meaning of their own, under the names of the protocol: those of ``_OPTIONS``.
    options: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)  # HTTP headers or gRPC metadata, every value as text
    casting: Casting = "safe"  # how an array becomes one of the declared dtype

    def with_changes(
        self,
        *,
        timeout_s: float | None,
        request_id: str | None,
        priority: int | None,
        queue_timeout_s: float | None,
        parameters: Mapping[str, ParameterValue] | None,
        headers: Mapping[str, str | int | bool] | None,
        casting: Casting | None,
    ) -> CallOptions:
        """Return these options with others in their place; ``None`` keeps one, and mappings are joined."""
        custom, options = check_parameters(parameters)
        if priority is not None:
            options.update(check_parameters({"priority": priority})[1])
        if queue_timeout_s is not None:
            # The protocol counts whole microseconds, and takes 0 for no limit at all.
            options["timeout"] = max(1, round(check_timeout(queue_timeout_s, "queue_timeout_s") * 1e6))
        return CallOptions(
            timeout_s=self.timeout_s if timeout_s is None else check_timeout(timeout_s, "timeout_s"),
            request_id=self.request_id if request_id is None else _check_request_id(request_id),
            parameters={**self.parameters, **custom},
            options={**self.options, **options},
            headers={**self.headers, **check_headers(headers)},
            casting=self.casting if casting is None else _check_casting(casting),
        )


NO_OPTIONS = CallOptions()


def _check_casting(casting: Casting) -> Casting:
    if casting not in get_args(Casting):
        raise PyTritonClientValueError(
            f"Expected casting to be one of {', '.join(map(repr, get_args(Casting)))}; received {casting!r}.",
            input_name="casting",
            received=repr(casting),
        )
    return casting


def check_parameters(parameters: object) -> tuple[dict[str, ParameterValue], dict[str, Any]]:
    """Return the custom parameters, and those with a meaning for Triton."""
    custom: dict[str, ParameterValue] = {}
    options: dict[str, Any] = {}
    for name, value in _check_names(parameters, "Parameter").items():
        if name in _RESERVED or name.startswith(_RESERVED_PREFIX):
            raise PyTritonClientValueError(
                f"Parameter {name!r}: Triton keeps this name for itself. Choose another one.", input_name=name
            )
        if isinstance(value, np.generic):
            value = value.item()
        _check_value(name, value)
        if name in _OPTIONS:
            # type() and not isinstance(), because True is an instance of int.
            if type(value) not in _OPTIONS[name]:
                types = " or ".join(kind.__name__ for kind in _OPTIONS[name])
                _refuse_value("Parameter", name, f"of the type that Triton gives to it, {types}", value)
            if type(value) is int and value < 0:
                _refuse_value("Parameter", name, "zero or more", value)
            options[name] = value
        else:
            custom[name] = value
    return custom, options


def check_headers(headers: object) -> dict[str, str]:
    """Return headers as they are sent."""
    checked: dict[str, str] = {}
    for name, value in _check_names(headers, "Header").items():
        if not _HEADER_NAME.fullmatch(name):
            _refuse_value("Header", name, "a name of letters, digits, dots, dashes and underscores", name)
        lower = name.lower()
        if lower in _RESERVED_HEADERS or lower.startswith("grpc-"):
            _refuse_value("Header", name, "for another name, as the connection needs this one for itself", value)
        if lower.endswith("-bin"):
            _refuse_value("Header", name, "for a name that does not end in -bin, which means bytes to gRPC", value)
        if isinstance(value, np.generic):
            value = value.item()
        if not isinstance(value, (str, int)):
            _refuse_value("Header", name, "a string, integer or boolean", value)
        text = str(value)
        # A line break would end the header, and gRPC refuses what is not ASCII.
        if not (text.isascii() and text.isprintable()):
            _refuse_value("Header", name, "printable ASCII", value)
        if len(name) + len(text) > _LONGEST_HEADER:
            _refuse_value("Header", name, "of 64 KiB at most, with its name", value)
        checked[name] = text
    return checked


def _check_value(name: str, value: object) -> None:
    if not isinstance(value, (str, int, float)):
        _refuse_value("Parameter", name, "a string, integer or boolean, or a float", value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        _refuse_value("Parameter", name, "an integer of 64 bits", value)
    if isinstance(value, float) and not math.isfinite(value):
        _refuse_value("Parameter", name, "a finite number, as JSON has no other", value)
    if isinstance(value, str) and not _is_text(value):
        _refuse_value("Parameter", name, f"text {_TEXT_RULE}", value)


def _check_names(mapping: object, kind: str) -> Mapping[str, Any]:
    if mapping is None:
        return {}
    if not isinstance(mapping, Mapping):
        raise PyTritonClientValueError(
            f"Parameters and headers must be a dictionary: expected one, received {type(mapping).__name__} {mapping!r}."
        )
    for name in mapping:
        if not isinstance(name, str):
            raise PyTritonClientValueError(
                f"Parameter/header key must be a string: received {type(name).__name__} {name!r} as one of a "
                f"{kind.lower()}."
            )
        if not _is_text(name):
            _refuse_value(kind, name, f"under a key {_TEXT_RULE}", mapping[name])
    return mapping


def _check_request_id(request_id: str) -> str:
    # The id appears in lines of the server's log; a line break in it could fake a line.
    if not isinstance(request_id, str) or not request_id or not request_id.isprintable() or not _is_text(request_id):
        raise PyTritonClientValueError(
            f"Expected request_id to be printable text; received {request_id!r}.",
            input_name="request_id",
            expected="printable text",
            received=repr(request_id),
        )
    return request_id


def _is_text(text: str) -> bool:
    # To Triton, a character NUL ends a text.
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _refuse_value(kind: str, name: str, expected: str, value: object) -> NoReturn:
    raise PyTritonClientValueError(
        f"Parameter/header value must be {expected}: received {type(value).__name__} {value!r:.200} for the "
        f"{kind.lower()} {name!r:.200}.",
        input_name=name,
        expected=expected,
        received=repr(value),
    )

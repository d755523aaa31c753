"""What values the fields of `TritonConfig` may have: conversion, ranges and formats."""

import operator
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from pytriton.exceptions import PyTritonBadParameterError, PyTritonValidationError
from pytriton.proxy_backend.settings import DURATION, read_duration
from pytriton.server.settings.origins import check_origins
from pytriton.server.settings.security import VALID_TRITON_ENDPOINTS

_TRUE = frozenset({"1", "true", "yes", "on", "y", "t"})
_FALSE = frozenset({"0", "false", "no", "off", "n", "f"})

# tritonserver stores other numbers in a C int.
_LARGEST_INT = 2**31 - 1
_LARGEST = {
    "http_max_input_size": 2**63 - 1,
    "grpc_infer_thread_count": 128,
    "pinned_memory_pool_byte_size": 2**63 - 1,
}
_LARGEST_PORT = 65535
# All others start at 0.
_SMALLEST = {
    "repository_poll_secs": 1,
    "model_load_thread_count": 1,
    "http_thread_count": 1,
    "http_max_input_size": 1,
    "grpc_infer_thread_count": 2,
    "grpc_max_response_pool_size": 1,
    "sagemaker_thread_count": 1,
    "vertex_ai_thread_count": 1,
    "metrics_interval_ms": 1,
    "grpc_keepalive_time": 1,
    "grpc_keepalive_timeout": 1,
    "grpc_max_connection_age": 1,
}
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")
_LOOK_AROUND = re.compile(r"(?<!\\)\(\?(?:[=!]|<[=!])")

_EXPECTED = {
    bool: "a boolean (true, false, 1, 0, yes, no, on, off)",
    int: "an integer",
    list: "a list of strings",
    pathlib.Path: "a path",
    str: "a string",
}


class Restriction:
    """A parsed `<groups>:<header>=<value>`."""

    def __init__(self, groups: tuple[str, ...], header: str, value: str) -> None:
        self.groups = groups
        self.header = header
        self.value = value


def converted(kind: type, value: Any, where: str) -> Any:
    """Return `value` as the type of its field, if that is safe."""
    result: Any = None
    if kind is bool:
        text = str(value).strip().lower()
        result = True if text in _TRUE else False if text in _FALSE else None
    elif kind is int:
        result = _as_int(value)
    elif kind is list:
        if isinstance(value, str):
            result = [value]
        elif isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
            result = list(value)
    elif kind is pathlib.Path:
        if isinstance(value, (str, os.PathLike)):
            result = pathlib.Path(os.fspath(value)).expanduser()
    elif isinstance(value, (str, int, float, os.PathLike)) and not isinstance(value, bool):
        result = str(value)
    if result is None:
        expected = _EXPECTED[kind]
        raise PyTritonValidationError(f"{where} must be {expected}; got {value!r}.", expected=expected, received=value)
    return result


def checked(name: str, value: Any, where: str) -> None:
    """Check a converted value against the rule of its field."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, (str, pathlib.Path)) and "\0" in str(text):
            raise PyTritonValidationError(f"{where} holds a NUL character.", expected="no NUL character")
    if isinstance(value, int) and not isinstance(value, bool):
        _check_range(name, value, where)
    elif name in _FORMATS:
        _FORMATS[name](value, where)


def parse_restriction(text: str, where: str) -> Restriction:
    """Split `<groups>:<header>=<value>` as tritonserver does. The error leaves out the value, which is a secret."""
    names, colon, pair = text.partition(":")
    header, equals, value = pair.partition("=")
    groups = tuple(names.split(","))
    if not (colon and equals and header and value):
        raise PyTritonValidationError(
            f"{where} must have the form <groups>:<header>=<value>, such as health,metadata:my-key=my-value (its "
            "value is not shown here).",
            expected="<groups>:<header>=<value>",
        )
    if not _HEADER_NAME.fullmatch(header) or not _HEADER_VALUE.fullmatch(value):
        raise PyTritonValidationError(
            f"{where} must name a header of HTTP and a value that can be sent in one: visible ASCII characters. The "
            f"name is {header!r}, the value is not shown here.",
            expected="a header and its value",
        )
    unknown = sorted(set(groups) - VALID_TRITON_ENDPOINTS)
    twice = sorted({group for group in groups if groups.count(group) > 1})
    if unknown or twice:
        raise PyTritonValidationError(
            f"{where} must name each group of endpoints once; "
            f"{f'{unknown} are none' if unknown else f'{twice} are named twice'}. Groups: "
            f"{sorted(VALID_TRITON_ENDPOINTS)}.",
            expected=sorted(VALID_TRITON_ENDPOINTS),
            received=unknown or twice,
        )
    return Restriction(groups, header, value)


def parse_port_range(text: str, where: str) -> tuple[int, int]:
    """Take `<first>-<last>` apart."""
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text.strip())
    first, last = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 0 < first <= last <= _LARGEST_PORT:
        raise PyTritonValidationError(
            f"{where} must be a range of ports <first>-<last>, such as 9000-9100; got {text!r}.",
            expected="<first>-<last>",
            received=text,
        )
    return first, last


def is_colliding(restriction: Restriction | None, header: str, value: str) -> bool:
    """Return whether one header would need two values."""
    return restriction is not None and restriction.header.lower() == header.lower() and restriction.value != value


def check_timeout(name: str, timeout_s: Any) -> None:
    """Check that an argument is a time to wait."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not timeout_s >= 0:
        raise PyTritonBadParameterError(
            f"{name} must be a number of seconds of at least 0; got {timeout_s!r}.",
            parameter=name,
            value=timeout_s,
            rule="at least 0",
        )


def _as_int(value: Any) -> int | None:
    if isinstance(value, (bool, np.bool_)):
        return None
    if isinstance(value, float) and value.is_integer():
        return int(value)  # tritonserver reads "10.0" as 10, too
    try:
        return int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        return None


def _check_range(name: str, value: int, where: str) -> None:
    if name.endswith("_port"):
        if not 0 <= value <= _LARGEST_PORT:
            raise PyTritonValidationError(
                f"{where}={value} is not a port: expected 0 (any free port) to {_LARGEST_PORT}.",
                expected=f"0 to {_LARGEST_PORT}",
                received=value,
            )
        return
    smallest, largest = _SMALLEST.get(name, 0), _LARGEST.get(name, _LARGEST_INT)
    if not smallest <= value <= largest:
        raise PyTritonValidationError(
            f"{where} must be between {smallest} and {largest}; got {value}.",
            expected=f"{smallest} to {largest}",
            received=value,
        )


def _one_of(*allowed: str) -> Callable[[str, str], None]:
    def check(value: str, where: str) -> None:
        if value.lower() not in allowed:
            raise PyTritonValidationError(
                f"{where} must be one of {', '.join(allowed)}; got {value!r}.", expected=allowed, received=value
            )

    return check


def _check_pattern(value: str, where: str) -> None:
    # tritonserver parses it with RE2, and ignores a pattern that fails. Patterns that only RE2 understands, such as
    # \pN, are accepted.
    problem = "RE2 has no look-ahead and no look-behind" if _LOOK_AROUND.search(value) else None
    if problem is None:
        try:
            re.compile(value)
        except re.error as error:
            if not error.msg.startswith(("bad escape", "global flags")):
                problem = str(error)
    if problem is not None:
        raise PyTritonValidationError(
            f"{where} must be a regular expression as RE2 understands it; got {value!r}: {problem}.",
            expected="a regular expression",
            received=value,
        )


def _check_duration(value: str, where: str) -> None:
    try:
        read_duration(value)
    except ValueError as error:
        raise PyTritonValidationError(f"{where}: {error}.", expected=DURATION, received=value) from None


def _items(pattern: str, form: str, example: str) -> Callable[[list[str], str], None]:
    def check(values: list[str], where: str) -> None:
        for item in values:
            if not re.fullmatch(pattern, item, re.DOTALL):
                raise PyTritonValidationError(
                    f"{where} must hold items of the form {form}, such as {example}; got {item!r}.",
                    expected=form,
                    received=item,
                )

    return check


_FORMATS: dict[str, Callable[[Any, str], object]] = {
    "python_models": _one_of("stub", "workers"),
    "python_models_idle": _check_duration,
    "model_control_mode": _one_of("explicit", "poll", "none"),
    "rate_limit": _one_of("execution_count", "off"),
    "rate_limit_resource": _items(
        r"[^:]+:\d{1,9}(:\d{1,9})?", "<resource>:<count> or <resource>:<count>:<device>", "licence:2"
    ),
    "backend_config": _items(r"[^,=]+,[^=]+=.+", "<backend>,<setting>=<value>", "onnxruntime,default-max-batch-size=8"),
    "host_policy": _items(r"[^,=]+,[^=]+=.+", "<policy>,<setting>=<value>", "gpu_0,numa-node=1"),
    "cuda_memory_pool_byte_size": _items(r"\d{1,9}:\d{1,18}", "<GPU>:<bytes>", "0:67108864"),
    "grpc_infer_response_compression_level": _one_of("none", "low", "medium", "high"),
    "http_header_forward_pattern": _check_pattern,
    "grpc_header_forward_pattern": _check_pattern,
    "http_restricted_api": parse_restriction,
    "cors_origins": check_origins,
    "grpc_restricted_protocol": parse_restriction,
    "sagemaker_safe_port_range": parse_port_range,
    "metrics_config": _items(r"[^,=]+=.+", "<setting>=<value>", "summary_latencies=true"),
    "cache_config": _items(r"[^,=]+,[^=]+=.+", "<cache>,<setting>=<value>", "local,size=1048576"),
    "trace_config": _items(
        r"((?i:triton|opentelemetry),)?[^,=]+=.+",
        "<setting>=<value> or <mode>,<setting>=<value> with the mode triton or opentelemetry",
        "opentelemetry,url=http://localhost:4318/v1/traces",
    ),
}

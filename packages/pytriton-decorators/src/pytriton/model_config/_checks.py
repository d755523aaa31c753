"""Checks of single values, and the one wording of their errors."""

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from pytriton.exceptions import PyTritonBadParameterError

__all__ = [
    "INT32_MAX",
    "INT64_MAX",
    "MICROSECONDS_MAX",
    "UINT32_MAX",
    "UINT64_MAX",
    "boolean",
    "integer",
    "is_list",
    "microseconds",
    "rejected",
    "seconds",
    "sizes",
]

INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1
INT64_MAX = 2**63 - 1
# Triton adds a time in nanoseconds to its clock, in 64 bits: 285 years are far from the end of them.
MICROSECONDS_MAX = 9 * 10**15
SECONDS_MAX = 9e9


def rejected(parameter: str, value: object, rule: str, advice: str = "") -> PyTritonBadParameterError:
    """Make the error for a value that breaks a rule; `rule` completes "... must be"."""
    text = f"{parameter}={value!r} is not accepted: it must be {rule}."
    return PyTritonBadParameterError(
        f"{text} {advice}" if advice else text, parameter=parameter, value=value, rule=f"must be {rule}"
    )


def integer(parameter: str, value: Any, minimum: int, maximum: int | None = None, *, why: str = "") -> None:
    """Raise PyTritonBadParameterError unless `value` is an integer within the bounds; a bool is none."""
    fits = isinstance(value, Integral) and not isinstance(value, bool)
    if fits and value >= minimum and (maximum is None or value <= maximum):
        return
    # A limit of the wire format is told only to those who passed it.
    tell_maximum = maximum is not None and (maximum < INT32_MAX or (fits and value > maximum))
    rule = f"an integer from {minimum} to {maximum}" if tell_maximum else f"an integer of at least {minimum}"
    raise rejected(parameter, value, rule, why)


def microseconds(value: Any) -> Any:
    """Return a time that came out of a calculation, such as `0.05 * 1e6`, as an integer; leaves anything else alone."""
    return int(value) if isinstance(value, (float, np.floating)) and np.isfinite(value) else value


def boolean(parameter: str, value: Any) -> None:
    """Raise PyTritonBadParameterError unless `value` is True or False, also as 1 or 0 or of numpy."""
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, Integral) and value in (0, 1)):
        return
    raise rejected(parameter, value, "True or False")


def seconds(parameter: str, value: Any, minimum: float = 0, *, optional: bool = False) -> None:
    """Raise PyTritonBadParameterError unless `value` is a number within the bounds, or None where that is no limit."""
    if value is None and optional:
        return
    is_number = isinstance(value, (float, Integral, np.floating)) and not isinstance(value, bool)
    if is_number and minimum <= value <= SECONDS_MAX:
        return
    # A limit of the clock is told only to those who passed it.
    tell_maximum = minimum or (is_number and value > SECONDS_MAX)
    rule = f"from {minimum} to {SECONDS_MAX:g}" if tell_maximum else f"{minimum} or more"
    or_none = ", or None for no limit" if optional else ""
    raise rejected(parameter, value, f"a number of seconds{', ' if not tell_maximum else ' '}{rule}{or_none}")


def is_list(value: Any) -> bool:
    """Tell whether `value` is a sequence of values, which a string is not meant to be."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def sizes(parameter: str, shape: Any, rule: str, minimum: int, *, free: bool) -> tuple[int, ...]:
    """Return a shape as a tuple of integers.

    Args:
        parameter: What to call the value in an error.
        shape: Any iterable of integers.
        rule: What is accepted, in words.
        minimum: The smallest size of an axis.
        free: Whether -1 stands for a size that may vary.

    Raises:
        PyTritonBadParameterError: It is no iterable, or one of its elements is no such size.
    """
    if not isinstance(shape, Iterable) or isinstance(shape, (str, bytes)):
        raise rejected(parameter, shape, rule, "One axis is written as (size,), with the comma.")
    found = tuple(shape)
    for size in found:
        is_integer = isinstance(size, Integral) and not isinstance(size, bool)
        if not is_integer or not (minimum <= size <= INT64_MAX or (free and size == -1)):
            raise rejected(parameter, found, rule, f"{size!r} is none of them.")
    return tuple(int(size) for size in found)

"""Checks of the values of fields, and the error that they raise."""

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from pytriton.exceptions import PyTritonBadParameterError

INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1
INT64_MAX = 2**63 - 1
# Triton adds the time in nanoseconds to its clock in 64 bits; 285 years do not overflow.
MICROSECONDS_MAX = 9 * 10**15
SECONDS_MAX = 9e9


def parameter_error(parameter: str, value: object, rule: str, advice: str = "") -> PyTritonBadParameterError:
    """Make the error for a value that breaks a rule; `rule` completes the sentence "it must be ..."."""
    text = f"{parameter}={value!r} is not accepted: it must be {rule}."
    return PyTritonBadParameterError(
        f"{text} {advice}" if advice else text, parameter=parameter, value=value, rule=f"must be {rule}"
    )


def check_integer(parameter: str, value: Any, minimum: int, maximum: int | None = None, *, why: str = "") -> None:
    """Raise PyTritonBadParameterError unless `value` is an integer within the bounds; True and False are refused."""
    fits = isinstance(value, Integral) and not isinstance(value, bool)
    if fits and value >= minimum and (maximum is None or value <= maximum):
        return
    # A maximum that comes only from the number of bits is mentioned only if it was exceeded.
    tell_maximum = maximum is not None and (maximum < INT32_MAX or (fits and value > maximum))
    rule = f"an integer from {minimum} to {maximum}" if tell_maximum else f"an integer of at least {minimum}"
    raise parameter_error(parameter, value, rule, why)


def to_microseconds(value: Any) -> Any:
    """Convert a float, such as `0.05 * 1e6`, to an integer; return other values unchanged."""
    return int(value) if isinstance(value, (float, np.floating)) and np.isfinite(value) else value


def check_bool(parameter: str, value: Any) -> None:
    """Raise PyTritonBadParameterError unless `value` is True or False, 1 or 0, or numpy's bool."""
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, Integral) and value in (0, 1)):
        return
    raise parameter_error(parameter, value, "True or False")


def check_seconds(parameter: str, value: Any, minimum: float = 0, *, optional: bool = False) -> None:
    """Raise PyTritonBadParameterError unless `value` is a number within the bounds; None is allowed if `optional`."""
    if value is None and optional:
        return
    is_number = isinstance(value, (float, Integral, np.floating)) and not isinstance(value, bool)
    if is_number and minimum <= value <= SECONDS_MAX:
        return
    # The limit of the clock is mentioned only if it was exceeded.
    tell_maximum = minimum or (is_number and value > SECONDS_MAX)
    rule = f"from {minimum} to {SECONDS_MAX:g}" if tell_maximum else f"{minimum} or more"
    or_none = ", or None for no limit" if optional else ""
    raise parameter_error(parameter, value, f"a number of seconds{', ' if not tell_maximum else ' '}{rule}{or_none}")


def is_list(value: Any) -> bool:
    """Return whether `value` is a sequence other than a string."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def to_shape(parameter: str, shape: Any, rule: str, minimum: int, *, allow_variable: bool) -> tuple[int, ...]:
    """Return a shape as a tuple of integers of at least `minimum`, or -1 if sizes may vary; errors quote `rule`."""
    if not isinstance(shape, Iterable) or isinstance(shape, (str, bytes)):
        raise parameter_error(parameter, shape, rule, "One axis is written as (size,), with the comma.")
    found = tuple(shape)
    for size in found:
        is_integer = isinstance(size, Integral) and not isinstance(size, bool)
        if not is_integer or not (minimum <= size <= INT64_MAX or (allow_variable and size == -1)):
            raise parameter_error(parameter, found, rule, f"{size!r} is none of them.")
    return tuple(int(size) for size in found)

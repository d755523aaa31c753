"""Checks of single values, and the one wording of their errors."""

from numbers import Integral
from typing import Any

from pytriton.exceptions import PyTritonBadParameterError

__all__ = ["integer", "rejected"]


def rejected(parameter: str, value: object, rule: str, advice: str = "") -> PyTritonBadParameterError:
    """Makes the error for a value that breaks a rule; `rule` completes "... must be"."""
    text = f"{parameter}={value!r} is not accepted: it must be {rule}."
    return PyTritonBadParameterError(
        f"{text} {advice}" if advice else text, parameter=parameter, value=value, rule=f"must be {rule}"
    )


def integer(parameter: str, value: Any, minimum: int, maximum: int | None = None, *, why: str = "") -> None:
    """Raises PyTritonBadParameterError unless `value` is an integer within the bounds; a bool is none."""
    fits = isinstance(value, Integral) and not isinstance(value, bool)
    if fits and value >= minimum and (maximum is None or value <= maximum):
        return
    rule = f"an integer of at least {minimum}" if maximum is None else f"an integer from {minimum} to {maximum}"
    raise rejected(parameter, value, rule, why)

from __future__ import annotations

import time
from typing import Any

import pytest

from pytriton.client._core.deadline import Deadline, check_timeout
from pytriton.client.exceptions import PyTritonClientValueError


def test_remaining_time_shrinks_to_zero() -> None:
    far = Deadline(1000)
    assert far.timeout_s == 1000
    assert 0 < far.remaining_s() <= 1000
    assert not far.is_over
    deadline = Deadline(0.05)
    time.sleep(0.06)
    assert deadline.remaining_s() == 0
    assert deadline.is_over


def test_usable_timeouts() -> None:
    assert check_timeout(2, "timeout_s") == 2.0
    # Sockets refuse infinity.
    assert 86400 < check_timeout(float("inf"), "timeout_s") < 2**31 / 1000


@pytest.mark.parametrize("value", [0, -1, float("nan"), "1", True, None])
def test_refused(value: Any) -> None:
    with pytest.raises(PyTritonClientValueError, match="Expected timeout_s to be a number of seconds above zero"):
        check_timeout(value, "timeout_s")

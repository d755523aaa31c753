"""What wants a server stopped, and the thread that waits for it."""

import math

import pytest

from pytriton.triton._stop_orders import StopOrders


@pytest.mark.parametrize("period_s", [1e300, math.inf])
def test_a_wait_without_end_ends_when_it_is_woken(period_s: float) -> None:
    orders = StopOrders()
    orders.wake()
    orders.wait(period_s)

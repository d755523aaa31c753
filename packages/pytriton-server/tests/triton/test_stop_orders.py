"""What wants a server stopped, and the thread that waits for it."""

import math
import signal
import threading

import pytest

from pytriton.server.lifecycle.stop_signals import StopSignals
from pytriton.triton._stop_orders import StopOrders
from support.waiting import PATIENCE_S, eventually


@pytest.mark.parametrize("period_s", [1e300, math.inf])
def test_a_wait_without_end_ends_when_it_is_woken(period_s: float) -> None:
    orders = StopOrders()
    orders.wake()
    orders.wait(period_s)


def test_a_wait_sees_a_signal_that_did_not_end_the_wait_of_the_system() -> None:
    orders = StopOrders()
    is_waiting, is_over = threading.Event(), threading.Event()

    def interrupt_another_thread() -> None:
        is_waiting.wait(PATIENCE_S)
        # As with one that comes right before the wait: Python knows of it, and the main thread sleeps on.
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        is_over.wait(PATIENCE_S)

    thread = threading.Thread(target=interrupt_another_thread)
    thread.start()
    with StopSignals(orders.on_signal):
        is_waiting.set()
        orders.wait(PATIENCE_S)
    is_over.set()
    thread.join()
    eventually(lambda: orders.signals == [signal.SIGTERM])
    assert orders.is_by_system

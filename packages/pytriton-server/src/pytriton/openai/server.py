"""What the command needs of the endpoints: where a model is asked, and a run until a signal ends it."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from pytriton.openai._models import UnfitModelError, read_model

__all__ = ["UnfitModelError", "endpoints_of", "run"]

_END_S = 5


def endpoints_of(config: Mapping[str, Any]) -> Sequence[str]:
    """Return the endpoints at which a model is asked."""
    served = read_model(config)
    served.chat_template.check()
    return served.endpoints


def run(app: FastAPI, listener: socket.socket) -> None:
    """Serve an application until SIGINT or SIGTERM; requests in flight have some seconds to end."""
    config = uvicorn.Config(
        app,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        # A caller could write those headers if no proxy is in front.
        proxy_headers=False,
        timeout_graceful_shutdown=_END_S,
    )
    server = uvicorn.Server(config)
    before = signal.getsignal(signal.SIGTERM)
    ordered: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        # A shutdown that is under way needs no second order. The exception of that order could be raised anywhere, such
        # as in a callback of the garbage collector, where Python prints and drops it.
        if server.should_exit:
            ordered.append(number)
        elif callable(before):
            before(number, frame)

    if callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)
    server.run(sockets=[listener])
    if ordered and callable(before):
        before(ordered[0], None)

"""Runs the application until a signal ends it."""

from __future__ import annotations

import logging
import socket

import uvicorn
from fastapi import FastAPI

__all__ = ["run"]

_END_S = 5


def run(app: FastAPI, listener: socket.socket) -> None:
    """Serve an application until SIGINT or SIGTERM; requests in flight have some seconds to end.

    Args:
        app: What `application` returned.
        listener: A socket that is bound, and need not listen yet.
    """
    config = uvicorn.Config(
        app,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        # Whoever stands before it may write those headers.
        proxy_headers=False,
        timeout_graceful_shutdown=_END_S,
    )
    uvicorn.Server(config).run(sockets=[listener])

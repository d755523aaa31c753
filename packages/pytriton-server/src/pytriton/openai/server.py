"""What the command needs of the endpoints: where a model is asked, and a run until a signal ends it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
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
    uvicorn.Server(config).run(sockets=[listener])

"""The endpoints of the OpenAI API in a thread, for tests that ask them."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from openai import OpenAI
from pytriton.openai import application
from pytriton.triton import Triton
from support.waiting import PATIENCE_S, eventually


class Served:
    """The endpoints in a thread of this process."""

    def __init__(self, server: Triton | FastAPI, **settings: Any) -> None:
        app = server if isinstance(server, FastAPI) else application(server, **settings)
        config = uvicorn.Config(app, port=0, log_level="warning")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self) -> Served:
        self._thread.start()
        eventually(lambda: self._server.started)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)

    def client(self, **settings: Any) -> OpenAI:
        return OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **settings})

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, (str, bytes)) else json.dumps(body)
        named = {"content-type": "application/json", **{name.replace("_", "-"): it for name, it in headers.items()}}
        return httpx.post(f"{self.url}{path}", content=content, headers=named, timeout=PATIENCE_S)


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)

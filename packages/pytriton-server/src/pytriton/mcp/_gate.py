"""Who may reach the tools: the key, the name that this server is called by, pages of other sites."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pytriton.guests.endpoints import given_key, is_of_another_site, is_right_key


class Gate:
    """An ASGI application that lets requests pass.

    Who has the key may come from anywhere. Without one, a page of another site must not reach the tools through
    somebody's browser: not by its own name (`Origin`), and not by a name that it has given to this address (`Host`).
    """

    def __init__(
        self, app: ASGIApp, api_key: str | None, hosts: Collection[str], cors_origins: Collection[str]
    ) -> None:
        self._app = app
        self._key = api_key
        self._hosts = {"localhost", *(host.lower().rstrip(".") for host in hosts)}
        self._cors_origins = cors_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request pass, or answer it."""
        if scope["type"] == "http" and (problem := self._problem(dict(scope["headers"]))) is not None:
            status, text = problem
            told = {"WWW-Authenticate": "Bearer"} if status == 401 else None
            error = {"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": text}}
            await JSONResponse(error, status, told)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _problem(self, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        if self._key is not None:
            key = given_key(headers)
            if is_right_key(key, self._key):
                return None
            got = "another key" if key else "none"
            return 401, f"Expected the header Authorization: Bearer KEY with the API key of this server; got {got}."
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._is_ours(host):
            return 421, f"This server is not known as {host!r}; --mcp-host, or --host of the command mcp, adds a name."
        if is_of_another_site(headers, self._cors_origins):
            return 403, "The page that sends this request is of another site, which is not among the cors_origins."
        return None

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            # Nobody can make a browser send another name as an IP address.
            return name.rstrip(".") in self._hosts or bool(ipaddress.ip_address(name))
        except ValueError:
            return False

"""Who may reach the console: the name it is called by, the page a request comes from, and a password.

The console calls and loads models with the token of a server. So a page of another site must not reach it through
somebody's browser: not by a form, a script or a websocket (`Origin`), and not by a name of its own for this address
(`Host`). Written against ASGI alone, so that it stands before whatever shows the pages.
"""

import asyncio
import hashlib
import hmac
import html
import ipaddress
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from typing import Any, TypeAlias
from urllib.parse import parse_qs, urlsplit

LEAST_PASSWORD = 8
"""The fewest characters of a password."""

MAX_BODY_BYTES = 64 << 20
"""The longest body of a request: a file that is tried on a model."""

_LOGIN = "/login"
_MAX_FORM_BYTES = 4 << 10
_SESSION_S = 12 * 3600.0
_MOST_SESSIONS = 1000
# After a wrong password, the same place has to wait this long; this many tries may wait.
_WRONG_DELAY_S = 1.0
_MOST_WAITING = 10
# An IPv6 network counts as one place, because its owner has all of its addresses.
_IPV6_NETWORK_BITS = 64
_SAFE_METHODS = ("GET", "HEAD")

_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; media-src 'self' data:; font-src 'self' data:; connect-src 'self'; "
    "object-src 'none'; base-uri 'self'; "
    "form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    # With no-referrer, browsers would send `Origin: null` from our own forms.
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class Gatekeeper:
    """An ASGI application before another one."""

    def __init__(
        self, app: App, hosts: Iterable[str], password: str | None, *, cookie: str, is_encrypted: bool = False
    ) -> None:
        self.app = app
        self._hosts = {"localhost", *(host.lower().rstrip(".") for host in hosts)}
        self._password = None if password is None else _digest(password)
        self._cookie = cookie
        self._secure = "; Secure" if is_encrypted else ""
        self._sessions: dict[bytes, float] = {}
        # By place of the caller: its attempts at the password.
        self._tries: dict[str, _Tries] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request on, or refuse it."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        problem = self._problem(scope)
        if problem:
            await _refuse(scope, receive, send, HTTPStatus.FORBIDDEN, problem)
        elif scope["type"] == "http" and scope["path"] == _LOGIN and self._password is not None:
            await self._log_in(scope, receive, send)
        elif not self._is_known(scope):
            if scope["type"] == "http" and scope["method"] in _SAFE_METHODS and scope["path"] == "/":
                await _answer(send, HTTPStatus.SEE_OTHER, b"", [(b"location", _LOGIN.encode())])
            else:
                await _refuse(scope, receive, send, HTTPStatus.UNAUTHORIZED, "log in first")
        else:
            await self.app(scope, _limited(receive), _with_headers(send))

    # ---- where a request comes from ---------------------------------------------------------------------------------

    def _problem(self, scope: Scope) -> str:
        """Return why a request must be refused whatever its password is."""
        hosts, origins = _values(scope, b"host"), _values(scope, b"origin")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return "the console is not known by this name; `--allowed-host` adds one"
        if origins:
            # The scheme is unknown behind a proxy that ends TLS; host and port have to be those of this console.
            return "" if len(origins) == 1 and _authority(origins[0]) == _authority(f"//{hosts[0]}") else _OTHER_SITE
        # Browsers always send the origin of a websocket or a form; a request without one does not come from a browser.
        if scope["type"] == "websocket" or scope["method"] not in _SAFE_METHODS:
            return _OTHER_SITE
        return ""

    def _is_ours(self, host: str) -> bool:
        name = _authority(f"//{host}")[0]
        if not name:
            return False
        try:
            # Nobody can make a browser send another name as an IP address.
            ipaddress.ip_address(name)
        except ValueError:
            return name.rstrip(".") in self._hosts
        return True

    # ---- who sends it -----------------------------------------------------------------------------------------------

    def _is_known(self, scope: Scope) -> bool:
        if self._password is None:
            return True
        found = False
        for value in _values(scope, b"cookie"):
            cookies: SimpleCookie = SimpleCookie()
            try:
                cookies.load(value)
            except CookieError:
                continue
            if self._cookie in cookies:
                until = self._sessions.get(_digest(cookies[self._cookie].value))
                found = found or (until is not None and time.monotonic() < until)
        return found

    async def _log_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in _SAFE_METHODS:
            await _answer(send, HTTPStatus.OK, _login_page())
            return
        body = await _read_body(receive)
        fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
        given = fields.get("password", [""])[0]
        # A user who is logged in cannot guess, and does not wait.
        is_right = self._compare(given) if self._is_known(scope) else await self._try(given, _place(scope))
        if is_right is None:
            await _answer(send, HTTPStatus.TOO_MANY_REQUESTS, _login_page("Too many try at the same time."))
            return
        if not is_right:
            await _answer(send, HTTPStatus.UNAUTHORIZED, _login_page("This is not the password."))
            return
        cookie = f"{self._cookie}={self._new_session()}; Path=/; HttpOnly; SameSite=Strict{self._secure}"
        await _answer(send, HTTPStatus.SEE_OTHER, b"", [(b"location", b"/"), (b"set-cookie", cookie.encode())])

    async def _try(self, given: str, place: str) -> bool | None:
        """Compare a password; `None` if too many are being tried from the same place."""
        tries = self._tries.setdefault(place, _Tries())
        if tries.waiting >= _MOST_WAITING:
            return None
        tries.waiting += 1
        try:
            # One try at a time: parallel tries are no faster.
            async with tries.lock:
                is_right = self._compare(given)
                if not is_right:
                    await asyncio.sleep(_WRONG_DELAY_S)
                return is_right
        finally:
            tries.waiting -= 1
            if not tries.waiting:
                del self._tries[place]

    def _compare(self, given: str) -> bool:
        return self._password is not None and hmac.compare_digest(_digest(given), self._password)

    def _new_session(self) -> str:
        now = time.monotonic()
        alive = {key: until for key, until in self._sessions.items() if until > now}
        while len(alive) >= _MOST_SESSIONS:
            del alive[min(alive, key=alive.__getitem__)]
        token = secrets.token_urlsafe(32)
        alive[_digest(token)] = now + _SESSION_S
        self._sessions = alive
        return token


class _Tries:
    """Passwords that are tried from one place at the same time."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.waiting = 0


_OTHER_SITE = "the request does not come from a page of this console"


def _place(scope: Scope) -> str:
    """Return the place that a request comes from: its address, or an IPv6 network."""
    host = str((scope.get("client") or ("",))[0])
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((int(address), _IPV6_NETWORK_BITS), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name]


def _authority(url: str) -> tuple[str, int | None]:
    """Return host and port of a URL; no host if it has none, or is not valid."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "", None
    if parts.username is not None or parts.path not in ("", "/"):
        return "", None
    # Browsers omit the default port of the scheme.
    return (parts.hostname or "").lower(), None if port in (80, 443) else port


async def _read_body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += bytes(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body") or len(body) > _MAX_FORM_BYTES:
            return body[:_MAX_FORM_BYTES]


def _limited(receive: Receive) -> Receive:
    """Cut off a body that is too long, as if its sender had gone away."""
    size = 0

    async def receive_some() -> Message:
        nonlocal size
        message = await receive()
        if message["type"] == "http.request":
            size += len(message.get("body", b""))
            if size > MAX_BODY_BYTES:
                return {"type": "http.disconnect"}
        return message

    return receive_some


def _with_headers(send: Send) -> Send:
    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
        await send(message)

    return send_more


async def _refuse(scope: Scope, receive: Receive, send: Send, status: HTTPStatus, reason: str) -> None:
    if scope["type"] == "websocket":
        # A refusal before the websocket is accepted gives the browser status 403.
        await receive()
        await send({"type": "websocket.close", "code": 1008})
        return
    await _answer(send, status, f"{reason}\n".encode(), [(b"content-type", b"text/plain; charset=utf-8")])


async def _answer(send: Send, status: HTTPStatus, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    given = list(headers) or [(b"content-type", b"text/html; charset=utf-8")]
    more = [(b"cache-control", b"no-store"), (b"content-length", str(len(body)).encode()), *_HEADERS]
    await send({"type": "http.response.start", "status": int(status), "headers": [*given, *more]})
    await send({"type": "http.response.body", "body": body})


def _login_page(problem: str = "") -> bytes:
    told = f'<p role="alert">{html.escape(problem)}</p>' if problem else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>pytriton console</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 1rem system-ui, sans-serif; display: grid; place-items: center; min-height: 90vh; margin: 0; }}
form {{ display: grid; gap: 1rem; width: min(20rem, 90vw); }}
input, button {{ font: inherit; padding: .6rem; }}
p {{ color: #c33; margin: 0; }}
</style></head><body>
<form method="post" action="{_LOGIN}">
<h1>pytriton console</h1>
{told}<label for="password">Password</label>
<input id="password" name="password" type="password" autocomplete="current-password" required autofocus>
<button>Log in</button>
</form></body></html>
""".encode()

"""Who may reach the console."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pytriton.console import gatekeeper
from pytriton.console.gatekeeper import Gatekeeper
from pytriton.guests.endpoints import is_loopback

PASSWORD = "correct horse"


async def page(scope: Any, receive: Any, send: Any) -> None:
    """Stands for the application: reads the body, and answers with its length."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        return
    size = 0
    while True:
        message = await receive()
        size += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body"):
            break
    if message["type"] == "http.disconnect":
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(size).encode()})


class Answer:
    def __init__(self, messages: list[Any]) -> None:
        self.kind = messages[0]["type"] if messages else "nothing"
        self.status = messages[0].get("status") if messages else None
        self.headers = dict(messages[0].get("headers", ())) if messages else {}
        self.body = b"".join(message.get("body", b"") for message in messages)


async def ask_async(
    keeper: Gatekeeper,
    method: str = "GET",
    path: str = "/",
    body: bytes = b"",
    client: str = "127.0.0.1",
    **headers: str,
) -> Answer:
    kind = "websocket" if method == "WS" else "http"
    given = {"host": "localhost:8003", **headers}
    scope = {
        "type": kind,
        "method": method,
        "path": path,
        "client": (client, 12345),
        "headers": [(name.encode(), value.encode()) for name, value in given.items() if value],
    }
    incoming: list[Any] = [{"type": "websocket.connect"}] if kind == "websocket" else []
    for start in range(0, len(body) + 1, 1 << 16):
        piece = body[start : start + (1 << 16)]
        incoming.append({"type": "http.request", "body": piece, "more_body": start + (1 << 16) <= len(body)})
    sent: list[Any] = []

    async def receive() -> Any:
        return incoming.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    await keeper(scope, receive, send)
    return Answer(sent)


def ask(keeper: Gatekeeper, method: str = "GET", path: str = "/", body: bytes = b"", **headers: str) -> Answer:
    return asyncio.run(ask_async(keeper, method, path, body, **headers))


def make(password: str | None = None, *hosts: str) -> Gatekeeper:
    return Gatekeeper(page, hosts, password, cookie="c")


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8003", "LOCALHOST:8003", "127.0.0.1:8003", "[::1]:8003", "10.1.2.3:80", "models.lan:8003"],
)
def test_names_that_are_ours(host: str) -> None:
    assert ask(make(None, "models.lan"), host=host).status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8003", "localhost.evil.example", "127.0.0.1.evil.example", "", "user@localhost",
     "localhost:port", "localhost/x", "127.1", "[::1", "0x7f000001"],
)  # fmt: skip
def test_other_names_are_refused(host: str) -> None:
    """As with DNS rebinding, where a name of somebody else leads to this address."""
    for method in ("GET", "POST", "WS"):
        answer = ask(make(), method, host=host, origin=f"http://{host}" if host else "")
        assert answer.status == 403 or answer.kind == "websocket.close"


@pytest.mark.parametrize("method", ["POST", "WS", "PUT", "DELETE"])
@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "http://localhost:8004", "http://localhost", "null", "", "http://localhost:8003.evil.example",
     "http://localhost:8003@evil.example"],
)  # fmt: skip
def test_pages_of_others_send_nothing(method: str, origin: str) -> None:
    answer = ask(make(), method, origin=origin)
    assert answer.status == 403 or answer.kind == "websocket.close"


def test_our_own_pages_do() -> None:
    assert ask(make(), "POST", body=b"abc", origin="http://localhost:8003").body == b"3"
    assert ask(make(), "WS", origin="http://localhost:8003").kind == "websocket.accept"
    # Behind a proxy that ends TLS.
    assert (
        ask(make(None, "models.lan"), "WS", host="models.lan", origin="https://models.lan").kind == "websocket.accept"
    )


def test_every_answer_forbids_frames_and_other_sites() -> None:
    for answer in (ask(make()), ask(make(PASSWORD), path="/login"), ask(make(), host="evil.example")):
        policy = answer.headers[b"content-security-policy"].decode()
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers[b"x-frame-options"] == b"DENY"


def test_nothing_is_shown_without_the_password() -> None:
    keeper = make(PASSWORD)
    answer = ask(keeper)
    assert (answer.status, answer.headers[b"location"]) == (303, b"/login")
    for path in ("/model", "/openapi.json", "/_nicegui/x"):
        assert ask(keeper, path=path).status == 401
    assert ask(keeper, "POST", "/x", origin="http://localhost:8003").status == 401
    assert ask(keeper, "WS", origin="http://localhost:8003").kind == "websocket.close"
    assert ask(keeper, cookie="c=forged").status == 303


def test_the_password_opens_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gatekeeper, "_WRONG_DELAY_S", 0.0)
    keeper = make(PASSWORD)
    origin = "http://localhost:8003"
    wrong = ask(keeper, "POST", "/login", b"password=wrong", origin=origin)
    assert (wrong.status, b"set-cookie" in wrong.headers) == (401, False)
    assert ask(keeper, "POST", "/login", b"password=correct+horse", origin="http://evil.example").status == 403
    right = ask(keeper, "POST", "/login", b"password=correct+horse", origin=origin)
    cookie = right.headers[b"set-cookie"].decode()
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert PASSWORD not in cookie
    mine = cookie.partition(";")[0]
    assert ask(keeper, cookie=f"other=1; {mine}").status == 200
    assert ask(keeper, "WS", origin=origin, cookie=mine).kind == "websocket.accept"
    monkeypatch.setattr("pytriton.console.gatekeeper.time.monotonic", lambda: 1e12)
    assert ask(keeper, cookie=mine).status == 303


def test_guesses_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    together = 0

    async def sleep(seconds: float) -> None:
        nonlocal together
        together += 1
        assert together == 1
        waited.append(seconds)
        for _ in range(20):
            await real_sleep(0)
        together -= 1

    real_sleep = asyncio.sleep
    monkeypatch.setattr("pytriton.console.gatekeeper.asyncio.sleep", sleep)

    async def guess() -> list[Answer]:
        keeper = make(PASSWORD)
        guesses = (
            ask_async(keeper, "POST", "/login", b"password=no", origin="http://localhost:8003") for _ in range(15)
        )
        return list(await asyncio.gather(*guesses))

    statuses = [answer.status for answer in asyncio.run(guess())]
    assert statuses.count(401) == 10
    assert statuses.count(429) == 5
    assert waited == [1.0] * 10


@pytest.mark.parametrize(
    ("guesser", "other", "is_let_in"),
    [
        ("10.0.0.1", "10.0.0.2", True),
        ("10.0.0.1", "10.0.0.1", False),
        ("10.0.0.1", "::ffff:10.0.0.1", False),
        ("2001:db8::1", "2001:db8::ffff", False),
        ("2001:db8::1", "2001:db8:0:1::1", True),
        ("2001:db8::1", "127.0.0.1", True),
    ],
)
def test_guesses_lock_out_nobody_from_elsewhere(
    guesser: str, other: str, is_let_in: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor somebody who is logged in."""
    released = asyncio.Event()

    async def sleep(_: float) -> None:
        await released.wait()

    monkeypatch.setattr("pytriton.console.gatekeeper.asyncio.sleep", sleep)

    async def guess() -> list[int | None]:
        keeper = make(PASSWORD)
        origin, right = "http://localhost:8003", b"password=correct+horse"
        first = await ask_async(keeper, "POST", "/login", right, client=other, origin=origin)
        session = first.headers[b"set-cookie"].decode().partition(";")[0]
        guesses = [
            asyncio.ensure_future(
                ask_async(keeper, "POST", "/login", b"password=no", client=guesser, origin=origin, cookie="c=forged")
            )
            for _ in range(15)
        ]
        # All of them wait, or are refused.
        while sum(each.done() for each in guesses) < 5:
            await asyncio.wait(guesses, timeout=0.01)
        again = await ask_async(keeper, "POST", "/login", right, client=other, origin=origin)
        within = await ask_async(keeper, "POST", "/login", right, client=guesser, origin=origin, cookie=session)
        shown = await ask_async(keeper, client=guesser, cookie=session)
        released.set()
        statuses = [each.status for each in await asyncio.gather(*guesses)]
        assert (statuses.count(401), statuses.count(429)) == (10, 5)
        assert not keeper._tries
        return [again.status, within.status, shown.status]

    assert asyncio.run(guess()) == [303 if is_let_in else 429, 303, 200]


def test_long_bodies_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gatekeeper, "MAX_BODY_BYTES", 1 << 17)
    assert ask(make(), "POST", body=bytes(1 << 17), origin="http://localhost:8003").status == 200
    assert ask(make(), "POST", body=bytes((1 << 17) + 1), origin="http://localhost:8003").kind == "nothing"


@pytest.mark.parametrize(
    ("address", "answer"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("127.9.9.9", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("models.lan", False)],
)  # fmt: skip
def test_loopback(address: str, answer: bool) -> None:
    assert is_loopback(address) is answer

"""Hostile HTTP requests, each made from a seed and its number alone."""

from __future__ import annotations

import gzip
import random
import zlib
from dataclasses import dataclass

from support.faults.front_end import bodies
from support.faults.front_end.values import INTEGERS

TOKEN_HEADER = "triton-access-token"


@dataclass(frozen=True)
class Case:
    """One exchange with the server: what is sent, and what comes after it."""

    kind: str
    """What was done to the request; for reports."""
    content: bytes
    """What goes over the connection."""
    cut: bool = False
    """Whether the connection is closed as soon as that is sent, so that no answer is waited for."""


@dataclass
class Request:
    """A request before it becomes bytes."""

    method: str
    target: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    chunked: bytes | None = None


def make(seed: int, number: int, token: str = "") -> Case:
    """Return the case of one number: the same for the same seed, whatever was made before."""
    rng = random.Random(f"{seed}/{number}")
    kind, request = _request(rng, token)
    twists: list[str] = [kind]
    if rng.random() < 0.35:
        twists.append(_twist(rng, request))
    content = _bytes(rng, request)
    roll = rng.random()
    if roll < 0.04:
        content, cut = content[: rng.randrange(len(content))], True
        twists.append("cut")
    elif roll < 0.07:
        cut = True
        twists.append("gone")
    else:
        cut = False
    if roll > 0.97:
        content = bodies.scramble(rng, content[:4000]) + content[4000:]
        twists.append("scrambled")
    elif roll > 0.95:
        content *= rng.choice([2, 3, 20]) if len(content) < 100_000 else 1
        twists.append("pipelined")
    return Case(" + ".join(twists), content, cut)


def _request(rng: random.Random, token: str) -> tuple[str, Request]:
    name = bodies.model(rng)
    version = rng.choice(["", "", "", "/versions/1", "/versions/2", "/versions/-1", "/versions/99999999999999999999"])
    path = f"/v2/models/{name}{version}"
    headers = [(b"Host", b"server"), (b"Content-Type", b"application/json")]
    roll = rng.random()
    if roll < 0.6:
        body, json_length = bodies.infer(rng, name)
        if json_length is not None:
            headers.append((b"Inference-Header-Content-Length", str(json_length).encode()))
        return "infer", Request("POST", f"{path}/infer", headers, body)
    if roll < 0.8:
        verb = rng.choice(["generate", "generate_stream"])
        return verb, Request("POST", f"{path}/{verb}", headers, bodies.generate(rng, name))
    if roll < 0.87:
        return "odd path", Request(rng.choice(["GET", "POST", "HEAD", "OPTIONS", "PUT"]), _path(rng), headers, b"")
    if roll < 0.92:
        target = rng.choice(
            ["/v2", "/v2/health/live", path, f"{path}/config", f"{path}/ready", f"{path}/stats", "/v2/models/stats"]
        )
        return "question", Request(rng.choice(["GET", "GET", "POST", "DELETE"]), target, headers, b"")
    if rng.random() < 0.8:
        headers.append((TOKEN_HEADER.encode(), token.encode()))
    return "settings", Request("POST", _settings_path(rng, name), headers, bodies.settings(rng))


def _settings_path(rng: random.Random, name: str) -> str:
    # No model of the test is loaded or unloaded: it would be gone for all that follows.
    region = rng.choice(["r", "r%00", "a" * 300, "%ff"])
    kind = rng.choice(["systemsharedmemory", "cudasharedmemory"])
    return rng.choice(
        [
            "/v2/repository/index",
            "/v2/repository/models/none/load",
            "/v2/repository/models/none/unload",
            f"/v2/{kind}/status",
            f"/v2/{kind}/region/{region}/status",
            f"/v2/{kind}/region/{region}/register",
            f"/v2/{kind}/region/{region}/unregister",
            f"/v2/{kind}/unregister",
            "/v2/trace/setting",
            f"/v2/models/{name}/trace/setting",
            "/v2/logging",
        ]
    )


def _path(rng: random.Random) -> str:
    piece = rng.choice(["%00", "%zz", "%", "%2f", "..", "//", "\xff", "a" * 5000, "?", "#", "*", ";", "\t", "%u0041"])
    query = rng.choice(
        ["", "", "?" + "a=b&" * rng.choice([1, 1000, 50_000]), "?" + "=" * 1000, "?%", "?a=%zz", "?" + "&" * 100_000]
    )
    form = rng.choice(
        [
            "/{}",
            "{}",
            "/v2/models/{}/infer",
            "/v2/models/batched/versions/{}/infer",
            "/v2/models/batched/{}",
            "/v2/{}",
            "http://h/{}",
        ]
    )
    return str(form.format(piece)) + query


def _twist(rng: random.Random, request: Request) -> str:
    """Return one thing of the request around the body, made otherwise; gives its name."""
    roll = rng.randrange(12)
    headers = request.headers
    if roll == 0:
        value = rng.choice(
            [*INTEGERS, "", "abc", "1 2", "0x10", "+1", "-0", len(request.body) + 1, len(request.body) * 2]
        )
        headers.append((b"Inference-Header-Content-Length", str(value).encode()))
        return f"json length {str(value)[:20]}"
    if roll == 1:
        value = rng.choice([*INTEGERS[:-1], "", "abc", "+5", "5, 5"])
        headers.append((b"Content-Length", str(value).encode()))
        return f"second content length {value}"
    if roll == 2:
        return _encode(rng, request)
    if roll == 3:
        kind = rng.choice(
            [
                "application/x-www-form-urlencoded",
                "multipart/form-data; boundary=x",
                "",
                "text/plain",
                "application/octet-stream",
                "a" * 5000,
            ]
        )
        headers[:] = [header for header in headers if header[0] != b"Content-Type"] + [(b"Content-Type", kind.encode())]
        if rng.random() < 0.2:
            request.body = rng.choice([b"a=b&", b"%41", b"&", b"=", b"%"]) * rng.choice([100, 10_000, 1_000_000])
        return f"content type {kind[:40]}"
    if roll == 4:
        count = rng.choice([10] * 10 + [1000] * 5 + [10_000] * 2 + [100_000])
        headers.extend((f"x-{index}".encode(), b"v") for index in range(count))
        return f"{count} headers"
    if roll == 5:
        size = rng.choice([1000] * 10 + [70_000] * 5 + [1_000_000] * 3 + [10_000_000])
        headers.append(rng.choice([(b"x", b"v" * size), (b"x" * size, b"v")]))
        return f"a header of {size}"
    if roll in (6, 7, 8):
        request.chunked = _chunked(rng, request.body)
        return "chunked"
    if roll == 9:
        headers.append(
            rng.choice(
                [
                    (
                        b"Accept-Encoding",
                        rng.choice([b"gzip", b"deflate", b"gzip, deflate", b"*;q=0", b"," * 10_000, b"br"]),
                    ),
                    (b"Expect", b"100-continue"),
                    (b"Connection", rng.choice([b"close", b"keep-alive", b"upgrade", b"x" * 1000])),
                    (b"traceparent", rng.choice([b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01", b"0", b"-" * 1000])),
                    (b"Upgrade", b"h2c"),
                    (b"Content-Encoding", rng.choice([b"gzip", b"deflate", b"br", b"identity"])),
                    (b"Transfer-Encoding", rng.choice([b"gzip", b"identity", b"chunked, chunked", b"x"])),
                    (b"Cookie", b"a=b; " * 5000),
                    (b"triton-request-timeout", str(rng.choice(INTEGERS)).encode()),
                ]
            )
        )
        return f"header {headers[-1][0].decode()}"
    if roll == 10:
        headers.append(
            rng.choice(
                [(b"", b""), (b"\0", b"\0"), (b"a b", b"c"), (b"a", b"b\r\n folded"), (b"a", b"\xff\xfe"), (b":", b":")]
            )
        )
        return "a malformed header"
    headers[:] = headers * (rng.choice([2, 50]) if len(headers) < 100 else 2)
    return "headers repeated"


def _encode(rng: random.Random, request: Request) -> str:
    name = rng.choice(["gzip", "deflate"])
    body = request.body
    bomb = rng.random() < 0.1
    if bomb:
        body = rng.choice([b"\0", b"[", b" ", b'{"a":']) * rng.choice([1_000_000] * 9 + [20_000_000])
    level = 1 if bomb else 6
    coded = gzip.compress(body, level, mtime=0) if name == "gzip" else zlib.compress(body, level)
    if rng.random() < 0.3:
        coded = bodies.scramble(rng, coded)
    if rng.random() < 0.2:
        coded = coded * rng.choice([2, 10]) if rng.random() < 0.5 else coded[: rng.randrange(len(coded) + 1)]
    request.body = coded
    request.headers.append((b"Content-Encoding", name.encode()))
    return f"{name} {'bomb' if bomb else ''}"


def _chunked(rng: random.Random, body: bytes) -> bytes:
    size = rng.choice([1, 2, 7, 100, 10_000])
    if rng.random() < 0.03:
        body, size = body + b" " * rng.choice([10_000, 100_000, 600_000]), 1
    elif len(body) > 5000:
        size = 10_000
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    extension = rng.choice([b"", b"", b"", b";a=b", b";" + b"x" * 5000]) if len(pieces) < 100 else b""
    coded = b"".join(b"%x%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces)
    roll = rng.random()
    if roll < 0.1:
        liar = rng.choice(
            [
                b"-1",
                b"ffffffffffffffff",
                b"7fffffffffffffff",
                b"ffffffff",
                b"zz",
                b"",
                b"0x5",
                b"1" * 1000,
                b"10000000000000000",
            ]
        )
        coded += liar + b"\r\nabc\r\n"
    end = rng.choice(
        [b"0\r\n\r\n"] * 6
        + [b"0\r\nTrailer: x\r\n\r\n", b"0\r\n" + b"t: v\r\n" * 10_000 + b"\r\n", b"", b"0\r\n", b"00000\r\n\r\n"]
    )
    return coded + end


def _bytes(rng: random.Random, request: Request) -> bytes:
    version = (
        "HTTP/1.1"
        if rng.random() < 0.97
        else rng.choice(["HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/9.9", "", "HTTQ/1.1"])
    )
    head = f"{request.method} {request.target} {version}\r\n".encode("latin-1")
    framing = (
        (b"Content-Length", str(len(request.body)).encode())
        if request.chunked is None
        else (b"Transfer-Encoding", b"chunked")
    )
    headers = [*request.headers, framing]
    if rng.random() < 0.1:
        rng.shuffle(headers)
    body = request.body if request.chunked is None else request.chunked
    return head + b"".join(b"%s: %s\r\n" % header for header in headers) + b"\r\n" + body

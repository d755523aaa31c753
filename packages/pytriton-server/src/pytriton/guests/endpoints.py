"""What guests share that answer HTTP at a port of their own: port, API key, pages of other sites, process."""

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pytriton.exceptions import PyTritonError

if TYPE_CHECKING:
    import uvicorn

    from pytriton.triton import Triton

__all__ = [
    "EndpointError", "bind_endpoint", "check_port", "find_address", "given_key", "is_loopback", "is_of_another_site",
    "is_right_key", "make_config", "read_key", "run_application", "run_endpoint_beside", "without_brackets",
]  # fmt: skip

# How many connections wait at a port until the application has started, and later until it takes them.
_BACKLOG = 2048
_END_S = 5
_OWN_SITES = ("none", "same-origin")


class EndpointError(PyTritonError):
    """The endpoints of a guest cannot be served; the text says why."""


def check_port(triton: "Triton", port: int, *, name: str, option: str) -> None:
    """Check that a port is none of the server's own.

    Raises:
        EndpointError: It is.
    """
    if port in triton.describe().ports:
        raise EndpointError(
            f"the port {port} is to be that of {name} and one of the server as well: choose another with {option} "
            "PORT; 0 takes a free one."
        )


def without_brackets(address: str) -> str:
    """Return an address as sockets take it: one of IPv6 without the brackets that it has in a URL."""
    return address.removeprefix("[").removesuffix("]")


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach an address."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(without_brackets(address)).is_loopback
    except ValueError:
        return False


def find_address(address: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Return family and socket address of an address or a name of this machine; one of IPv6 may be in brackets."""
    found = socket.getaddrinfo(without_brackets(address), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # IPv4 first, because callers without IPv6 reach it, too.
    family, _, _, _, target = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, target


def bind_endpoint(address: str, port: int, *, name: str, option: str, descriptor: int | None = None) -> socket.socket:
    """Return a socket that is bound, and does not listen yet; that of `descriptor`, if there is one.

    Raises:
        EndpointError: The port is taken, or not allowed.
    """
    if descriptor is not None:
        return socket.socket(fileno=descriptor)
    try:
        family, target = find_address(address, port)
    except OSError as error:
        raise EndpointError(
            f"{name} cannot listen at {address}: {error.strerror}. Give an address or a name of this machine, such as "
            "127.0.0.1 or ::1."
        ) from None
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
    except OSError as error:
        listener.close()
        raise EndpointError(
            f"{name} cannot listen at {address}, port {port}: {error.strerror}. Choose another with {option} PORT, or "
            f"--port of the command {option.strip('-')}; 0 takes a free one."
        ) from None
    return listener


def read_key(path: Path | None, variable: str) -> str | None:
    """Return the API key from a file, or from the environment; None if there is none.

    Raises:
        EndpointError: There is to be one, and it is empty or cannot be read.
    """
    if path is None:
        found = os.environ.get(variable)
        if found is not None and not found.strip():
            raise EndpointError(f"{variable} is empty: give it the key, or unset it to let everybody ask")
        return None if found is None else found.strip()
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise EndpointError(f"the API key cannot be read from {path}: {error}") from None
    if not key:
        raise EndpointError(f"the API key cannot be read from {path}: expected a line with the key, the file is empty")
    return key


def given_key(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the API key that a request brings, as ASGI has its headers; empty if there is none."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    # Azure's clients have a header of their own.
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"api-key", b"")


def is_right_key(given: bytes, key: str) -> bool:
    """Compare a key that was given with the right one, in a time that does not depend on either."""
    return hmac.compare_digest(given, key.encode())


def is_of_another_site(headers: Mapping[bytes, bytes], cors_origins: Collection[str]) -> bool:
    """Return whether a browser sends a request for a page of another site, whose origin is not allowed.

    Browsers send forms and texts to any address without a question beforehand. They say so by `Sec-Fetch-Site`; older
    ones do not, nor does any over plain HTTP to another machine, and then origin and host are compared.
    """
    origin = headers.get(b"origin", b"").decode("latin-1")
    if "*" in cors_origins or (origin and origin in cors_origins):
        return False
    fetch_site = headers.get(b"sec-fetch-site", b"").decode("latin-1").lower()
    if fetch_site:
        return fetch_site not in _OWN_SITES
    # The origin is "null" for what has none, such as a file or a frame in a sandbox.
    return bool(origin) and _authority(origin) != headers.get(b"host", b"").decode("latin-1").lower()


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def make_config(app: Any, end_s: int = _END_S) -> "uvicorn.Config":
    """Return how uvicorn serves the application of a guest; requests in flight have `end_s` seconds to end."""
    import uvicorn

    return uvicorn.Config(
        app,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        # A caller could write those headers if no proxy is in front.
        proxy_headers=False,
        timeout_graceful_shutdown=end_s,
    )


def run_application(
    app: Any,
    listener: socket.socket,
    *,
    title: str,
    path: str,
    has_key: bool,
    on_end: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Serve an ASGI application by uvicorn until SIGINT or SIGTERM, and print where.

    Args:
        app: The application.
        listener: A socket that is bound; it is closed in the end.
        title: What is served, for that line.
        path: Where callers find it.
        has_key: Whether they need an API key.
        on_end: Runs beside the end, and ends requests that would not end by themselves.

    Raises:
        KeyboardInterrupt: SIGINT has ended it.
    """
    import uvicorn

    from pytriton.server.garbage import collecting_what_is_new

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await asyncio.gather(super().shutdown(sockets), *(() if on_end is None else (on_end(),)))

    server = Server(make_config(app))
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
    with listener, collecting_what_is_new():
        # From now on, connections wait until the application has started.
        listener.listen(_BACKLOG)
        print(f"{title:<7} {_address_of(listener)}{path}" + (" (with an API key)" if has_key else ""), flush=True)
        server.run(sockets=[listener])
    if ordered and callable(before):
        before(ordered[0], None)


def _address_of(listener: socket.socket) -> str:
    """Return the URL of a socket, without a path."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def run_endpoint_beside(
    triton: "Triton", listener: socket.socket, command: str, options: Sequence[str], *, name: str
) -> Iterator[None]:
    """Run a command of `pytriton` with a socket for a server of this process, in another process, until the block ends.

    In this process, its work for each part of a stream would take the interpreter's lock from the callables. If it
    ends, it is started again with the same socket; if that repeats, it is given up, and the server says that it is not
    ready.
    """
    from pytriton.triton import run_beside

    program = [sys.executable, "-m", "pytriton", command, str(triton.grpc_url or triton.http_url)]
    program += ["--descriptor", str(listener.fileno()), *options]
    # If it is given up, connections are refused at once.
    with run_beside(triton, program, name=name, descriptors=[listener.fileno()], on_given_up=listener.close):
        yield

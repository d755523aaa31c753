"""Serves the console until a signal ends it."""

import contextlib
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

import uvicorn

from pytriton.client.management import TlsSettings, TritonUrl, check_tls, make_ssl_context
from pytriton.console.gatekeeper import LEAST_PASSWORD, Gatekeeper
from pytriton.console.pages import Console, make_app
from pytriton.console.trials import Caller
from pytriton.console.watcher import LogFile, MetricsSource, Watcher
from pytriton.exceptions import PyTritonBadParameterError
from pytriton.guests.endpoints import find_address, is_loopback, make_config, without_brackets
from pytriton.server.control.connect import connect

_METRICS_PORT = 8002
_END_S = 2


@dataclass(frozen=True, kw_only=True)
class ConsoleOptions:
    """How a console is served."""

    url: str  # where the server listens; HTTP
    metrics_url: str | None = None  # its page of metrics; by default port 8002 of the same host
    grpc_url: str | None = None  # where streams are asked for in place of HTTP
    access_token: str | None = None  # the token of the server
    ca_file: Path | None = None  # authorities to trust, for addresses with TLS
    address: str = "127.0.0.1"  # where the console listens
    port: int = 8003  # its port; 0 takes a free one
    allowed_hosts: Sequence[str] = ()  # names that it may be called by
    password: str | None = None  # what has to be entered; needed where others reach the address
    log_file: Path | None = None  # the log of the server


def serve_console(options: ConsoleOptions, tell: Callable[[str], None]) -> None:
    """Serve a console until SIGINT or SIGTERM."""
    password = _checked_password(options)
    url = TritonUrl.from_url(options.url)
    if url.protocol != "http":
        raise PyTritonBadParameterError(f"url must be an http:// address of the server; got {options.url!r}.")
    given_tls = None if options.ca_file is None else TlsSettings(ca_file=options.ca_file)
    tls = check_tls(given_tls, url) if url.is_encrypted else None
    control = connect(url, options.access_token, tls)
    console = Console(
        server_url=url.with_scheme,
        watcher=Watcher(control, MetricsSource(_metrics_url(options, url), make_ssl_context(given_tls))),
        control=control,
        caller=Caller(url.with_scheme, options.grpc_url or url.with_scheme, options.access_token, given_tls),
        log=None if options.log_file is None else LogFile(options.log_file),
    )
    with contextlib.closing(_listen(options.address, options.port)) as listener:
        port = listener.getsockname()[1]
        keeper = Gatekeeper(make_app(console), options.allowed_hosts, password, cookie=f"pytriton_console_{port}")
        address = without_brackets(options.address)
        shown = f"[{address}]" if ":" in address else address
        tell(f"http://{shown}:{port}")
        server = uvicorn.Server(make_config(keeper, _END_S))

        def end(_number: int, _frame: FrameType | None) -> None:
            server.should_exit = True

        # uvicorn replaces the handlers while it runs, and afterwards raises the signal again.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)
        server.run(sockets=[listener])


def _checked_password(options: ConsoleOptions) -> str | None:
    password = options.password
    if password is None and not is_loopback(options.address):
        raise PyTritonBadParameterError(
            f"password must be set where others reach the console, which calls and loads models; the address is "
            f"{options.address}. Set the variable PYTRITON_CONSOLE_PASSWORD, or give --password-file."
        )
    if password is not None and len(password) < LEAST_PASSWORD:
        raise PyTritonBadParameterError(f"password must have {LEAST_PASSWORD} characters or more; got {len(password)}.")
    return password


def _metrics_url(options: ConsoleOptions, url: TritonUrl) -> str:
    given = options.metrics_url
    if given is None:
        host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
        return f"http://{host}:{_METRICS_PORT}/metrics"
    full = given if "://" in given else f"http://{given}"
    try:
        parts = urlsplit(full)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_one = False
    if not is_one:
        raise PyTritonBadParameterError(f"metrics_url must be an http:// or https:// address; got {given!r}.")
    return full


def _listen(address: str, port: int) -> socket.socket:
    family, target = find_address(address, port)
    return socket.create_server(target, family=family)

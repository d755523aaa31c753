"""Clients in programs that gevent or eventlet have patched: a call gives way to other green threads, or says so."""

from __future__ import annotations

import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trustme

from pytriton.model_config import ModelConfig
from pytriton.triton import Triton
from support.callables import X, Y, identity, thrice
from support.clients import address_of
from support.faults.relay import Relay
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S

PROGRAM = """
import sys
library, address, authority, sign = sys.argv[1:]
if library == "gevent":
    from gevent import monkey, sleep, spawn
    monkey.patch_all()
else:
    import eventlet
    from eventlet import sleep, spawn
    eventlet.monkey_patch()
import faulthandler, os, warnings
import numpy as np
from pytriton.client import DecoupledModelClient, FuturesModelClient, ModelClient, TlsSettings
from pytriton.client.exceptions import PyTritonClientValueError

faulthandler.dump_traceback_later(120, exit=True)
settings = {"tls": TlsSettings(authority)} if address.startswith("https") else {}
x = np.ones(2, np.float32)
is_blocking = library == "eventlet" and address.startswith("grpc")

def look():
    while not os.path.exists(sign):
        sleep(0.01)
    print("gives way", flush=True)

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    client = ModelClient(address, "held", **settings)
assert is_blocking == any("each call stops all green threads" in str(it.message) for it in told), told
spawn(look)
same, futures = ModelClient(address, "same", **settings), FuturesModelClient(address, "same", **settings)
with client, same, futures:
    if not is_blocking:
        client.infer_sample(x)
    assert (same.infer_sample(x)["y"] == x).all()
    assert (futures.infer_sample(x).result(60)["y"] == x).all()
with DecoupledModelClient(address, "count", **settings) as streams:
    try:
        results = streams.infer_sample(x)
        assert len(list(results)) == 3
        next(streams.infer_sample(x))  # left early
        assert len(list(streams.infer_sample(x))) == 3
        assert not is_blocking
    except PyTritonClientValueError as error:
        assert is_blocking and "would wait for ever" in str(error), error
print("done", flush=True)
"""


class Served(NamedTuple):
    """A server, with TLS before it, and a model that waits."""

    triton: Triton
    relay: Relay
    authority: Path
    has_begun: threading.Event
    go_on: threading.Event


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    has_begun, go_on = threading.Event(), threading.Event()

    def held(requests: Any) -> Any:
        has_begun.set()
        assert go_on.wait(PATIENCE_S)
        return identity(requests)

    signs = trustme.CA()
    signs.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    signs.issue_cert("127.0.0.1").configure_cert(context)
    with short_home(), ExitStack() as stack:
        triton = Triton(config=local_config())
        for name, infer in (("held", held), ("same", identity), ("count", thrice)):
            triton.bind(name, infer, X, Y, config=ModelConfig(batching=False, decoupled=name == "count"))
        stack.enter_context(running(triton))
        relay = stack.enter_context(Relay(str(triton.http_url), context))
        stack.callback(go_on.set)
        yield Served(triton, relay, tmp_path / "ca.pem", has_begun, go_on)


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
@pytest.mark.parametrize("scheme", ["http", "https", "grpc"])
def test_green_threads(served: Served, tmp_path: Path, scheme: str, library: str) -> None:
    pytest.importorskip(library)
    https = f"https://127.0.0.1:{served.relay.port}"
    address = https if scheme == "https" else address_of(served.triton, scheme)
    sign = tmp_path / "sign"
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, library, address, str(served.authority), str(sign)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        if (scheme, library) != ("grpc", "eventlet"):
            assert served.has_begun.wait(PATIENCE_S)
            sign.touch()
            assert process.stdout.readline() == "gives way\n"
            served.go_on.set()
        written = process.stdout.read()
        assert process.wait(PATIENCE_S) == 0, written
    assert written == "done\n"

"""The garbage collector may run anywhere, and end streams and clients there: no call waits for ever.

The rule: what a finalizer, a callback of a weak reference or the end of a generator can reach takes no lock that the
thread it interrupts may have. It takes a reentrant one, leaves its work to the holder, or to a thread of its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from pytriton.triton import Triton, TritonSecurityConfig
from support.clients import address_of, serving_all
from support.waiting import PATIENCE_S

TOKEN = "of-this-test"

# The collector runs nowhere but where a lock has just been taken, in every function of the client.
PROGRAM = """
import faulthandler, gc, random, sys, threading
import numpy as np
from pytriton.client import DecoupledModelClient, FuturesModelClient, ModelClient
import pytriton.client._futures_pool, pytriton.client._grpc.transport, pytriton.client._http.transport
import pytriton.client._shm.plans, pytriton.client._shm.pool

chance = random.Random(1)

class Collecting:
    def __init__(self, lock):
        self.lock = lock

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *_):
        self.lock.release()

    def acquire(self, *args, **options):
        taken = self.lock.acquire(*args, **options)
        # Not each time, or a lock that is always taken first would see it all.
        if chance.random() < 0.3:
            gc.collect()
        return taken

    def __getattr__(self, name):
        return getattr(self.lock, name)

class Threading:
    Lock = staticmethod(lambda: Collecting(threading.Lock()))
    RLock = staticmethod(lambda: Collecting(threading.RLock()))

    def __getattr__(self, name):
        return getattr(threading, name)

for name, module in list(sys.modules.items()):
    if name.startswith("pytriton.client") and hasattr(module, "threading"):
        module.threading = Threading()

class Session:
    def __init__(self, held):
        self.held, self.me = held, self

address, shared_memory = sys.argv[1], sys.argv[2] == "shm"
faulthandler.dump_traceback_later(120, exit=True)
options = {"shared_memory": True, "access_token": sys.argv[4]} if shared_memory else {}
x = np.ones(1000, np.float32)
with DecoupledModelClient(address, "count", **options) as streams, ModelClient(address, "same", **options) as client:
    next(streams.infer_sample(x=x)), client.infer_sample(x=x)
    gc.collect()
    gc.freeze()  # so that a collection takes no time
    gc.disable()
    for number in range(int(sys.argv[3])):
        session = Session(streams.infer_sample(x=x))
        next(session.held)
        del session
        assert len(list(streams.infer_sample(x=x))) == 3
        session = Session(client.infer_sample(x=x))
        del session
        futures = FuturesModelClient.from_existing_client(client)
        calls = [futures.infer_sample(x=x) for _ in range(3)]
        futures.me = futures
        del futures
        assert all((call.result(60)["y"] == x).all() for call in calls)
print("done")
"""


@pytest.fixture(scope="module")
def served() -> Iterator[Triton]:
    with serving_all(security_config=TritonSecurityConfig(access_token=TOKEN)) as triton:
        yield triton


# Streams over HTTP are JSON: they have no shared memory.
@pytest.mark.parametrize(("protocol", "way"), [("http", "plain"), ("grpc", "plain"), ("grpc", "shm")])
def test_streams_and_clients_end_anywhere(served: Triton, protocol: str, way: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, address_of(served, protocol), way, "30", TOKEN],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr

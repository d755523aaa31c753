"""Try `softmax_app.py` out on two Ray nodes, which both run on this machine: `python two_nodes.py`.

It starts the nodes, deploys one replica on each, asks them as any KServe v2 server is asked, kills one replica under
load, waits until there are two again, and ends everything.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
import tritonclient.http
from ray import serve
from ray.cluster_utils import Cluster
from softmax_app import softmax

from pytriton.client import ModelClient
from pytriton.client.exceptions import PyTritonClientError
from pytriton.ray import GRPC_SERVICER, application

CALLERS = 4
TIMEOUT_S = 600.0
OBJECT_STORE_BYTES = 80 << 20
LOGITS = np.array([[0, 1, 2]], np.float32)


@contextmanager
def two_nodes() -> Iterator[None]:
    """Start two nodes of one processor each, and connect to them; in the end nothing of them is left."""
    cluster = Cluster()
    node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES}
    # Without Ray's dashboard, autoscaler and collector of logs, for which such a cluster has no use.
    node |= {"include_dashboard": False, "no_monitor": True, "include_log_monitor": False}
    try:
        for _ in range(2):
            cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def replicas() -> int:
    """Return how many replicas run."""
    states = serve.status().applications["softmax"].deployments["triton"].replica_states
    return sum(count for state, count in states.items() if state == "RUNNING")


def wait(what: str, is_there: Any) -> None:
    """Wait for something."""
    deadline = time.monotonic() + TIMEOUT_S
    while not is_there():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {TIMEOUT_S:g} s for {what}")
        time.sleep(0.1)


def kill_a_replica() -> None:
    """Kill the process of one replica."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = f"RAY_TMPDIR={os.environ['RAY_TMPDIR']}\0".encode() in (folder / "environ").read_bytes()
            if is_ours and (folder / "cmdline").read_bytes().startswith(b"ray::ServeReplica:softmax:triton"):
                os.kill(int(folder.name), signal.SIGKILL)
                return
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # somebody else's, or it has ended


def call_for_ever(url: str, number: int, over: list[bool]) -> Counter[str]:
    """Call until it is over; tell how often there was the right answer, a wrong one, or an error."""
    outcomes: Counter[str] = Counter()
    with ModelClient(url, "softmax") as client:
        while not over:
            try:
                found = client.infer_batch(LOGITS * number)["output"]
            except PyTritonClientError:
                outcomes["told"] += 1
            else:
                expected = np.exp(LOGITS * number) / np.exp(LOGITS * number).sum()
                outcomes["right" if np.allclose(found, expected, atol=1e-5) else "wrong"] += 1
    return outcomes


def main() -> None:
    """Deploy, ask, kill, tell."""
    # Below those that the system gives away, so that nobody has them by the time that the nodes are there.
    http_port, grpc_port = random.sample(range(20_000, 30_000), 2)
    with two_nodes():
        serve.start(
            # On a real cluster every node has proxies; here they would want the same ports.
            proxy_location="HeadOnly",
            http_options={"host": "127.0.0.1", "port": http_port},
            grpc_options={"port": grpc_port, "grpc_servicer_functions": [GRPC_SERVICER]},
        )
        try:
            serve.run(application(softmax, num_replicas=2, max_replicas_per_node=1), name="softmax")
            urls = f"http://127.0.0.1:{http_port}", f"grpc://127.0.0.1:{grpc_port}"
            for url in urls:
                with ModelClient(url, "softmax") as client:
                    print([round(float(value), 3) for value in client.infer_batch(LOGITS)["output"][0]])
            with tritonclient.http.InferenceServerClient(f"127.0.0.1:{http_port}") as plain:
                print("ready:", plain.is_model_ready("softmax"))
            over: list[bool] = []
            with ThreadPoolExecutor(CALLERS) as pool:
                calls = [pool.submit(call_for_ever, urls[0], number, over) for number in range(CALLERS)]
                try:
                    kill_a_replica()
                    wait("the end of a replica", lambda: replicas() < 2)
                    wait("two replicas", lambda: replicas() == 2)
                finally:
                    over.append(True)
                outcomes = sum((call.result() for call in calls), Counter[str]())
            print("a replica was killed, and replaced:", *(f"{count} {name}" for name, count in outcomes.items()))
        finally:
            serve.shutdown()


if __name__ == "__main__":
    # Ray keeps logs and sockets there; the name has to be short, as the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        os.environ.setdefault("RAY_TMPDIR", folder)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        main()

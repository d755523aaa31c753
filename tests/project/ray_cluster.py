"""A cluster of Ray that is changed under load: a program that `test_ray_serve.py` runs, which prints what callers saw.

One replica becomes two as the load asks for it, both are replaced by those of another version of the model, and the
node of one is killed with all that runs there, and another node takes its place. Meanwhile both clients call over both
protocols, and count right answers, wrong ones, and errors.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import ray
import tritonclient.grpc
import tritonclient.http
from geventhttpclient.response import HTTPConnectionClosed
from numpy.typing import NDArray
from ray import serve
from ray.cluster_utils import Cluster
from tritonclient.utils import InferenceServerException

from pytriton.client import ModelClient
from pytriton.client.exceptions import PyTritonClientError
from pytriton.decorators import Shape, model
from pytriton.ray import GRPC_SERVICER, application

TIMEOUT_S = 900.0
NAME = "scale"
Rows = Annotated[NDArray[np.float32], Shape("batch", 1)]
NODE: dict[str, Any] = {
    "num_cpus": 2,
    "object_store_memory": 80 << 20,
    # Without Ray's dashboard, autoscaler and collector of logs, for which such a cluster has no use.
    "include_dashboard": False,
    "no_monitor": True,
    "include_log_monitor": False,
}


def version(factor: int) -> Any:
    """Return a model that multiplies by a number, by which its version can be told."""

    @model(batched=True, max_batch_size=8)
    def scale(rows: Rows) -> Rows:
        product: Rows = rows * np.float32(factor)
        return product

    return scale


def with_model_client(url: str) -> Callable[[float], float]:
    client = ModelClient(url, NAME, init_timeout_s=TIMEOUT_S, inference_timeout_s=TIMEOUT_S)

    def ask(value: float) -> float:
        return float(client.infer_batch(np.array([[value]], np.float32))["output"][0, 0])

    return ask


def with_tritonclient(kind: Any, address: str, **options: Any) -> Callable[[float], float]:
    client = kind.InferenceServerClient(address, **options)

    def ask(value: float) -> float:
        given = kind.InferInput("rows", [1, 1], "FP32").set_data_from_numpy(np.array([[value]], np.float32))
        return float(client.infer(NAME, [given]).as_numpy("output")[0, 0])

    return ask


class Load:
    """Callers that call until it is over."""

    def __init__(self, http_port: int, grpc_port: int) -> None:
        http, grpc = f"127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}"
        made = {
            "ModelClient, HTTP": lambda: with_model_client(f"http://{http}"),
            "ModelClient, gRPC": lambda: with_model_client(f"grpc://{grpc}"),
            "tritonclient, HTTP": lambda: with_tritonclient(
                tritonclient.http, http, connection_timeout=TIMEOUT_S, network_timeout=TIMEOUT_S
            ),
            "tritonclient, gRPC": lambda: with_tritonclient(tritonclient.grpc, grpc),
        }
        self.callers = list(made)
        self.counts = {name: Counter[str]() for name in made}
        self.errors: Counter[str] = Counter()
        self._expected = {1}
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(len(made))
        self._calls = [
            self._pool.submit(self._call, name, make, 10.0 ** (1 + number))
            for number, (name, make) in enumerate(made.items())
        ]

    def _call(self, name: str, make: Callable[[], Callable[[float], float]], value: float) -> None:
        ask = make()
        while not self._over.is_set():
            # A caller has values of its own, so that an answer to another one is told from its own.
            value += 1 if value % 10 < 5 else -5
            expected = set(self._expected)
            try:
                found = ask(value)
            # tritonclient tells of a connection that HAProxy has closed in the words of its library.
            except (PyTritonClientError, InferenceServerException, HTTPConnectionClosed) as error:
                outcome = "told"
                self.errors[f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:160]}"] += 1
            else:
                outcome = "right" if found / value in expected | self._expected else "wrong"
                self.counts[name][f"version {found / value:g}"] += 1
            self.counts[name][outcome] += 1

    def expect(self, *factors: int) -> None:
        """Say which versions may answer what is asked from now on."""
        self._expected = set(factors)

    def wait(self, what: str, is_there: Callable[[], bool], more: int = 3) -> None:
        """Wait for something, and then until everybody has been answered some more times."""
        deadline = time.monotonic() + TIMEOUT_S
        since: dict[str, int] | None = None
        while since is None or any(self.counts[name]["right"] < since[name] + more for name in self.callers):
            for call in self._calls:
                if call.done():
                    call.result()
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {TIMEOUT_S:g} s for {what}: {self.counts}, {self.errors}")
            if since is None and is_there():
                since = {name: self.counts[name]["right"] for name in self.callers}
            time.sleep(0.05)

    def tell(self, what: str) -> None:
        """Print what callers saw since the last time."""
        total = sum(self.counts.values(), Counter[str]())
        print(f"{what}:", *(f"{total[name]} {name}" for name in ("right", "told", "wrong")), flush=True)
        print("   ", {name: dict(count) for name, count in self.counts.items()}, file=sys.stderr)
        print("   ", dict(self.errors), file=sys.stderr, flush=True)
        for count in (*self.counts.values(), self.errors):
            count.clear()

    def end(self) -> None:
        """Let the callers end after the call that they are in."""
        self._over.set()
        for call in self._calls:
            call.result()


def replicas() -> int:
    """Return how many replicas run."""
    states = serve.status().applications[NAME].deployments["triton"].replica_states
    return sum(count for state, count in states.items() if state == "RUNNING")


def below(root: int) -> list[int]:
    """Return a process and all that it has started, and those have."""
    found = [root]
    for pid in found:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has ended
            if parent == pid:
                found.append(int(folder.name))
    return found


def kill(node: Any) -> None:
    """Kill a node with everything on it, as if its machine were gone."""
    pids = {pid for kinds in node.all_processes.values() for each in kinds for pid in below(each.process.pid)}
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it ended with another one


def main() -> None:
    """Deploy, change, tell."""
    with socket.socket() as http, socket.socket() as grpc:
        for holder in (http, grpc):
            holder.bind(("127.0.0.1", 0))
        http_port, grpc_port = (holder.getsockname()[1] for holder in (http, grpc))
    cluster = Cluster()
    try:
        cluster.add_node(**NODE)
        other = cluster.add_node(**NODE)
        ray.init(address=cluster.address, log_to_driver=False)
        serve.start(
            # On a real cluster every node has proxies; here they would want the same ports.
            proxy_location="HeadOnly",
            http_options={"host": "127.0.0.1", "port": http_port},
            grpc_options={"port": grpc_port, "grpc_servicer_functions": [GRPC_SERVICER]},
        )
        options: dict[str, Any] = {"max_replicas_per_node": 1, "health_check_period_s": 2}
        autoscaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 0.5}
        autoscaling |= {"upscale_delay_s": 0, "downscale_delay_s": 10 * TIMEOUT_S}
        serve.run(application(version(1), autoscaling_config=autoscaling, **options), name=NAME)
        assert replicas() == 1
        load = Load(http_port, grpc_port)
        try:
            load.wait("a second replica", lambda: replicas() == 2)
            load.tell("from one replica to two")

            load.expect(1, 2)
            serve.run(application(version(2), num_replicas=2, **options), name=NAME)
            load.expect(2)
            load.wait("two replicas of the next version", lambda: replicas() == 2)
            load.tell("from one version to the next")

            kill(other)
            load.wait("the end of a replica", lambda: replicas() < 2)
            cluster.add_node(**NODE)
            load.wait("another replica", lambda: replicas() == 2)
            load.tell("a node was killed, and replaced")
        finally:
            load.end()
        serve.shutdown()  # type: ignore[no-untyped-call,unused-ignore]
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call,unused-ignore]


if __name__ == "__main__":
    # Ray keeps logs and sockets there; the name has to be short, as the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        os.environ["RAY_TMPDIR"] = folder
        main()

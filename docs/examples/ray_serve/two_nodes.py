"""Try `softmax_app.py` out on two Ray nodes, which both run on this machine: `python two_nodes.py`.

It starts the nodes, deploys one replica on each, asks them, prints what the Triton of each replica did, and ends
everything again.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster
from softmax_app import Softmax

REQUESTS = 64
TIMEOUT_S = 600.0
OBJECT_STORE_BYTES = 80 << 20


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


def statistics_by_node(handle: Any, nodes: int) -> list[dict[str, int]]:
    """Ask until every replica has told what it did: a handle picks one of them for each call."""
    found: dict[str, dict[str, int]] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while len(found) < nodes:
        if time.monotonic() > deadline:
            raise TimeoutError(f"heard of {len(found)} of {nodes} replicas in {TIMEOUT_S:g} s")
        told = handle.statistics.remote().result(timeout_s=TIMEOUT_S)
        found[told.pop("node")] = told
    return list(found.values())


def main() -> None:
    """Deploy, ask, tell."""
    with two_nodes():
        # Callers here have a handle. On a real cluster every node answers HTTP, too; these would want the same port.
        serve.start(proxy_location="Disabled")
        try:
            handle = serve.run(Softmax.options(max_replicas_per_node=1).bind(), name="softmax", route_prefix=None)
            probabilities = handle.predict.remote([0.0, 1.0, 2.0]).result(timeout_s=TIMEOUT_S)
            print([round(value, 3) for value in probabilities])
            # A handle leaves out a replica that is slow to say how busy it is, as one is that has just started.
            replicas = statistics_by_node(handle, 2)
            deadline = time.monotonic() + TIMEOUT_S
            while min(replica["requests"] for replica in replicas) == 0 and time.monotonic() < deadline:
                responses = [handle.predict.remote([0.0, number / 10]) for number in range(REQUESTS)]
                answers = [response.result(timeout_s=TIMEOUT_S) for response in responses]
                print("all different:", len({answer[1] for answer in answers}) == REQUESTS)
                replicas = statistics_by_node(handle, 2)
            for replica in replicas:
                print(f"a node: {replica['requests']} requests in {replica['calls']} calls")
        finally:
            serve.shutdown()


if __name__ == "__main__":
    # Ray keeps logs and sockets there; the name has to be short, as the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        os.environ.setdefault("RAY_TMPDIR", folder)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        main()

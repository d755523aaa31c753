"""The servers that are compared."""

from __future__ import annotations

from benchmarks.peers.base import Peer
from benchmarks.peers.nvidia_pytriton import NvidiaPyTriton, NvidiaPyTritonEnvironment
from benchmarks.peers.ours import Ours, OursAsleep, OursInProcesses
from benchmarks.peers.tritonserver import Limit, OursForPythonModels, TritonPythonBackend
from benchmarks.peers.web import web_peers

__all__ = ["Peer", "all_peers"]


def all_peers(peer_python: str | None = None) -> list[Peer]:
    """Return every peer, ours first; `peer_python` is the interpreter for those that need an old one."""
    shared = NvidiaPyTritonEnvironment(peer_python)
    repositories = [Limit(), TritonPythonBackend(shared), OursForPythonModels()]
    return [Ours(), OursAsleep(), OursInProcesses(), *repositories, NvidiaPyTriton(shared), *web_peers()]

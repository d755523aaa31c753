"""What is measured; a module for each kind of work."""

from __future__ import annotations

from benchmarks.workloads.base import Bench, Workload
from benchmarks.workloads.growth import Growth, Instances, Workers
from benchmarks.workloads.grpc import Grpc
from benchmarks.workloads.large import Large
from benchmarks.workloads.payloads import Stream, Strings
from benchmarks.workloads.programs import Client, InProcess, Start
from benchmarks.workloads.tiny import Batching, Tiny, Varied

__all__ = ["WORKLOADS", "Bench", "Workload"]

_ALL: tuple[Workload, ...] = (
    Tiny(),
    Varied(),
    Batching(),
    Large(),
    Grpc(),
    Strings(),
    Stream(),
    Instances(),
    Workers(),
    InProcess(),
    Client(),
    Start(),
    Growth(),
)
WORKLOADS = {workload.name: workload for workload in _ALL}

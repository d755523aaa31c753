"""What is measured; a module for each kind of work."""

from __future__ import annotations

from benchmarks.workloads.base import Bench, Workload
from benchmarks.workloads.tiny import Batching, Tiny

__all__ = ["WORKLOADS", "Bench", "Workload"]

WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in (Tiny(), Batching())}

"""How many processors this process may use."""

from __future__ import annotations

import os
from pathlib import Path

# The quota of the container or machine, as its own processes see it: control groups version 2, and version 1.
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_OLD_QUOTA = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
_OLD_PERIOD = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


def usable_processors() -> float:
    """Return how many processors this process may use at once, by its affinity and its container's quota."""
    try:
        usable = float(len(os.sched_getaffinity(0)))
    except OSError:  # a sandbox may deny the question
        usable = float(os.cpu_count() or 1)
    for files in ((_QUOTA,), (_OLD_QUOTA, _OLD_PERIOD)):
        try:
            quota, period = " ".join(file.read_text() for file in files).split()
            if quota != "max" and int(quota) > 0:
                usable = min(usable, int(quota) / int(period))
        except (OSError, ValueError):
            continue  # no such file, or another form: no quota is set
    return usable

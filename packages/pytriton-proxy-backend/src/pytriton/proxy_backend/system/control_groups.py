"""What the control group of this process says: limits of a container, and who was killed for want of memory."""

from __future__ import annotations

from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_MACHINE = Path("/proc/vmstat")
_KILLS = "oom_kill"


def read_own_group(controller: str, name: str, old_name: str) -> str | None:
    """Return the content of a file of this process's control group, by its name in version 2 or 1; None without one."""
    try:
        lines = _OWN.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = ["0::/", f"1:{controller}:/"]
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top, file = (_GROUPS / controller, old_name) if controllers else (_GROUPS, name)
        # In a container the path is often the one outside of it, while the own group appears at the top.
        for folder in (top / path.lstrip("/"), top):
            try:
                return (folder / file).read_text(encoding="utf-8")
            except OSError:
                continue
    return None


class MemoryKills:
    """Finds out whether the system has killed processes for lack of memory since this was made."""

    def __init__(self) -> None:
        self._before = self._count()

    def explain(self) -> str:
        """Return who probably sent a SIGKILL that this program did not send."""
        (group_before, machine_before), (group, machine) = self._before, self._count()
        if group is not None and group_before is not None and group > group_before:
            return "from the system, as the memory that its container (control group) may have was used up"
        if machine is not None and machine_before is not None and machine > machine_before:
            return "most likely from the system, which has killed processes since then, as memory was used up"
        if group is None or machine is None:
            return "from another program, or from the system, as memory was used up"
        return "from another program: the system has killed no process for want of memory"

    @staticmethod
    def _count() -> tuple[int | None, int | None]:
        try:
            machine = _MACHINE.read_text(encoding="utf-8")
        except OSError:
            machine = None
        return _kills_in(read_own_group("memory", "memory.events", "memory.oom_control")), _kills_in(machine)


def _kills_in(text: str | None) -> int | None:
    for line in (text or "").splitlines():
        name, _, count = line.partition(" ")
        if name == _KILLS and count.strip().isdecimal():
            return int(count)
    return None

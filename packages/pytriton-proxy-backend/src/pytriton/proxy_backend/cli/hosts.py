"""`hosts`: starts the processes of converted models."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from .app import add_hosts_endpoint, duration, hosts_endpoint, memory_budget
from .logs import add_service_options, start_log


def register(commands: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "hosts",
        help="start the processes of converted models when a tritonserver asks for them",
        description="Starts processes for converted models when tritonserver loads these, as the server's user, and "
        "ends them when it unloads them; until SIGINT or SIGTERM. Requests in flight are finished then.",
    )
    add_hosts_endpoint(parser)
    parser.add_argument(
        "--idle",
        type=duration,
        metavar="TIME",
        help="without a request for so long, such as 90s, 5m or 1h, the process of an instance ends, and the next "
        "request starts it again; a model's own parameter PYTRITON_IDLE_TIMEOUT_S counts more",
    )
    parser.add_argument(
        "--memory-budget",
        type=memory_budget,
        metavar="SIZE",
        help="how much memory the processes may take together (PSS), such as 2GiB: those of the instances that were "
        "used least recently end for one that needs it, and their next request starts them again",
    )
    add_service_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Start processes until a signal comes."""
    # Imported late, because the other commands do not need it.
    from ..forkserver_main import early_forkserver

    with early_forkserver():
        return _serve(arguments)


def _serve(arguments: argparse.Namespace) -> int:
    # Imported after the fork, because the forkserver does not need it.
    from ..hosting.supervisor import HostSupervisor, check_folder
    from ..process.budget import MemoryBudget
    from ..system.stop_signals import StopSignals

    start_log(arguments.log_level, arguments.log_format)
    folder = hosts_endpoint(arguments)
    check_folder(folder)
    supervisor = HostSupervisor(
        folder,
        "Choose another folder (--endpoint) that this user may write to.",
        idle_timeout_s=arguments.idle,
        budget=MemoryBudget(arguments.memory_budget),
    )
    stop = StopSignals()
    with stop:
        supervisor.start()
        try:
            logging.getLogger(__name__).info("Processes of converted models can be had at %s", supervisor.socket_path)
            stop.wanted.wait()
        finally:
            supervisor.close(arguments.stop_timeout)
    return 0

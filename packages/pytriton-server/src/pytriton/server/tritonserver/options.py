"""Options that not every tritonserver has: those of releases after 2.51, and those of parts that a build may lack.

An option that a server does not know ends it before it logs anything but its usage. So where one of these is set, the
server is asked for its `--help` first, which takes it some 12 ms. The others are asked for when a server has ended.
"""

from __future__ import annotations

import functools
import logging
import re
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path

from pytriton.exceptions import PyTritonValidationError
from pytriton.server.settings.config import TritonConfig
from pytriton.server.tritonserver.binary import TritonServerBinary
from pytriton.server.tritonserver.process import shim_command
from pytriton.server.tritonserver.version import describe_server_version

OLDEST_SERVER = "2.44"
"""The oldest server that the native proxy works with: the first with version 1.19 of the API for backends."""

NEEDED_SERVER = {
    "grpc_max_response_pool_size": "tritonserver 2.56 or later",
    "grpc_infer_thread_count": "tritonserver 2.57 or later",
    "http_max_input_size": "tritonserver 2.59 or later",
    "allow_client_shm": "tritonserver 2.68 or later",
    "trace_config": "a tritonserver that was built with tracing",
}
"""Options of `TritonConfig` that not every server knows, each with the servers that do."""

_DEADLINE_S = 60.0
# A server that is too old for the proxy says this: the loader's words, or the proxy's own.
_TOO_OLD = re.compile(r"libtriton_pytriton\.so: undefined symbol: (\w+)|this server has (backend API [\d.]+)")
_OPTION = re.compile(r"^\s+--([a-z0-9][a-z0-9-]*)", re.MULTILINE)

logger = logging.getLogger(__name__)


def check_options(config: TritonConfig, binary: TritonServerBinary) -> None:
    """Check that the server knows the options that are set."""
    given = [name for name in NEEDED_SERVER if getattr(config, name) is not None]
    known = known_options(binary) if given else frozenset[str]()
    if not known:
        # The program cannot be asked, or does not answer; the start of the server will show why.
        return
    for name in given:
        option = name.replace("_", "-")
        if option not in known:
            raise PyTritonValidationError(
                f"TritonConfig.{name} needs {NEEDED_SERVER[name]}; {binary.executable} is "
                f"{describe_server_version(binary)} and has no option --{option}. Leave it unset, or name "
                "another server with PYTRITON_TRITONSERVER_DIR.",
                expected=NEEDED_SERVER[name],
                received=str(binary.executable),
            )


def explain_misfit(binary: TritonServerBinary, command: Iterable[str], said: Iterable[str]) -> str | None:
    """Explain what a server that could not serve lacks; None if it lacks nothing."""
    found = next((found for line in said if (found := _TOO_OLD.search(line))), None)
    if found is not None:
        missing = f"lacks the function {found[1]}" if found[1] else f"has {found[2]}"
    else:
        known = known_options(binary)
        given = [part.partition("=")[0] for part in command if part.startswith("--")]
        unknown = [option for option in dict.fromkeys(given) if option.removeprefix("--") not in known]
        if not known or not unknown:
            return None
        missing = f"has no option {' and no option '.join(unknown)}"
    return (
        f"{binary.executable} cannot take these models and settings: it {missing}. Expected tritonserver "
        f"{OLDEST_SERVER} or later, and settings that it knows; received {describe_server_version(binary)}. Name "
        "another server with PYTRITON_TRITONSERVER_DIR or server_dir=, or none to take the one that comes with "
        "pytriton-server."
    )


def known_options(binary: TritonServerBinary) -> frozenset[str]:
    """Return the names of all options of a server, such as `http-port`; none if it does not list them."""
    try:
        status = binary.executable.stat()
    except OSError:
        # The start that follows reports what is wrong.
        return frozenset()
    return _listed_options(binary.executable, status.st_ino, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=8)
def _listed_options(executable: Path, *_identity: int) -> frozenset[str]:
    try:
        done = subprocess.run(
            [*shim_command(signal.SIGKILL), str(executable), "--help"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_DEADLINE_S,
            check=False,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.debug("%s does not list its options: %s", executable, error)
        return frozenset()
    # The exit code of --help is 1.
    return frozenset(_OPTION.findall(done.stdout))

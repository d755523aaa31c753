"""The guard: a library in tritonserver that refuses requests which would end it. `GuardConfig`."""

import dataclasses
import enum
import os
import re
import stat
import struct
from pathlib import Path

from pytriton.exceptions import PyTritonValidationError
from pytriton.proxy_backend import LibraryNotFoundError, guard_library_path

GUARD_VARIABLE = "PYTRITON_GUARD"
"""Environment variable with the settings where `Triton` gets none: `name=value` with commas between them, or `off`."""
CORS_VARIABLE = "PYTRITON_GUARD_CORS"
"""Environment variable with the origins whose pages may read answers, blanks between them; `*` is any."""

_OFF = "off"
_ELF_MAGIC = b"\x7fELF"
_ELF_64 = 2
_PT_INTERP = 3


class Part(enum.Enum):
    """What the guard consists of; the value is the name of its folder in `native/guard`."""

    REFUSE = "refuse"
    HANDOVER = "handover"
    FRONTEND = "frontend"
    ANSWERS = "answers"
    WORKAROUNDS = "workarounds"


_SWITCHED = (Part.REFUSE, Part.HANDOVER, Part.FRONTEND)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """For `Triton(guard=...)`: what one request may ask of tritonserver before it is refused.

    The bundled tritonserver 2.51 can be ended by a single request: a shape that nobody can hold, JSON that nests too
    deep, a body in too many chunks, and more. The guard is a library of this package that is loaded into tritonserver
    and answers such requests with an error. The limits are far above what honest callers send.

    Raises:
        PyTritonValidationError: A number is out of its range.
    """

    enabled: bool = True
    """Whether the guard is loaded."""
    max_request_bytes: int = 2**31 - 1
    """Largest body of an HTTP request, and largest size that a compressed request may grow to, in bytes. tritonserver
    2.51 itself takes no more than the default over HTTP."""
    max_input_bytes: int | None = None
    """Most bytes that the shapes of one request's inputs may ask for, over HTTP and gRPC, tensors in shared memory
    included. None: as `max_in_flight_bytes`."""
    max_in_flight_bytes: int | None = None
    """Memory for the bodies of all HTTP requests that are being read or served, in bytes, and likewise for all inputs;
    requests that need more are refused with UNAVAILABLE (503). None: half of what the machine or container has."""
    max_json_depth: int = 512
    """How deep the JSON of a request may nest."""
    head_timeout_s: int = 60
    """How long the first line and the header fields of an HTTP request may take to come, in seconds. A caller that is
    slower is answered 408, and its connection is closed."""
    thread_stack_bytes: int = 256 << 20
    """Stack of each of the server's threads, in bytes. It is reserved and not used, except by bodies of very many
    pieces; 0 leaves it as the system has it, which makes fewer pieces the limit."""
    grpc_front_end: bool = True
    """Whether inference over gRPC is served by a front end of the guard's own, which callers cannot end by cancelling
    calls. False leaves it to Triton's."""
    generate_extra_names: bool = False
    """Whether a request to `generate` may have names that are no inputs, as Triton alone takes them, where the model is
    one under `@model` that reads no parameters. False refuses them (400): a misspelt optional input would be left out
    without a word."""
    page: bool = True
    """Whether `GET /` and `GET /docs` show a page about the server: its models that are ready, their tensors, and how
    they are called. It leaves the models out where the endpoints `metadata` or `model-config` are protected."""
    refuse: bool = True
    """Whether the guard refuses requests. False hands each request to tritonserver as it came, so that the limits above
    hold nobody. The access token stays off the command line."""
    handover: bool = True
    """Whether the server can hand its sockets over to one that replaces it, as `Triton.replace_server` does."""
    frontend: bool = True
    """Whether the guard speeds up the front end for HTTP, notices callers who leave, and serves inference over gRPC.
    False leaves both protocols to Triton's own front ends, as `grpc_front_end=False` does for one."""

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise _bad(field.name, value, "True or False")
                continue
            least = least_of(field)
            if value is None and field.default is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
                raise _bad(field.name, value, f"a whole number of at least {least}")

    def to_text(self) -> str:
        """Return the value of the variable `PYTRITON_GUARD` that says the same."""
        if not self.enabled:
            return _OFF
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[1:]}
        return ",".join(f"{name}={int(value)}" for name, value in values.items() if value is not None)


def least_of(field: "dataclasses.Field[object]") -> int:
    """Return the smallest number that a field of `GuardConfig` may have."""
    return 0 if field.name == "thread_stack_bytes" else 1


@dataclasses.dataclass(frozen=True)
class Guard:
    """The guard of one server."""

    library: Path | None = None  # the file to load; None if it cannot be loaded, or is not wanted
    settings: str = ""  # the value of `PYTRITON_GUARD` for it
    obstacle: str | None = None  # why it cannot be loaded; None if nothing is in the way, or it is not wanted

    @property
    def parts_off(self) -> frozenset[Part]:
        """The parts that its settings switch off."""
        values = dict(re.findall(r"(\w+)=(\d+)", self.settings))
        return frozenset(part for part in _SWITCHED if int(values.get(part.value, "1")) == 0)


def find_guard(config: GuardConfig | None, executable: Path) -> Guard:
    """Find out whether and with what settings a server is guarded; without a config as the environment says."""
    settings = os.environ.get(GUARD_VARIABLE, "").strip() if config is None else config.to_text()
    if settings == _OFF:
        return Guard()
    obstacle = _obstacle(executable)
    if obstacle is not None:
        return Guard(obstacle=obstacle)
    try:
        return Guard(guard_library_path(), settings)
    except LibraryNotFoundError as error:
        return Guard(obstacle=str(error))


def _obstacle(executable: Path) -> str | None:
    """Say why the loader would not load a library into a program that the environment names."""
    try:
        mode = executable.stat().st_mode
        if mode & (stat.S_ISUID | stat.S_ISGID):
            return f"{executable} runs as another user or group (setuid, setgid), which ignores LD_PRELOAD"
        if "security.capability" in os.listxattr(executable):
            return f"{executable} has capabilities of its own (setcap), which ignores LD_PRELOAD"
        with executable.open("rb") as file:
            head = file.read(64)
            if head[:4] == _ELF_MAGIC and not _has_interpreter(head, file.read(4096)):
                return f"{executable} is linked statically, which knows no LD_PRELOAD"
    except OSError as error:
        return f"{executable} cannot be looked at: {error.strerror}"
    return None


def _has_interpreter(head: bytes, rest: bytes) -> bool:
    """Tell whether a program is loaded by the dynamic loader. Other than 64-bit files count as such."""
    if len(head) < 64 or head[4] != _ELF_64:
        return True
    offset, (size, count) = struct.unpack_from("<Q", head, 32)[0], struct.unpack_from("<HH", head, 54)
    table = (head + rest)[offset : offset + size * count]
    return any(
        struct.unpack_from("<I", table, start)[0] == _PT_INTERP for start in range(0, len(table) - 3, size or 56)
    )


def _bad(name: str, value: object, expected: str) -> PyTritonValidationError:
    return PyTritonValidationError(
        f"GuardConfig.{name} must be {expected}; got {value!r}.", expected=expected, received=value
    )

"""What passes between a program and its worker processes: one job, then lines of JSON in both directions.

The job is a file in memory, whose descriptor the new process inherits with one end of a socket. On the socket the child
says how far it is, and its parent says when to stop; the end of the socket is the end of the other one. What the child
writes to its output is text for people, and no part of this.

The file has a part for the counters of the child in front of the text, at which it is read: so its parent has what was
counted up to the last moment, however the child has ended. FORMAT counts for the layout of the counters as well.

=========== ================================================================================================
from child  with
=========== ================================================================================================
hello       format, pid, python: the first message
configured  config, changed: of a Python model, what its `auto_complete_config` has made of the configuration
parent      keeps, reason: of a parent of workers, what its forks have: "weights", or "imports" and why no weights
ready       the factory, or `initialize` of a Python model, has returned, and the warm-up is over
golden      answer: an output of the warm-up, see `runtime.results.golden`; before `ready`, where the job asks for it
attached    value: whether it is attached to the proxy backend
metrics     value, first, last: a part of what its code has registered with prometheus_client, see `process.metrics`
alive       nothing: sent every second
record      a record of the log, see `runtime.records`; lost: how many before it were left out
cut         nothing: the proxy backend has closed the connection, and the callable is still busy
failed      stage ("load", "warm-up", "golden", "worker", "refused", "unrecoverable"), error, text, traceback: the
            last but for done; "refused" is what no other process of the same job could do, such as a protocol of
            another version
finalizing  nothing: of a Python model, its requests are answered, and `finalize` comes next; before `done`
done        nothing: it has detached, and the interpreter ends
=========== ================================================================================================

A parent of workers says hello, parent, ready, record and failed alone. It is asked for forks over a socket of its own,
see `process.forkserver`, for which FORMAT counts as well.

The parent sends `stop` with timeout_s, and after `configured` `serve`, with the fields of `PythonModelServing`.

Parent and child may have different versions of this package as long as FORMAT is the same. A new field of a job has a
default, which is what earlier versions did, and a field that has it is not sent: so an older child does all that it
knows, and refuses a job that asks for more. Whatever else changes takes a new FORMAT.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from typing import Any

from ..errors import ProtocolError

FORMAT = 4
MAX_LINE_BYTES = 1 << 20


class JobRefusedError(ProtocolError):
    """A job is for another version of this package; the text says which, and what to do."""


@dataclass(frozen=True, kw_only=True)
class WorkerJob:
    """What a worker process is to do; all of it is JSON."""

    target: str  # what makes the callable: `module:name` or `file.py:name`
    model: str  # the model's description, as `render_description` makes it
    endpoint: str  # where the proxy backend listens
    name: str  # what the worker calls itself
    args: Sequence[Any] = ()  # positional arguments of the factory
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # its keyword arguments
    sys_path: Sequence[str] = ()  # where modules are looked for beside the places of the interpreter
    log_level: int = 20  # the least level of log records of pytriton that the parent wants
    root_log_level: int = 20  # the least level of all other log records
    warmups: Sequence[Mapping[str, Any]] = ()  # the model's warm-up: the fields of `ModelWarmup`
    trace_config: Sequence[str] = ()  # where spans go; empty for nowhere
    # How the outputs of the warm-up are compared: `tolerance`, and `known`, what `golden` messages of an earlier
    # process had, empty in the first one; `None` where they are not compared.
    golden: Mapping[str, Any] | None = None

    def to_text(self) -> str:
        """Return the job as the child reads it."""
        return json.dumps({"format": FORMAT, **_asked(self)})

    @classmethod
    def from_text(cls, text: str) -> WorkerJob:
        """Read a job.

        Raises:
            JobRefusedError: If it has another format, or a field that this version does not know.
        """
        found = json.loads(text)
        format_ = found.pop("format", None)
        if format_ != FORMAT:
            raise JobRefusedError(
                f"expected a job of format {FORMAT}, received {format_!r}: the interpreter of the worker process and "
                "that of its parent must have the same version of pytriton-proxy-backend"
            )
        _check_known(cls, found)
        return cls(**found)


@dataclass(frozen=True, kw_only=True)
class PythonModelServing:
    """One instance of a Python model."""

    args: Mapping[str, str]  # what its `initialize` is given
    endpoint: str  # where the proxy backend listens for it
    name: str  # what the worker calls itself


@dataclass(frozen=True, kw_only=True)
class PythonModelJob:
    """What a host is to do, the process that runs the `model.py` of a Python model; all of it is JSON."""

    model_name: str
    model_version: int
    model_file: str  # its `model.py`, whatever its name
    model_dir: str  # its folder, that of `config.pbtxt`
    model_config: str  # its configuration, as Triton gives it
    auto_complete: bool = False  # whether to complete that, and to wait for `serve` then
    # The instance to serve; `None` where the configuration is to be completed first.
    serve: PythonModelServing | None = None
    log_level: int = 20  # the least level of log records that the parent wants

    @property
    def endpoint(self) -> str:
        """The endpoint of the proxy backend; empty while it is not known."""
        return "" if self.serve is None else self.serve.endpoint

    def to_text(self) -> str:
        """Return the job as the child reads it."""
        return json.dumps({"format": FORMAT, "python_model": _asked(self)})

    @classmethod
    def from_fields(cls, found: Mapping[str, Any]) -> PythonModelJob:
        """Read the fields under `python_model` in a job.

        Raises:
            JobRefusedError: If it has a field that this version does not know.
            ProtocolError: If one is missing.
        """
        _check_known(cls, found)
        try:
            serve = found.get("serve")
            return cls(**{**found, "serve": None if serve is None else PythonModelServing(**serve)})
        except TypeError as error:
            raise ProtocolError(f"the job of a Python model cannot be read: {error}") from error


Job = WorkerJob | PythonModelJob
"""The job of a worker process."""


def _asked(job: Job) -> dict[str, Any]:
    """Return the fields of a job, without those that have their default: an older version may not know them."""
    values = asdict(job)
    return {each.name: values[each.name] for each in fields(job) if getattr(job, each.name) != _default(each)}


def _default(described: Field[Any]) -> object:
    return described.default if described.default_factory is MISSING else described.default_factory()


def _check_known(job: type[Job], found: Mapping[str, Any]) -> None:
    unknown = sorted(found.keys() - {each.name for each in fields(job)})
    if unknown:
        raise JobRefusedError(
            f"the job asks for {', '.join(unknown)}, which the worker's version of pytriton-proxy-backend does not "
            "know: install the version of the parent's interpreter in that of the worker process"
        )


def encode_message(kind: str, **fields: object) -> bytes:
    """Make one line."""
    return json.dumps({"kind": kind, **fields}).encode() + b"\n"


class LineReader:
    """Puts lines together that come in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Take the next piece, and return the messages that it completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise ProtocolError(f"a message of more than {MAX_LINE_BYTES} bytes came")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
                raise ProtocolError(f"expected a line of JSON with a kind, got {line[:80]!r}")
            messages.append(message)
        return messages


def find_not_json(value: object, where: str) -> str | None:
    """Return the place and the value of something that JSON cannot carry; `None` if there is nothing."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return None
    if type(value) is float:
        return None if math.isfinite(value) else f"{where} is {value!r}"
    if isinstance(value, (list, tuple)):
        places = [find_not_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return next((place for place in places if place is not None), None)
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                return f"{where} has the key {key!r}, which is a {type(key).__name__}"
            place = find_not_json(item, f"{where}[{key!r}]")
            if place is not None:
                return place
        return None
    return f"{where} is {_shortened(value)}, which is a {type(value).__module__}.{type(value).__qualname__}"


def _shortened(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."

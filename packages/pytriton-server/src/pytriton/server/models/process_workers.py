"""Inference callables in processes of their own: `ProcessWorker` describes them, and each becomes worker processes."""

import contextvars
import dataclasses
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytriton.exceptions import PyTritonBadParameterError, PyTritonRuntimeError, PyTritonUnrecoverableError
from pytriton.model_config import ModelConfig
from pytriton.model_config.dtypes import array_dtype
from pytriton.proxy_backend import ModelSpec, TargetError, Worker, WorkerProcessError
from pytriton.proxy_backend.description import render_description
from pytriton.proxy_backend.process.child import Launch
from pytriton.proxy_backend.process.log import WORKER_LOGGER
from pytriton.proxy_backend.process.messages import WorkerJob, find_not_json
from pytriton.proxy_backend.process.parent_process import ForkedWorkerProcess, ParentProcesses
from pytriton.proxy_backend.process.scaling import ScalingLimits
from pytriton.proxy_backend.process.worker_process import RestartLimits, WorkerProcess
from pytriton.proxy_backend.worker.loading import target_of

Environment = Mapping[str, "str | Sequence[str | None] | None"] | Sequence[Mapping[str, str | None]]
"""Variables by name; a list has one value for each copy. Or one mapping for each copy."""

PROCESS, PARENT = "process", "parent"
SLEEPS = (PROCESS, PARENT)
"""What is said of a model that sleeps: all of its processes end, or one stays to fork them from."""

MAX_COPIES = 1024
"""How many processes one `ProcessWorker` may be."""

_GOLDEN_TOLERANCE = 1e-3

# A process may be silent for this much longer than a batch may take.
_SILENCE_MARGIN_S = 2.0


class TritonWorkerError(PyTritonRuntimeError):
    """A process worker does not work, and is not started again.

    Args:
        error: What is known of it.
    """

    def __init__(self, error: WorkerProcessError) -> None:
        super().__init__(str(error))
        self.reason = error.reason
        """The text without the lines that it wrote."""
        self.model_name = error.model_name
        """The model that it was to serve."""
        self.number = error.number
        """Which of the model's workers it is, from 0 on."""
        self.exit_code = error.exit_code
        """How its last process ended: negative for a signal, None if unknown."""
        self.crashes = error.crashes
        """How many processes ended by themselves within `crash_window_s`."""
        self.log_lines = error.log_lines
        """The last lines that its processes wrote, oldest first."""

    def __reduce__(self) -> tuple[Any, ...]:
        facts = {
            "reason": self.reason,
            "model_name": self.model_name,
            "number": self.number,
            "exit_code": self.exit_code,
            "crashes": self.crashes,
            "log_lines": self.log_lines,
        }
        return _rebuilt, (self.message, facts)


class ProcessWorker:
    """Inference callables in processes of their own, to be given to `Triton.bind` in place of a callable.

    Each process calls the factory once, and serves the model with the callable that it returns. It shares neither an
    interpreter lock nor a crash with this process or with other copies. One that ends by itself is started again after
    0.1 s, and after twice the time whenever it ends again, up to 5 s.

    The processes end with this one, however it ends. What they write goes to the loggers
    `pytriton.worker.<model>.<number>`.

    Args:
        factory: What makes the callable: `"package.module:name"`, `"path/to/file.py:name"`, or a function or class at
            the level of a module. A factory in the script that is being run is found if the script guards what it does
            with `if __name__ == "__main__":`. What is decorated with `@model` is no factory, but serves itself, a class
            by an object that is made in the process.
        args: Positional arguments of the factory. They are sent as JSON.
        kwargs: Keyword arguments of the factory, likewise.
        copies: How many processes, at most where `min_copies` is given.
        env: Environment variables beside those of this process: by name, where a list has one value for each copy
            (`{"CUDA_VISIBLE_DEVICES": ["0", "1"]}`); or one mapping for each copy. None takes a variable away.
        python: Another Python interpreter. It needs `pytriton-proxy-backend`, for the decorators `pytriton-decorators`,
            and what the model needs.
        working_dir: The working directory, where modules are looked for as well; that of this process by default.
        max_crashes: A worker whose processes have ended by themselves so many times within `crash_window_s` is given
            up.
        crash_window_s: The time in which they count, in seconds.
        start_timeout_s: How long factory and warm-up of one process may take, in seconds.
        idle_timeout_s: When no request has come for so long, in seconds, the processes end, and their memory is free;
            the model stays ready, and its next request starts them again, and waits for them as long as
            `ModelConfig.attach_timeout_s` says. None lets them run, unless the server has a memory budget and another
            model needs their memory.
        sleep: What stays of it meanwhile: "process" is nothing; "parent" is a process that has imported what the
            factory needs, and has called it where that does no harm to forks, from which the others are forked: they
            start many times faster, also after a crash, and share its memory.
        starts_asleep: Whether it sleeps from the beginning on: no process is started before the first request. So a
            factory that fails is not found out by `bind`; whoever waits is told, and the next request tries it again.
            Where more models are bound before a start than a memory budget has room for, the others start so anyway.
        pinned: Whether they run on although another model needs their memory, see `Triton(memory_budget=...)`.
        min_copies: So many processes run at least. One more starts while requests wait in Triton's queue for longer
            than `grow_queue_s`, up to `copies`; one ends when one fewer would have done for `shrink_calm_s`. It
            finishes its requests first. None is all of `copies`, always.
        grow_queue_s: The time in the queue, in the mean, above which there are too few, in seconds. What the batcher of
            the model waits for more requests comes on top.
        shrink_calm_s: How long there have to be too many until one ends, in seconds.
        golden: Whether a process that is started again, after a sleep or an end, has to give the answers to
            `ModelConfig.model_warmup` that the first one gave, before it serves callers; one that does not counts as
            one that has ended. A number is how far fractions may be apart, by itself and as a part of the first; True
            is 0.001. All else has to be equal.

    Raises:
        PyTritonBadParameterError: An argument is not acceptable; says which one, and why.
    """

    def __init__(
        self,
        factory: "str | Callable[..., Any]",
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        copies: int = 1,
        env: Environment | None = None,
        python: "str | os.PathLike[str] | None" = None,
        working_dir: "str | os.PathLike[str] | None" = None,
        max_crashes: int = 5,
        crash_window_s: float = 60.0,
        start_timeout_s: float = 300.0,
        idle_timeout_s: float | None = None,
        sleep: str = PROCESS,
        starts_asleep: bool = False,
        pinned: bool = False,
        golden: bool | float = False,
        min_copies: int | None = None,
        grow_queue_s: float = 0.1,
        shrink_calm_s: float = 30.0,
    ) -> None:
        self.factory = factory
        """The factory as it was given."""
        self.target = _checked_target(factory)
        """The factory as text."""
        self.args = _checked_args(args)
        """Positional arguments of the factory."""
        self.kwargs = _checked_kwargs(kwargs)
        """Keyword arguments of the factory."""
        self.copies = _integer("copies", copies, MAX_COPIES)
        """The number of processes, the largest where it changes."""
        self.scaling = _checked_scaling(min_copies, self.copies, grow_queue_s, shrink_calm_s)
        """When there are more or fewer of them; None where their number stays."""
        self.environments = _checked_environments(env, self.copies)
        """The variables of each copy."""
        self.python = _checked_python(python)
        """The interpreter; None is that of this process."""
        self.working_dir = _checked_folder(working_dir)
        """The working directory, absolute; None is that of this process."""
        self.limits = RestartLimits(
            max_crashes=_integer("max_crashes", max_crashes),
            crash_window_s=_seconds("crash_window_s", crash_window_s),
            start_timeout_s=_seconds("start_timeout_s", start_timeout_s),
        )
        """When a process is started again, and when it is given up."""
        self.idle_timeout_s = None if idle_timeout_s is None else _seconds("idle_timeout_s", idle_timeout_s)
        """After how long without a request the processes end, in seconds; None is never."""
        self.sleep = _checked_sleep(sleep)
        """What stays of them then: nothing of "process", a process to fork them from of "parent"."""
        self.starts_asleep = _checked_bool("starts_asleep", starts_asleep)
        """Whether no process is started before the first request."""
        self.pinned = _checked_pinned(pinned, idle_timeout_s, starts_asleep)
        """Whether they run on although another model needs their memory."""
        self.golden = _checked_tolerance(golden)
        """How far answers to the warm-up may be from those of the first process; None if they are not compared."""

    def __repr__(self) -> str:
        return f"ProcessWorker({self.target!r}, copies={self.copies})"

    @property
    def sys_path(self) -> list[str]:
        """Where the processes look for modules beside the places of their interpreter."""
        if self.python is None:
            return [path for path in sys.path if path]
        # Packages of this interpreter are not for another one, but files beside the script may be.
        file = getattr(sys.modules.get("__main__"), "__file__", None)
        return [] if file is None else [str(Path(file).absolute().parent)]

    def launch(self, copy: int) -> Launch:
        """Return how one copy is started.

        Args:
            copy: Which, from 0 on.
        """
        return Launch(python=self.python, environment=self.environments[copy], working_dir=self.working_dir)


def common_idle_timeout(callables: Sequence[Any], model_name: str) -> float | None:
    """Return after how many seconds without a request the workers of a model sleep, about which all have to agree."""
    wanted = [each.idle_timeout_s if isinstance(each, ProcessWorker) else None for each in callables]
    found = [each for each in wanted if each is not None]
    if not found:
        return None
    if wanted != [found[0]] * len(wanted):
        in_threads = any(not isinstance(each, ProcessWorker) for each in callables)
        raise PyTritonBadParameterError(
            f"Model {model_name!r}: ProcessWorker.idle_timeout_s must be the same for all workers of a model, which "
            f"sleeps as a whole; got {', '.join('none' if each is None else f'{each:g}' for each in wanted)}."
            + (" A callable in a thread of this process cannot sleep." if in_threads else ""),
            parameter="ProcessWorker.idle_timeout_s",
            value=wanted,
            rule="the same for all workers of a model",
        )
    return found[0]


def common_scaling(callables: Sequence[Any], model_name: str, batching_delay_s: float) -> ScalingLimits | None:
    """Return when the workers of a model get more or fewer; None where their number stays.

    Args:
        callables: What serves the model.
        model_name: Its name.
        batching_delay_s: How long requests wait in the queue for others to join them, however many workers there are.

    Raises:
        PyTritonBadParameterError: There are other workers beside those that come and go.
    """
    scaling = [each.scaling for each in callables if isinstance(each, ProcessWorker)]
    if not any(scaling):
        return None
    limits = scaling[0]
    if len(callables) > 1 or limits is None:
        raise PyTritonBadParameterError(
            f"Model {model_name!r}: ProcessWorker.min_copies is for a model that one ProcessWorker serves alone, as "
            f"its processes come and go by the queue of the whole model; it has {len(callables)} callables. Give all "
            "copies to one ProcessWorker, or leave min_copies out.",
            parameter="ProcessWorker.min_copies",
            value=[None if each is None else each.fewest for each in scaling],
            rule="given for the only ProcessWorker of a model",
        )
    return dataclasses.replace(limits, grow_queue_s=limits.grow_queue_s + batching_delay_s)


def common_start(callables: Sequence[Any], model_name: str) -> bool:
    """Return whether the workers of a model sleep from the beginning on.

    Raises:
        PyTritonBadParameterError: Not all of them say the same.
    """
    wanted = [isinstance(each, ProcessWorker) and each.starts_asleep for each in callables]
    if any(wanted) and not all(wanted):
        raise PyTritonBadParameterError(
            f"Model {model_name!r}: ProcessWorker.starts_asleep must be the same for all workers of a model, which "
            "sleeps as a whole; a callable in a thread of this process cannot sleep.",
            parameter="ProcessWorker.starts_asleep",
            value=wanted,
            rule="the same for all workers of a model",
        )
    return all(wanted)


def check_golden(callables: Sequence[Any], config: ModelConfig, model_name: str) -> None:
    """Refuse to compare the answers to a warm-up where there is no such request."""
    has_golden = any(isinstance(each, ProcessWorker) and each.golden is not None for each in callables)
    if has_golden and not any(warmup.count for warmup in config.model_warmup or ()):
        rule = "unset for a model without warm-up requests"
        raise PyTritonBadParameterError(
            f"Model {model_name!r}: ProcessWorker.golden compares the answers to its warm-up, and it has none: give it "
            "requests whose answers are known, with ModelConfig(model_warmup=[...]), or leave golden out.",
            parameter="ProcessWorker.golden",
            value=True,
            rule=rule,
        )


def make_worker_process(
    described: ProcessWorker,
    copy: int,
    *,
    number: int,
    spec: ModelSpec,
    config: ModelConfig,
    endpoint: Path,
    parents: ParentProcesses,
    trace_config: Sequence[str],
    on_unrecoverable: Callable[[BaseException], None],
    on_given_up: Callable[[WorkerProcessError], None],
) -> WorkerProcess:
    """Make one worker process, without starting it; what it may be forked from is one of the parents."""
    logger = logging.getLogger(f"{WORKER_LOGGER}{spec.name}.{number}")
    job = WorkerJob(
        target=described.target,
        model=render_description(spec),
        endpoint=str(endpoint),
        name=f"process {number}, {described.target}",
        args=described.args,
        kwargs=described.kwargs,
        sys_path=described.sys_path,
        log_level=logger.getEffectiveLevel(),
        root_log_level=logging.getLogger().level,
        warmups=_warmups(config),
        golden=None if described.golden is None else {"tolerance": described.golden, "known": []},
        trace_config=list(trace_config),
    )
    timeout_s = config.execution_timeout_s
    warmup_s = float(config.warmup_timeout_s) if config.model_warmup else 0.0
    limits = RestartLimits(
        max_crashes=described.limits.max_crashes,
        crash_window_s=described.limits.crash_window_s,
        start_timeout_s=described.limits.start_timeout_s + warmup_s,
        silence_timeout_s=None if timeout_s is None else float(timeout_s) + _SILENCE_MARGIN_S,
    )
    launch = described.launch(copy)
    options: dict[str, Any] = {
        "launch": launch,
        "limits": limits,
        "on_unrecoverable": lambda text: on_unrecoverable(PyTritonUnrecoverableError(text)),
        "on_given_up": on_given_up,
    }
    if described.sleep != PARENT:
        return WorkerProcess(job, spec.name, number, **options)
    parent = parents.find(job, spec.name, number, launch=launch, limits=described.limits)
    return ForkedWorkerProcess(job, spec.name, number, parent=parent, **options)


def _warmups(config: ModelConfig) -> list[dict[str, Any]]:
    return [
        {
            "name": warmup.name,
            "batch_size": int(warmup.batch_size),
            "count": int(warmup.count),
            "inputs": {
                name: {
                    "dtype": "bytes" if (dtype := array_dtype(given.dtype)).kind == "O" else dtype.name,
                    "shape": [int(size) for size in given.shape],
                    "zero_data": bool(given.zero_data),
                    "random_data": bool(given.random_data),
                    # The process may have another working directory.
                    "input_data_file": None
                    if given.input_data_file is None
                    else os.path.abspath(given.input_data_file),
                }
                for name, given in warmup.inputs.items()
            },
        }
        for warmup in config.model_warmup or ()
    ]


class FallbackWorker:
    """A worker that answers every request of a model with an error, once all its process workers are given up."""

    def __init__(self, spec: ModelSpec, endpoint: Path) -> None:
        self._spec = spec
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._is_stopped = False

    @property
    def is_started(self) -> bool:
        """Whether it answers, or is about to."""
        return self._worker is not None

    def start(self, error: WorkerProcessError) -> None:
        """Begin to answer with `error`; a second call, or one after `stop`, does nothing."""
        # Callers get the reason, but not the output of the process.
        reason = PyTritonRuntimeError(error.reason)

        def refuse(requests: Sequence[Any]) -> list[Any]:
            return [reason for _ in requests]

        with self._lock:
            if self._worker is not None or self._is_stopped:
                return
            self._worker = Worker(refuse, self._spec, self._endpoint, context=contextvars.Context(), stands_in=True)
            self._worker.start()

    def stop(self, timeout_s: float) -> None:
        """End it, for good."""
        with self._lock:
            self._is_stopped = True
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop(timeout_s)


def _rebuilt(message: str, facts: dict[str, Any]) -> TritonWorkerError:
    return TritonWorkerError(WorkerProcessError(message, **facts))


def _rejected(parameter: str, value: object, rule: str, why: str = "") -> PyTritonBadParameterError:
    field = f"ProcessWorker.{parameter}"
    text = f"{field} must be {rule}; got {value!r}." + (f" {why}" if why else "")
    return PyTritonBadParameterError(text, parameter=field, value=value, rule=rule)


def _checked_scaling(fewest: Any, copies: int, queue_s: Any, calm_s: Any) -> ScalingLimits | None:
    grow_queue_s, shrink_calm_s = _seconds("grow_queue_s", queue_s), _seconds("shrink_calm_s", calm_s)
    if fewest is None:
        return None
    if isinstance(fewest, int) and fewest == 0:
        raise _rejected("min_copies", fewest, "at least 1", "That a model without requests has no process, say with "
                        "idle_timeout_s, beside min_copies=1.")  # fmt: skip
    least = _integer("min_copies", fewest)
    if least > copies:
        raise _rejected("min_copies", fewest, f"at most copies, which is {copies}")
    if least == copies:
        return None
    return ScalingLimits(fewest=least, grow_queue_s=grow_queue_s, shrink_calm_s=shrink_calm_s)


def _checked_sleep(sleep: Any) -> str:
    if not isinstance(sleep, str) or sleep not in SLEEPS:
        raise _rejected("sleep", sleep, " or ".join(map(repr, SLEEPS)))
    return sleep


def _checked_target(factory: Any) -> str:
    rule = "'module:name' or a function or class at the level of a module, which makes the inference callable"
    if isinstance(factory, str):
        module, separator, name = factory.rpartition(":")
        if not (separator and module and name):
            raise _rejected("factory", factory, rule)
        return factory
    if not callable(factory):
        raise _rejected("factory", factory, rule)
    try:
        return target_of(factory)
    except TargetError as error:
        raise _rejected("factory", factory, rule, f"{error}.") from error


_NO_JSON = "Arguments are sent as JSON: None, bool, int, float, str, lists and dictionaries of them; for all else send "
_NO_JSON += "what it is made of, such as a path or .tolist(), and make it in the factory."


def _checked_args(args: Any) -> list[Any]:
    if isinstance(args, (str, bytes, Mapping)) or not isinstance(args, Sequence):
        raise _rejected("args", args, "a tuple or list of arguments")
    for index, value in enumerate(args):
        place = find_not_json(value, f"args[{index}]")
        if place is not None:
            raise _rejected(f"args[{index}]", value, "JSON", f"{place}. {_NO_JSON}")
    return list(args)


def _checked_kwargs(kwargs: Any) -> dict[str, Any]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise _rejected("kwargs", kwargs, "a dictionary of arguments by name")
    for name, value in kwargs.items():
        place = find_not_json(value, f"kwargs[{name!r}]")
        if place is not None:
            raise _rejected(f"kwargs[{name!r}]", value, "JSON", f"{place}. {_NO_JSON}")
    return dict(kwargs)


def _checked_environments(env: Any, copies: int) -> list[dict[str, str | None]]:
    if env is None:
        return [{} for _ in range(copies)]
    if isinstance(env, Mapping):
        made: list[dict[str, str | None]] = [{} for _ in range(copies)]
        for name, value in env.items():
            values = value if isinstance(value, (list, tuple)) else [value] * copies
            if len(values) != copies:
                raise _rejected(f"env[{name!r}]", value, f"one text, or a list of {copies}, one for each copy")
            for copy, text in enumerate(values):
                made[copy][name] = text
    elif isinstance(env, Sequence) and all(isinstance(item, Mapping) for item in env) and len(env) == copies:
        made = [dict(item) for item in env]
    else:
        raise _rejected("env", env, f"a dictionary, or a list of {copies} dictionaries, one for each copy")
    for variables in made:
        for name, text in variables.items():
            if not isinstance(name, str) or not name or "=" in name or "\0" in name:
                raise _rejected("env", env, "a dictionary by names of variables", f"{name!r} is none.")
            if text is not None and (not isinstance(text, str) or "\0" in text):
                raise _rejected(f"env[{name!r}]", text, "text, or None")
    return made


def _checked_python(python: Any) -> str | None:
    if python is None:
        if not sys.executable:
            raise _rejected("python", None, "the path of a Python interpreter, since this program has none of its own")
        return None
    try:
        path = os.path.expanduser(os.fspath(python))
    except TypeError:
        path = None
    found = shutil.which(path) if isinstance(path, str) else None
    if found is None:
        raise _rejected("python", python, "the path of a Python interpreter that this user may run")
    # Links are not resolved, because the link makes a virtual environment.
    return os.path.abspath(found)


def _checked_bool(parameter: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _rejected(parameter, value, "True or False")
    return value


def _checked_pinned(pinned: Any, idle_timeout_s: float | None, starts_asleep: bool) -> bool:
    if _checked_bool("pinned", pinned) and (idle_timeout_s is not None or starts_asleep):
        given = "starts_asleep" if idle_timeout_s is None else "idle_timeout_s"
        raise _rejected("pinned", pinned, f"False where {given} is given", "What is pinned never sleeps.")
    return bool(pinned)


def _checked_tolerance(golden: Any) -> float | None:
    if isinstance(golden, bool):
        return _GOLDEN_TOLERANCE if golden else None
    if not isinstance(golden, (int, float)) or not 0 <= golden < 1:
        raise _rejected("golden", golden, "True, False, or a number of at least 0 and below 1")
    return float(golden)


def _checked_folder(folder: Any) -> str | None:
    if folder is None:
        return None
    try:
        path = os.path.abspath(os.path.expanduser(os.fspath(folder)))
    except TypeError:
        path = ""
    if not isinstance(path, str) or not os.path.isdir(path):
        raise _rejected("working_dir", folder, "a folder that exists")
    return path


def _integer(name: str, value: Any, limit: int | None = None) -> int:
    rule = "an integer of at least 1" + (f" and at most {limit}" if limit else "")
    try:
        number = None if isinstance(value, bool) else value.__index__()
    except AttributeError:
        number = None
    if number is None or number < 1 or (limit is not None and number > limit):
        raise _rejected(name, value, rule)
    return int(number)


def _seconds(name: str, value: Any) -> float:
    try:
        number = None if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        number = None
    if number is None or not 0 < number < float("inf"):
        raise _rejected(name, value, "a finite number of seconds above 0")
    return number

"""One bound model: what the user gave, checked; what Triton and the proxy are told; and the workers that serve it."""

import contextlib
import contextvars
import copy
import dataclasses
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pytriton.decorators import TritonContext
from pytriton.decorators.serving import set_served_model
from pytriton.exceptions import PyTritonUnrecoverableError
from pytriton.model_config import DeviceKind, ModelConfig, Tensor
from pytriton.model_config.triton_model_config import ResponseCache, TritonModelConfig
from pytriton.proxy_backend import (
    SIDE_FILE_NAME,
    AttachError,
    EndpointError,
    ModelSpec,
    ProxySettings,
    Worker,
    WorkerProcessError,
    description_path,
    endpoint_path,
    write_description,
)
from pytriton.proxy_backend._tracers import use_worker_tracer
from pytriton.proxy_backend.process import WorkerProcess
from pytriton.server.bind_arguments import (
    InferFunc,
    checked_callables,
    checked_config,
    checked_name,
    checked_tensors,
    checked_version,
    named_specs,
    wire_specs,
)
from pytriton.server.config_pbtxt import render_config, render_config_json
from pytriton.server.errors import WorkspaceError
from pytriton.server.metrics_totals import CallableTotals, StatisticsTotals
from pytriton.server.process_workers import ProcessWorker, TritonWorkerError
from pytriton.server.process_workers_bound import StandIn, make_worker_process
from pytriton.server.readiness import POLL_S, StartCancelled
from pytriton.server.tracing import ModelTracing, TracerLease
from pytriton.server.warmup import WarmupBatches

__all__ = ["BoundModel", "InferFunc"]

_SHORT_NAME_LENGTH = 12

logger = logging.getLogger(__name__)


class BoundModel:
    """One version of a model and the callables that serve it.

    Args:
        name: Name of the model.
        infer_func: The callable, or several that serve the model in parallel; a `ProcessWorker` stands for as many as
            it has copies.
        inputs: Its inputs.
        outputs: Its outputs.
        version: Its version.
        config: How it is served. It is copied: later changes have no effect.
        strict: Whether outputs are held against their description in every detail.
        triton_context: What the callables learn about the other models.
        generation: Tells the sockets of models apart that follow each other under one name and version, because
            for a moment both are there.
        tracing: Which tracer the callables get.

    Raises:
        PyTritonValidationError: A name, a version, a tensor or a callable is not acceptable.
        PyTritonBadParameterError: `config` breaks one of its own rules.
    """

    def __init__(
        self,
        *,
        name: str,
        infer_func: "InferFunc | ProcessWorker | Sequence[InferFunc | ProcessWorker]",
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        version: int,
        config: ModelConfig,
        strict: bool,
        triton_context: TritonContext,
        generation: int = 0,
        tracing: ModelTracing | None = None,
    ) -> None:
        self.name = checked_name(name)
        self._inputs = checked_tensors(inputs, "inputs", name)
        self._outputs = checked_tensors(outputs, "outputs", name)
        self._strict = strict
        self.version = checked_version(version, name)
        self._infer_funcs = checked_callables(infer_func, name)
        named_inputs = named_specs(self._inputs, "INPUT", name)
        named_outputs = named_specs(self._outputs, "OUTPUT", name)
        checked_config(config, name, named_inputs)
        self._config = copy.deepcopy(config)
        self._warmup = WarmupBatches(
            self._config.model_warmup or (),
            batching=bool(config.batching),
            output_names=[spec.name for spec in named_outputs],
        )
        self.triton_config = TritonModelConfig(
            model_name=name,
            model_version=self.version,
            max_batch_size=int(config.max_batch_size or 0),
            batching=bool(config.batching),
            batcher=self._config.batcher,
            # One Triton instance hands batches to all workers.
            instance_group={DeviceKind.KIND_CPU: 1},
            decoupled=bool(config.decoupled),
            inputs=named_inputs,
            outputs=named_outputs,
            response_cache=ResponseCache(enable=True) if config.response_cache else None,
            model_warmup=self._config.model_warmup,
        )
        self._triton_context = triton_context
        self.generation = generation
        self.shared_endpoint: Path | None = None
        """The socket of the model where another process has loaded it, and this one serves it together with that."""
        self.was_attached = False
        """Whether all workers have been waited for, until they were attached: before, the model is not yet served."""
        self._spec = ModelSpec(
            name=name,
            version=self.version,
            inputs=wire_specs(self.triton_config.inputs),
            outputs=wire_specs(self.triton_config.outputs),
            batching=self.triton_config.batching,
            max_batch_size=self.triton_config.max_batch_size if config.batching else 0,
            decoupled=self.triton_config.decoupled,
            strict=bool(strict),
            send_tracebacks=bool(config.send_tracebacks),
        )
        self._workers: list[Worker | WorkerProcess] = []
        # One for each worker; None for those in processes of their own.
        self._warmups: list[WarmupBatches | None] = []
        self._stand_in: StandIn | None = None
        self._totals = StatisticsTotals()
        self._tracing = tracing
        self._tracer: TracerLease | None = None
        self._description: Path | None = None

    def successor(
        self,
        infer_func: "InferFunc | ProcessWorker | Sequence[InferFunc | ProcessWorker]",
        *,
        inputs: Sequence[Tensor] | None = None,
        outputs: Sequence[Tensor] | None = None,
        config: ModelConfig | None = None,
        strict: bool | None = None,
    ) -> "BoundModel":
        """Makes the model that is to follow this one under its name and version. What is None stays as it is.

        Raises:
            PyTritonValidationError: A tensor or a callable is not acceptable.
            PyTritonBadParameterError: `config` breaks one of its own rules.
        """
        model = BoundModel(
            name=self.name,
            infer_func=infer_func,
            inputs=self._inputs if inputs is None else inputs,
            outputs=self._outputs if outputs is None else outputs,
            version=self.version,
            config=self._config if config is None else config,
            strict=self._strict if strict is None else strict,
            triton_context=self._triton_context,
            tracing=self._tracing,
        )
        model.shared_endpoint = self.shared_endpoint
        # What was counted is the model's, whoever served it.
        model._totals = self._totals
        return model

    @property
    def key(self) -> tuple[str, int]:
        """What no two models of one server share: the name without regard to case, and the version."""
        return self.name.lower(), self.version

    @property
    def config_text(self) -> str:
        """The text of the model's `config.pbtxt`."""
        return render_config(self.triton_config)

    def differences(self, other: "BoundModel") -> list[str]:
        """Says in words where two models differ in what Triton would be told of them; empty if nowhere."""
        if self.config_text == other.config_text:
            return []
        pairs = [
            (name, getattr(self.triton_config, name), getattr(other.triton_config, name))
            for name in ("inputs", "outputs", "batching", "max_batch_size", "batcher", "decoupled", "response_cache")
        ]
        return [f"{name} ({mine} and {its})" for name, mine, its in pairs if mine != its] or ["its tensors"]

    def config_json(self, parameters: Mapping[str, str]) -> str:
        """Gives the same as `config_text` in JSON.

        Args:
            parameters: Further parameters. Where they differ from before, Triton loads the model again even if nothing
                else does.
        """
        parameters = {**self.triton_config.backend_parameters, **parameters}
        return render_config_json(dataclasses.replace(self.triton_config, backend_parameters=parameters))

    @property
    def batching_delay_s(self) -> float:
        """How long Triton may hold a request back for others to join its batch, in seconds."""
        batcher = self.triton_config.batcher
        return 0.0 if batcher is None else batcher.max_queue_delay_microseconds * 1e-6

    @property
    def is_alive(self) -> bool:
        """Whether the model has workers and all of them run, none of them stuck in its callable."""
        return bool(self._workers) and all(
            worker.is_alive and not (isinstance(worker, Worker) and worker.stuck) for worker in self._workers
        )

    @property
    def is_attached(self) -> bool:
        """Whether the model has workers and all of them are attached to the server right now."""
        return self.is_alive and all(worker.is_attached for worker in self._workers)

    @property
    def has_attached(self) -> bool:
        """Whether one of the workers at least is attached to the server right now."""
        return any(worker.is_attached for worker in tuple(self._workers))

    @property
    def error(self) -> BaseException | None:
        """Why a worker ended that nobody stopped."""
        error = next((worker.error for worker in self._workers if worker.error is not None), None)
        return TritonWorkerError(error) if isinstance(error, WorkerProcessError) else error

    def publish(self) -> None:
        """Lets the callables of all models of the server see this model's configuration."""
        for infer in self._own_callables():
            self._triton_context.model_configs[infer] = self.triton_config

    def unpublish(self) -> None:
        """Takes the configuration back where `publish` has put it and nobody has put another one since."""
        configs = self._triton_context.model_configs
        for infer in self._own_callables():
            if configs.get(infer) is self.triton_config:
                del configs[infer]

    def _own_callables(self) -> list[InferFunc]:
        return [infer for infer in self._infer_funcs if not isinstance(infer, ProcessWorker)]

    def endpoint(self, endpoints: Path) -> Path:
        """Gives the path of the socket between the server and the workers; the file is there while the model is loaded.

        Args:
            endpoints: Folder for the sockets.

        Raises:
            EndpointError: The folder's path is too long for the system.
        """
        if self.shared_endpoint is not None:
            return self.shared_endpoint
        # "~" is in no model's name.
        suffix = f"~{self.generation}" if self.generation else ""
        try:
            return endpoint_path(endpoints, self.name + suffix, self.version)
        except EndpointError:
            # Linux allows a socket's path 107 bytes, of which a usual workspace takes more than half.
            short = hashlib.sha256(self.name.encode()).hexdigest()[:_SHORT_NAME_LENGTH]
            return endpoint_path(endpoints, f"~{short}{suffix}", self.version)

    def side_files(self, endpoints: Path) -> list[tuple[str, str]]:
        """Gives names and texts of the files that the proxy reads from the version's folder.

        Args:
            endpoints: Folder for the sockets.

        Raises:
            EndpointError: The path of the socket is too long for the system.
        """
        settings = ProxySettings(
            endpoint=self.endpoint(endpoints),
            batching=self._spec.batching,
            decoupled=self._spec.decoupled,
            attach_timeout_s=self._config.attach_timeout_s,
            arena_budget_bytes=self._config.arena_budget_bytes,
            execution_timeout_s=self._config.execution_timeout_s,
            repeatable=bool(self._config.repeatable),
            tensors_digest=self._spec.tensors_digest,
        )
        return [(SIDE_FILE_NAME, settings.to_text())]

    def start_workers(self, endpoints: Path, on_unrecoverable: Callable[[BaseException], None]) -> None:
        """Starts one worker per callable. They warm their callables up, and attach as soon as the proxy listens.

        Args:
            endpoints: Folder for the sockets.
            on_unrecoverable: Called in a worker's thread when its callable raised PyTritonUnrecoverableError, after the
                caller got its answer.
        """
        endpoint = self.endpoint(endpoints)
        if self._tracing is not None and self._tracer is None:
            self._tracer = self._tracing.acquire()
        self._stand_in = StandIn(self._spec, endpoint)
        for infer in self._infer_funcs:
            if not isinstance(infer, ProcessWorker):
                self._start_thread(infer, endpoint, on_unrecoverable)
                continue
            for number in range(infer.copies):
                self._add(
                    make_worker_process(
                        infer,
                        number,
                        number=len(self._workers),
                        spec=self._spec,
                        config=self._config,
                        endpoint=endpoint,
                        trace_config=() if self._tracing is None else self._tracing.trace_config,
                        on_unrecoverable=on_unrecoverable,
                        on_given_up=self._note_given_up,
                    )
                )

    def _start_thread(
        self, infer: InferFunc, endpoint: Path, on_unrecoverable: Callable[[BaseException], None]
    ) -> None:
        context = contextvars.copy_context()
        context.run(use_worker_tracer, None if self._tracer is None else self._tracer.tracer)
        context.run(set_served_model, infer, self.triton_config, self._triton_context)
        warmup = copy.copy(self._warmup)
        worker = Worker(
            infer,
            self._spec,
            endpoint,
            unrecoverable=(PyTritonUnrecoverableError,),
            on_unrecoverable=on_unrecoverable,
            context=context,
            warmup=warmup,
        )
        self._add(worker, warmup)

    def _add(self, worker: Worker | WorkerProcess, warmup: WarmupBatches | None = None) -> None:
        self._workers.append(worker)
        self._warmups.append(warmup)
        worker.start()
        self._totals.add(len(self._workers) - 1, worker)

    def describe(self, endpoints: Path) -> None:
        """Writes what a worker from elsewhere must know beside the socket; `stop_workers` removes it.

        Args:
            endpoints: Folder for the sockets.

        Raises:
            WorkspaceError: The file cannot be written.
        """
        path = description_path(self.endpoint(endpoints))
        try:
            write_description(path, self._spec)
        except OSError as error:
            raise WorkspaceError(
                f"The description of model {self.name!r} cannot be written to {path}: {error.strerror or error}. Is "
                "the disk full, or the workspace removed?",
                path=str(path),
            ) from error
        self._description = path

    def _note_given_up(self, error: WorkerProcessError) -> None:
        workers, stand_in = self._workers, self._stand_in
        was_served = any(isinstance(worker, WorkerProcess) and worker.was_attached for worker in workers)
        # With others left, an answer that comes at once would draw the requests away from them: other workers of this
        # model, or those of the one that it was to follow.
        if stand_in is not None and was_served and not any(worker.is_alive for worker in workers):
            stand_in.start(error)

    def read_totals(self) -> list[CallableTotals]:
        """Gives what the callables have done, those included that served the model before. From any thread."""
        return self._totals.read()

    def wait_warm(self, timeout_s: float | None = None, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Waits until every callable has served the model's warm-up, and those in processes of their own are made.

        Args:
            timeout_s: How long to wait for warm-ups in this process, in seconds; None is
                `ModelConfig.warmup_timeout_s`.
            cancelled: Asked again and again; True ends the wait.

        Raises:
            StartCancelled: `cancelled` said so.
            AttachError: A callable failed (its error is the cause, and in the text), or the time is over.
        """
        limit_s = float(self._config.warmup_timeout_s if timeout_s is None else timeout_s)
        deadline = time.monotonic() + limit_s
        # Processes have their factories to call in any case, and deadlines of their own.
        waiting = [
            pair
            for pair in zip(self._workers, self._warmups, strict=True)
            if pair[1] is None or self._config.model_warmup
        ]
        while waiting := [pair for pair in waiting if not _is_warm(*pair)]:
            if cancelled():
                raise StartCancelled
            late = next((warmup for _, warmup in waiting if warmup is not None), None)
            if late is not None and time.monotonic() >= deadline:
                raise AttachError(
                    f"the warm-up of model {self.name!r} (version {self.version}) was not over after {limit_s:g} s: "
                    f"{late.progress}. Set ModelConfig.warmup_timeout_s higher, or warm up with less"
                )
            with contextlib.suppress(AttachError):
                waiting[0][0].wait_warm(POLL_S)

    def wait_attached(self, timeout_s: float) -> None:
        """Waits until every worker is attached to the server.

        Raises:
            AttachError: One is not within `timeout_s` seconds, or was refused; the text has the reason.
        """
        deadline = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.wait_attached(max(0.0, deadline - time.monotonic()))
        self.was_attached = True

    def cut_workers(self) -> None:
        """Cuts the workers off from the server, whatever they are at. `stop_workers` has to follow."""
        for worker in self._workers:
            worker.stop(0.0)

    def stop_workers(self, timeout_s: float) -> None:
        """Detaches the workers when they have finished what they are at.

        Args:
            timeout_s: After so many seconds a busy one is cut off and left behind, with a warning.
        """
        for warmup in self._warmups:
            if warmup is not None:
                warmup.cut()
        workers, self._workers, self._warmups = self._workers, [], []
        for _ in range(_still_busy(workers, timeout_s)):
            logger.warning(
                "The inference callable of model %r (version %d) is still busy: it is left to end by itself.",
                self.name,
                self.version,
            )
        stand_in, self._stand_in = self._stand_in, None
        if stand_in is not None:
            stand_in.stop(timeout_s)
        # A successor that listens at the same place has the file, too.
        if self._description is not None and not self._description.with_suffix("").exists():
            self._description.unlink(missing_ok=True)
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.release()


def _is_warm(worker: Worker | WorkerProcess, warmup: WarmupBatches | None) -> bool:
    try:
        worker.wait_warm(0.0)
    except AttachError as error:
        if worker.error is not None:
            if warmup is None:
                raise
            raise AttachError(f"{error} ({warmup.progress})") from worker.error
        if not worker.is_alive:
            raise
        return False
    return True


def _still_busy(workers: Sequence[Worker | WorkerProcess], timeout_s: float) -> int:
    """Stops workers and tells how many have not ended."""
    ended: list[bool] = []
    # All at once: each takes no more batches from the beginning, and has the whole time for what it is at.
    stoppers = [
        threading.Thread(target=lambda worker=worker: ended.append(worker.stop(timeout_s)), name="pytriton-stop-worker")
        for worker in workers[1:]
    ]
    for stopper in stoppers:
        stopper.start()
    if workers:
        ended.append(workers[0].stop(timeout_s))
    for stopper in stoppers:
        stopper.join()
    return ended.count(False)

"""The service of a defined model by workers: where they meet the server, the proxy's files, and the workers."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.proxy_backend import (
    SIDE_FILE_NAME,
    EndpointError,
    ProxySettings,
    description_path,
    endpoint_path,
    write_description,
)
from pytriton.proxy_backend.process.budget import MemoryBudget
from pytriton.proxy_backend.process.scaling import Queue
from pytriton.proxy_backend.settings import cost_settings
from pytriton.proxy_backend.system.shortage import explain
from pytriton.proxy_backend.wire.settings import serving_settings
from pytriton.server.errors import WorkspaceError
from pytriton.server.models.arguments import Servable
from pytriton.server.models.definition import ModelDefinition
from pytriton.server.models.process_workers import ProcessWorker
from pytriton.server.models.tracing import ModelTracing, TracerLease
from pytriton.server.models.workers import Begin, ModelWorkers
from pytriton.server.observe.metrics_totals import CallableTotals, SleepFacts

_SHORT_NAME_LENGTH = 12


class WorkerService:
    """A model and its workers, whose memory comes from a budget where there is one."""

    def __init__(
        self, definition: ModelDefinition, tracing: ModelTracing | None = None, budget: MemoryBudget | None = None
    ) -> None:
        self.definition = definition
        """What the model is."""
        self.name = definition.name
        self.version = definition.version
        self.decoupled = definition.spec.decoupled
        self.has_cost = definition.spec.cost is not None
        self.generation = 0
        """Tells the sockets of models apart that follow each other under one name and version: for a moment both are
        there."""
        self.shared_endpoint: Path | None = None
        """The socket of the model where another process has loaded it, and this one serves it together with that."""
        self.workers = ModelWorkers(definition.spec, definition.config, warmup=definition.new_warmup())
        """Who serves it."""
        self._tracing = tracing
        self.budget = MemoryBudget() if budget is None else budget
        """Where worker processes get their memory."""
        self._tracer: TracerLease | None = None
        self._description: Path | None = None

    def successor(
        self,
        infer_func: Servable,
        *,
        inputs: Sequence[Tensor] | None = None,
        outputs: Sequence[Tensor] | None = None,
        config: ModelConfig | None = None,
        strict: bool | None = None,
    ) -> "WorkerService":
        """Make the service that is to follow this one, see `ModelDefinition.successor`."""
        definition = self.definition.successor(infer_func, inputs=inputs, outputs=outputs, config=config, strict=strict)
        service = WorkerService(definition, self._tracing, self.budget)
        service.succeed(self)
        return service

    def succeed(self, old: "WorkerService") -> None:
        """Take over from the service of the same name and version what is the model's, whoever serves it."""
        self.shared_endpoint = old.shared_endpoint
        self.workers.totals = old.workers.totals
        self.workers.memory_bytes = old.workers.memory_bytes

    @property
    def key(self) -> tuple[str, int]:
        """What no two models of one server share: the name without regard to case, and the version."""
        return self.definition.key

    @property
    def is_alive(self) -> bool:
        """Whether the model has workers and all of them run, none of them stuck in its callable."""
        return self.workers.is_alive

    @property
    def is_attached(self) -> bool:
        """Whether the model has workers and all of them are attached to the server right now."""
        return self.workers.is_attached

    @property
    def is_asleep(self) -> bool:
        """Whether its workers have ended until a request comes, which counts as attached."""
        return self.workers.is_asleep

    @property
    def error(self) -> BaseException | None:
        """Why a worker ended that nobody stopped."""
        return self.workers.error

    def endpoint(self, endpoints: Path) -> Path:
        """Return the path of the socket between the server and the workers.

        The file is there while the model is loaded. Raises `EndpointError` if the folder's path is too long for the
        system.
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

    def side_files(self, endpoints: Path, cache_bytes: int = 0) -> list[tuple[str, str]]:
        """Return names and texts of the files that the proxy reads from the version's folder.

        A model whose answers are given again may have `cache_bytes` of them on the server. Raises as `endpoint` does.
        """
        settings = ProxySettings(
            endpoint=self.endpoint(endpoints),
            batching=self.definition.spec.batching,
            decoupled=self.definition.spec.decoupled,
            max_waiting=_max_queue_size(self.definition.config.batcher),
            cache_bytes=cache_bytes if self.definition.config.response_cache else 0,
            stream_backlog_bytes=self.definition.config.stream_backlog_bytes,
            stream_stall_timeout_s=self.definition.config.stream_stall_timeout_s,
            ignores_parameters=self.definition.ignores_parameters,
            tensors_digest=self.definition.spec.tensors_digest,
            **cost_settings(self.definition.spec),
            **serving_settings(self.definition.config),
        )
        return [(SIDE_FILE_NAME, settings.to_text())]

    def start_workers(
        self,
        endpoints: Path,
        on_unrecoverable: Callable[[BaseException], None],
        stop_wanted: Callable[[], bool] = lambda: False,
        begins: Begin = Begin.AWAKE,
        queue: Queue | None = None,
    ) -> None:
        """Start one worker per callable. They warm their callables up, and attach as soon as the proxy listens.

        Under a memory budget, it is waited until there is room for those in processes of their own. After a
        PyTritonUnrecoverableError, `on_unrecoverable` is called in the worker's thread when the caller got its answer.
        By how long requests wait in `queue`, processes come and go; without one, all run.
        """
        endpoint = self.endpoint(endpoints)
        definition, is_limited = self.definition, self.budget.limit_bytes is not None
        may_sleep = definition.idle_timeout_s is not None or definition.starts_asleep
        scaling = definition.scaling
        if may_sleep or scaling is not None or (is_limited and definition.has_processes):
            self.workers.join_budget(
                self.budget,
                endpoint,
                sleeps=definition.is_movable and (is_limited or may_sleep),
                scaling=None if scaling is None or queue is None else (scaling, queue),
                pinned=definition.is_pinned,
                idle_timeout_s=definition.idle_timeout_s,
                stop_wanted=stop_wanted,
                begins=Begin.ASLEEP if definition.starts_asleep else begins,
            )
        if self._tracing is not None and self._tracer is None:
            self._tracer = self._tracing.acquire()
        for infer in self.definition.callables:
            if isinstance(infer, ProcessWorker):
                trace_config = () if self._tracing is None else self._tracing.trace_config
                self.workers.start_processes(infer, endpoint, trace_config, on_unrecoverable)
                continue
            context = self.definition.make_context(infer, None if self._tracer is None else self._tracer.tracer)
            self.workers.start_thread(infer, endpoint, context, on_unrecoverable)
        self.workers.start_sleep()

    def describe(self, endpoints: Path) -> None:
        """Write what a worker from elsewhere must know beside the socket; `stop_workers` removes it."""
        path = description_path(self.endpoint(endpoints))
        try:
            write_description(path, self.definition.spec)
        except OSError as error:
            raise WorkspaceError(
                f"The description of model {self.name!r} cannot be written to {path}: "
                + explain(error, "Is the disk full, or the workspace removed?"),
                path=str(path),
            ) from error
        self._description = path

    def read_totals(self) -> list[CallableTotals]:
        """Return what the callables have done, those included that served the model before. From any thread."""
        return self.workers.totals.read()

    def read_sleep(self) -> SleepFacts | None:
        """Return what is known of processes that may sleep, or have a memory budget; None of others."""
        return self.workers.read_sleep()

    def stop_workers(self, timeout_s: float) -> None:
        """Detach the workers when they have finished.

        After `timeout_s` seconds a busy one is cut off, with a warning.
        """
        self.workers.stop(timeout_s)
        # A successor that listens at the same place has the file, too.
        if self._description is not None and not self._description.with_suffix("").exists():
            self._description.unlink(missing_ok=True)
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.release()


def _max_queue_size(batcher: DynamicBatcher | None) -> int:
    """Return how many requests a queue of Triton's may hold for a model; 0 is any number."""
    if batcher is None:
        return 0
    policies = [batcher.default_queue_policy, *(batcher.priority_queue_policy or {}).values()]
    sizes = [0 if policy is None else policy.max_queue_size for policy in policies]
    return max(sizes) if all(sizes) else 0

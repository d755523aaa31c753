"""The workers of one model, in threads and in processes: started, waited for and stopped together."""

import contextlib
import contextvars
import copy
import enum
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pytriton.exceptions import PyTritonUnrecoverableError
from pytriton.model_config import ModelConfig
from pytriton.proxy_backend import AttachError, ModelSpec, Worker, WorkerProcessError
from pytriton.proxy_backend.process.budget import Account, MemoryBudget, NoRoomError
from pytriton.proxy_backend.process.parent_process import ParentProcesses
from pytriton.proxy_backend.process.scaling import Queue, Scaling, ScalingLimits
from pytriton.proxy_backend.process.sleep import Sleep, SleepState, are_up
from pytriton.proxy_backend.process.worker_process import WorkerProcess
from pytriton.proxy_backend.system.threads import start_all
from pytriton.server.models.process_workers import FallbackWorker, ProcessWorker, TritonWorkerError, make_worker_process
from pytriton.server.models.warmup import WarmupBatches
from pytriton.server.observe.metrics_totals import ScalingFacts, SleepFacts, StatisticsTotals, wall_time

_POLL_S = 0.01
# How long the start of workers waits at most until others have made room for them.
_ROOM_S = 60.0

logger = logging.getLogger(__name__)


class Begin(enum.Enum):
    """How workers begin that may be put to sleep."""

    AWAKE = "awake"
    IF_ROOM = "awake if the memory budget has room"
    ASLEEP = "asleep"


class StartCancelled(Exception):
    """A start, or the bind of a model, was stopped from elsewhere while it was waited for."""


class ModelWorkers:
    """The workers of one model, none at first. They may be stopped, and others started, any number of times."""

    def __init__(self, spec: ModelSpec, config: ModelConfig, *, warmup: WarmupBatches) -> None:
        self._spec = spec
        self._config = config
        self._warmup = warmup
        self.totals = StatisticsTotals()
        """What the workers do, added up, those included that were here before."""
        self._workers: list[Worker | WorkerProcess] = []
        # One for each worker; None for those in processes of their own.
        self._warmups: list[WarmupBatches | None] = []
        self._fallback: FallbackWorker | None = None
        self._sleep: Sleep | None = None
        self._budget: MemoryBudget | None = None
        self._account: Account | None = None
        self._size: int | None = None
        self._scaling: ScalingLimits | None = None
        # What those in processes of their own are forked from.
        self._parents: list[ParentProcesses] = []
        # All in processes of their own have begun to start.
        self._are_started = False
        self.begins_asleep = False
        """Whether those in processes of their own begin asleep, which `join_budget` finds out."""
        self.was_attached = False
        """Whether all workers have been waited for, until they were attached: before, the model is not yet served."""

    @property
    def are_there(self) -> bool:
        """Whether there are workers, whatever they do."""
        return bool(self._workers)

    @property
    def is_alive(self) -> bool:
        """Whether there are workers and all of them run, none of them stuck in its callable."""
        return bool(self._workers) and all(
            worker.is_alive and not (isinstance(worker, Worker) and worker.stuck) for worker in self._workers
        )

    @property
    def is_attached(self) -> bool:
        """Whether there are workers and all that are to serve are attached to the server right now, or all sleep."""
        if not self.is_alive or self._holds_place:
            return self.is_alive
        serving = [worker for worker in self._workers if not _is_spare(worker)]
        return bool(serving) and all(worker.is_attached for worker in serving)

    @property
    def has_attached(self) -> bool:
        """Whether one of the workers at least is attached to the server right now, or will be for a request."""
        return any(worker.is_attached for worker in tuple(self._workers)) or self._holds_place

    @property
    def is_asleep(self) -> bool:
        """Whether the workers have ended until a request comes."""
        sleep = self._sleep
        return sleep is not None and sleep.state is SleepState.ASLEEP

    @property
    def memory_bytes(self) -> int | None:
        """How much those in processes of their own took when they were awake the last time; None if unknown."""
        account = self._account
        size = self._size if account is None or account.size is None else account.size
        if size is None or self._scaling is None:
            return size
        return self._scaling.size_at_start(size, sum(not _is_spare(worker) for worker in self._workers))

    @memory_bytes.setter
    def memory_bytes(self, size: int | None) -> None:
        """Set how much they are likely to take."""
        self._size = size

    @property
    def _holds_place(self) -> bool:
        sleep = self._sleep
        return sleep is not None and sleep.holds_place

    @property
    def has_stand_in(self) -> bool:
        """Whether somebody is attached, or about to be, who only says why there is no worker any more."""
        fallback = self._fallback
        return fallback is not None and fallback.is_started

    @property
    def error(self) -> BaseException | None:
        """Why a worker ended that nobody stopped."""
        error = next((worker.error for worker in self._workers if worker.error is not None), None)
        return TritonWorkerError(error) if isinstance(error, WorkerProcessError) else error

    def new_warmup(self) -> WarmupBatches:
        """Return the batches of the model's warm-up, for one of its callables."""
        return copy.copy(self._warmup)

    def start_thread(
        self,
        infer: Callable[..., Any],
        endpoint: Path,
        context: contextvars.Context,
        on_unrecoverable: Callable[[BaseException], None],
    ) -> None:
        """Start a worker in a thread of this process, whose callable runs in `context`."""
        warmup = self.new_warmup()
        worker = Worker(
            infer,
            self._spec,
            endpoint,
            unrecoverable=(PyTritonUnrecoverableError,),
            on_unrecoverable=on_unrecoverable,
            context=context,
            warmup=warmup,
        )
        worker.log_attachment_at(logging.DEBUG)
        self._add(worker, warmup)

    def start_processes(
        self,
        described: ProcessWorker,
        endpoint: Path,
        trace_config: Sequence[str],
        on_unrecoverable: Callable[[BaseException], None],
    ) -> None:
        """Start workers in processes of their own, whose spans go where `trace_config` says."""
        if self._fallback is None:
            self._fallback = FallbackWorker(self._spec, endpoint)
        parents = ParentProcesses()
        self._parents.append(parents)
        for place in range(described.copies):
            worker = make_worker_process(
                described,
                place,
                number=len(self._workers),
                spec=self._spec,
                config=self._config,
                endpoint=endpoint,
                parents=parents,
                trace_config=trace_config,
                on_unrecoverable=on_unrecoverable,
                on_given_up=self._on_given_up,
            )
            if self.begins_asleep or (self._scaling is not None and place >= self._scaling.fewest):
                worker.begin_asleep()
            self._add(worker)

    def join_budget(
        self,
        budget: MemoryBudget,
        endpoint: Path,
        *,
        sleeps: bool,
        scaling: tuple[ScalingLimits, Queue] | None,
        pinned: bool,
        idle_timeout_s: float | None,
        stop_wanted: Callable[[], bool],
        begins: Begin = Begin.AWAKE,
    ) -> None:
        """Wait until there is memory for workers in processes of their own, which have to be started next.

        With `sleeps`, they may be put to sleep after `idle_timeout_s` seconds without a call; None leaves that to the
        budget. If they are `pinned`, they run on although others need their memory. With `begins`, they wait for a
        request before they start. `scaling` says when there are more or fewer of them, and where requests
        wait; None is always all.
        """
        workers, self._are_started = self._workers, False
        parents = self._parents = []

        def processes() -> list[WorkerProcess]:
            return [worker for worker in workers if isinstance(worker, WorkerProcess)]

        account = Account(
            self._spec.name,
            pids=lambda: [pid for worker in processes() if (pid := worker.pid) is not None],
            is_up=lambda: self._are_started and are_up(processes()),
            is_gone=lambda: self._are_started and not any(worker.is_alive for worker in processes()),
            kept=lambda: [pid for each in parents for pid in each.pids],
            drop=lambda: list(map(ParentProcesses.sleep, parents)),
            pinned=pinned,
            size=self._size,
            wakes=self.totals.wakes,
        )
        self._scaling = None if scaling is None else scaling[0]
        scaler = None if scaling is None else Scaling(self._spec, *scaling, self.totals.scalings)
        if sleeps or scaler is not None:
            timeout_s = float(self._config.attach_timeout_s)
            self._sleep = Sleep(self._spec, endpoint, idle_timeout_s, timeout_s, budget, account, scaling=scaler)
            if not sleeps:
                account.ask_to_sleep = None
        budget.open(account)
        self._budget, self._account = budget, account
        is_modest = sleeps and begins is Begin.IF_ROOM
        self.begins_asleep = sleeps and begins is Begin.ASLEEP
        try:
            if not self.begins_asleep and not budget.admit(
                account, _ROOM_S, stop_wanted, after_starts=True, is_modest=is_modest
            ):
                raise StartCancelled
        except NoRoomError:
            if not is_modest:
                raise
            self.begins_asleep = True

    def start_sleep(self) -> None:
        """Put the workers to sleep from now on, where `join_budget` has said so; all of them have been started."""
        self._are_started = True
        if self._sleep is None:
            return
        for worker in self._workers:
            if isinstance(worker, WorkerProcess):
                self._sleep.add(worker)
        self._sleep.start()

    def read_sleep(self) -> SleepFacts | None:
        """Return what is known of processes that may sleep, or have a memory budget; None of others."""
        budget, account, sleep = self._budget, self._account, self._sleep
        if budget is None or account is None:
            return None
        scaling = None
        if self._scaling is not None:
            processes = [worker for worker in tuple(self._workers) if isinstance(worker, WorkerProcess)]
            scaling = ScalingFacts(
                running=sum(worker.is_attached for worker in processes),
                wanted=sum(worker.is_alive and not worker.is_asleep for worker in processes),
                fewest=self._scaling.fewest,
                most=len(processes),
                counts=self.totals.scalings.copy(),
            )
        return SleepFacts(
            state="awake" if sleep is None else sleep.state.value,
            memory=budget.read(account),
            last_used=wall_time(account.last_used),
            wakes=account.wakes.seconds,
            wake_quantiles_s=account.wakes.quantiles_s,
            wakes_refused=account.wakes.refused,
            scaling=scaling,
        )

    def check_budget(self, old: "ModelWorkers | None" = None) -> None:
        """Refuse workers that have started, and are too large for the memory budget without the `old` ones."""
        if self._budget is not None and self._account is not None:
            self._budget.check(self._account, None if old is None else old._account)

    def _add(self, worker: Worker | WorkerProcess, warmup: WarmupBatches | None = None) -> None:
        self._workers.append(worker)
        self._warmups.append(warmup)
        worker.start()
        self.totals.add(len(self._workers) - 1, worker)

    def _on_given_up(self, error: WorkerProcessError) -> None:
        workers, fallback = self._workers, self._fallback
        was_served = any(isinstance(worker, WorkerProcess) and worker.was_attached for worker in workers)
        # With others left, an answer that comes at once would draw the requests away from them: other workers of this
        # model, or those of the one that it was to follow.
        if fallback is not None and was_served and not any(worker.is_alive for worker in workers):
            fallback.start(error)

    def wait_warm(self, timeout_s: float | None = None, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Wait until every callable has served the model's warm-up, and those in processes of their own are made.

        `timeout_s` limits warm-ups in this process; None is `ModelConfig.warmup_timeout_s`. The cause of an
        `AttachError` is the error of the callable.
        """
        limit_s = float(self._config.warmup_timeout_s if timeout_s is None else timeout_s)
        deadline = time.monotonic() + limit_s
        # Processes have their factories to call in any case, and deadlines of their own.
        waiting = [
            pair
            for pair in zip(self._workers, self._warmups, strict=True)
            if (self._config.model_warmup if pair[1] is not None else not self.begins_asleep)
        ]
        while waiting := [pair for pair in waiting if not _is_warm(*pair)]:
            if cancelled():
                raise StartCancelled
            late = next((warmup for _, warmup in waiting if warmup is not None), None)
            if late is not None and time.monotonic() >= deadline:
                raise AttachError(
                    f"the warm-up of model {self._spec.name!r} (version {self._spec.version}) was not over after "
                    f"{limit_s:g} s: {late.progress}. Set ModelConfig.warmup_timeout_s higher, or warm up with less"
                )
            with contextlib.suppress(AttachError):
                waiting[0][0].wait_warm(_POLL_S)

    def wait_attached(self, timeout_s: float) -> None:
        """Wait until every worker is attached to the server; `AttachError` has the reason why one is not."""
        deadline = time.monotonic() + timeout_s
        for worker in self._workers:
            # They may sleep before the server, which was started again, has met them.
            while not self._holds_place and not _is_spare(worker):
                with contextlib.suppress(AttachError):
                    worker.wait_attached(_POLL_S)
                    break
                if not worker.is_alive or time.monotonic() >= deadline:
                    worker.wait_attached(0.0)
        self.was_attached = self.totals.was_served = True

    def cut(self) -> None:
        """Cut the workers off from the server, whatever they are doing. `stop` has to follow."""
        if self._sleep is not None:
            self._sleep.cut()
        for worker in self._workers:
            worker.stop(0.0)

    def stop(self, timeout_s: float) -> None:
        """Detach the workers when they have finished.

        After `timeout_s` seconds a busy one is cut off, with a warning.
        """
        if (sleep := self._sleep) is not None:
            sleep.cut()
        for warmup in self._warmups:
            if warmup is not None:
                warmup.cut()
        self._size = self.memory_bytes
        workers, self._workers, self._warmups = self._workers, [], []
        for _ in range(_still_busy(workers, timeout_s)):
            logger.warning(
                "The inference callable of model %r (version %d) is still busy: it is left to end by itself.",
                self._spec.name,
                self._spec.version,
            )
        self._sleep = None
        if sleep is not None:
            sleep.stop()
        budget, account = self._budget, self._account
        self._budget = self._account = None
        if budget is not None and account is not None:
            budget.close(account)
        fallback, self._fallback = self._fallback, None
        if fallback is not None:
            fallback.stop(timeout_s)


def _is_spare(worker: Worker | WorkerProcess) -> bool:
    """Return whether nobody waits for a worker, since it sleeps, or starts beside others."""
    return isinstance(worker, WorkerProcess) and (bool(worker.is_asleep) or worker.is_waking)


def _is_warm(worker: Worker | WorkerProcess, warmup: WarmupBatches | None) -> bool:
    if _is_spare(worker):
        return True
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
    """Stop workers and tell how many have not ended."""
    if not workers:
        return 0
    # One whose stop raises has not ended.
    ended = [False] * len(workers)

    def stop(place: int) -> None:
        ended[place] = workers[place].stop(timeout_s)

    # All at once: each takes no more batches from the beginning, and has all of the time for the one in its callable.
    stoppers = [
        threading.Thread(target=stop, args=(place,), name="pytriton-stop-worker") for place in range(1, len(workers))
    ]
    count = start_all(stoppers)
    for place in (0, *range(count + 1, len(workers))):
        stop(place)
    for stopper in stoppers[:count]:
        stopper.join()
    return ended.count(False)

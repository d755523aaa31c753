"""`Queues`: how long the requests of a server's models wait in Triton's queues, by which processes come and go."""

import http.client
import logging
from collections.abc import Callable
from dataclasses import dataclass

from pytriton.proxy_backend.process.scaling import QueueTime
from pytriton.server.control.http import Control, ControlError, queue_time_of
from pytriton.server.control.metrics import pending_requests, read_metrics
from pytriton.server.errors import TritonServerError
from pytriton.server.tritonserver.ports import Endpoint

logger = logging.getLogger(__name__)


class Queues:
    """The queues of all models of one server."""

    def __init__(self, control: Callable[[], Control], metrics: Callable[[], Endpoint | None]) -> None:
        """Prepare them.

        Args:
            control: Returns the connection to the server.
            metrics: Returns where the server has its own page of metrics; None if that is not known.
        """
        self._control = control
        self._metrics = metrics
        self._has_told_refusal = False

    def of(self, name: str, version: int) -> "ModelQueue":
        """Return the queue of one model."""
        return ModelQueue(self, name, version)

    def times(self, name: str, version: int) -> QueueTime | None:
        """Return how many requests have left the queue, and how long they waited; None while the server is silent."""
        try:
            return queue_time_of(self._control().statistics(name, version))
        except TritonServerError as error:
            if isinstance(error, ControlError) and error.is_restricted and not self._has_told_refusal:
                self._has_told_refusal = True
                logger.warning(
                    "No model gets more worker processes while requests wait (ProcessWorker.min_copies), as the server "
                    "does not tell how long they do: %s. Leave its statistics open to this program.",
                    error.reason,
                )
            return None

    def pending(self, name: str, version: int) -> int | None:
        """Return how many requests wait; None if the server does not tell, as one without a page of metrics."""
        endpoint = self._metrics()
        if endpoint is None:
            return None
        try:
            return pending_requests(read_metrics(endpoint), name, version)
        except (OSError, http.client.HTTPException) as error:
            logger.debug("How many requests wait for model %r is not known: %s", name, error)
            return None


@dataclass(frozen=True)
class ModelQueue:
    """The queue of one model, for `Scaling`."""

    queues: Queues
    name: str
    version: int

    def times(self) -> QueueTime | None:
        """Return how many requests have left it, and how long they waited."""
        return self.queues.times(self.name, self.version)

    def pending(self) -> int | None:
        """Return how many requests are in it now."""
        return self.queues.pending(self.name, self.version)

"""`Figures`: the page of metrics of a server, and what stands on it."""

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pytriton.proxy_backend.system.processes import resident_bytes
from pytriton.server.lifecycle.deployment import Deployment
from pytriton.server.lifecycle.files import ServerFiles
from pytriton.server.lifecycle.running import RunningServer
from pytriton.server.models.service import WorkerService
from pytriton.server.observe.metrics_totals import HostedModel, hosted_models
from pytriton.server.tritonserver.ports import Endpoint

if TYPE_CHECKING:
    from pytriton.server.observe.metrics import ModelTexts
    from pytriton.server.observe.metrics_page import MetricsPage

logger = logging.getLogger(__name__)


class Figures:
    """Serves the metrics of a server, in place of that server's own page."""

    def __init__(
        self,
        server: RunningServer,
        deployment: Deployment,
        files: ServerFiles,
        guard_states: Callable[[], Mapping[str, bool]],
    ) -> None:
        self._server = server
        self._deployment = deployment
        self._files = files
        self._guard_states = guard_states
        self._page: MetricsPage | None = None
        self._texts: ModelTexts | None = None

    def prepare(self) -> None:
        """Import the modules of the page while the server starts, when that takes no extra time."""
        from pytriton.server.observe import metrics_page  # noqa: F401

    def start(self) -> None:
        """Serve the page of a running server, if it should have one."""
        if (ports := self._server.ports) is None:
            return
        page, first, listener = ports.metrics, ports.triton_metrics, ports.take_metrics_listener()
        if page is None or first is None or listener is None:
            return
        # Imported late, see `prepare`.
        from pytriton.server.observe.metrics_page import MetricsPage

        self._page = MetricsPage(listener, lambda: self._render(first))
        self._page.start()
        logger.info("Metrics are served at http://%s/metrics", page.authority)

    def close(self) -> None:
        """Serve the page no more."""
        if self._page is not None:
            self._page.close()

    def _render(self, first: Endpoint) -> bytes:
        # Imported late, because the import takes as long as the rest of the start.
        from pytriton.server.observe.metrics import ModelTexts, render_metrics

        if self._texts is None:
            self._texts = ModelTexts()
        server = self._server
        # The current server, which may have replaced the first one.
        current = None if server.ports is None else server.ports.triton_metrics
        process = server.process
        return render_metrics(
            current or first,
            self._models,
            self._guard_states,
            files=lambda: None if process is None else process.open_files,
            memory=lambda: None if process is None or process.pid is None else resident_bytes(process.pid),
            outcomes=None if server.outcomes is None else server.outcomes.read(),
            texts=self._texts,
            budget=self._budget,
        )

    def _budget(self) -> tuple[int, int] | None:
        budget = next((model.budget for model in self._deployment.models), None)
        limit = None if budget is None else budget.limit_bytes
        return None if budget is None or limit is None else (budget.used_bytes, limit)

    def _models(self) -> list[WorkerService | HostedModel]:
        supervisor = self._files.supervisor
        return [*self._deployment.models, *([] if supervisor is None else hosted_models(supervisor.serving()))]

"""The pages, which NiceGUI draws and keeps up to date."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from nicegui import Client, app, ui

from pytriton.catalog.listing import ASLEEP, NOT_READY, ListedModel
from pytriton.catalog.openapi import describe_openapi
from pytriton.catalog.tensors import describe_signature
from pytriton.client import ModelSpec
from pytriton.console.charts import (
    COLORS,
    MOST_LINES,
    batch_chart,
    failures_chart,
    lately,
    latency_chart,
    names_of,
    requests_chart,
)
from pytriton.console.form import Form
from pytriton.console.samples import Point, WorkerCounts
from pytriton.console.trials import Caller
from pytriton.console.watcher import LogFile, View, Watcher
from pytriton.proxy_backend.system.threads import keep_on
from pytriton.server.control.http import Control, ControlError

TITLE = "pytriton console"

_REFRESH_S = 0.5
# The lengths of time that a chart may show, in seconds; 0 shows everything.
_SPANS = {300: "5 min", 3600: "1 h", 0: "all"}
_LOAD_TIMEOUT_S = 600.0
_FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" fill="#2f7ed8"/>'
    '<path d="M9 7v9a7 7 0 0 0 14 0V7M16 7v19" fill="none" stroke="#fff" stroke-width="3.4" stroke-linecap="round"/>'
    "</svg>"
)

# A row of a table. On a phone it repeats the names of the columns.
_ROW = """
<q-tr :props="props"><q-td v-for="col in props.cols" :key="col.name" :props="props" :data-label="col.label">
<a v-if="col.name == 'name'" class="c-link" :href="props.row.href">{{ col.value }}</a>
<q-badge v-else-if="col.name == 'state'" :color="props.row.color">{{ col.value }}</q-badge>
<span v-else>{{ col.value }}</span>
</q-td></q-tr>
"""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Console:
    """The sources of what the pages show."""

    server_url: str
    watcher: Watcher
    control: Control
    caller: Caller
    log: LogFile | None


def make_app(console: Console) -> FastAPI:
    """Return the application that shows the pages. NiceGUI allows a single one in each process."""
    made = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    looking = _Looking(console.watcher)

    # FastAPI runs it in a thread of its pool.
    @made.get("/openapi.json")
    def openapi() -> JSONResponse:
        view = console.watcher.view
        if not looking.is_wanted():
            view = looking.look_once()
        return JSONResponse(describe_openapi(view.models, console.server_url))

    @ui.page("/", title=TITLE)
    def overview() -> None:
        _Overview(console)

    @ui.page("/model", title=TITLE)
    def model(name: str = "") -> None:
        _ModelPage(console, name, looking)

    app.on_connect(looking.wake)
    app.on_startup(looking.start)
    app.on_shutdown(looking.stop)
    ui.run_with(
        made, title=TITLE, favicon=_FAVICON, dark=None, tailwind=False, show_welcome_message=False,
        binding_refresh_interval=None,
    )  # fmt: skip
    return made


class _Looking:
    """The thread that looks at the server while somebody has a page open."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._woken = threading.Event()
        self._ending = threading.Event()
        self._once = threading.Lock()
        # Seconds until the next look; None waits until somebody opens a page.
        self._pause_s: float | None = watcher.interval_s
        self._thread = threading.Thread(target=self._run, name="pytriton-console-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        self._woken.set()

    def wake(self) -> None:
        self._woken.set()

    def look_once(self) -> View:
        with self._once:
            return self._watcher.poll()

    @staticmethod
    def is_wanted() -> bool:
        return any(client.has_socket_connection for client in list(Client.instances.values()))

    def _run(self) -> None:
        while not self._ending.is_set():
            # In this order, a visitor who comes in between wakes the thread.
            self._woken.clear()
            # If this thread ended, pages would show old data.
            keep_on(self._look_if_wanted, "The console cannot look at the server")
            self._woken.wait(self._pause_s)

    def _look_if_wanted(self) -> None:
        self._pause_s = self._watcher.interval_s
        if self.is_wanted():
            self.look_once()
        else:
            self._pause_s = None


async def _in_thread(call: Callable[[], Answer]) -> Answer:
    """Run a slow call in a thread and return its result; the end of the console does not wait for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Answer] = loop.create_future()

    def tell(answer: Answer | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(answer)  # type: ignore[arg-type] # one of the two is there

    def run() -> None:
        answer, error = None, None
        try:
            answer = call()
        except BaseException as raised:
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, answer, error)

    threading.Thread(target=run, name="pytriton-console-call", daemon=True).start()
    return await done


class _Page:
    """The common part of all pages: the head, and the alerts."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._seen = -1
        ui.add_css(Path(__file__).with_name("console.css"))
        with ui.row().classes("c-head w-full").style("width: 100vw; margin: -1rem calc(50% - 50vw) 0"):
            ui.link("pytriton console", "/").classes("c-brand")
            self._state = ui.badge("...").classes("c-state")
            ui.label(console.server_url).classes("c-server")
            self._version = ui.label("")
            ui.element("div").classes("c-grow")
            ui.link("OpenAPI", "/openapi.json", new_tab=True)
        self._told = ui.column().style("width: 100%")
        self._told.set_visibility(False)
        self._telling: list[tuple[str, str]] = []

    def begin(self) -> None:
        """Show the known state, and keep it up to date."""
        self._refresh()
        ui.timer(_REFRESH_S, self._refresh)

    def _refresh(self) -> None:
        view = self.console.watcher.check()
        if view.serial == self._seen:
            return
        self._seen = view.serial
        colors = {"READY": "positive", "NOT READY": "warning", "NO ANSWER": "negative"}
        self._state.set_text(view.state)
        self._state.props["color"] = colors.get(view.state, "grey")
        self._state.update()
        self._version.set_text(f"Triton {view.version}" if view.version else "")
        told = [("c-alert", view.problem)] if view.problem else []
        told += [("c-alert", text) for text in self.alerts(view)]
        told += [("c-note", text) for text in view.notes]
        if told != self._telling:
            self._telling = told
            self._told.set_visibility(bool(told))
            self._told.clear()
            with self._told:
                for kind, text in told:
                    ui.label(text).classes(f"{kind} c-told")
        self.show(view)

    def alerts(self, view: View) -> Iterable[str]:
        """Yield the problems of models and workers."""
        for worker in view.workers:
            times = f"{worker.ends} time{'s' if worker.ends != 1 else ''}"
            if not worker.attached and not worker.asleep:
                ended = f": its process has ended by itself {times}" if worker.ends else ""
                yield f"{_worker_name(worker)} is not attached{ended}."
            elif worker.ended_lately:
                yield f"{_worker_name(worker)} ended by itself, and was started again ({times} so far)."

    def show(self, view: View) -> None:
        """Show a view."""
        raise NotImplementedError


class _Overview(_Page):
    """The page of all models."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._tiles = _tiles(
            "requests/s", "errors/s", "latency, ms", "in the queue", "models ready", "workers attached"
        )
        self._charts = _Charts("")
        with ui.element("div").classes("c-box"):
            with ui.row().style("width: 100%; align-items: center"):
                ui.label("Models").classes("c-h")
                ui.element("div").classes("c-grow")
                search = ui.input(placeholder="Search").props("dense clearable outlined").classes("c-search")
            names = ("name", "state", "versions", "workers", "requests", "errors", "latency", "signature")
            self._table = ui.table(
                rows=[],
                columns=[
                    {"name": name, "label": name.capitalize(), "field": name, "sortable": True, "align": "left"}
                    for name in names
                ],
                row_key="name",
                pagination={"rowsPerPage": 50, "sortBy": "name"},
            ).classes("c-table c-models")
            self._table.props("flat dense :rows-per-page-options=[10,50,200]")
            self._table.add_slot("body", _ROW)
            self._table.bind_filter_from(search, "value")
        self._log = None if console.log is None else _Log(console.log)
        self.begin()

    def show(self, view: View) -> None:
        """Show a view."""
        watcher = self.console.watcher
        history = watcher.points()
        point = _last(history)
        ready = sum(model.state in ("READY", ASLEEP) for model in view.models)
        attached = sum(worker.attached for worker in view.workers)
        self._tiles(
            _rate(point.requests_s if point else None),
            _rate(point.all_failures_s if point else None),
            _number(point.latency_ms if point else None),
            _number(point.pending if point else None),
            f"{ready} of {len(view.models)}",
            f"{attached} of {len(view.workers)}" if view.workers else "-",
        )
        busy = watcher.busiest(len(view.models))
        # A fixed order, so that each name keeps its colour.
        names = sorted(busy[:MOST_LINES])
        lines = {name: watcher.points(name) for name in names} or {"all": history}
        self._charts(history, lines, others=len(busy) - len(names))
        self._table.rows = [_row(model, view, _last(watcher.points(model.name))) for model in view.models]
        if self._log is not None:
            self._log.show()


class _ModelPage(_Page):
    """The page of one model."""

    def __init__(self, console: Console, name: str, looking: _Looking) -> None:
        super().__init__(console)
        self._name = name
        self._looking = looking
        self._spec: ModelSpec | None = None
        with ui.row().style("align-items: center; width: 100%; gap: .8rem"):
            ui.label(name).style("font-size: 1.4rem; font-weight: 650; overflow-wrap: anywhere").classes("c-name")
            self._model_state = ui.badge("...").classes("c-model-state")
            self._versions = ui.label("").classes("c-quiet")
            ui.element("div").classes("c-grow")
            with ui.row().classes("c-buttons"):
                self._load = ui.button("Load", on_click=lambda: self._change("load")).classes("c-load")
                self._unload = ui.button("Unload", on_click=lambda: self._change("unload")).classes("c-unload")
            for button in (self._load, self._unload):
                button.props("outline dense no-caps padding='2px 12px'")
        self._signature = ui.label("").classes("c-mono c-signature")
        self._words = ui.label("").classes("c-quiet c-words")
        self._problem = ui.label("").classes("c-alert c-problem")
        self._tiles = _tiles("requests/s", "errors/s", "latency, ms", "rows of a batch", "in the queue", "ok / failed")
        with ui.element("div").classes("c-two"):
            self._try = ui.element("div").classes("c-box")
            self._calls = ui.element("div").classes("c-box")
        self._charts = _Charts(name)
        with ui.element("div").classes("c-box") as self._workers_box:
            ui.label("Workers").classes("c-h")
            self._use = ui.label("").classes("c-quiet c-use")
            names = ("worker", "state", "pid", "busy", "requests", "errors", "crashes")
            self._workers = ui.table(
                rows=[],
                columns=[{"name": each, "label": each.capitalize(), "field": each, "align": "left"} for each in names],
                row_key="worker",
            ).classes("c-table c-workers")
            self._workers.props("flat dense")
            self._workers.add_slot("body", _ROW)
        self.begin()

    def alerts(self, view: View) -> Iterable[str]:
        """Yield the problems of this model's workers."""
        mine = [worker for worker in view.workers if worker.model == self._name]
        return super().alerts(View(workers=mine))

    def show(self, view: View) -> None:
        """Show a view."""
        model = view.model(self._name)
        state = "NOT THERE" if model is None else model.state
        self._model_state.set_text(state)
        self._model_state.props["color"] = _color(state)
        self._model_state.update()
        versions = [] if model is None else [str(each.version) for each in model.versions if each.version is not None]
        self._versions.set_text(f"version {', '.join(versions)}" if versions else "")
        can_load = self._name in view.loadable
        self._load.set_text("Reload" if state in ("READY", NOT_READY, ASLEEP) else "Load")
        self._load.set_visibility(can_load)
        self._unload.set_visibility(model is not None and bool(versions) and state != "UNAVAILABLE")
        spec = None if model is None else model.spec
        problem = "The server has no such model." if model is None else model.problem
        self._problem.set_text(problem)
        self._problem.set_visibility(bool(problem))
        self._signature.set_text("" if spec is None else describe_signature(spec))
        self._words.set_text("" if spec is None else _in_words(spec))
        history = self.console.watcher.points(self._name)
        point = _last(history)
        counts = None if model is None else model.counts
        self._tiles(
            _rate(point.requests_s if point else None),
            _rate(point.all_failures_s if point else None),
            _number(point.latency_ms if point else None),
            _number(point.batch_rows if point else None),
            _number(point.pending if point else None),
            "-" if counts is None else f"{counts.succeeded:,} / {counts.failed:,}",
        )
        self._charts(history, {self._name: history})
        mine = [worker for worker in view.workers if worker.model == self._name]
        self._workers_box.set_visibility(bool(mine))
        use = None if model is None else model.use
        self._use.set_visibility(use is not None)
        if use is not None:
            self._use.set_text(f"Memory: {use.memory}. Last used: {use.used(time.time())}. Woken: {use.woken}.")
        self._workers.rows = [_worker_row(worker) for worker in mine]
        if spec != self._spec:
            self._spec = spec
            self._try.clear()
            self._calls.clear()
            if spec is not None:
                Form(self.console.server_url, self.console.caller, spec, self._try, self._calls)

    async def _change(self, word: str) -> None:
        """Load or unload the model, once that is confirmed."""
        name, control = self._name, self.console.control
        text = {
            "load": f"Load {name} from the repository, in place of what is loaded?",
            "unload": f"Unload {name}? Requests of it fail until it is loaded again.",
        }[word]
        with ui.dialog() as dialog, ui.card():
            ui.label(text).style("overflow-wrap: anywhere")
            if word == "unload" and name not in self.console.watcher.view.loadable:
                ui.label("It is not in the repository: only the program that handed it over can load it again.")
            with ui.row():
                ui.button(word.capitalize(), on_click=lambda: dialog.submit(True)).props("no-caps").classes("c-confirm")
                ui.button("Cancel", on_click=lambda: dialog.submit(False)).props("flat no-caps")
        if not await dialog:
            return
        call = control.load if word == "load" else control.unload
        waiting = ui.notification(f"{word.capitalize()} {name} ...", spinner=True, timeout=None)
        try:
            await _in_thread(lambda: call(name, _LOAD_TIMEOUT_S))
        except ControlError as error:
            said = error.reason or str(error)
            ui.notify(f"{word.capitalize()} failed: {said}", type="negative", timeout=0, close_button=True)
        else:
            ui.notify(f"{name}: {word} done.", type="positive")
        finally:
            waiting.dismiss()
            self.console.watcher.forget(name)
            self._looking.wake()


class _Charts:
    """The four charts of a page."""

    def __init__(self, name: str) -> None:
        self._shown: list[Any] = []
        self._legends: list[_Legend] = []
        self._last: Callable[[], None] | None = None
        with ui.row().style("width: 100%; align-items: center; gap: .6rem"):
            ui.label("The last").classes("c-quiet")
            self._span = ui.toggle(_SPANS, value=300, on_change=self._again).classes("c-span")
            self._span.props("dense no-caps unelevated toggle-color=primary color=grey-4 text-color=black")
        with ui.element("div").classes("c-charts"):
            for title in ("Requests a second", "Errors a second", "Latency in ms", "Batches and queue"):
                with ui.element("div").classes("c-box"):
                    ui.label(title).classes("c-h")
                    self._legends.append(_Legend())
                    self._shown.append(ui.echart({}).classes("c-chart"))

    def __call__(
        self,
        history: list[tuple[float, Point | None]],
        by_model: Mapping[str, list[tuple[float, Point | None]]],
        *,
        others: int = 0,
    ) -> None:
        """Show points: those of everything, and those of single models; `others` models are left out."""
        self._last = lambda: self(history, by_model, others=others)
        span = float(self._span.value)
        part = lately(history, span)
        parts = {name: lately(points, span) for name, points in by_model.items()}
        made = [requests_chart(parts), failures_chart(part), latency_chart(part), batch_chart(part)]
        for number, (chart, legend, options) in enumerate(zip(self._shown, self._legends, made, strict=True)):
            legend(names_of(options), others if number == 0 else 0)
            chart.options.clear()
            chart.options.update(options)
            chart.update()

    def _again(self) -> None:
        if self._last is not None:
            self._last()


class _Legend:
    """The names of the lines of a chart, which break into as many rows as they need."""

    def __init__(self) -> None:
        self._names: tuple[list[str], int] = ([], 0)
        self._row = ui.row().classes("c-legend")

    def __call__(self, names: list[str], others: int) -> None:
        if (names, others) == self._names:
            return
        self._names = names, others
        self._row.clear()
        with self._row:
            for number, name in enumerate(names):
                with ui.row().classes("c-key"):
                    ui.element("span").classes("c-dot").style(f"background: {COLORS[number % len(COLORS)]}")
                    ui.label(name)
            if others and names:
                ui.label(f"and {others} more").classes("c-quiet")


class _Log:
    """The last lines of the server's log."""

    def __init__(self, log: LogFile) -> None:
        self._log = log
        self._lines: list[str] = []
        with ui.element("div").classes("c-box"):
            ui.label("Log").classes("c-h")
            with ui.element("div").classes("c-scroll c-bottom"):
                self._label = ui.label("").classes("c-mono c-log")

    def show(self) -> None:
        lines = self._log.last_lines()
        if lines != self._lines:
            self._lines = lines
            self._label.set_text("\n".join(lines))


def _tiles(*names: str) -> Callable[..., None]:
    """Make a row of numbers, and return a function that sets them."""
    labels = []
    with ui.element("div").classes("c-tiles"):
        for name in names:
            with ui.element("div").classes("c-tile"):
                labels.append(
                    ui.label("-").classes(f"c-number c-is-{name.split(',')[0].replace(' ', '-').replace('/', '-')}")
                )
                ui.label(name).classes("c-quiet")

    def show(*texts: str) -> None:
        for label, text in zip(labels, texts, strict=True):
            label.set_text(text)

    return show


def _in_words(spec: ModelSpec) -> str:
    """Explain the words of a signature."""
    said = (
        f"Requests that wait at the same time are joined to one batch, of up to {spec.max_batch_size} rows."
        if spec.batching
        else "No batching: each request comes to the model alone."
    )
    if spec.decoupled:
        said += " Decoupled: a request may get any number of answers, which come as they are made."
    return said


def _row(model: ListedModel, view: View, point: Point | None) -> dict[str, Any]:
    workers = [worker for worker in view.workers if worker.model == model.name]
    versions = [str(version.version) for version in model.versions if version.version is not None]
    return {
        "name": model.name,
        "href": f"/model?name={quote(model.name, safe='')}",
        "state": model.state,
        "color": _color(model.state),
        "versions": ", ".join(versions) or "-",
        "workers": f"{sum(worker.attached for worker in workers)} of {len(workers)}" if workers else "-",
        "requests": f"{_rate(point.requests_s)}/s" if point else "-",
        "errors": f"{_rate(point.all_failures_s)}/s" if point else "-",
        "latency": "-" if point is None or point.latency_ms is None else f"{_number(point.latency_ms)} ms",
        "signature": describe_signature(model.spec) if model.spec else " ".join(model.problem.split())[:300],
    }


def _worker_row(worker: WorkerCounts) -> dict[str, Any]:
    return {
        "worker": f"{worker.place}" + (f", version {worker.version}" if worker.version != "1" else ""),
        "state": "asleep" if worker.asleep else "attached" if worker.attached else "not attached",
        "color": "info" if worker.asleep else "positive" if worker.attached else "negative",
        "pid": "-" if worker.pid is None else str(worker.pid),
        "busy": "-" if worker.busy is None else f"{worker.busy:.0%}",
        "requests": f"{worker.requests:,.0f}",
        "errors": f"{worker.failed:,.0f}",
        "crashes": str(worker.ends),
    }


def _worker_name(worker: WorkerCounts) -> str:
    version = f" (version {worker.version})" if worker.version != "1" else ""
    return f"Worker {worker.place} of {worker.model}{version}"


def _color(state: str) -> str:
    return {"READY": "positive", ASLEEP: "info", "LOADING": "info", "UNLOADING": "info"}.get(state, "negative")


def _last(history: list[tuple[float, Point | None]]) -> Point | None:
    return history[-1][1] if history else None


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:,.1f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:,.3g}"

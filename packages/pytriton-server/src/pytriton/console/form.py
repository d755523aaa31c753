"""The form by which somebody tries a model. With `pages`, the only module that imports NiceGUI."""

import base64
from collections.abc import Callable, Sequence

from nicegui import ui
from nicegui.events import UploadEventArguments

from pytriton.catalog.snippets import asks_for_file, describe_calls, describe_type, example_text
from pytriton.catalog.tensors import parse_inputs
from pytriton.client import ModelSpec, TensorSpec
from pytriton.client.exceptions import PyTritonClientError, PyTritonClientValueError
from pytriton.console.gatekeeper import MAX_BODY_BYTES
from pytriton.console.media import Part
from pytriton.console.trials import Caller, Trial

_STREAM_REFRESH_S = 0.2
_MOST_INPUTS = 100
_TOOLS = ("curl", "Python", "JavaScript")


class Form:
    """The form by which somebody tries a model, and the same call for other tools."""

    def __init__(self, server_url: str, caller: Caller, spec: ModelSpec, where: ui.element, calls: ui.element) -> None:
        self._server_url = server_url
        self._caller = caller
        self._spec = spec
        self._fields: dict[str, _Field] = {}
        self._batch: ui.switch | None = None
        self._trial: Trial | None = None
        with where:
            ui.label("Try it").classes("c-h")
            with ui.column().classes("c-form"):
                # Optional inputs are left out, so that the author's defaults hold; but a request without any input is
                # unlikely.
                has_required = any(not tensor.optional for tensor in spec.inputs)
                for tensor in spec.inputs[:_MOST_INPUTS]:
                    is_sent = not (tensor.optional and has_required)
                    self._fields[tensor.name] = _Field(tensor, self._show_calls, is_sent=is_sent)
                if spec.batching:
                    self._batch = ui.switch("values are a batch: one more axis", on_change=self._show_calls)
                    self._batch.tooltip("A batch is several samples in one request: a list of what one sample takes.")
                with ui.row().classes("c-buttons"):
                    self._call = ui.button("Call", on_click=self._begin).props("no-caps unelevated").classes("c-call")
                    self._stop = ui.button("Stop", on_click=self._end).props("no-caps outline").classes("c-stop")
                    self._status = ui.label("").classes("c-quiet c-status")
                self._error = ui.label("").classes("c-alert c-error")
                self._answer = ui.label("").classes("c-mono c-code c-scroll c-answer")
                self._parts = ui.column().classes("c-parts")
        self._stop.set_visibility(False)
        self._error.set_visibility(False)
        self._answer.set_visibility(False)
        with calls:
            ui.label("The same from elsewhere").classes("c-h")
            with ui.tabs().props("dense no-caps align=left") as tabs:
                titles = [ui.tab(title).classes(f"c-tab-{title}") for title in _TOOLS]
            self._texts: dict[str, ui.label] = {}
            with ui.tab_panels(tabs, value=titles[0]).style("width: 100%; background: none"):
                for title, tab in zip(_TOOLS, titles, strict=True):
                    with ui.tab_panel(tab).style("padding: .6rem 0"):
                        text = ui.label("").classes(f"c-mono c-code c-snippet c-{title}")
                        self._texts[title] = text
                        ui.button("Copy", on_click=lambda text=text: ui.clipboard.write(text.text)).props(
                            "flat dense no-caps icon=content_copy"
                        )
        self._timer = ui.timer(_STREAM_REFRESH_S, self._show_trial, active=False)
        self._show_calls()

    def _inputs(self, *, for_show: bool = False) -> dict[str, object]:
        """Return the inputs; with `for_show`, a file that is not chosen yet is empty."""
        texts, values, files = {}, {}, {}
        for name, field in self._fields.items():
            if not field.is_given:
                continue
            if field.is_missing and not for_show:
                raise PyTritonClientValueError(
                    f"Input {name!r} takes a file: choose one with the paper clip, or write a text.",
                    model_name=self._spec.model_name,
                )
            if field.file is not None or field.is_missing:
                texts[name], files[name] = f"@{name}", field.file or b""
            elif field.is_text:
                # The text is used as it is: it may begin with any character.
                values[name] = field.text
            else:
                texts[name] = field.text
        return parse_inputs(self._spec, texts, values, is_batch=self._is_batch, files=files)

    @property
    def _is_batch(self) -> bool:
        return self._batch is not None and bool(self._batch.value)

    def _show_calls(self) -> None:
        files = [name for name, field in self._fields.items() if field.is_given and field.sends_file]
        try:
            inputs = self._inputs(for_show=True)
            calls = describe_calls(self._server_url, self._spec, inputs, is_batch=self._is_batch, files=files)
        except PyTritonClientError as error:
            calls = dict.fromkeys(self._texts, f"# {error}")
        for title, label in self._texts.items():
            label.set_text(calls[title])

    def _begin(self) -> None:
        self._end()
        self._show_error("")
        try:
            inputs = self._inputs()
        except PyTritonClientError as error:
            self._show_error(str(error))
            return
        self._trial = self._caller.begin(self._spec, inputs, is_batch=self._is_batch)
        self._stop.set_visibility(self._spec.decoupled)
        self._status.set_text("...")
        self._answer.set_text("")
        self._parts.clear()
        self._timer.activate()

    def _end(self) -> None:
        if self._trial is not None and not self._trial.is_done:
            self._trial.stop()

    def _show_trial(self) -> None:
        trial = self._trial
        if trial is None:
            return
        is_done = trial.is_done  # read first: parts that come later are shown the next time
        answers = list(trial.answers)
        self._answer.set_text("\n".join(answers))
        self._answer.set_visibility(bool(answers))
        several = f"{trial.count:,} answer{'' if trial.count == 1 else 's'}, " if self._spec.decoupled else ""
        self._status.set_text(f"{several}{trial.seconds * 1e3:,.1f} ms" if is_done else f"{several}...")
        if is_done:
            self._show_error(trial.error)
            self._show_parts(list(trial.parts))
            self._stop.set_visibility(False)
            self._timer.deactivate()

    def _show_parts(self, parts: Sequence[Part]) -> None:
        """Show images, play sounds, and let everything be saved that is more than a short text."""
        with self._parts:
            for part in parts:
                source = f"data:{part.media_type};base64,{base64.b64encode(part.data).decode()}"
                if part.is_image:
                    image = ui.element("img").classes("c-image")
                    image.props["src"], image.props["alt"] = source, part.name
                elif part.is_sound:
                    sound = ui.element("audio").classes("c-sound")
                    sound.props["src"], sound.props["controls"] = source, True
                ui.button(
                    f"Save {part.file_name} ({len(part.data):,} bytes)",
                    on_click=lambda part=part: ui.download.content(part.data, part.file_name, part.media_type),
                ).props("flat dense no-caps icon=download").classes("c-save")

    def _show_error(self, text: str) -> None:
        self._error.set_text(text)
        self._error.set_visibility(bool(text))


class _Field:
    """One input of the form."""

    def __init__(self, tensor: TensorSpec, on_change: Callable[[], None], *, is_sent: bool) -> None:
        self.is_text = tensor.datatype == "BYTES" and all(length in (1, -1) for length in tensor.shape)
        """Whether the input is a single text."""
        self.wants_file = asks_for_file(tensor)
        """Whether it is rather a file than a text, as an image is."""
        self.file: bytes | None = None
        """The uploaded file."""
        self._on_change = on_change
        with ui.element("div").classes("c-field"):
            with ui.row().style("align-items: center; gap: .6rem"):
                ui.label(tensor.name).style("font-weight: 600; overflow-wrap: anywhere")
                ui.label(describe_type(tensor)).classes("c-quiet c-type")
                self._given = (
                    ui.switch("send", value=is_sent, on_change=on_change).props("dense") if tensor.optional else None
                )
            hint = "text" if self.is_text else "JSON" if tensor.datatype == "BYTES" else "numbers with commas, or JSON"
            if self.wants_file:
                hint = "choose a file with the paper clip, or write a text"
            self._box = ui.textarea(placeholder=hint, value=example_text(tensor), on_change=self._send)
            self._box.props("outlined dense autogrow debounce=200").style("width: 100%").classes("c-input")
            upload = ui.upload(auto_upload=True, max_files=1, max_file_size=MAX_BODY_BYTES // 2, on_upload=self._take)
            upload.style("display: none")
            self._pick = ui.button(icon="attach_file", on_click=lambda: upload.run_method("pickFiles"))
            what = "A file" if tensor.datatype == "BYTES" else "A .npy file"
            self._pick.classes("c-pick").props("flat dense round").tooltip(what)
            self._shown = ui.chip(removable=True).classes("c-file").props("dense outline").on("remove", self._drop)
            self._shown.set_visibility(False)
        self._upload = upload

    @property
    def is_given(self) -> bool:
        """Whether it is sent."""
        return self._given is None or bool(self._given.value)

    @property
    def is_missing(self) -> bool:
        """Whether a file is still to be chosen."""
        return self.wants_file and self.file is None and not self.text

    @property
    def sends_file(self) -> bool:
        """Whether its value comes from a file."""
        return self.file is not None or self.is_missing

    @property
    def text(self) -> str:
        """The text of the field."""
        return self._box.value or ""

    def _send(self) -> None:
        """Send what somebody has changed."""
        if self._given is not None and not self._given.value:
            self._given.set_value(True)
        else:
            self._on_change()

    async def _take(self, event: UploadEventArguments) -> None:
        self.file = await event.file.read()
        self._shown.set_text(f"{event.file.name[:60]} ({len(self.file):,} bytes)")
        if self._given is not None:
            self._given.set_value(True)
        self._show()

    def _drop(self) -> None:
        self.file = None
        self._upload.reset()
        self._show()

    def _show(self) -> None:
        self._box.set_visibility(self.file is None)
        self._shown.set_value(True)
        self._shown.set_visibility(self.file is not None)
        self._on_change()

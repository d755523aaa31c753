"""Two servers that have the same Python models: one runs them by Triton's Python backend, the other by our workers.

Whatever a test asks of both is compared. What is meant to differ is named in `MEANT`, with the reason.
"""

from __future__ import annotations

import contextlib
import math
import queue
import re
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from pytriton.triton import Triton
from support.paths import TESTS
from support.python_models.comparison import check_alike
from support.python_models.python_backend import why_no_python_backend
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, eventually

MODELS = TESTS / "python_models" / "models"

Array = np.ndarray[Any, Any]
Told = TypeVar("Told")
PROTOCOLS = {"http": tritonclient.http, "grpc": tritonclient.grpc}
# How long a model of Triton's own may take to be gone.
_KEPT_S = 60.0
_METRIC = re.compile(r"(\w+)\{(.*)\} (\S+)")
# The utilities are a file in Triton's Python backend; ours are left out, as its C++ is.
_UTILITIES = re.compile(r"  /\S+/triton_python_backend_utils\w*\.py\(\d+\): \w+\n")
_IMPORT = re.compile(r"(<frozen importlib\.\w+>)\(\d+\)")


class Side:
    """One of the two servers."""

    def __init__(self, who: str, repository: Path, **settings: Any) -> None:
        self.who = who  # who runs the models: `stub` or `workers`
        self.repository = repository  # the folder that it serves, with a copy of each model that was loaded
        config = local_config(
            model_repository=repository,
            python_models=who,
            allow_metrics=True,
            metrics_port=0,
            exit_timeout_secs=60,
            **settings,
        )
        self.triton = Triton(config=config)

    @contextlib.contextmanager
    def clients(self) -> Iterator[None]:
        """Be able to make calls while a block runs."""
        self._headers = {"triton-access-token": str(self.triton.get_access_token())}
        with (
            tritonclient.http.InferenceServerClient(
                str(self.triton.http_url).partition("//")[2],
                network_timeout=PATIENCE_S,
                connection_timeout=PATIENCE_S,
            ) as http,
            tritonclient.grpc.InferenceServerClient(self._grpc_address) as grpc,
        ):
            self._clients = {"http": http, "grpc": grpc}
            yield

    @property
    def _grpc_address(self) -> str:
        return str(self.triton.grpc_url).partition("//")[2]

    # ---- models -----------------------------------------------------------------------------------------------------

    def load(self, model: str, source: str | None = None, edit: Mapping[str, str] | None = None) -> str:
        """Copy a model into the repository and load it; return the error, empty if there was none.

        Args:
            model: Its name.
            source: Its `model.py`, where it is another one.
            edit: What is replaced in its `config.pbtxt`, and by what.
        """
        shutil.copytree(MODELS / model, self.repository / model, dirs_exist_ok=True)
        config = self.repository / model / "config.pbtxt"
        for old, new in (edit or {}).items():
            assert old in config.read_text(), f"{old!r} is not in {config}"
            config.write_text(config.read_text().replace(old, new))
        if source is not None:
            (self.repository / model / "1" / "model.py").write_text(source)
        try:
            self._clients["http"].load_model(model, headers=self._headers)
        except InferenceServerException as error:
            return self.neutral(str(error.message()))
        return ""

    def unload(self, model: str) -> None:
        """Unload a model and wait until it is gone."""
        self._clients["http"].unload_model(model, headers=self._headers)

        def is_gone() -> bool:
            index = self._clients["http"].get_model_repository_index(headers=self._headers)
            return all(entry.get("state") != "UNLOADING" for entry in index if entry["name"] == model)

        # Triton's own backend keeps one in some sixty models for ever whose `execute` has raised.
        deadline = time.monotonic() + _KEPT_S if self.who == "stub" else math.inf
        eventually(lambda: is_gone() or time.monotonic() > deadline)
        shutil.rmtree(self.repository / model)

    def config(self, model: str) -> Any:
        """Return the configuration of a model, as the server has it."""
        return self._clients["http"].get_model_config(model, headers=self._headers)

    def file(self, model: str, name: str) -> Path:
        """Return where a model writes a file."""
        return self.repository / model / name

    def neutral(self, text: str) -> str:
        """Return a text without what differs from server to server."""
        return _IMPORT.sub(r"\1", _UTILITIES.sub("", text)).replace(str(self.repository), "<repository>")

    # ---- requests ---------------------------------------------------------------------------------------------------

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        protocol: str = "http",
        outputs: Sequence[str] | None = None,
        binary: bool = True,
        **options: Any,
    ) -> Any:
        """Make a request; return its outputs, or its error, as plain values.

        Args:
            model: The model.
            inputs: Its inputs by name.
            protocol: `http` or `grpc`.
            outputs: The outputs that are wanted; all if not given.
            binary: Whether the data of tensors go besides the JSON.
            options: Further arguments of tritonclient.
        """
        library = PROTOCOLS[protocol]
        wanted = [library.InferRequestedOutput(name) for name in outputs] if outputs is not None else None
        if protocol == "http" and not binary:
            wanted = [library.InferRequestedOutput(name, binary_data=False) for name in outputs or ()]
        more = {"client_timeout": PATIENCE_S} if protocol == "grpc" else {}
        try:
            result = self._clients[protocol].infer(
                model, _tensors(protocol, inputs, binary), outputs=wanted, **more, **options
            )
        except InferenceServerException as error:
            return self._error(error)
        return _outputs(result, protocol)

    def infer_together(self, model: str, requests: Sequence[Mapping[str, Array]]) -> list[Any]:
        """Make requests that wait for their answers at the same time; return these in the order of the requests."""
        answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

        def note(number: int) -> Callable[[Any, Any], None]:
            return lambda result, error: answers.put(
                (number, self._error(error) if error else _outputs(result, "grpc"))
            )

        for number, inputs in enumerate(requests):
            self._clients["grpc"].async_infer(
                model, _tensors("grpc", inputs), callback=note(number), client_timeout=PATIENCE_S
            )
        found = dict(answers.get(timeout=PATIENCE_S) for _ in requests)
        return [found[number] for number in range(len(requests))]

    def stream(self, model: str, *requests: Mapping[str, Array], **options: Any) -> list[Any]:
        """Make requests on one stream; return all that comes until the server ends it."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with tritonclient.grpc.InferenceServerClient(self._grpc_address) as client:
            client.start_stream(
                lambda result, error: answers.put(self._error(error) if error else _outputs(result, "grpc")),
                stream_timeout=PATIENCE_S,
            )
            for number, inputs in enumerate(requests):
                client.async_stream_infer(
                    model,
                    _tensors("grpc", inputs),
                    request_id=str(number),
                    enable_empty_final_response=True,
                    **options,
                )
            # It says that nothing more will be asked, and waits for the end of what has been.
            client.stop_stream()
        found = []
        while not answers.empty():
            found.append(answers.get())
        return found

    def cancel(self, model: str, inputs: Mapping[str, Array], begun: Path) -> Any:
        """Make a request and cancel it once a file is there; return the answer that the caller gets."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        call = self._clients["grpc"].async_infer(
            model,
            _tensors("grpc", inputs),
            callback=lambda result, error: answers.put(self._error(error) if error else _outputs(result, "grpc")),
            client_timeout=PATIENCE_S,
        )
        eventually(begun.exists)
        call.cancel()
        return answers.get(timeout=PATIENCE_S)

    def _error(self, error: Any) -> dict[str, str]:
        assert "DEADLINE_EXCEEDED" not in str(error.status()), f"{self.who}: no answer within {PATIENCE_S:g} s"
        return {"status": str(error.status()), "error": self.neutral(str(error.message()))}

    # ---- what the server says about them ----------------------------------------------------------------------------

    def statistics(self, model: str, requests: int) -> dict[str, Any]:
        """Return the counts of a model, when it has got so many requests."""

        def counted() -> dict[str, Any] | None:
            (told,) = self._clients["http"].get_inference_statistics(model, headers=self._headers)["model_stats"]
            counts = told["inference_stats"]
            done = sum(counts[kind]["count"] for kind in ("success", "fail", "cancel") if kind in counts)
            return told if done >= requests else None

        told = eventually(counted)
        return {
            "inferences": told["inference_count"],
            "executions": told["execution_count"],
            "batches": {
                each["batch_size"]: {key: value["count"] for key, value in each.items() if key != "batch_size"}
                for each in told["batch_stats"]
            },
            "requests": {key: value["count"] for key, value in told["inference_stats"].items()},
            "responses": {
                index: {key: value["count"] for key, value in each.items()}
                for index, each in told.get("response_stats", {}).items()
            },
        }

    def metrics(self, model: str) -> dict[str, float]:
        """Return Triton's counters of a model that count no time, and those that it has made itself."""
        return {
            f"{name}{{{labels}}}": value
            for name, labels, value in self._metrics(model)
            if not name.startswith("pytriton_") and not name.endswith(("_us", "pending_request_count"))
        }

    def pending(self, model: str) -> float:
        """Return how many requests to a model wait."""
        return sum(value for name, _, value in self._metrics(model) if name == "nv_inference_pending_request_count")

    def _metrics(self, model: str) -> list[tuple[str, str, float]]:
        with urllib.request.urlopen(str(self.triton.metrics_url), timeout=PATIENCE_S) as page:
            text = page.read().decode()
        found = _METRIC.findall(text)
        return [(name, labels, float(value)) for name, labels, value in found if f'model="{model}"' in labels]


class Pair:
    """Both servers."""

    def __init__(self, stub: Side, workers: Side) -> None:
        self.stub = stub  # the one with Triton's Python backend
        self.workers = workers  # the one with our workers

    @contextlib.contextmanager
    def loaded(self, *models: str, edit: Mapping[str, str] | None = None) -> Iterator[None]:
        """Have models loaded in both while a block runs.

        Args:
            models: Their names.
            edit: What is replaced in each `config.pbtxt`, and by what.
        """
        done: list[tuple[Side, str]] = []
        try:
            for side in (self.stub, self.workers):
                for model in models:
                    done.append((side, model))
                    assert side.load(model, edit=edit) == "", f"{model} of {side.who}"
            yield
        finally:
            for side, model in reversed(done):
                side.unload(model)

    def compare(self, ask: Callable[[Side], Told], meant: Mapping[str, str] | None = None) -> Told:
        """Ask both the same and compare what they say.

        Args:
            ask: Asks one of them.
            meant: What must differ: a place in the answer, with all below it, and the name in `MEANT`.

        Returns:
            What both have said; where it differs, what our workers did.
        """
        expected, found = ask(self.stub), ask(self.workers)
        check_alike(expected, found, meant or {})
        return found


@contextlib.contextmanager
def serving_pair(folder: Callable[[str], Path], **settings: Any) -> Iterator[Pair]:
    """Run both servers, without models; a test is skipped where Triton's Python backend does not work.

    Args:
        folder: Makes a folder of a name.
        settings: Further ones of `TritonConfig`.
    """
    if why := why_no_python_backend():
        pytest.skip(why)
    sides = [Side(who, folder(who), **settings) for who in ("stub", "workers")]
    with short_home(), running(*(side.triton for side in sides)), sides[0].clients(), sides[1].clients():
        yield Pair(*sides)


def text(*elements: str) -> Array:
    """Return a tensor of strings."""
    return np.array([element.encode() for element in elements], np.object_)


def _tensors(protocol: str, inputs: Mapping[str, Array], binary: bool = True) -> list[Any]:
    made = []
    for name, array in inputs.items():
        tensor = PROTOCOLS[protocol].InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        if protocol == "http":
            tensor.set_data_from_numpy(array, binary_data=binary)
        else:
            tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def _outputs(result: Any, protocol: str) -> Any:
    if protocol == "grpc":
        response = result.get_response()
        tensors = {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in response.outputs}
        identity = response.id
        parameters = {
            key: getattr(value, str(value.WhichOneof("parameter_choice"))) for key, value in response.parameters.items()
        }
    else:
        response = result.get_response()
        tensors = {tensor["name"]: (tensor["datatype"], tensor["shape"]) for tensor in response.get("outputs", ())}
        identity = response.get("id", "")
        parameters = response.get("parameters", {})
    return {
        "id": identity,
        "parameters": parameters,
        "outputs": {
            name: {"datatype": datatype, "shape": shape, "data": _plain(result.as_numpy(name))}
            for name, (datatype, shape) in tensors.items()
        },
    }


def _plain(array: Array | None) -> Any:
    if array is None:
        return None
    if array.dtype.kind == "V":
        # BF16, for which numpy has no type of its own.
        array = array.astype(np.float32)
    if array.dtype.kind != "O":
        return array.ravel().tolist()
    return [element.decode() if isinstance(element, bytes) else element for element in array.ravel()]

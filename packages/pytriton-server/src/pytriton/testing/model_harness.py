"""Runs a `model.py` for Triton's Python backend in this process, by the code of the workers that serve it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pytriton.decorators.harness_checks import Checker, Result
from pytriton.decorators.testing import HarnessRequest
from pytriton.exceptions import PyTritonInvalidOperationError, PyTritonValidationError
from pytriton.model_config.parser import ModelConfigParser
from pytriton.proxy_backend.model import python_model_spec
from pytriton.proxy_backend.python_models.errors import PythonModelError
from pytriton.proxy_backend.python_models.execution import Execution, ModelService
from pytriton.proxy_backend.python_models.host import PythonModel
from pytriton.proxy_backend.python_models.server import SERVER, Phase
from pytriton.proxy_backend.runtime.statistics import Counters
from pytriton.proxy_backend.wire.batch import BatchReader, RequestData, lay_out_batch
from pytriton.proxy_backend.wire.dtypes import carry_bf16_bits, release_bf16_bits
from pytriton.testing.calls import HarnessCalls
from pytriton.testing.configuration import completed_config, read_config
from pytriton.testing.errors import ModelError
from pytriton.testing.responses import ResponseCollector
from pytriton.testing.sequences import SequenceControls


class ModelHarness:
    """A `model.py` for Triton's Python backend, unmodified and without a server.

    It is loaded, initialized, called, and finalized at the end of the `with` block, in this process and this thread: so
    breakpoints, monkeypatches and coverage work. Requests are made and answers are read by the code of the workers that
    serve such models, so what it may do and may not do, and the texts of its errors, are those of a server.

    ```python
    with ModelHarness("models/double", calls={"embed": lambda request: {"vector": request["x"]}}) as model:
        result = model.infer({"x": [[1.0, 2.0]]})
    ```

    Attributes:
        name: The model's name.
        model_config: Its configuration, as `initialize` gets it, after `auto_complete_config`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        config: str | Mapping[str, Any] | None = None,
        version: int | None = None,
        calls: Mapping[str, Callable[[Any], Any]] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """Load a model and call its `initialize`.

        Args:
            folder: The folder of the model, with `config.pbtxt` and a folder for each version, or the path of a
                `model.py` in a folder of a version.
            config: The configuration in the place of `config.pbtxt`: its text, or its fields.
            version: The version; None is the highest one.
            calls: What answers the model's calls of other models, by their names: functions that get a request (a
                mapping of the inputs, with `parameters` and the rest of `make_request`) and return a mapping of arrays
                by name of the output; for a decoupled model a list of such mappings. What they raise is the error that
                the model gets. `infer` of another harness is such a function.
            timeout_s: How long to wait for answers that are sent after `execute` has returned, in seconds.

        Raises:
            ModelError: The model cannot be loaded; the text is that of the load error on a server.
            PyTritonModelConfigError: The configuration cannot be read, or asks for what a server alone has.
        """
        path = Path(folder).absolute()
        file = path if path.is_file() else None
        self._folder = path if file is None else file.parent.parent
        if version is None:
            version = _highest(self._folder) if file is None else int(file.parent.name)
        written = read_config(self._folder, config)
        self.model_config = completed_config(written, self._folder.name)
        self.name = str(self.model_config["name"])
        self._version = version
        self._file = file or self._folder / str(version) / str(self.model_config["default_model_filename"])
        self._instance = f"{self.model_config['instance_group'][0]['name']}_0"
        self._calls = HarnessCalls(calls or {})
        self._timeout_s = timeout_s
        self._number = 0
        self._closed = False
        self._path = list(sys.path)
        self._known = frozenset(sys.modules)
        self._forget_modules()
        carry_bf16_bits(self)
        try:
            self._model = self._load()
        except PythonModelError as error:
            self._forget()
            raise ModelError(str(error)) from error
        except BaseException:
            self._forget()
            raise

    def _load(self) -> PythonModel:
        with self._serving(Phase.LOADING):
            model = PythonModel(str(self._file), self._version, str(self._folder))
            completed = model.complete(self.name, json.dumps(self.model_config))
            if completed is not None:
                self.model_config = completed_config(json.loads(completed), self.name)
            spec = ModelConfigParser.from_dict(self.model_config)
            self._batching = spec.batching
            self._checker = Checker(spec, inputs=spec.inputs, outputs=None, max_rows=spec.max_batch_size, strict=False)
            model.initialize(
                {
                    "model_config": json.dumps(self.model_config),
                    "model_instance_kind": "CPU",
                    "model_instance_name": self._instance,
                    "model_instance_device_id": "0",
                    "model_repository": str(self._folder),
                    "model_version": str(self._version),
                    "model_name": self.name,
                }
            )
        self._outputs = [str(output["name"]) for output in self.model_config["output"]]
        self._service = ModelService(
            model.execute,
            str(self._file),
            self._instance,
            python_model_spec(self.name, self._version, self.model_config),
            Counters(),
            self._outputs,
        )
        self._reader = BatchReader(self._batching)
        self._controls = SequenceControls(self.model_config, batching=self._batching)
        return model

    # ---- requests ---------------------------------------------------------------------------------------------------

    def infer(self, requests: Any, *, return_exceptions: bool = False) -> Any:
        """Call `execute` with one batch, and give what the callers of its requests would get.

        Without a batch axis each request is a batch of its own, as on a server.

        Args:
            requests: One request, or a list of them: mappings of arrays (or plain lists) by name of the input, or what
                `make_request` makes of one. `correlation_id` is the sequence that a request belongs to; the parameters
                `sequence_start` and `sequence_end` say where one begins and ends.
            return_exceptions: Have errors be in the place of the results, in lists. False raises the first one.

        Returns:
            For one request a `Result`, for a list of them a list of results. Of a decoupled model each of these is the
            list of the responses.

        Raises:
            ModelError: A request failed: the text is what its caller would get.
            PyTritonValidationError: A server would refuse a request.
            TimeoutError: A request was not answered in time.
        """
        if self._closed:
            raise PyTritonInvalidOperationError("The harness is closed: the model's finalize was called.")
        single = not isinstance(requests, Sequence)
        given = self._checker.requests([requests] if single else requests)
        batches = [given] if self._batching else [[request] for request in given]
        answers = [answer for batch in batches for answer in self._run(batch)]
        if self._service.state.decoupled:
            found: list[Any] = answers
        else:
            found = [responses[0] if responses else None for responses in answers]
        if not return_exceptions:
            for response in (response for responses in answers for response in responses):
                if isinstance(response, ModelError):
                    raise response
        return found[0] if single else found

    def _run(self, batch: Sequence[HarnessRequest]) -> list[list[Result | ModelError]]:
        answers: list[list[Result | ModelError]] = [[] for _ in batch]
        todo = list(range(len(batch)))
        data = [self._request_data(request) for request in batch]
        while todo:
            collector = ResponseCollector(len(todo), decoupled=self._service.state.decoupled)
            self._service.sink = collector
            # Until the last answer, because coroutines and threads of the model may call the server after `execute`.
            with self._serving(Phase.SERVING):
                self._execute([batch[place] for place in todo], [data[place] for place in todo])
                collector.wait(self._timeout_s, self._instance)
            for place, responses in zip(todo, collector.responses, strict=True):
                answers[place] += responses
            # Requests that `execute` gave back to the scheduler come again, as with iterative sequences.
            todo = [todo[index] for index in sorted(collector.rescheduled)]
            for place in todo:
                data[place] = self._controls.continued(data[place])
        return answers

    def _execute(self, batch: Sequence[HarnessRequest], data: Sequence[RequestData]) -> None:
        self._number += 1
        record = lay_out_batch(data, batching=self._batching)
        block = bytearray(record.layout.length)
        record.write(block, 0, self._number)
        made = self._reader.read(memoryview(block), bytes(block), 0, self._number)
        for index, request in enumerate(batch):
            if request.is_cancelled():
                block[made.metadata.cancelled_offset(index)] = 1
        execution = Execution(self._service, made)
        # Only the model may hold requests, so that one that it forgets is answered when it is deleted.
        del made
        execution.run(None)

    def _request_data(self, request: Any) -> RequestData:
        parameters = dict(request.parameters)
        start, end = (bool(parameters.pop(name, False)) for name in ("sequence_start", "sequence_end"))
        wanted = request.requested_output_names
        unknown = sorted(set(wanted or ()) - set(self._outputs))
        if unknown:
            raise PyTritonValidationError(
                f"The request wants the outputs {unknown}, which the model has not: expected some of {self._outputs}.",
                expected=self._outputs,
                received=unknown,
            )
        made = RequestData(
            inputs=dict(request.items()),
            outputs=list(self._outputs if wanted is None else wanted),
            request_id=request.request_id,
            priority=request.priority,
            timeout_us=request.timeout_us,
            correlation_id=request.correlation_id,
            parameters=parameters,
        )
        return self._controls.begun(made, start=start, end=end)

    # ---- what else there is -----------------------------------------------------------------------------------------

    @property
    def metrics(self) -> dict[str, Any]:
        """The values of the metrics that the model has made, by `name` or `name{label="value"}`.

        Of a histogram the values that were observed.
        """
        return {
            name + ("{" + ",".join(f'{label}="{value}"' for label, value in labels) + "}" if labels else ""): value
            for (name, labels), value in self._calls.metrics.items()
        }

    def is_ready(self) -> bool:
        """Ask the model whether it is ready; a model that has no `is_ready` is.

        Raises:
            ModelError: It raised, or answered with something else than a boolean value.
        """
        if not self._model.tells_readiness:
            return True
        with self._serving(Phase.SERVING):
            answer, failure = self._model.is_ready(self._service.loop)
        if failure:
            raise ModelError(failure)
        return answer

    def close(self) -> None:
        """Call the model's `finalize`, and forget what was imported for it. What `finalize` raises is logged."""
        if self._closed:
            return
        self._closed = True
        try:
            self._service.loop.close()
            with self._serving(Phase.FINALIZING):
                self._model.finalize()
        finally:
            self._forget()

    def __enter__(self) -> ModelHarness:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _serving(self, phase: Phase) -> Iterator[None]:
        with SERVER.replaced(self._calls, self._instance, phase):
            yield

    def _forget(self) -> None:
        release_bf16_bits(self)
        sys.path[:] = [entry for entry in sys.path if entry in self._path]
        self._forget_modules()

    def _forget_modules(self) -> None:
        """Make the next model import its own modules: `1.model`, and those of its folder.

        Modules that were imported before stay, because tests and environments may lie in that folder, too.
        """
        package = str(self._version)
        inside, packages = str(self._folder) + os.sep, f"{os.sep}site-packages{os.sep}"
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            is_own = name not in self._known and file.startswith(inside) and packages not in file[len(inside) - 1 :]
            if is_own or name == package or name.startswith(f"{package}."):
                del sys.modules[name]


def _highest(folder: Path) -> int:
    versions = [int(entry.name) for entry in folder.iterdir() if entry.is_dir() and entry.name.isdigit()]
    if not versions:
        raise ModelError(f"Expected a folder for each version in {folder}, such as {folder / '1' / 'model.py'}.")
    return max(versions)

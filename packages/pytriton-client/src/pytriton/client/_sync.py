"""The synchronous clients: ``ModelClient``, and ``DecoupledModelClient`` for models with any number of responses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ._base import BaseModelClient, Made, check_made_anew
from ._core.deadline import Deadline, check_timeout
from ._core.forks import Lock
from ._core.options import Headers, Parameters
from ._core.requests import (
    InferRequest,
    InferResponse,
    ModelResult,
    check_call,
    decode_response,
    is_end_of_stream,
)
from ._core.spec import ModelSpec
from ._core.startup import (
    Ask,
    Pause,
    PlanStep,
    Question,
    ask_server,
    find_change,
    wait_for_model,
    wait_for_server,
)
from ._core.telemetry import TracedCall, trace_call
from ._core.translate import closed_error, may_be_refusal
from ._transport import ResponseStream, make_transport
from .exceptions import (
    PyTritonClientError,
    PyTritonClientInferenceServerError,
    PyTritonClientModelNotReadyError,
)

if TYPE_CHECKING:
    from typing_extensions import Self

    from ._shm.plans import SharedMemory

Result = TypeVar("Result")


class ModelClient(BaseModelClient):
    """A client for one model that waits for each answer.

    Several threads may use one client at a time. Close it when it is no longer needed, or use ``with``::

        with ModelClient("localhost", "AddSub") as client:
            result = client.infer_sample(np.array([1.0], np.float32), np.array([2.0], np.float32))

    The arguments are those of ``BaseModelClient``.

    Raises:
        PyTritonClientInvalidUrlError: The address cannot be understood.
        PyTritonClientValueError: Another argument cannot be used.
        PyTritonClientModelNotReadyError: With ``lazy_init=False``: the model was not ready in time.
    """

    def _open(self) -> None:
        self._closed = threading.Event()
        self._prepare_lock = Lock()
        self._transport = make_transport(
            self._url, self._access_token, self._tls, self._max_response_bytes, self._class_name
        )
        self._shared_memory = self._make_shared_memory()
        if not self._lazy_init:
            try:
                self._get_spec()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, and give back shared memory. A wait in another thread ends with an error.

        A second call does nothing.
        """
        try:
            if self._shared_memory is not None and not self._closed.is_set():
                self._drive(self._shared_memory.close())
        finally:
            self._closed.set()
            self._transport.close()

    def infer_sample(
        self,
        /,
        *inputs: object,
        parameters: Parameters = None,
        headers: Headers = None,
        **named_inputs: object,
    ) -> ModelResult:
        """Infer one sample.

        Args:
            inputs: Each of the shape ``shape`` of its input, without a batch axis, in the order of the model. An array
                of the declared type, or of one that converts to it safely, a list, a scalar, text or bytes.
            parameters: Custom request parameters. ``priority``, ``timeout`` (in microseconds, for the server's queue),
                ``sequence_id``, ``sequence_start`` and ``sequence_end`` have the meaning that Triton gives to them.
            headers: HTTP headers or gRPC metadata.
            named_inputs: The same by name, in place of ``inputs`` or behind them. Optional inputs may be left out.

        Returns:
            An array of ``shape`` for every output, by name. Strings are object arrays of ``bytes``. What has no axis
            but that of the batch is a numpy scalar, or ``bytes``.

        Raises:
            PyTritonClientValueError: The inputs, parameters or headers cannot be sent; nothing was.
            PyTritonClientModelNotReadyError: Before the first inference: the model was not ready within
                ``init_timeout_s``.
            PyTritonClientTimeoutError: The answer was not there within ``inference_timeout_s``.
            PyTritonClientInferenceServerError: The server, or the model in it, answered with an error.
            PyTritonClientConnectionError: The server cannot be reached, or the connection broke.
            PyTritonClientClosedError: The client is closed.
        """
        return self._infer(inputs, named_inputs, parameters, headers, is_batch=False)

    def infer_batch(
        self,
        /,
        *inputs: object,
        parameters: Parameters = None,
        headers: Headers = None,
        **named_inputs: object,
    ) -> ModelResult:
        """Infer a batch of samples.

        Args:
            inputs: Each of the shape ``(batch, *shape)``, in the order of the model; else as in ``infer_sample``. Where
                a sample is a single value, ``(batch,)`` does as well: a list of texts or numbers.
            parameters: As in ``infer_sample``.
            headers: As in ``infer_sample``.
            named_inputs: The same by name, in place of ``inputs`` or behind them.

        Returns:
            An array of the shape ``(batch, *shape)`` for every output, by name.

        Raises:
            PyTritonClientModelDoesntSupportBatchingError: The model takes one sample at a time.
            PyTritonClientError: As in ``infer_sample``.
        """
        return self._infer(inputs, named_inputs, parameters, headers, is_batch=True)

    @property
    def model_config(self) -> ModelSpec:
        """What the server says about the model. Asked for once; waits for the model like a first inference.

        Raises:
            PyTritonClientModelNotReadyError: The model was not ready within ``init_timeout_s``.
            PyTritonClientClosedError: The client is closed.
        """
        return self._get_spec()

    @property
    def is_batching_supported(self) -> bool:
        """Whether ``infer_batch`` can be used with the model. Raises as ``model_config`` does."""
        return self.model_config.batching

    def wait_for_server(self, timeout_s: float) -> None:
        """Wait until the server is ready.

        Args:
            timeout_s: How long, in seconds.

        Raises:
            PyTritonClientTimeoutError: It was not ready in time.
            PyTritonClientClosedError: The client is closed.
        """
        self._drive(wait_for_server(self._target, Deadline(check_timeout(timeout_s, "timeout_s"))))

    def wait_for_model(self, timeout_s: float) -> None:
        """Wait until the model is ready.

        Args:
            timeout_s: How long, in seconds.

        Raises:
            PyTritonClientModelNotReadyError: It was not ready in time: a ``PyTritonClientTimeoutError`` and a
                ``PyTritonClientModelUnavailableError`` that says whether the server, the model or the version is
                missing.
            PyTritonClientClosedError: The client is closed.
        """
        self._drive(wait_for_model(self._target, Deadline(check_timeout(timeout_s, "timeout_s"))))
        self._model_info.was_ready = True

    def load_model(self, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Ask the server to load the model, or to load it anew. May take ``init_timeout_s`` seconds.

        Args:
            config: A model configuration as JSON, in place of the one in the server's repository.
            files: The files of the model, by names such as ``"file:1/model.py"``; needs ``config``.

        Raises:
            PyTritonClientInferenceServerError: The server cannot load it, or runs in another model control mode.
            PyTritonClientTimeoutError: It was not loaded in time.
            PyTritonClientClosedError: The client is closed.
        """
        self._check_open()
        self._transport.ask(Ask(Question.LOAD, self._init_timeout_s, config, files), self._target)
        self._forget_model()

    def unload_model(self) -> None:
        """Ask the server to unload the model. Raises as ``load_model`` does."""
        self._check_open()
        self._transport.ask(Ask(Question.UNLOAD, self._init_timeout_s), self._target)
        self._forget_model()

    def _infer(
        self,
        inputs: tuple[object, ...],
        named_inputs: Mapping[str, object],
        parameters: Parameters,
        headers: Headers,
        *,
        is_batch: bool,
    ) -> ModelResult:
        checked = check_call(inputs, named_inputs, parameters, headers, self._options)
        with trace_call(checked, self._target) as call:
            deadline = self._call_deadline()

            def build(spec: ModelSpec) -> Made:
                return spec, self._build_request(spec, call, self._check_is_coupled, is_batch=is_batch), None

            made = self._make(build, deadline)
            try:
                response = self._send(made, deadline)
            except PyTritonClientInferenceServerError as error:
                made = self._make_anew(build, deadline, made, error)
                response = self._send(made, deadline)
            return decode_response(made[0], response, is_batch=is_batch)

    def _send(self, made: Made, deadline: Deadline | None) -> InferResponse:
        timeout_s = self._inference_timeout_s if deadline is None else deadline.remaining_s()
        spec, request, _ = made
        if self._shared_memory is None:
            return self._transport.infer(request, timeout_s)
        return self._drive(self._shared_memory.infer(spec, request, timeout_s))

    def _make(self, build: Callable[[ModelSpec], Made], deadline: Deadline | None) -> Made:
        """Make a call to the model as it is known; if the call does not fit, read the model again."""
        spec = self._get_spec(deadline)
        try:
            return build(spec)
        except PyTritonClientError:
            changed = self._find_change(spec, deadline)
            if changed is None:
                raise
        return build(changed)

    def _make_anew(
        self,
        build: Callable[[ModelSpec], Made],
        deadline: Deadline | None,
        made: Made,
        error: PyTritonClientInferenceServerError,
    ) -> Made:
        """Build a refused call again for the model as it is now; raise the error if the model is the same."""
        is_refusal = may_be_refusal(error, is_stream=made[2] is not None)
        changed = self._find_change(made[0], deadline) if is_refusal else None
        if changed is None:
            raise error
        return check_made_anew(build(changed), made, error)

    def _find_change(self, known: ModelSpec, call_deadline: Deadline | None) -> ModelSpec | None:
        deadline = self._prepare_deadline(call_deadline)
        if not self._prepare_lock.acquire(timeout=deadline.remaining_s()):
            return None
        try:
            return self._drive(find_change(self._target, deadline, self._model_info, known))
        finally:
            self._prepare_lock.release()

    def _get_spec(self, call_deadline: Deadline | None = None) -> ModelSpec:
        self._check_open()
        info = self._model_info
        spec = info.spec
        if info.is_prepared and spec is not None:
            return spec
        deadline = self._prepare_deadline(call_deadline)
        # Threads that come while one asks wait for its answer, no longer than they would have asked themselves.
        if not self._prepare_lock.acquire(timeout=deadline.remaining_s()):
            raise PyTritonClientModelNotReadyError(
                f"Waited {deadline.timeout_s:g} s at {self._target.url} for another thread that waits for the model "
                f"{self._target.model}.",
                **self._target.fields,
                timeout_s=deadline.timeout_s,
                waited_for="model ready",
            )
        try:
            return self._drive(self._preparation(deadline))
        finally:
            self._prepare_lock.release()

    def _drive(self, plan: Generator[PlanStep, Any, Result]) -> Result:
        """Run a plan of ``_core.startup`` and return its result."""
        resume: Callable[[Any], PlanStep] = plan.send
        answer: Any = None
        try:
            while True:
                step = resume(answer)
                self._check_open()
                try:
                    answer, resume = self._answer(step), plan.send
                except PyTritonClientError as error:
                    answer, resume = error, plan.throw
        except StopIteration as end:
            result: Result = end.value
            return result
        finally:
            plan.close()

    def _answer(self, step: PlanStep) -> Any:
        if isinstance(step, Pause):
            self._closed.wait(step.seconds)
            return None
        return ask_server(self._transport, self._target, step)

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise closed_error(self._target.model_name, self._target.url, self._class_name)


# PyTriton's client waits without a limit, whatever it is given, and some scripts pass 0.1 seconds. They work here, and
# a wait still ends.
_LEAST_RESPONSE_TIMEOUT_S = 60.0


class DecoupledModelClient(ModelClient):
    """A client for one decoupled model, whose results come one by one.

    Over gRPC a stream carries any tensors. Over HTTP it is JSON (Triton's ``generate_stream``), which holds most models
    and not all; a request that it cannot carry is refused before it is sent, and says why. Several streams may be open
    at a time, in one thread or in several::

        with DecoupledModelClient("grpc://localhost", "Words") as client:
            for result in client.infer_sample(np.array([b"a prompt"])):
                print(result["word"])

    Shared memory carries inputs, over gRPC alone; responses travel in the stream.

    The arguments are those of ``BaseModelClient``. The wait for a response is bounded by ``inference_timeout_s``, or by
    one minute where that is longer: PyTriton's client does not bound it, and programs rely on that. A strict limit for
    each response is ``client.with_options(timeout_s=...)``.

    Raises:
        PyTritonClientInvalidUrlError: The address cannot be understood.
        PyTritonClientValueError: Another argument cannot be used.
        PyTritonClientModelNotReadyError: With ``lazy_init=False``: the model was not ready in time.
    """

    _reads_streams = True

    def infer_sample(  # type: ignore[override] # many results in place of one, as PyTriton has it
        self,
        /,
        *inputs: object,
        parameters: Parameters = None,
        headers: Headers = None,
        **named_inputs: object,
    ) -> Generator[ModelResult, None, None]:
        """Infer one sample.

        What is wrong with the call is raised at once, also that the model is not there. The request is sent when the
        first result is asked for. Closing the generator, or dropping it, cancels the request on the server.

        Args:
            inputs: Each of the shape ``shape`` of its input, without a batch axis, in the order of the model; else as
                in ``ModelClient.infer_sample``.
            parameters: Custom request parameters.
            headers: HTTP headers or gRPC metadata. Triton forwards those of a stream over gRPC only.
            named_inputs: The same by name, in place of ``inputs`` or behind them. Optional inputs may be left out.

        Returns:
            A generator of results, each with an array of ``shape`` for every output, by name.

        Raises:
            PyTritonClientValueError: The inputs, parameters or headers cannot be sent, or not over HTTP; nothing was.
            PyTritonClientModelNotReadyError: Before the first inference: the model was not ready within
                ``init_timeout_s``.
            PyTritonClientInferenceServerError: The model is not decoupled. From the generator, after the results before
                it: the model, or the server, answered with an error.
            PyTritonClientTimeoutError: From the generator: a response was not there in time; see the class.
            PyTritonClientConnectionError: From the generator: no connection, or it broke.
            PyTritonClientClosedError: The client is closed, or was while the generator waited.
        """
        return self._infer_stream(inputs, named_inputs, parameters, headers, is_batch=False)

    def infer_batch(  # type: ignore[override] # many results in place of one, as PyTriton has it
        self,
        /,
        *inputs: object,
        parameters: Parameters = None,
        headers: Headers = None,
        **named_inputs: object,
    ) -> Generator[ModelResult, None, None]:
        """Infer a batch of samples. Else as ``infer_sample``.

        Args:
            inputs: Each of the shape ``(batch, *shape)``, in the order of the model, or ``(batch,)`` of single values.
            parameters: As in ``infer_sample``.
            headers: As in ``infer_sample``.
            named_inputs: The same by name, in place of ``inputs`` or behind them.

        Returns:
            A generator of results, each with an array of the shape ``(batch, *shape)`` for every output, by name.

        Raises:
            PyTritonClientModelDoesntSupportBatchingError: The model takes one sample at a time.
            PyTritonClientError: As in ``infer_sample``.
        """
        return self._infer_stream(inputs, named_inputs, parameters, headers, is_batch=True)

    def _infer_stream(
        self,
        inputs: tuple[object, ...],
        named_inputs: Mapping[str, object],
        parameters: Parameters,
        headers: Headers,
        *,
        is_batch: bool,
    ) -> Generator[ModelResult, None, None]:
        traced = trace_call(check_call(inputs, named_inputs, parameters, headers, self._options), self._target)
        timeout_s = self._options.timeout_s or max(self._inference_timeout_s, _LEAST_RESPONSE_TIMEOUT_S)

        def build(spec: ModelSpec) -> Made:
            request = self._build_request(spec, traced.call, self._check_is_decoupled, is_batch=is_batch)
            if self._shared_memory is None:
                return spec, request, _receive(self._transport.stream(spec, request), timeout_s)
            return spec, request, self._receive_shared(self._shared_memory, spec, request, timeout_s)

        try:
            made = self._make(build, self._call_deadline())
        except BaseException as error:
            traced.__exit__(type(error), error, None)
            raise
        return self._results(build, made, traced, is_batch=is_batch)

    def _results(
        self, build: Callable[[ModelSpec], Made], made: Made, traced: TracedCall, *, is_batch: bool
    ) -> Generator[ModelResult, None, None]:
        with traced:
            for was_refused in (False, True):
                spec, _, responses = made
                has_begun = False
                try:
                    with closing(responses):
                        for response in responses:
                            has_begun = True
                            if not is_end_of_stream(response):
                                yield decode_response(spec, response, is_batch=is_batch)
                    return
                except PyTritonClientInferenceServerError as error:
                    if has_begun or was_refused:
                        raise
                    made = self._make_anew(build, self._call_deadline(), made, error)

    def _receive_shared(
        self, shared_memory: SharedMemory, spec: ModelSpec, request: InferRequest, timeout_s: float
    ) -> Generator[InferResponse, None, None]:
        """Yield the responses to a request whose inputs go through shared memory."""
        was_unknown = has_begun = False
        while True:
            placed = self._drive(shared_memory.place(spec, request, Deadline(timeout_s), is_stream=True))
            try:
                with closing(_receive(self._transport.stream(spec, placed.request), timeout_s)) as responses:
                    for response in responses:
                        has_begun = True
                        yield response
                placed.give_back()
                return
            except PyTritonClientInferenceServerError as error:
                if has_begun or not shared_memory.may_place_anew(placed, error, was_unknown=was_unknown):
                    raise
                was_unknown = True
            finally:
                placed.leave()  # leave the regions that were not given back: the server may still read them


def _receive(stream: ResponseStream, timeout_s: float) -> Generator[InferResponse, None, None]:
    with closing(stream):
        while (response := stream.receive(timeout_s)) is not None:
            yield response

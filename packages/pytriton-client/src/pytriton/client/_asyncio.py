"""The asyncio clients: ``AsyncioModelClient``, and ``AsyncioDecoupledModelClient`` for any number of responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ._base import DEFAULT_INFERENCE_TIMEOUT_S, BaseModelClient, Made, check_made_anew
from ._core.deadline import Deadline, check_timeout
from ._core.options import Headers, Parameters
from ._core.requests import (
    InferCall,
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
from ._core.telemetry import trace_call
from ._core.translate import closed_error, may_be_refusal
from ._core.url import TritonUrl
from ._transport import AsyncResponseStream, make_async_transport
from .exceptions import PyTritonClientError, PyTritonClientInferenceServerError

if TYPE_CHECKING:
    from typing_extensions import Self

    from ._shm.plans import SharedMemory

Result = TypeVar("Result")


class AsyncioModelClient(BaseModelClient):
    """A client for one model whose calls are awaited.

    Any number of tasks may use one client at a time. It may be made where no event loop runs, and serve one loop after
    the other, or several in different threads. Close it when it is no longer needed, or use ``async with``::

        async with AsyncioModelClient("localhost", "AddSub") as client:
            result = await client.infer_sample(np.array([1.0], np.float32), np.array([2.0], np.float32))

    A call whose task is cancelled is cancelled on the server as well.

    The arguments are those of ``BaseModelClient``. With ``lazy_init=False`` the server is contacted on entry of
    ``async with``, since a constructor cannot wait.

    Raises:
        PyTritonClientInvalidUrlError: The address cannot be understood.
        PyTritonClientValueError: Another argument cannot be used.
    """

    _library_suffix = ".aio"
    _coupled_class = "AsyncioModelClient"
    _decoupled_class = "AsyncioDecoupledModelClient"
    _has_direct_streams = False

    def _open(self) -> None:
        self._transport = make_async_transport(
            self._url,
            self._access_token,
            self._tls,
            self._max_response_bytes,
            self._class_name,
            direct_streams=self._has_direct_streams,
        )
        self._shared_memory = self._make_shared_memory()
        from ._asyncio_waits import Waits

        # All views of a client share it.
        self._waits = Waits(repr(self), self._transport)

    async def __aenter__(self) -> Self:
        if not self._lazy_init:
            try:
                await self._get_spec()
            except BaseException:
                await self.close()
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections, and give back shared memory. Calls that wait end with an error.

        A second call does nothing.
        """
        try:
            if self._shared_memory is not None and not self._waits.is_closed:
                await self._drive(self._shared_memory.close())
        finally:
            self._waits.close()
            await self._transport.close()

    async def infer_sample(
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
        return await self._infer(inputs, named_inputs, parameters, headers, is_batch=False)

    async def infer_batch(
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
        return await self._infer(inputs, named_inputs, parameters, headers, is_batch=True)

    @property
    async def model_config(self) -> ModelSpec:
        """What the server says about the model, to be awaited: ``await client.model_config``.

        Asked for once; waits for the model like a first inference.

        Raises:
            PyTritonClientModelNotReadyError: The model was not ready within ``init_timeout_s``.
            PyTritonClientClosedError: The client is closed.
        """
        return await self._get_spec()

    @property
    async def is_batching_supported(self) -> bool:
        """Whether ``infer_batch`` can be used with the model, to be awaited. Raises as ``model_config`` does."""
        return (await self._get_spec()).batching

    async def wait_for_server(self, timeout_s: float) -> None:
        """Wait until the server is ready.

        Args:
            timeout_s: How long, in seconds.

        Raises:
            PyTritonClientTimeoutError: It was not ready in time.
            PyTritonClientClosedError: The client is closed.
        """
        await self._drive(wait_for_server(self._target, Deadline(check_timeout(timeout_s, "timeout_s"))))

    async def wait_for_model(self, timeout_s: float) -> None:
        """Wait until the model is ready.

        Args:
            timeout_s: How long, in seconds.

        Raises:
            PyTritonClientModelNotReadyError: It was not ready in time: a ``PyTritonClientTimeoutError`` and a
                ``PyTritonClientModelUnavailableError`` that says whether the server, the model or the version is
                missing.
            PyTritonClientClosedError: The client is closed.
        """
        await self._drive(wait_for_model(self._target, Deadline(check_timeout(timeout_s, "timeout_s"))))
        self._model_info.was_ready = True

    async def load_model(self, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
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
        await self._transport.ask(Ask(Question.LOAD, self._init_timeout_s, config, files), self._target)
        self._forget_model()

    async def unload_model(self) -> None:
        """Ask the server to unload the model. Raises as ``load_model`` does."""
        self._check_open()
        await self._transport.ask(Ask(Question.UNLOAD, self._init_timeout_s), self._target)
        self._forget_model()

    def create_client_from_url(self, url: str, network_timeout_s: float | None = None) -> Any:
        """Return an asyncio client of tritonclient itself, for what this class has no method for.

        To be called while the event loop runs that will use it. The caller closes it.

        Args:
            url: As for the constructor.
            network_timeout_s: For connecting over HTTP, in seconds; ``None`` is 60.

        Raises:
            PyTritonClientInvalidUrlError: The address cannot be understood.
        """
        parsed = TritonUrl.from_url(url)
        tls = self._tls if parsed.is_encrypted else None
        if parsed.protocol == "grpc":
            from ._grpc.asyncio_transport import make_tritonclient as make_grpc_client

            return make_grpc_client(parsed, tls)
        from ._http.asyncio_transport import make_tritonclient as make_http_client

        timeout_s = DEFAULT_INFERENCE_TIMEOUT_S if network_timeout_s is None else network_timeout_s
        return make_http_client(parsed, check_timeout(timeout_s, "network_timeout_s"), tls)

    async def _infer(
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

            made = await self._make(build, deadline)
            try:
                response = await self._send(made, deadline)
            except PyTritonClientInferenceServerError as error:
                made = await self._make_anew(build, deadline, made, error)
                response = await self._send(made, deadline)
            return decode_response(made[0], response, is_batch=is_batch)

    def _send(self, made: Made, deadline: Deadline | None) -> Coroutine[Any, Any, InferResponse]:
        timeout_s = self._inference_timeout_s if deadline is None else deadline.remaining_s()
        spec, request, _ = made
        if self._shared_memory is None:
            return self._transport.infer(request, timeout_s)
        return self._drive(self._shared_memory.infer(spec, request, timeout_s))

    async def _make(self, build: Callable[[ModelSpec], Made], deadline: Deadline | None) -> Made:
        """Make a call to the model, as ``ModelClient`` does. Raises what is wrong with it."""
        spec = await self._get_spec(deadline)
        try:
            return build(spec)
        except PyTritonClientError:
            changed = await self._find_change(spec, deadline)
            if changed is None:
                raise
        return build(changed)

    async def _make_anew(
        self,
        build: Callable[[ModelSpec], Made],
        deadline: Deadline | None,
        made: Made,
        error: PyTritonClientInferenceServerError,
    ) -> Made:
        """Make a call that the server has refused to the model as it is now, as ``ModelClient`` does."""
        is_refusal = may_be_refusal(error, is_stream=made[2] is not None)
        changed = await self._find_change(made[0], deadline) if is_refusal else None
        if changed is None:
            raise error
        return check_made_anew(build(changed), made, error)

    async def _find_change(self, known: ModelSpec, call_deadline: Deadline | None) -> ModelSpec | None:
        deadline = self._prepare_deadline(call_deadline)
        plan = find_change(self._target, deadline, self._model_info, known)
        return await self._waits.share(lambda: self._drive(plan), deadline, self._target)

    async def _get_spec(self, call_deadline: Deadline | None = None) -> ModelSpec:
        self._check_open()
        info = self._model_info
        if info.is_prepared and info.spec is not None:
            return info.spec
        deadline = self._prepare_deadline(call_deadline)
        # One task of each event loop asks; the others wait for its answer.
        return await self._waits.share(lambda: self._drive(self._preparation(deadline)), deadline, self._target)

    async def _drive(self, plan: Generator[PlanStep, Any, Result]) -> Result:
        """Run a plan of ``_core.startup`` and return its result."""
        resume: Callable[[Any], PlanStep] = plan.send
        answer: Any = None
        try:
            while True:
                step = resume(answer)
                self._check_open()
                try:
                    answer, resume = await self._answer(step), plan.send
                except PyTritonClientError as error:
                    answer, resume = error, plan.throw
        except StopIteration as end:
            result: Result = end.value
            return result
        finally:
            plan.close()

    async def _answer(self, step: PlanStep) -> Any:
        if isinstance(step, Pause):
            return await self._waits.pause(step.seconds)
        return await ask_server(self._transport, self._target, step)

    def _check_open(self) -> None:
        if self._waits.is_closed:
            raise closed_error(self._target.model_name, self._target.url, self._class_name)


class AsyncioDecoupledModelClient(AsyncioModelClient):
    """A client for one decoupled model, whose results are iterated over as they come.

    Any number of streams may run on one client at a time::

        async with AsyncioDecoupledModelClient("grpc://localhost", "Count") as client:
            async for result in client.infer_sample(np.array([3], np.int32)):
                print(result["number"])

    Over gRPC a stream carries any tensors. Over HTTP it uses Triton's generate extension, which carries JSON: what that
    cannot say is refused before anything is sent.

    Shared memory carries inputs, over gRPC alone; responses travel in the stream.

    The arguments are those of ``AsyncioModelClient``; ``inference_timeout_s`` is how long each response may take.

    Raises:
        PyTritonClientInvalidUrlError: The address cannot be understood.
        PyTritonClientValueError: Another argument cannot be used.
    """

    _reads_streams = True

    def infer_sample(  # type: ignore[override] # many results in place of one, as PyTriton has it
        self,
        /,
        *inputs: object,
        parameters: Parameters = None,
        headers: Headers = None,
        **named_inputs: object,
    ) -> AsyncGenerator[ModelResult, None]:
        """Infer one sample.

        Arguments that no model could take are refused at once. All else happens when the first result is asked for: the
        wait for the model, the check of the inputs, the request.

        A loop that is left early, or a generator that is dropped or closed (``aclose()``), cancels the request on the
        server.

        Args:
            inputs: Each of the shape ``shape`` of its input, without a batch axis, in the order of the model; else as
                in ``AsyncioModelClient.infer_sample``.
            parameters: Custom request parameters.
            headers: HTTP headers or gRPC metadata. Triton forwards those of a stream over gRPC only.
            named_inputs: The same by name, in place of ``inputs`` or behind them. Optional inputs may be left out.

        Returns:
            An asynchronous generator of results, each with an array of ``shape`` for every output, by name.

        Raises:
            PyTritonClientValueError: The inputs, parameters or headers cannot be sent, or not over HTTP; nothing was.
            PyTritonClientModelNotReadyError: From the generator, before the first inference: the model was not ready
                within ``init_timeout_s``.
            PyTritonClientInferenceServerError: From the generator: the model is not decoupled. Or, after the results
                before it: the model, or the server, answered with an error.
            PyTritonClientTimeoutError: From the generator: a response was not there within ``inference_timeout_s``.
            PyTritonClientConnectionError: From the generator: no connection, or it broke.
            PyTritonClientClosedError: From the generator: the client is closed, or was while the generator waited.
        """
        call = check_call(inputs, named_inputs, parameters, headers, self._options)
        return self._results(call, is_batch=False)

    def infer_batch(  # type: ignore[override] # as above
        self,
        /,
        *inputs: object,
        parameters: Parameters = None,
        headers: Headers = None,
        **named_inputs: object,
    ) -> AsyncGenerator[ModelResult, None]:
        """Infer a batch of samples. Else as ``infer_sample``.

        Args:
            inputs: Each of the shape ``(batch, *shape)``, in the order of the model, or ``(batch,)`` of single values.
            parameters: As in ``infer_sample``.
            headers: As in ``infer_sample``.
            named_inputs: The same by name, in place of ``inputs`` or behind them.

        Returns:
            An asynchronous generator of results, each with an array of the shape ``(batch, *shape)`` for every output,
            by name.

        Raises:
            PyTritonClientModelDoesntSupportBatchingError: From the generator: the model takes one sample at a time.
            PyTritonClientError: As in ``infer_sample``.
        """
        call = check_call(inputs, named_inputs, parameters, headers, self._options)
        return self._results(call, is_batch=True)

    async def _results(self, checked: InferCall, *, is_batch: bool) -> AsyncGenerator[ModelResult, None]:
        with trace_call(checked, self._target) as call:
            timeout_s = self._options.timeout_s or self._inference_timeout_s

            def build(spec: ModelSpec) -> Made:
                request = self._build_request(spec, call, self._check_is_decoupled, is_batch=is_batch)
                if self._shared_memory is None:
                    return spec, request, _receive(self._transport.stream(spec, request), timeout_s)
                return spec, request, self._receive_shared(self._shared_memory, spec, request, timeout_s)

            async with aclosing(self._received(build)) as received:
                async for spec, response in received:
                    if not is_end_of_stream(response):
                        yield decode_response(spec, response, is_batch=is_batch)

    async def _received(self, build: Callable[[ModelSpec], Made]) -> AsyncGenerator[tuple[ModelSpec, Any], None]:
        """Yield what comes of a request, which is made anew if the server refuses its form."""
        made = await self._make(build, self._call_deadline())
        for was_refused in (False, True):
            spec, _, responses = made
            has_begun = False
            try:
                async with aclosing(responses):
                    async for response in responses:
                        has_begun = True
                        yield spec, response
                return
            except PyTritonClientInferenceServerError as error:
                if has_begun or was_refused:
                    raise
                made = await self._make_anew(build, self._call_deadline(), made, error)

    async def _receive_shared(
        self, shared_memory: SharedMemory, spec: ModelSpec, request: InferRequest, timeout_s: float
    ) -> AsyncGenerator[InferResponse, None]:
        """Yield the responses to a request whose inputs go through shared memory."""
        was_unknown = has_begun = False
        while True:
            placed = await self._drive(shared_memory.place(spec, request, Deadline(timeout_s), is_stream=True))
            try:
                async with aclosing(_receive(self._transport.stream(spec, placed.request), timeout_s)) as responses:
                    async for response in responses:
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


class DirectStreamsClient(AsyncioDecoupledModelClient):
    """A client for one decoupled model that reads streams over gRPC without the library of gRPC.

    It is for programs that hand on many streams, such as the OpenAI endpoints, and needs hpack.
    """

    _has_direct_streams = True

    async def infer_texts(
        self,
        output: str,
        /,
        *,
        parameters: Parameters = None,
        headers: Headers = None,
        **named_inputs: object,
    ) -> AsyncGenerator[list[bytes], None]:
        """Infer one sample, and yield what an output of strings has in the responses that have come together.

        It costs a fraction of ``infer_sample``, whose arguments and errors it has. A response without the output has no
        text.
        """
        checked = check_call((), named_inputs, parameters, headers, self._options)
        with trace_call(checked, self._target) as call:
            timeout_s = self._options.timeout_s or self._inference_timeout_s

            def build(spec: ModelSpec) -> Made:
                request = self._build_request(spec, call, self._check_is_decoupled, is_batch=False)
                return spec, request, _receive_texts(self._transport.stream(spec, request), timeout_s, output)

            async with aclosing(self._received(build)) as received:
                async for _, texts in received:
                    yield texts


async def _receive(stream: AsyncResponseStream, timeout_s: float) -> AsyncGenerator[InferResponse, None]:
    try:
        while (response := await stream.receive(timeout_s)) is not None:
            yield response
    finally:
        stream.close()


async def _receive_texts(
    stream: AsyncResponseStream, timeout_s: float, output: str
) -> AsyncGenerator[list[bytes], None]:
    try:
        receive_texts: Any = getattr(stream, "receive_texts", None)  # only streams that are read without gRPC have it
        if receive_texts is not None:
            while (texts := await receive_texts(timeout_s, output)) is not None:
                yield texts
            return
        while (response := await stream.receive(timeout_s)) is not None:
            if not is_end_of_stream(response):
                yield [b"".join(response.outputs[output].ravel().tolist()) if output in response.outputs else b""]
    finally:
        stream.close()

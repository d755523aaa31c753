"""The asyncio client for models that may send any number of responses to a request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

from ._asyncio import AsyncioModelClient
from ._core.requests import Call, build_request, check_call, decode_response, is_end_of_stream
from ._core.results import ModelResult, ParameterValue
from ._core.telemetry import trace_call

__all__ = ["AsyncioDecoupledModelClient"]


class AsyncioDecoupledModelClient(AsyncioModelClient):
    """A client for one decoupled model, whose results are iterated over as they come.

    Any number of streams may run on one client at a time::

        async with AsyncioDecoupledModelClient("grpc://localhost", "Count") as client:
            async for result in client.infer_sample(np.array([3], np.int32)):
                print(result["number"])

    Over gRPC a stream carries any tensors. Over HTTP it uses Triton's generate extension, which carries JSON: what that
    cannot say is refused before anything is sent.

    The arguments are those of ``AsyncioModelClient``; ``inference_timeout_s`` is how long each response may take.

    Raises:
        PyTritonClientInvalidUrlError: The address cannot be understood.
        PyTritonClientValueError: Another argument cannot be used.
    """

    def infer_sample(  # type: ignore[override] # many results in place of one, as PyTriton has it
        self,
        *inputs: object,
        parameters: Mapping[str, ParameterValue] | None = None,
        headers: Mapping[str, str | int | bool] | None = None,
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
            named_inputs: The same by name, in place of ``inputs``. Optional inputs may be left out.

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
        *inputs: object,
        parameters: Mapping[str, ParameterValue] | None = None,
        headers: Mapping[str, str | int | bool] | None = None,
        **named_inputs: object,
    ) -> AsyncGenerator[ModelResult, None]:
        """Infer a batch of samples. Else as ``infer_sample``.

        Args:
            inputs: Each of the shape ``(batch, *shape)``, in the order of the model.
            parameters: As in ``infer_sample``.
            headers: As in ``infer_sample``.
            named_inputs: The same by name, in place of ``inputs``.

        Returns:
            An asynchronous generator of results, each with an array of the shape ``(batch, *shape)`` for every output,
            by name.

        Raises:
            PyTritonClientModelDoesntSupportBatchingError: From the generator: the model takes one sample at a time.
            PyTritonClientError: As in ``infer_sample``.
        """
        call = check_call(inputs, named_inputs, parameters, headers, self._options)
        return self._results(call, is_batch=True)

    async def _results(self, checked: Call, *, is_batch: bool) -> AsyncGenerator[ModelResult, None]:
        with trace_call(checked, self._target) as call:
            spec = await self._get_spec(self._call_deadline())
            self._check_is_decoupled(spec)
            request = build_request(
                spec,
                call,
                model_name=self._target.model_name,
                model_version=self._target.model_version,
                request_id=self._next_request_id(),
                is_batch=is_batch,
            )
            timeout_s = self._options.timeout_s or self._inference_timeout_s
            stream = self._transport.stream(spec, request)
            try:
                while (response := await stream.receive(timeout_s)) is not None:
                    if not is_end_of_stream(response):
                        yield decode_response(spec, response, is_batch=is_batch)
            finally:
                stream.close()

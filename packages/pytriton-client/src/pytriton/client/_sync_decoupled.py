"""The synchronous client for models that may send any number of responses to a request."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import closing

from ._core.options import Headers, Parameters
from ._core.requests import build_request, check_call, decode_response, is_end_of_stream
from ._core.results import ModelResult
from ._core.spec import ModelSpec
from ._core.telemetry import TracedCall, trace_call
from ._sync import ModelClient
from ._transport import ResponseStream

__all__ = ["DecoupledModelClient"]

# PyTriton's client waits without a limit, whatever it is given, and there are programs that give it 0.1 seconds. This
# lets them run, and still ends a wait that would be for ever.
_LEAST_RESPONSE_TIMEOUT_S = 60.0


class DecoupledModelClient(ModelClient):
    """A client for one decoupled model, whose results come one by one.

    Over gRPC a stream carries any tensors. Over HTTP it is JSON (Triton's ``generate_stream``), which holds most models
    and not all; a request that it cannot carry is refused before it is sent, and says why. Several streams may be open
    at a time, in one thread or in several::

        with DecoupledModelClient("grpc://localhost", "Words") as client:
            for result in client.infer_sample(np.array([b"a prompt"])):
                print(result["word"])

    The arguments are those of ``BaseModelClient``. The wait for a response is bounded by ``inference_timeout_s``, or by
    one minute where that is longer: PyTriton's client does not bound it, and programs rely on that. A strict limit for
    each response is ``client.with_options(timeout_s=...)``.

    Raises:
        PyTritonClientInvalidUrlError: The address cannot be understood.
        PyTritonClientValueError: Another argument cannot be used.
        PyTritonClientModelNotReadyError: With ``lazy_init=False``: the model was not ready in time.
    """

    def infer_sample(  # type: ignore[override] # many results in place of one, as PyTriton has it
        self,
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
            named_inputs: The same by name, in place of ``inputs``. Optional inputs may be left out.

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
        *inputs: object,
        parameters: Parameters = None,
        headers: Headers = None,
        **named_inputs: object,
    ) -> Generator[ModelResult, None, None]:
        """Infer a batch of samples. Else as ``infer_sample``.

        Args:
            inputs: Each of the shape ``(batch, *shape)``, in the order of the model.
            parameters: As in ``infer_sample``.
            headers: As in ``infer_sample``.
            named_inputs: The same by name, in place of ``inputs``.

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
        try:
            spec = self._get_spec(self._call_deadline())
            self._check_is_decoupled(spec)
            request = build_request(
                spec,
                traced.call,
                model_name=self._target.model_name,
                model_version=self._target.model_version,
                request_id=self._next_request_id(),
                is_batch=is_batch,
            )
            stream = self._transport.stream(spec, request)
        except BaseException as error:
            traced.__exit__(type(error), error, None)
            raise
        return self._results(spec, stream, traced, is_batch=is_batch)

    def _results(
        self, spec: ModelSpec, stream: ResponseStream, traced: TracedCall, *, is_batch: bool
    ) -> Generator[ModelResult, None, None]:
        timeout_s = self._options.timeout_s or max(self._inference_timeout_s, _LEAST_RESPONSE_TIMEOUT_S)
        with traced, closing(stream):
            while (response := stream.receive(timeout_s)) is not None:
                if not is_end_of_stream(response):
                    yield decode_response(spec, response, is_batch=is_batch)

"""The model that Triton's Python backend runs. The one module that knows `triton_python_backend_utils`."""

from __future__ import annotations

import importlib
import json
import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..description import DESCRIPTION_NAME, description_path, read_description, write_description
from ..dlpack import end_capsule, to_capsule
from ..errors import ProxyBackendError
from ..model import ModelSpec
from ..protocol.proxy import EndpointSettings
from ..settings import PYTHON_SIDE_FILE_NAME, PythonProxySettings
from ..wire.batch import RequestData
from ..wire.layout import ErrorCode
from ..wire.response import ResponseData
from ..wire.settings import serving_settings
from .endpoint import ProxyEndpoint
from .keys import check_keys_given
from .memory import MemoryListener, memory_path
from .sockets import ZmqSocket, open_listener
from .workers import logger

_MESSAGE_OVERHEAD = 1 << 20


class MalformedRequestError(ProxyBackendError):
    """One request is not what its model takes."""


class UnsupportedModelError(ProxyBackendError):
    """The stub of this server cannot serve this model; the text says why, and the way out."""


class TritonPythonModel:
    """Takes Triton's requests, and hands them to workers."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Begin to listen. What it raises, Triton gives as the reason why the model cannot be loaded."""
        backend = importlib.import_module("triton_python_backend_utils")

        if not logging.getLogger().handlers:
            logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        _refuse_core_cache(args)
        folder = Path(args["model_repository"]) / args["model_version"]
        self._backend = backend
        self._model = read_description(folder / DESCRIPTION_NAME)
        settings = PythonProxySettings.read(folder / PYTHON_SIDE_FILE_NAME)
        _warn_about_sharing(args["model_name"], int(args["model_version"]), self._model, settings.address)
        self._codec = TensorCodec(backend, self._model)
        self._has_parameters = _takes_parameters(backend)
        self._endpoint = ProxyEndpoint(
            EndpointSettings(
                model_name=args["model_name"],
                model_version=int(args["model_version"]),
                batching=self._model.batching,
                decoupled=self._model.decoupled,
                tensors_digest=self._model.tensors_digest,
                **serving_settings(settings),
            ),
            lambda: listen(settings),
        )
        self._endpoint.start()
        if settings.address.startswith("ipc://"):
            # The folder may not have been there yet when the model was added.
            try:
                write_description(description_path(Path(settings.address.removeprefix("ipc://"))), self._model)
            except OSError as error:
                logger.warning("workers need --description, it cannot be written beside the socket: %s", error)
        logger.info("model '%s': workers attach at %s", args["model_name"], self._endpoint.address)

    def execute(self, requests: Sequence[Any]) -> Any:
        """Hand a batch over.

        Requests are answered one by one through their senders; where the server has these for decoupled models alone,
        all together by what is returned here.
        """
        senders = [_sender(request) for request in requests]
        callers = [
            TritonCaller(self._backend, self._codec, request, sender, self._has_parameters)
            for request, sender in zip(requests, senders, strict=True)
        ]
        data: list[RequestData] = []
        readable: list[TritonCaller] = []
        for request, caller in zip(requests, callers, strict=True):
            try:
                data.append(self._read(request))
                readable.append(caller)
            except MalformedRequestError as error:
                caller.fail(ErrorCode.INVALID_ARG, str(error))
            except Exception as error:
                caller.fail(ErrorCode.INTERNAL, f"model '{self._model.name}': the request cannot be read: {error}")
        if data:
            self._endpoint.execute(data, readable)
        if senders and senders[0] is None:
            return [caller.wait() for caller in callers]
        return None

    def _read(self, request: Any) -> RequestData:
        parameters = request.parameters() if hasattr(request, "parameters") else ""
        trace: Any = request.trace() if hasattr(request, "trace") else None
        context = trace.get_context() if hasattr(trace, "get_context") else None
        return RequestData(
            inputs={tensor.name(): self._codec.read(tensor) for tensor in request.inputs()},
            outputs=list(request.requested_output_names()),
            request_id=request.request_id(),
            correlation_id=request.correlation_id(),
            flags=request.flags() & 3,
            timeout_us=request.timeout() if hasattr(request, "timeout") else 0,
            trace_context=context if isinstance(context, str) else "",
            parameters=json.loads(parameters) if parameters else {},
        )

    def is_ready(self) -> bool:
        """Tell whether the model is ready. The Python backend of tritonserver 2.67 and later asks."""
        return self._endpoint.is_ready()

    def finalize(self) -> None:
        """End the connections to all workers."""
        self._endpoint.stop()


class TensorCodec:
    """Tensors of Triton's stub as numpy arrays and back, whatever numpy the stub was built for.

    Raises:
        UnsupportedModelError: If the model has tensors that do not survive this stub.
    """

    def __init__(self, backend: Any, model: ModelSpec) -> None:
        self._backend = backend
        self._dtypes = {tensor.name: tensor.dtype for tensor in (*model.inputs, *model.outputs)}
        self._ranks = {tensor.name: len(tensor.shape) + model.batching for tensor in model.inputs}
        if any(dtype.name == "bfloat16" for dtype in self._dtypes.values()):
            raise UnsupportedModelError(
                f"model '{model.name}' has BF16 tensors, which Triton's Python backend does not give to Python: serve "
                f"it with the native flavour of pytriton-proxy-backend"
            )
        self._plain = self._stub_fits()
        strings = sorted(name for name, dtype in self._dtypes.items() if dtype.kind == "O")
        if strings and not self._plain:
            raise UnsupportedModelError(
                f"model '{model.name}' has string tensors ({', '.join(strings)}), and the stub of this server's Python "
                f"backend was not built for numpy {np.__version__}, with which it crashes on strings. Install numpy<2 "
                f"in the server's Python, use a server whose Python backend is for numpy 2 (25.01 or later), or serve "
                f"the model with the native flavour of pytriton-proxy-backend"
            )

    def _stub_fits(self) -> bool:
        """Return whether the stub and numpy agree on what an array is: asked of an array that the stub itself makes."""
        if int(np.__version__.partition(".")[0]) < 2:
            return True
        expected = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.float32)
        try:
            capsule = to_capsule(expected)
            tensor = self._backend.Tensor.from_dlpack("probe", capsule)
            end_capsule(capsule)
            made = tensor.as_numpy()
            return made.shape == expected.shape and made.dtype == expected.dtype and bool((made == expected).all())
        except Exception:  # however it fails, it does not fit
            logger.debug("the stub of Triton's Python backend does not fit this numpy", exc_info=True)
            return False

    def read(self, tensor: Any) -> np.ndarray[Any, Any]:
        """Return an input as an array, valid as long as its request.

        Refuses one that has not the model's dimensions.
        """
        name = tensor.name()
        array: np.ndarray[Any, Any] | None = tensor.as_numpy() if self._plain else None
        shape = tuple(tensor.shape()) if array is None else array.shape
        if len(shape) != self._ranks[name]:
            # Triton takes a batch of no rows for no batch.
            raise MalformedRequestError(
                f"input '{name}': expected {self._ranks[name]} dimensions, got {len(shape)}; where there is a batch "
                f"axis, it has 1 row or more"
            )
        if array is not None:
            return array
        if 0 in shape:
            return np.empty(shape, self._dtypes[name])
        return np.from_dlpack(tensor)

    def write(self, name: str, array: np.ndarray[Any, Any]) -> Any:
        """Return an output as a tensor of the stub, which keeps the array as long as it needs it."""
        if self._plain:
            # Stubs misread arrays that are not aligned, as views on a message may be.
            return self._backend.Tensor(name, np.require(array, requirements=["C", "A"]))
        capsule = to_capsule(array)
        tensor = self._backend.Tensor.from_dlpack(name, capsule)
        end_capsule(capsule)
        return tensor


class TritonCaller:
    """One request of Triton's.

    Args:
        backend: `triton_python_backend_utils`.
        codec: Makes tensors.
        request: The request.
        sender: What answers it; `None` if it is answered by what `execute` returns.
        has_parameters: Whether responses can have parameters.
    """

    def __init__(self, backend: Any, codec: TensorCodec, request: Any, sender: Any, has_parameters: bool) -> None:
        self._backend = backend
        self._codec = codec
        self._request = request
        self._sender = sender
        self._has_parameters = has_parameters
        self._wanted = set(request.requested_output_names())
        self._answered = threading.Event()
        self._response: Any = None

    def respond(self, response: ResponseData) -> None:
        """Give Triton one response; one that Triton refuses becomes an error."""
        if response.error is not None:
            self.fail(response.code, response.error)
            return
        try:
            made = None if response.empty else self._make(response)
        except Exception as error:
            self.fail(ErrorCode.INTERNAL, f"the response cannot be given to Triton: {error}")
            return
        self._send(made, final=response.final)

    def _make(self, response: ResponseData) -> Any:
        tensors = [self._codec.write(name, array) for name, array in response.outputs.items() if name in self._wanted]
        if response.parameters and self._has_parameters:
            parameters = {
                _printable(name): _printable(value) if isinstance(value, str) else value
                for name, value in response.parameters.items()
            }
            return self._backend.InferenceResponse(tensors, parameters=parameters)
        return self._backend.InferenceResponse(tensors)

    def fail(self, code: int, text: str) -> None:
        """End the request with an error."""
        codes = self._backend.TritonError
        name = ErrorCode(code).name if code in ErrorCode.__members__.values() else "INTERNAL"
        text = _printable(text)
        error = codes(text, getattr(codes, name, codes.INTERNAL)) if hasattr(codes, "INTERNAL") else codes(text)
        self._send(self._backend.InferenceResponse(output_tensors=[], error=error), final=True)

    def _send(self, response: Any, *, final: bool) -> None:
        if self._sender is None:
            self._response = response
            self._answered.set()
            return
        flags = self._backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        try:
            if response is None:
                if final:
                    self._sender.send(flags=flags)
            else:
                self._sender.send(response, flags=flags)
        except Exception as error:
            logger.error("a response was not accepted by Triton: %s", error)

    def wait(self) -> Any:
        """Wait for the response, and return it. The wait ends, because a batch fails when its worker is gone."""
        self._answered.wait()
        return self._response

    def is_cancelled(self) -> bool:
        """Return whether nobody waits for it any more."""
        ask = getattr(self._sender if self._sender is not None else self._request, "is_cancelled", None)
        return bool(ask()) if ask is not None else False


def _refuse_core_cache(args: Mapping[str, str]) -> None:
    if (json.loads(args["model_config"]).get("response_cache") or {}).get("enable"):
        raise UnsupportedModelError(
            f"model '{args['model_name']}': its configuration has response_cache {{ enable: true }}. Triton's cache "
            "answers failed requests with empty successes, and requests of other shapes, parameters or outputs with "
            "what others have asked for: remove that. The native flavour has a cache of its own (add --response-cache)"
        )


def _warn_about_sharing(name: str, version: int, written_for: ModelSpec, address: str) -> None:
    """Warn where this model and another one are told to listen at the same place, as after a folder was copied."""
    if (written_for.name, written_for.version) != (name, version):
        logger.warning(
            "model '%s' version %d: its folder was written for model '%s' version %d, whose endpoint %s it takes, and "
            "whose workers it turns away. Do not copy or rename the folder: add each model with pytriton-proxy-backend "
            "add",
            name, version, written_for.name, written_for.version, address,
        )  # fmt: skip
        return
    path = Path(address.removeprefix("ipc://"))
    if not address.startswith("ipc://") or not path.is_socket():
        return
    try:
        there = read_description(description_path(path))
    except ProxyBackendError:
        return  # whose socket it is, nobody knows
    if (there.name, there.version) != (name, version):
        logger.warning(
            "model '%s' version %d: its endpoint %s is that of model '%s' version %d as well, which gets no worker "
            "from now on: give each model an endpoint of its own",
            name, version, address, there.name, there.version,
        )  # fmt: skip


def listen(settings: PythonProxySettings) -> tuple[ZmqSocket, MemoryListener | None]:
    """Begin to listen for workers; those of this machine may share memory.

    Raises `BindError` or `KeyFileError` if it cannot, and `KeysMissingError` if anybody could attach there.
    """
    remedy = (
        "Add the model again with --replace and with keys (--curve-secret-key and --curve-workers), or with --insecure "
        "where nobody else reaches the address"
    )
    check_keys_given(settings.address, has_keys=settings.keys is not None, insecure=settings.insecure, remedy=remedy)
    memory = None
    path = memory_path(settings.address)
    if path is not None:
        try:
            memory = MemoryListener(path)
        except OSError as error:
            logger.warning("tensors travel in messages, no memory can be shared at %s: %s", path, error)
    try:
        socket = open_listener(
            settings.address,
            max_message_bytes=settings.arena_budget_bytes + _MESSAGE_OVERHEAD,
            keys=settings.keys,
            link_timeout_s=settings.link_timeout_s,
        )
    except BaseException:
        if memory is not None:
            memory.close()
        raise
    return socket, memory


def _printable(text: str) -> str:
    """Return a text as the stub can take it: bytes of it that are no UTF-8 are replaced."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _sender(request: Any) -> Any:
    """Return what answers a request later; `None` if the server has that for decoupled models alone."""
    try:
        return request.get_response_sender()
    except Exception:  # the type of the error differs from version to version
        return None


def _takes_parameters(backend: Any) -> bool:
    try:
        backend.InferenceResponse([], parameters={})
    except TypeError:
        return False
    return True

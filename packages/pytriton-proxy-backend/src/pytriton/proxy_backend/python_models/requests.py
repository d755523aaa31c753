"""`InferenceRequest`: one that came with a batch, or one that a model makes for another model."""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..wire.batch import Batch
from ..wire.record import Array
from . import bls
from .errors import TritonModelException, text_of
from .responses import checked_parameters, given_text, received_text
from .senders import InferenceResponseSender, OpenBatch
from .server import SERVER
from .tensors import Tensor, make_tensor, sent_arrays

if TYPE_CHECKING:
    from ..transport.calls import Call, CallResult

_UINT32_MAX = (1 << 32) - 1
_INT64_MAX = (1 << 63) - 1
_UINT64_MAX = (1 << 64) - 1
RELEASE_ALL = 1
"""`TRITONSERVER_REQUEST_RELEASE_ALL`."""
RELEASE_RESCHEDULE = 2
"""`TRITONSERVER_REQUEST_RELEASE_RESCHEDULE`."""


class MemoryType(enum.Enum):
    """Where the outputs of a request of a model's own are wanted."""

    TRITONSERVER_MEMORY_GPU = 1
    TRITONSERVER_MEMORY_CPU = 2


class PreferredMemory:
    """Where the outputs of a request of a model's own are wanted.

    Args:
        preferred_memory_type: The memory of the host or of a device.
        preferred_device_id: Which device.
    """

    __slots__ = ("device_id", "kind")

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        if not isinstance(preferred_memory_type, MemoryType):
            raise TypeError(
                "PreferredMemory: expected TRITONSERVER_MEMORY_CPU or TRITONSERVER_MEMORY_GPU, got "
                f"{preferred_memory_type!r}"
            )
        self.kind = preferred_memory_type
        self.device_id = preferred_device_id


class InferenceTrace:
    """The trace of a request, which a request to another model may go on with."""

    __slots__ = ("_context", "parent")

    def __init__(self, context: str = "", parent: tuple[int, int] = (0, 0)) -> None:
        """Begin with a W3C trace context as a JSON text, and the number of the batch with the request's place in it."""
        self._context = context
        self.parent = parent

    def get_context(self) -> str | None:
        """Return its W3C trace context as a JSON text; `None` if there is none."""
        return self._context or None


class InferenceRequest:
    """A request.

    Those of a batch are given to `execute`; with the constructor a model makes one to another model.

    Args:
        request_id: Its id.
        correlation_id: The sequence that it belongs to, a number or a text.
        inputs: Its inputs.
        requested_output_names: The outputs that are wanted.
        model_name: The model that is asked.
        model_version: Its version; -1 is the one that the server chooses.
        flags: Those of a sequence.
        timeout: How long it may wait in the queue, in microseconds.
        preferred_memory: Where the outputs are wanted.
        trace: The trace that it belongs to.
        parameters: A dictionary of text to bool, int or text.

    Raises:
        TritonModelException: An input is `None`, an output has no name, or a parameter or the correlation id is of
            another type.
        TypeError: Something else is of another type, or a number is out of range.
    """

    __slots__ = (
        "__weakref__", "_batch", "_correlation_id", "_flags", "_index", "_inputs", "_load", "_model_name",
        "_model_version", "_outputs", "_parameters", "_preferred_memory", "_release_flags", "_request_id", "_sender",
        "_timeout", "_trace",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,
        requested_output_names: Sequence[str] | None = None,
        model_name: str | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Any = None,
    ) -> None:
        if inputs is None or requested_output_names is None or model_name is None:
            raise TypeError("InferenceRequest: inputs, requested_output_names and model_name must be given")
        if correlation_id is None:
            raise TypeError("InferenceRequest: correlation_id must be a whole number or a text, got None")
        request_id = text_of(request_id, "request_id")
        model_name = text_of(model_name, "model_name")
        whose = f"for request with id '{request_id}' and model name '{model_name}' should not be empty."
        for name, value, of in (
            ("inputs", inputs, "Tensor"),
            ("requested_output_names", requested_output_names, "str"),
        ):
            # A string would be read as a list of its characters.
            if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
                raise TypeError(f"{name}: expected a list of {of}, got a {type(value).__name__}")
        for tensor in inputs:
            if tensor is None:
                raise TritonModelException(f"Input tensor {whose}")
            if not isinstance(tensor, Tensor):
                raise TypeError(f"inputs: expected a list of Tensor, got a {type(tensor).__name__} in it")
        outputs = frozenset(text_of(name, "requested_output_names") for name in requested_output_names)
        if "" in outputs:
            raise TritonModelException(f"Requested output name {whose}")
        if not isinstance(correlation_id, (int, str)):
            raise TritonModelException("Correlation ID must be integer or string")
        if isinstance(correlation_id, str):
            text_of(correlation_id, "correlation_id")
        else:
            correlation_id = _whole(correlation_id, "correlation_id", 0, _UINT64_MAX)
        self._batch: OpenBatch | None = None
        self._load: Callable[[], Batch] | None = None
        self._index = 0
        self._sender: InferenceResponseSender | None = None
        self._release_flags = RELEASE_ALL
        self._inputs = list(inputs)
        self._request_id = request_id
        self._correlation_id = correlation_id
        self._outputs = outputs
        self._model_name = model_name
        self._model_version = _whole(model_version, "model_version", -_INT64_MAX - 1, _INT64_MAX)
        self._flags: int | None = _whole(flags, "flags", 0, _UINT32_MAX)
        self._timeout = _whole(timeout, "timeout", 0, _UINT64_MAX)
        self._preferred_memory = preferred_memory
        self._trace = InferenceTrace() if trace is None else trace
        self._parameters = checked_parameters(parameters)

    # ---- what it says -----------------------------------------------------------------------------------------------

    def inputs(self) -> list[Tensor]:
        """Return its inputs."""
        return self._inputs

    def request_id(self) -> str:
        """Return its id."""
        return self._request_id if self._load is None else self._fields()[0]

    def correlation_id(self) -> int | str:
        """Return the sequence that it belongs to; 0 is none."""
        return self._correlation_id if self._load is None else self._fields()[3]

    def flags(self) -> int:
        """Return the flags of a sequence."""
        flags = self._flags
        return self._fields()[4] if flags is None else flags

    def set_flags(self, flags: int) -> None:
        """Set the flags of a sequence."""
        self._flags = _whole(flags, "set_flags", 0, _UINT32_MAX)

    def timeout(self) -> int:
        """Return how long it may wait in the queue, in microseconds; 0 is as long as it takes."""
        return self._timeout if self._load is None else self._fields()[2]

    def parameters(self) -> str:
        """Return its parameters as a JSON text."""
        if self._load is None:
            return given_text(self._parameters)
        return received_text(self._received().load_parameters(self._index))

    def trace(self) -> InferenceTrace:
        """Return its trace."""
        if self._load is None:
            return self._trace
        batch = self._received()
        return InferenceTrace(batch.load_fields(self._index)[5], (batch.number, self._index))

    def requested_output_names(self) -> set[str]:
        """Return the names of the outputs that the caller asked for."""
        if self._load is None:
            return set(self._outputs)
        return set(self._received().load_requested_outputs(self._index))

    def is_cancelled(self) -> bool:
        """Return whether its caller is gone."""
        return self._load is not None and self._received().is_cancelled(self._index)

    def _received(self) -> Batch:
        assert self._load is not None
        return self._load()

    def _fields(self) -> tuple[str, int, int, int | str, int, str]:
        return self._received().load_fields(self._index)

    # ---- to another model -------------------------------------------------------------------------------------------

    def exec(self, decoupled: bool = False) -> Any:
        """Have the other model answer it, and wait for that.

        Args:
            decoupled: Whether any number of responses may come.

        Returns:
            The response, which may be an error; with `decoupled` an iterator of responses, the last of which may have
            no outputs.

        Raises:
            TritonModelException: It is called outside of `execute`, or the request is one that came.
        """
        return bls.execute(self._ask, decoupled)

    def async_exec(self, decoupled: bool = False) -> Any:
        """Have the other model answer it, in a running event loop.

        Args:
            decoupled: Whether any number of responses may come.

        Returns:
            A future of what `exec` returns.

        Raises:
            TritonModelException: As `exec`.
            RuntimeError: No event loop is running.
        """
        return bls.execute_async(self._ask, decoupled)

    def _ask(self, stream: bool, on_response: Callable[[CallResult], object]) -> Call:
        if self._load is not None:
            raise TritonModelException(
                "a request that came cannot be sent to a model: make one of its inputs with InferenceRequest(...)"
            )
        inputs = sent_arrays(self._inputs)
        if len(inputs) != len(self._inputs):
            raise TritonModelException("the request has two inputs of the same name")
        return SERVER.calls().infer(
            self._model_name,
            inputs,
            sorted(self._outputs),
            version=self._model_version,
            request_id=self._request_id,
            correlation_id=self._correlation_id,
            flags=self.flags(),
            timeout_us=self._timeout,
            parameters=self._parameters,
            parent=self._trace.parent,
            stream=stream,
            on_response=on_response,
        )

    # ---- what becomes of it -----------------------------------------------------------------------------------------

    def get_response_sender(self) -> InferenceResponseSender:
        """Return what sends its responses."""
        sender = self._sender
        if sender is None:
            sender = self._sender = InferenceResponseSender(self._batch, self._index)
            if self._batch is None:
                sender.close()
        return sender

    def set_release_flags(self, flags: int) -> None:
        """Say whether Triton is to give the request to `execute` again, where that returns `None` for it."""
        self._release_flags = _whole(flags, "set_release_flags", 0, _UINT32_MAX)


def _whole(value: Any, what: str, least: int, most: int) -> int:
    number = operator.index(value)
    if not least <= number <= most:
        raise TypeError(f"{what}: expected a whole number from {least} to {most}, got {number}")
    return number


def make_request(batch: OpenBatch, load: Callable[[], Batch], index: int, inputs: dict[str, Array]) -> InferenceRequest:
    """Make the request at place `index` of a batch, which `load` gives."""
    made = _new_request(InferenceRequest)
    made._batch = batch
    made._load = load
    made._index = index
    made._sender = made._flags = None
    made._release_flags = RELEASE_ALL
    made._inputs = [make_tensor(name, array) for name, array in inputs.items()]
    return made


def are_untouched(requests: Iterable[InferenceRequest]) -> bool:
    """Return whether nobody has asked for the sender of a request, nor for one to be rescheduled."""
    for request in requests:  # noqa: SIM110 - a generator takes three times as long
        if request._sender is not None or request._release_flags != RELEASE_ALL:
            return False
    return True


def is_to_be_rescheduled(request: InferenceRequest) -> bool:
    """Return whether a request goes back to Triton's scheduler."""
    return request._release_flags == RELEASE_RESCHEDULE


_new_request = InferenceRequest.__new__

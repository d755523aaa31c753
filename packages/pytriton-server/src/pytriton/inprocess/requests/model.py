"""`Model`, a name and version to ask about and to infer with, and the dictionary that `Server.models()` gives."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Mapping
from typing import Any

from pytriton.inprocess.capi.enums import ModelBatchFlag, ModelTxnPropertyFlag
from pytriton.inprocess.capi.errors import (
    InvalidArgumentError,
    NotFoundError,
    TritonError,
    checked_integer,
    wrong_argument,
)
from pytriton.inprocess.requests.inference import AsyncResponseIterator, ResponseIterator
from pytriton.inprocess.requests.named import NamedModel, ServerReference, access_of
from pytriton.inprocess.requests.request import InferenceRequest, new_request

_CONFIG_VERSIONS = range(2**32)


class Model(NamedModel):
    """A model of a server. It is a name to be looked up on every use: the model may be loaded later, or never.

    Args:
        server: The server.
        name: Name of the model.
        version: Its version; -1 for the one that the model's version policy chooses, which is the latest by default.
        state: What the server's index says, such as `"READY"`; `None` if it was not asked, or if the model was never
            loaded.
        reason: Why the model is in this state, such as the text of the failure to load it.

    Raises:
        InvalidArgumentError: If the name or the version is of the wrong type, or none that the C API can take.
    """

    __slots__ = ("reason", "state")

    def __init__(
        self, server: ServerReference, name: str, version: int = -1, state: str | None = None, reason: str | None = None
    ) -> None:
        super().__init__(server, name, version)
        self.state = state
        self.reason = reason

    def create_request(self, **kwargs: Any) -> InferenceRequest:
        """Make a request to this model.

        Args:
            **kwargs: Fields of `InferenceRequest`.
        """
        return InferenceRequest(self, **kwargs)

    def infer(
        self, inference_request: InferenceRequest | None = None, raise_on_error: bool = True, **kwargs: Any
    ) -> ResponseIterator:
        """Send a request and iterate over its responses.

        Args:
            inference_request: The request, to any version of this model; it goes to the one that it names. It may be
                sent again, also while it is in flight.
            raise_on_error: Whether the iterator raises the error of a response, or yields the response with its `error`
                set.
            **kwargs: Fields of a new `InferenceRequest`, in place of `inference_request`.

        Returns:
            An iterator over the responses, which has a method `cancel()`.

        Raises:
            InvalidArgumentError: If both a request and its fields are given, if the request is for another model, or if
                an input cannot be sent.
            TritonError: What Triton says if it does not accept the request.
        """
        if inference_request is None:
            return ResponseIterator(new_request(self, kwargs), raise_on_error)
        return ResponseIterator(self._checked(inference_request, kwargs), raise_on_error)

    def async_infer(
        self, inference_request: InferenceRequest | None = None, raise_on_error: bool = True, **kwargs: Any
    ) -> AsyncResponseIterator:
        """Send a request and iterate over its responses in the running event loop.

        Args and errors are those of `infer`.

        Returns:
            An asynchronous iterator over the responses, which has a method `cancel()`.
        """
        if inference_request is None:
            return AsyncResponseIterator(new_request(self, kwargs), raise_on_error)
        return AsyncResponseIterator(self._checked(inference_request, kwargs), raise_on_error)

    def _checked(self, request: InferenceRequest, fields: dict[str, Any]) -> InferenceRequest:
        if not isinstance(request, InferenceRequest):
            raise wrong_argument("inference_request", "an InferenceRequest", request, where=f"model {self.name!r}")
        model = request.model
        if not isinstance(model, Model) or model.name != self.name or model._server is not self._server:
            raise InvalidArgumentError(
                f"Model {self.name!r}: expected a request to this model, received one to {model!r}. Its own model's "
                "infer() takes it.",
                expected=self,
                received=model,
                where=f"model {self.name!r}",
            )
        if fields:
            raise InvalidArgumentError(
                f"Model {self.name!r}: expected either an inference_request or its fields, received both (the fields "
                f"{', '.join(fields)}). Set the fields of the request, or leave it out.",
                expected="an inference_request or its fields",
                received=tuple(fields),
                where=f"model {self.name!r}",
            )
        return request

    def metadata(self) -> dict[str, Any]:
        """Return the names, types and shapes of the inputs and outputs, the platform and the versions.

        Raises:
            NotFoundError: If the model is not loaded.
        """
        return self._ask("TRITONSERVER_ServerModelMetadata")

    def config(self, config_version: int = 1) -> dict[str, Any]:
        """Return the configuration that the server uses.

        Args:
            config_version: Version of the format. Triton has 1.

        Raises:
            NotFoundError: If the model is not loaded.
            InvalidArgumentError: If there is no such version of the format.
        """
        version = checked_integer("config_version", config_version, _CONFIG_VERSIONS, where=f"model {self.name!r}")
        return self._ask("TRITONSERVER_ServerModelConfig", version)

    def statistics(self) -> dict[str, Any]:
        """Return counts and durations of the requests since the model was loaded, in nanoseconds.

        Raises:
            NotFoundError: If the model is not loaded.
        """
        return self._ask("TRITONSERVER_ServerModelStatistics")

    def ready(self) -> bool:
        """Tell whether the model answers requests. A model that is not loaded does not."""
        access = access_of(self)
        is_ready = ctypes.c_bool()
        with access.use() as handle, contextlib.suppress(NotFoundError):
            access.api.TRITONSERVER_ServerModelIsReady(handle, self.encoded_name, self.version, ctypes.byref(is_ready))
        return is_ready.value

    def batch_properties(self) -> ModelBatchFlag:
        """Tell whether the model takes several requests at once along the first dimension.

        Raises:
            NotFoundError: If the model is not loaded.
        """
        return ModelBatchFlag(self._properties("TRITONSERVER_ServerModelBatchProperties"))

    def transaction_properties(self) -> ModelTxnPropertyFlag:
        """Tell whether a request has one response, or any number.

        Raises:
            NotFoundError: If the model is not loaded.
        """
        return ModelTxnPropertyFlag(self._properties("TRITONSERVER_ServerModelTransactionProperties"))

    def _ask(self, function: str, *arguments: object) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = access_of(self).ask(function, self.encoded_name, self.version, *arguments)
        except (InvalidArgumentError, NotFoundError) as error:
            raise self._not_found(error)  # noqa: B904 - it says itself what caused it
        return answer

    def _properties(self, function: str) -> int:
        access = access_of(self)
        flags = ctypes.c_uint32()
        try:
            with access.use() as handle:
                getattr(access.api, function)(handle, self.encoded_name, self.version, ctypes.byref(flags), None)
        except (InvalidArgumentError, NotFoundError) as error:
            raise self._not_found(error)  # noqa: B904 - it says itself what caused it
        return flags.value

    def _not_found(self, error: TritonError) -> TritonError:
        """Return the same error for all questions about a missing model, although Triton has several.

        In Python 3.10, the generator behind a context manager would keep an interrupted call alive.
        """
        if "is not available" not in error.message and "unknown model" not in error.message:
            return error
        not_found = NotFoundError(
            f"Model {self.name!r}: expected a model that is loaded, received: {error.message}",
            expected="a loaded model",
            received=(self.name, self.version),
            where=f"model {self.name!r}",
        )
        not_found.__cause__ = error
        return not_found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Model):
            return NotImplemented
        return self._server is other._server and (self.name, self.version) == (other.name, other.version)

    def __hash__(self) -> int:
        return hash((id(self._server), self.name, self.version))

    def __repr__(self) -> str:
        return repr({"name": self.name, "version": self.version, "state": self.state})


class ModelDictionary(dict[tuple[str, int], Model]):
    """The models of a server at one moment, by name and version.

    A bare name stands for version -1, the one that the model's version policy chooses: `models["linear"]`.
    """

    def __init__(self, server: ServerReference, models: list[Model]) -> None:
        super().__init__({(model.name, model.version): model for model in models})
        self._server = server

    def __getitem__(self, key: tuple[str, int] | str) -> Model:
        if not isinstance(key, str):
            return super().__getitem__(key)
        versions = [model for model in self.values() if model.name == key]
        if not versions:
            raise KeyError(key)
        latest = max(versions, key=lambda model: model.version)
        return Model(self._server, key, -1, latest.state, latest.reason)

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str):
            return any(model.name == key for model in self.values())
        return super().__contains__(key)

    def get(self, key: tuple[str, int] | str, default: Any = None) -> Any:
        """Return a model as the index operation does, or `default` if there is none."""
        try:
            return self[key]
        except KeyError:
            return default


def listed_models(server: ServerReference, index: Iterable[Mapping[str, Any]]) -> ModelDictionary:
    """Make models of what Triton's model index lists."""
    return ModelDictionary(
        server,
        [
            Model(server, each["name"], int(each.get("version", -1)), each.get("state"), each.get("reason"))
            for each in index
        ],
    )

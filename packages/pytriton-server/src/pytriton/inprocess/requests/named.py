"""A model by its name: what requests, responses and descriptions need to know of it."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from pytriton.inprocess.capi.errors import checked_integer, encoded_text
from pytriton.inprocess.requests.access import ServerAccess

_VERSIONS = range(-(2**63), 2**63)

_Model = TypeVar("_Model", bound="NamedModel")


class ServerReference(Protocol):
    """A server, which may be stopped and started again."""

    def _running(self) -> ServerAccess:
        """Return the access to it while it runs; raise an error while it does not."""


class NamedModel:
    """A name and a version of a model of a server, see `Model`."""

    __slots__ = ("__weakref__", "_server", "encoded_name", "name", "version")

    def __init__(self, server: ServerReference, name: str, version: int) -> None:
        self.encoded_name = encoded_text("model_name", name)
        self.version = checked_integer("model_version", version, _VERSIONS, where=f"model {name!r}")
        self._server = server
        self.name = name

    def metadata(self) -> dict[str, Any]:
        """Return the names, types and shapes of the inputs and outputs."""
        raise NotImplementedError

    def config(self, config_version: int = 1) -> dict[str, Any]:
        """Return the configuration that the server uses."""
        raise NotImplementedError

    def infer(self, inference_request: Any = None, raise_on_error: bool = True, **kwargs: Any) -> Any:
        """Send a request and iterate over its responses."""
        raise NotImplementedError

    def async_infer(self, inference_request: Any = None, raise_on_error: bool = True, **kwargs: Any) -> Any:
        """Send a request and iterate over its responses in the running event loop."""
        raise NotImplementedError


def access_of(model: NamedModel) -> ServerAccess:
    """Return the access to the server of a model."""
    return model._server._running()


def answering(model: _Model, name: str, version: int) -> _Model:
    """Return another model of the same server: the one that has answered for a model."""
    return type(model)(model._server, name, version)

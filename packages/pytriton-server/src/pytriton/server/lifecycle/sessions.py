"""What `Triton` and `RemoteTriton` have in common below the surface: a server with models, from start to end."""

from collections.abc import Callable, Iterable
from typing import Protocol

from pytriton.server.lifecycle.hosting import ModelHost
from pytriton.server.models.bound_model import BoundModel

__all__ = ["Session"]


class Session(Protocol):
    """A server with models, from the start or the first contact to the end."""

    @property
    def is_running(self) -> bool:
        """Whether the server is up."""

    @property
    def host(self) -> ModelHost:
        """The models on the server."""

    def start(self, models: Iterable[BoundModel], *, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        """Bring server and models up. After an error, `close` has to follow.

        Args:
            models: The models that are bound already.
            timeout_s: How long the server, and then each model's callables, may take, in seconds.
            cancelled: Asked again and again; True ends the wait.
        """

    def claim(self, model: BoundModel) -> None:
        """Make sure that a model may get its name, before it is loaded.

        Raises:
            PyTritonInvalidOperationError: The name is somebody else's.
        """

    def close(self, *, hurried: Callable[[], bool], linger_s: float | None = 0.0) -> None:
        """Take the models out of service when their requests are answered, and let go of the server.

        Args:
            hurried: Asked again and again; True ends all patience.
            linger_s: How long a server of our own accepts requests while it says already that it is not ready, in
                seconds; None is as long as some come, within limits.
        """

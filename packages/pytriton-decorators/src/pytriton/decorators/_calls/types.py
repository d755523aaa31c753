"""Types of requests and results, and what a type checker sees of a decorated callable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from numpy.typing import NDArray

ResultT_co = TypeVar("ResultT_co", covariant=True)


class RequestLike(Protocol):
    """The arrays of one request by input name, each `(batch, *tensor.shape)` for a batching model.

    Every `Mapping` is one, so are plain dictionaries, and so is the `Request` that the server hands to a callable.
    """

    def __getitem__(self, name: str, /) -> NDArray[Any]: ...

    def __iter__(self) -> Iterator[str]: ...

    def __len__(self) -> int: ...

    def keys(self) -> Iterable[str]: ...

    def values(self) -> Iterable[NDArray[Any]]: ...

    def items(self) -> Iterable[tuple[str, NDArray[Any]]]: ...


InputNames: TypeAlias = list[str]
"""Names of inputs."""
InferenceRequest: TypeAlias = RequestLike
"""The arrays of one request by input name."""
InferenceRequests: TypeAlias = Sequence[RequestLike]
"""What a callable gets: the requests of one batch."""
InferenceResult: TypeAlias = Mapping[str, NDArray[Any]]
"""The arrays of one response by output name."""
InferenceResults: TypeAlias = Sequence[InferenceResult]
"""What a callable returns: one result for each request, in the order of the requests."""


class InferCallable(Protocol[ResultT_co]):
    """A decorated function or method: it takes the requests of a batch, whatever the function below takes."""

    def __call__(self, requests: InferenceRequests, /) -> ResultT_co: ...

    def __get__(self, instance: object, owner: type | None = None, /) -> InferCallable[ResultT_co]: ...

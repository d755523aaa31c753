"""The configuration of the model that a callable serves.

It is found in two places. While the server runs a callable, it is in a context variable, set through
`pytriton.decorators.serving`: nothing is written on the user's objects, and one function may serve two models. Where
that is not set, as in unit tests, it is the attribute `__triton_context__` of the callable or of the object whose
method it is.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from pytriton.decorators._calls.requests import get_requests, get_row_requests
from pytriton.decorators._calls.wrapping import undecorated
from pytriton.exceptions import PyTritonValidationError
from pytriton.model_config.triton_model_config import TritonModelConfig

_ATTRIBUTE: Final = "__triton_context__"


class ModelConfigDict(MutableMapping[Callable[..., Any], TritonModelConfig]):
    """Model configurations by inference callable.

    A callable is found by what it is, not by what it prints as or compares as: two objects of equal `repr`, and two
    that are equal, are two callables. Decorators make no difference, every access to a method finds the same entry, and
    an object and its `__call__` are one.

    Args:
        base: Where to look up what has no entry here.
    """

    def __init__(self, base: "ModelConfigDict | None" = None) -> None:
        self._base = base
        # The entry holds the callable, so no other object gets its id while the entry exists.
        self._entries: dict[tuple[int, ...], tuple[Callable[..., Any], TritonModelConfig]] = {}

    def __getitem__(self, infer_func: Callable[..., Any]) -> TritonModelConfig:
        identity = _identity(infer_func)
        configs: ModelConfigDict | None = self
        while configs is not None:
            entry = configs._entries.get(identity)
            if entry is not None:
                return entry[1]
            configs = configs._base
        raise KeyError(infer_func)

    def __setitem__(self, infer_func: Callable[..., Any], model_config: TritonModelConfig) -> None:
        self._entries[_identity(infer_func)] = (infer_func, model_config)

    def __delitem__(self, infer_func: Callable[..., Any]) -> None:
        try:
            del self._entries[_identity(infer_func)]
        except KeyError:
            raise KeyError(infer_func) from None

    def __len__(self) -> int:
        return len(self._merged())

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        """Iterate over the callables."""
        return iter([infer_func for infer_func, _ in self._merged().values()])

    def __eq__(self, other: object) -> bool:
        """Return whether `other` has equal configurations for the same callables."""
        if not isinstance(other, ModelConfigDict):
            return NotImplemented
        own, others = self._merged(), other._merged()
        return own.keys() == others.keys() and all(own[key][1] == others[key][1] for key in own)

    __hash__ = None  # type: ignore[assignment] # it changes

    def __repr__(self) -> str:
        listed = ", ".join(f"{infer_func!r}: {config!r}" for infer_func, config in self._merged().values())
        return f"ModelConfigDict({{{listed}}})"

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or unpickled callable has another id.
        return _rebuilt, (self._base, list(self._entries.values()))

    def _merged(self) -> dict[tuple[int, ...], tuple[Callable[..., Any], TritonModelConfig]]:
        return self._entries if self._base is None else {**self._base._merged(), **self._entries}


def _rebuilt(
    base: ModelConfigDict | None, entries: Sequence[tuple[Callable[..., Any], TritonModelConfig]]
) -> ModelConfigDict:
    configs = ModelConfigDict(base)
    for infer_func, model_config in entries:
        configs[infer_func] = model_config
    return configs


@dataclass
class TritonContext:
    """What a callable can learn about the models of its server, and about the requests that it is answering."""

    model_configs: ModelConfigDict = field(default_factory=ModelConfigDict)
    """Configurations of all models of one `Triton` object by callable."""

    @property
    def requests(self) -> Sequence[Any]:
        """The requests that the decorated callable is answering, with their parameters: `get_requests()`.

        Raises:
            PyTritonRuntimeError: No decorated callable is running in this thread or task, or it was called with arrays
                in place of requests.
        """
        return get_requests()

    @property
    def row_requests(self) -> list[Any]:
        """The request of every row of the arrays that the callable got: `get_row_requests()`.

        Raises:
            PyTritonRuntimeError: As for `requests`.
        """
        return get_row_requests()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that the running callable serves."""

    model_config: TritonModelConfig
    triton_context: TritonContext


SERVED_MODEL: Final[ContextVar[ServedModel | None]] = ContextVar("pytriton_served_model", default=None)


def get_triton_context(wrapped: Any, instance: Any = None) -> TritonContext:
    """Return the context of the server that a callable is bound to.

    Args:
        wrapped: The callable, as a wrapt decorator gets it.
        instance: The object whose method it is, or None.

    Returns:
        The context of the model being served, else the attribute `__triton_context__` of the object or the callable.

    Raises:
        PyTritonValidationError: There is neither.
    """
    context = find_triton_context(wrapped, instance)
    if context is None:
        raise _not_bound(wrapped)
    return context


def get_model_config(wrapped: Any, instance: Any = None) -> TritonModelConfig:
    """Return the configuration of the model that a callable serves.

    Args:
        wrapped: The callable, as a wrapt decorator gets it.
        instance: The object whose method it is, or None.

    Returns:
        The configuration of the model being served, else the entry for the callable in the context that is the
        attribute `__triton_context__` of the object or the callable.

    Raises:
        PyTritonValidationError: There is neither.
    """
    config = find_model_config(wrapped, instance)
    if config is None:
        raise _not_bound(wrapped)
    return config


def find_triton_context(wrapped: Any, instance: Any = None) -> TritonContext | None:
    """Return what `get_triton_context` does, or None if there is no context."""
    served = SERVED_MODEL.get()
    if served is not None:
        return served.triton_context
    for owner in _owners(wrapped, instance):
        context: TritonContext | None = getattr(owner, _ATTRIBUTE, None)
        if context is not None:
            return context
    return None


def find_model_config(wrapped: Any, instance: Any = None) -> TritonModelConfig | None:
    """Return what `get_model_config` does, or None if there is no configuration."""
    served = SERVED_MODEL.get()
    if served is not None:
        return served.model_config
    context = find_triton_context(wrapped, instance)
    if context is None:
        return None
    for owner in _owners(wrapped, instance):
        if callable(owner) and owner in context.model_configs:
            return context.model_configs[owner]
    return None


def _owners(wrapped: Any, instance: Any) -> Iterator[Any]:
    """Yield the callable, and what it belongs to or was made of, nearest first."""
    below = undecorated(wrapped)
    if instance is not None and not inspect.ismethod(below) and inspect.isfunction(below):
        # The method was called through its class, so wrapt gives the plain function.
        yield below.__get__(instance)
    yield below
    owner = getattr(below, "__self__", None) if instance is None else instance
    if owner is not None:
        yield owner
    if isinstance(below, functools.partial):
        yield from _owners(below.func, None)


def _identity(func: Any) -> tuple[int, ...]:
    func = undecorated(func)
    owner = getattr(func, "__self__", None)
    if owner is None or not inspect.ismethod(func):
        return (id(func),)
    function = undecorated(func.__func__)
    if function is undecorated(type(owner).__call__):
        return (id(owner),)
    return (id(owner), id(function))


def _not_bound(wrapped: Any) -> PyTritonValidationError:
    name = getattr(wrapped, "__qualname__", None) or repr(undecorated(wrapped))
    return PyTritonValidationError(
        f"The model configuration of {name} was asked for, but it is not bound to a model. Expected: a call by the "
        "server (Triton.bind), or in a unit test by pytriton.decorators.testing.Harness with its inputs and outputs; "
        "or the attribute __triton_context__ of the function (of the object, for a method), holding a TritonContext "
        "whose model_configs has an entry for it. In a thread of your own, run the function through "
        "contextvars.copy_context().run.",
        expected="a callable bound to a model",
        received=wrapped,
    )

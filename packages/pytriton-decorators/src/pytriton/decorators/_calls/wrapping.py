"""Makes decorators that work on every kind of callable. The only module that imports wrapt.

A decorator is one function, `prepare`: it gets the arguments of a call and returns a `Plan`, which says with which
arguments the decorated function is called, once or several times, and how the results are combined.
`decorator(prepare)` does the rest for every kind of callable.

For a coroutine function everything happens when the coroutine is awaited. For all others `prepare` and the calls happen
when the decorated callable is called, so a request that does not fit is refused there, not in the first step of a
generator.
"""

import copy
import dataclasses
import functools
import importlib
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import wrapt  # type: ignore[import-untyped, unused-ignore]

from pytriton.decorators._calls.execution import Prepare, execute, execute_async
from pytriton.exceptions import PyTritonBadParameterError

# wrapt 2 added a base class below ObjectProxy.
_PROXY: Any = getattr(wrapt, "BaseObjectProxy", wrapt.ObjectProxy)
# Only wrapt 2 has type hints, and they lack attributes that are used here.
_FunctionWrapper: Any = wrapt.FunctionWrapper
_BoundFunctionWrapper: Any = wrapt.BoundFunctionWrapper

SignatureConverter = Callable[[inspect.Signature], inspect.Signature]
"""Signature of the callable below, without `self`, to that of the decorated callable."""

BatchCall = Callable[[Any, Any, Mapping[str, Any], list[int], Callable[[], Sequence[Any]]], Any]
"""`(wrapped, instance, inputs, sizes, requests)`: the call of a server that has the batch as one array per input.

`sizes` has the rows of each request, `requests` makes the requests. The result is a dictionary of arrays over the whole
batch, or, as anything else, what the decorated callable itself would have returned."""
Relay = Callable[[Callable[..., Any], Any, Any, Mapping[str, Any], list[int], Callable[[], Sequence[Any]]], Any]
"""`(below, wrapped, instance, inputs, sizes, requests)`: hands such a call on to that of the callable below, which is
`below(inputs, sizes, requests)`."""


@dataclass(frozen=True)
class DecoratorTraits:
    """What a decorator does besides its plans, and what is known of the arguments that it passes on."""

    name: str  # name of the decorator, for errors
    # Decorates in the same way, for pickle: a function of a module, or `picklable` of one.
    redecorate: Callable[[Any], Any]
    # Makes the signature that `inspect.signature` shows; None shows that of the callable below.
    convert_signature: SignatureConverter | None = None
    # Makes calls for whole batches, without an object for each request. The decorated callable offers it as
    # `__pytriton_whole__(inputs, sizes, requests)`, unless it is a coroutine function.
    batch_call: BatchCall | None = None
    relay: Relay | None = None  # passes such calls on to the callable below, if that offers them
    unpacks_requests: bool = False  # whether it takes requests and passes on their inputs by name
    added_arguments: tuple[str, ...] = ()  # names of keyword arguments that it adds
    filled_inputs: tuple[str, ...] = ()  # names of inputs that it adds where the caller has left them out

    def without_batch_calls(self) -> "DecoratorTraits":
        """Return the same for a callable that does not offer calls for whole batches."""
        return dataclasses.replace(self, batch_call=None, relay=None)


@dataclass(frozen=True)
class Layer:
    """A decorator on a callable."""

    traits: DecoratorTraits  # what it does to the arguments
    below: Any  # that callable, bound to its object where it is a method; `None` if it is not known to which object


def decorator(prepare: Prepare, traits: DecoratorTraits) -> Callable[[Any], Any]:
    """Make a decorator for callables of any kind: `prepare` makes the plan of each call."""

    def invoke(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plan = prepare(wrapped, instance, args, kwargs)
        return wrapped(*args, **kwargs) if plan is None else execute(wrapped, plan)

    async def invoke_coroutine(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plan = prepare(wrapped, instance, args, kwargs)
        return await (wrapped(*args, **kwargs) if plan is None else execute_async(wrapped, plan))

    def apply(func: Any) -> Any:
        if not callable(func) and not isinstance(func, (classmethod, staticmethod)):
            raise PyTritonBadParameterError(
                f"@{traits.name} decorates a callable, not {func!r}.",
                parameter=traits.name,
                value=func,
                rule="a callable",
            )
        kind = _Decorated if _code_of_object(func) is None else _DecoratedObject
        decorated = kind(func, invoke, traits)
        function = func.__func__ if isinstance(func, (classmethod, staticmethod)) else decorated
        if inspect.iscoroutinefunction(function):
            return kind(func, invoke_coroutine, traits.without_batch_calls())
        return decorated

    return apply


def picklable(make: Callable[..., Callable[[Any], Any]], *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """Return the decorator `make(*args, **kwargs)` in a form that pickle takes, which closures are not."""
    return functools.partial(_redecorate, make, args, kwargs)


def _redecorate(
    make: Callable[..., Callable[[Any], Any]], args: tuple[Any, ...], kwargs: dict[str, Any], func: Any
) -> Any:
    return make(*args, **kwargs)(func)


def requests_signature(inner: inspect.Signature) -> inspect.Signature:
    """Return the signature of a decorated callable that takes the requests of a batch instead of arrays."""
    requests = inspect.Parameter("requests", inspect.Parameter.POSITIONAL_ONLY)
    return inspect.Signature([requests])


def is_decorated(func: Any) -> bool:
    """Return whether there is a decorator directly on `func`."""
    return isinstance(func, _PROXY)


def layer_of(func: Any) -> Layer | None:
    """Return the uppermost decorator of this package on a callable; `None` if another decorator is above it."""
    if isinstance(func, _Bound):
        return Layer(func._self_parent._self_traits, None if _is_unbound(func) else func.__wrapped__)
    if isinstance(func, _Decorated):
        is_descriptor = isinstance(func.__wrapped__, (classmethod, staticmethod))
        return Layer(func._self_traits, None if is_descriptor else func.__wrapped__)
    return None


def undecorated(func: Any) -> Any:
    """Return what is below all decorators of `func`; a bound method stays bound."""
    while isinstance(func, _PROXY):
        func = func.__wrapped__
    return func


# --- what a decorated callable looks like ----------------------------------------------------------------------------


class _Bound(_BoundFunctionWrapper):  # type: ignore[misc]
    """A decorated callable that was read as an attribute of an object or a class."""

    @property
    def __pytriton_whole__(self) -> Callable[..., Any] | None:
        # Through the class, the object to call is not known.
        return (
            None
            if self._self_instance is None
            else self._self_parent._self_batch_call_of(self.__wrapped__, self._self_instance)
        )

    @property
    def __signature__(self) -> inspect.Signature:
        return _signature(
            self.__wrapped__, self._self_parent._self_traits.convert_signature, keeps_self=_is_unbound(self)
        )

    @property
    def __func__(self) -> "_Decorated":
        # inspect asks a bound method for its function, and removes the first parameter from the function's signature.
        return _decorated_function(self._self_parent, self.__wrapped__.__func__)

    def __copy__(self) -> "_Bound":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Like a method, a copy belongs to the copied object.
        return self if self._self_instance is None else getattr(copy.deepcopy(self._self_instance, memo), self.__name__)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if inspect.ismethod(self.__wrapped__):
            return getattr, (self.__self__, self.__name__)
        # Pickle needs more than the name, because every access makes another object.
        return _named, (self.__module__, self.__qualname__)


class _Decorated(_FunctionWrapper):  # type: ignore[misc]
    """A decorated callable; everything not named here is that of the callable below."""

    __bound_function_wrapper__ = _Bound

    def __init__(
        self, wrapped: Any, invoke: Callable[..., Any], traits: DecoratorTraits, *, keeps_self: bool | None = None
    ) -> None:
        super().__init__(wrapped, invoke)
        self._self_traits = traits
        self._self_keeps_self = keeps_self

    @property
    def __pytriton_whole__(self) -> Callable[..., Any] | None:
        # The wrapped object may be a method, which is called through its object.
        if isinstance(self.__wrapped__, (classmethod, staticmethod)):
            return None
        return self._self_batch_call_of(self.__wrapped__, getattr(self.__wrapped__, "__self__", None))

    def _self_batch_call_of(self, wrapped: Any, instance: Any) -> Callable[..., Any] | None:
        traits = self._self_traits
        if traits.batch_call is not None:
            return functools.partial(traits.batch_call, wrapped, instance)
        # Only our own classes are asked, because a foreign proxy returns the attribute of what it wraps, and would be
        # skipped.
        below = wrapped.__pytriton_whole__ if isinstance(wrapped, (_Decorated, _Bound)) else None
        if traits.relay is None or below is None:
            return None
        return functools.partial(traits.relay, below, wrapped, instance)

    @property
    def __signature__(self) -> inspect.Signature:
        return _signature(self.__wrapped__, self._self_traits.convert_signature, keeps_self=self._self_keeps_self)

    @property
    def __func__(self) -> "_Decorated":
        # Only a bound method that was decorated afterwards has a function.
        return _decorated_function(self, self.__wrapped__.__func__)

    def __copy__(self) -> "_Decorated":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Decorated":
        # A decorated function is its own copy, like a function; a decorated method or object is copied.
        below = copy.deepcopy(self.__wrapped__, memo)
        return self if below is self.__wrapped__ else self._self_around(below)

    def _self_around(self, below: Any) -> "_Decorated":
        return type(self)(below, self._self_wrapper, self._self_traits, keeps_self=self._self_keeps_self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickle by name if the name leads to this callable; otherwise pickle the wrapped object and decorate it again.
        if inspect.isfunction(undecorated(self)) and _has_name(self):
            return self.__qualname__
        return self._self_traits.redecorate, (self.__wrapped__,)


class _DecoratedObject(_Decorated):
    """A decorated object with a `__call__` written in Python.

    `inspect.iscoroutinefunction` and similar functions read the `__code__` of functions only, so this object offers the
    code of its `__call__`.
    """

    @property
    def __code__(self) -> Any:
        return _code_of_object(self.__wrapped__)

    @property
    def __name__(self) -> str:
        name: str = getattr(self.__wrapped__, "__name__", type(self.__wrapped__).__name__)
        return name

    @property
    def __defaults__(self) -> None:
        return None

    @property
    def __kwdefaults__(self) -> None:
        return None

    def __copy__(self) -> "_Decorated":
        return self._self_around(copy.copy(self.__wrapped__))


def _decorated_function(method: _Decorated, function: Any) -> _Decorated:
    """Return the function of a bound method, decorated like the method."""
    return _Decorated(function, method._self_wrapper, method._self_traits.without_batch_calls(), keeps_self=True)


def _is_unbound(method: "_Bound") -> bool:
    """Return whether a method was reached through its class, so that its object is its first argument."""
    return method._self_instance is None and method._self_binding in ("function", "instancemethod")


def _named(module: str, qualified_name: str) -> Any:
    return operator.attrgetter(qualified_name)(importlib.import_module(module))


def _has_name(decorated: "_Decorated") -> bool:
    try:
        return _named(decorated.__module__, decorated.__qualname__) is decorated
    except (ImportError, AttributeError):
        return False


def _code_of_object(func: Any) -> Any:
    """Return the code of the `__call__` of an object; None for functions, methods, classes and objects without one."""
    if isinstance(func, (type, classmethod, staticmethod)) or hasattr(func, "__code__"):
        return None
    return getattr(undecorated(type(func).__call__), "__code__", None)


def _signature(
    inner: Any, convert_signature: SignatureConverter | None, *, keeps_self: bool | None
) -> inspect.Signature:
    """Return the signature of a decorated callable.

    With `keeps_self`, the first parameter is the object or class and stays; None keeps it if it is called `self` or
    `cls`, since Python 3.13 does not show otherwise that a function will be a class method.
    """
    if convert_signature is None:
        return inspect.signature(inner)
    try:
        signature = inspect.signature(inner)
    except ValueError:
        # A callable written in C may have no signature.
        return convert_signature(inspect.Signature())
    parameters = list(signature.parameters.values())
    if keeps_self is None:
        keeps_self = bool(parameters) and parameters[0].name in ("self", "cls")
    if not keeps_self or not parameters:
        return convert_signature(signature)
    own = parameters[0].replace(kind=inspect.Parameter.POSITIONAL_ONLY, annotation=inspect.Parameter.empty)
    shown = convert_signature(signature.replace(parameters=parameters[1:]))
    return shown.replace(parameters=[own, *shown.parameters.values()])

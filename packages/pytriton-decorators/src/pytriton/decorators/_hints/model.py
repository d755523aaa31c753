"""The decorator `model`: a model from the type hints of a function or class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, overload

from pytriton.decorators._calls.wrapping import undecorated
from pytriton.decorators._hints.adapters import make_infer_func
from pytriton.decorators._hints.signatures import ModelSignature, SignatureToCome, layer_of_requests, make_signature
from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config.model_config import ModelOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ModelOptions", "find_signature", "get_model_signature", "load_infer_func", "model"]

_ATTRIBUTE = "__pytriton_model__"

ModelT = TypeVar("ModelT", bound=Callable[..., Any])


@overload
def model(func: ModelT, /) -> ModelT: ...
@overload
def model(
    *, name: str | None = None, batched: bool = False, **options: Unpack[ModelOptions]
) -> Callable[[ModelT], ModelT]: ...
def model(func: Any = None, /, *, name: str | None = None, batched: bool = False, **options: Any) -> Any:
    """Make a model of a function or class, whose inputs and outputs are what its type hints say.

    The function itself stays as it is, and is what is returned. Its model is bound by `Triton.bind(function)`.

    ```python
    @model(max_batch_size=64)
    def softmax(logits: Annotated[NDArray[np.float32], Shape(-1)]) -> Annotated[NDArray[np.float32], Shape(-1)]:
        ...
    ```

    The hints describe what the function gets. As a rule that is one sample, for each of which it is called; with
    `batched=True` it is a batch, whose axis is the first of every array and is called `"batch"`.

    Of a class, `__call__` is the function. Each worker makes an object of it, once; where it takes arguments, bind an
    object, or a `ProcessWorker` with them.

    Args:
        func: The function or class.
        name: The name of the model; None is that of the function or class.
        batched: Whether the function gets whole batches.
        **options: Fields of `ModelConfig`. A function that is called for each sample gets requests of several samples,
            and Triton joins requests, only where `max_batch_size` is given; a `batcher` without it has the policies of
            the queue.

    Returns:
        The function or class, unchanged.

    Raises:
        PyTritonBadParameterError: A hint is not understood: says of which parameter, and what is accepted. Or an option
            breaks its rule. Where a hint names what is defined only later, both are found out when the model is bound.
    """

    def decorate(target: Any) -> Any:
        read = functools.partial(make_signature, target, name=name, batched=batched, options=options)
        signature: ModelSignature | SignatureToCome
        try:
            signature = read()
        except PyTritonBadParameterError as error:
            if not isinstance(error.__cause__, NameError):
                raise
            signature = SignatureToCome(read)
        setattr(undecorated(target), _ATTRIBUTE, signature)
        return target

    return decorate if func is None else decorate(func)


def get_model_signature(func: Any) -> ModelSignature:
    """Return what `model` has read from the hints of a function or class.

    Args:
        func: The function or class, or an object of the class.

    Returns:
        The signature, which can be printed.

    Raises:
        PyTritonBadParameterError: It is not decorated with `model`, or a hint names what still has no value.
    """
    signature = find_signature(func)
    if signature is None:
        raise PyTritonBadParameterError(
            f"{func!r} is no model: expected a function or class that is decorated with @model, or an object of such a "
            "class.",
            parameter="func",
            value=func,
            rule="decorated with @model",
        )
    return signature


def find_signature(func: Any) -> ModelSignature | None:
    """Return what `get_model_signature` does; None if the callable is not decorated, or now takes requests."""
    if layer_of_requests(func) is not None:
        return None
    owner = undecorated(func)
    # A subclass of a model has hints of its own.
    found = getattr(owner, "__dict__", {}).get(_ATTRIBUTE)
    if found is None and not isinstance(owner, type):
        found = vars(type(owner)).get(_ATTRIBUTE)
    if isinstance(found, SignatureToCome):
        found = found.signature
    return found if isinstance(found, ModelSignature) else None


def load_infer_func(func: Any, /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return the inference callable of a model, which takes the requests of a batch."""
    signature = get_model_signature(func)
    if isinstance(func, type):
        return make_infer_func(func(*args, **kwargs), signature)
    if args or kwargs:
        raise TypeError(f"{signature.name} is a function, which serves requests itself: it takes no arguments before.")
    return make_infer_func(func, signature)

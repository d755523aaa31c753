"""From a type hint to what it says about an input or output."""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typing_inspect

from pytriton.decorators._hints.jaxtyped import JaxtypingError, read_jaxtyping
from pytriton.decorators._hints.values import Form, Value
from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config.dtypes import canonical_type

BATCH = "batch"
"""The name by which an axis is known as that of the batch."""
_SCALARS = (str, bytes, bool, int, float)
# numpy's string types; arrays of them become objects here, because numpy drops NULs at the end of strings.
_STRINGS = {np.str_: str, np.bytes_: bytes, np.object_: bytes}
_ACCEPTED = (
    "str, bytes, int, float, bool and numpy's scalar types such as np.float32; a list of one of them; dict and "
    "list[dict], which travel as JSON; "
    'Annotated[NDArray[np.float32], Shape(-1, 3)]; where jaxtyping is installed, Float32[np.ndarray, "n 3"] and its '
    "like; for an input that may be left out, each also as X | None"
)


@dataclass(frozen=True, init=False)
class Shape:
    """The shape of an array, for `Annotated[NDArray[np.float32], Shape(-1, 3)]`.

    Args:
        *dims: The size of each axis; -1, or a name such as `"width"`, is a size that may vary. Without any, the array
            has no axes.

    Raises:
        PyTritonBadParameterError: One of them is neither a positive integer, nor -1, nor a name.
    """

    dims: tuple[int | str, ...]
    """The size or name of each axis."""

    def __init__(self, *dims: int | str) -> None:
        for size in dims:
            is_size = isinstance(size, int) and not isinstance(size, bool) and (size == -1 or size >= 1)
            if not is_size and not (isinstance(size, str) and size.isidentifier()):
                raise PyTritonBadParameterError(
                    f"Shape({', '.join(map(repr, dims))}): expected sizes of at least 1, and -1 or a name for a size "
                    f"that may vary; got {size!r}.",
                    parameter="Shape.dims",
                    value=size,
                    rule="integers of at least 1, -1, or names",
                )
        object.__setattr__(self, "dims", dims)

    def __repr__(self) -> str:
        return f"Shape({', '.join(map(repr, self.dims))})"


def parse_hint(hint: Any, *, batched: bool, where: str) -> Value:
    """Return what a hint says about a parameter or an output; `where` names it in errors."""
    base, shapes, optional = _unwrapped(hint)

    def wrong(why: str) -> PyTritonBadParameterError:
        return rejected(where, hint, why)

    if len(shapes) > 1:
        raise wrong("it has more than one Shape")
    form, dtype, dims = _parse_base(base, shapes[0].dims if shapes else None, batched, wrong)
    if form != "array":
        if shapes:
            raise wrong("a Shape is for arrays")
        dims = (BATCH,) if form == "list" and batched else (-1,) if form == "list" else ()
    dtype = _STRINGS.get(dtype, dtype)
    if dtype not in _SCALARS:
        try:
            dtype = canonical_type(dtype)
        except PyTritonBadParameterError:
            raise wrong("Triton has no such element type") from None
    if dims is None:
        raise wrong("it does not say the shape of the array")
    _check_axes(form, dims, batched, wrong)
    return Value(form, dtype, dims, batched, shown_hint(base, shapes), optional)


def _parse_base(
    base: Any,
    dims: tuple[int | str, ...] | None,
    batched: bool,
    wrong: Callable[[str], PyTritonBadParameterError],
) -> tuple[Form, Any, tuple[int | str, ...] | None]:
    """Return form, element type and dimensions of a hint without its `Shape`, of which `dims` are the sizes."""
    try:
        jaxtyped = read_jaxtyping(base)
    except JaxtypingError as error:
        raise wrong(str(error)) from None
    if jaxtyped is not None:
        return "array", *jaxtyped
    if _is_scalar(base):
        return "scalar", base, dims
    if _is_json(base):
        if batched:
            raise wrong("with batched=True JSON is taken as text: list[str], and json.loads for each")
        return ("object" if _is_dict(base) else "objects"), str, dims
    if typing.get_origin(base) is list:
        (dtype,) = typing.get_args(base) or (None,)
        if not _is_scalar(dtype):
            raise wrong("lists have plain elements; for more axes take an array")
        return "list", dtype, dims
    if typing.get_origin(base) is np.ndarray:
        dtype, axes = _array_parts(base)
        if axes is not None and dims is None:
            dims = (BATCH, *[-1] * (axes - 1)) if batched else (-1,) * axes
        if dtype is None:
            raise wrong("it does not say the dtype of the array")
        return "array", dtype, dims
    if base is np.ndarray:
        raise wrong("it says neither the dtype nor the shape of the array")
    if typing_inspect.is_union_type(base):
        raise wrong("only a union with None is understood")
    raise wrong("it is not understood")


def rejected(where: str, hint: Any, why: str) -> PyTritonBadParameterError:
    """Make the error for a hint that cannot be used."""
    return PyTritonBadParameterError(
        f"@model: {where} has the hint {shown_hint(hint)}: {why}. Accepted: {_ACCEPTED}.",
        parameter=where,
        value=hint,
        rule=_ACCEPTED,
    )


def plain_hint(hint: Any) -> Any:
    """Return what a `NewType` or an alias made with `type` stands for; anything else as it is."""
    while True:
        origin = typing.get_origin(hint)
        if typing_inspect.is_new_type(hint):
            hint = hint.__supertype__
        elif _is_alias(hint):
            hint = hint.__value__
        elif _is_alias(origin):
            # Since numpy 2.5, NDArray[np.float32] is such an alias.
            hint = origin.__value__[typing.get_args(hint)]
        else:
            return hint


def _is_alias(hint: Any) -> bool:
    # The class is compared by name, because it exists since Python 3.12 only.
    return type(hint).__name__ == "TypeAliasType"


def shown_hint(hint: Any, shapes: Sequence[Shape] = ()) -> str:
    """Return a hint as a user would write it."""
    if shapes:
        return f"Annotated[{shown_hint(hint)}, {shapes[0]!r}]"
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return f"Annotated[{shown_hint(args[0])}, {', '.join(map(repr, args[1:]))}]"
    if typing_inspect.is_union_type(hint):
        return " | ".join("None" if arg is type(None) else shown_hint(arg) for arg in args)
    if _is_alias(origin):
        return f"{origin.__name__}[{', '.join(map(shown_hint, args))}]"
    if origin is np.ndarray:
        dtype = typing.get_args(args[1]) if len(args) > 1 else ()
        return f"NDArray[{', '.join(map(shown_hint, dtype))}]"
    if origin is None and isinstance(hint, type):
        return f"np.{hint.__name__}" if hint.__module__ == "numpy" else hint.__qualname__
    return repr(hint).replace("typing.", "")


def _unwrapped(hint: Any) -> tuple[Any, list[Shape], bool]:
    """Return the hint inside `Annotated`, `X | None` and aliases, its shapes, and whether None is allowed."""
    shapes: list[Shape] = []
    optional = False
    while True:
        hint = plain_hint(hint)
        args = typing.get_args(hint)
        if typing.get_origin(hint) is Annotated:
            shapes += [item for item in args[1:] if isinstance(item, Shape)]
            hint = args[0]
        elif typing_inspect.is_union_type(hint) and len(args) == 2 and type(None) in args:
            optional = True
            hint = next(arg for arg in args if arg is not type(None))
        else:
            return hint, shapes, optional


def _is_scalar(hint: Any) -> bool:
    return hint in _SCALARS or (isinstance(hint, type) and issubclass(hint, np.generic))


def _is_dict(hint: Any) -> bool:
    # A TypedDict is such a class as well, but its members would not be checked.
    return hint is dict or (typing.get_origin(hint) is dict and typing.get_args(hint)[:1] == (str,))


def _is_json(hint: Any) -> bool:
    # A list of the module typing may have no arguments.
    members = typing.get_args(hint) if typing.get_origin(hint) is list else ()
    return _is_dict(hint) or any(_is_dict(plain_hint(member)) for member in members)


def _array_parts(hint: Any) -> tuple[Any, int | None]:
    """Return the element type and number of axes of `np.ndarray[shape, np.dtype[type]]`, or None for a missing one."""
    shape, *rest = typing.get_args(hint)
    dtype = (typing.get_args(rest[0]) or (None,))[0] if rest else None
    dtype = typing.get_origin(dtype) or dtype
    sizes = typing.get_args(shape) if typing.get_origin(shape) is tuple else ()
    # Since Python 3.11 `Any` is a class.
    return (dtype if isinstance(dtype, type) and dtype is not Any else None), (
        None if not sizes or Ellipsis in sizes else len(sizes)
    )


def _check_axes(form: str, dims: tuple[int | str, ...], batched: bool, wrong: Callable[[str], Exception]) -> None:
    if batched and form == "scalar":
        raise wrong(
            "with batched=True the function gets all samples of a batch at once, so it takes a list of them (list[str])"
            " or an array"
        )
    if batched and (not dims or not isinstance(dims[0], str)):
        raise wrong(
            "with batched=True the first axis of every array is that of the batch: give it the name 'batch', as in "
            'Shape("batch", -1)'
        )
    if not batched and dims[:1] == (BATCH,):
        raise wrong(
            "its first axis is called 'batch', but the function is called for each sample: say @model(batched=True), "
            "or leave that axis out"
        )

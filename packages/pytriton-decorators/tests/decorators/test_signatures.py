"""What is refused when it is bound is what would fail in every call, and nothing else is refused."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import wrapt

from pytriton.decorators import (
    batch,
    fill_optionals,
    first_value,
    group_by_keys,
    group_by_values,
    pad_batch,
    sample,
    triton_context,
)
from pytriton.decorators.serving import check_callable
from pytriton.decorators.testing import Harness
from pytriton.exceptions import PyTritonValidationError
from pytriton.model_config import ModelConfig, Tensor

IMG = [Tensor(name="img", dtype=np.float32, shape=(1,))]
BOTH = [*IMG, Tensor(name="mask", dtype=np.float32, shape=(1,), optional=True)]
ROWS = {"img": np.ones((2, 1), np.float32)}
ONE = np.ones(1, np.float32)


def outputs(_array: Any) -> dict[str, Any]:
    return {"y": ROWS["img"]}


class Model:
    def plain(self, img: Any) -> Any:
        return outputs(img)

    @batch
    def good(self, img: Any) -> Any:
        return outputs(img)

    @batch
    def bad(self, x: Any) -> Any:
        return outputs(x)

    @batch
    @triton_context
    def with_context(self, img: Any, *, triton_context: Any) -> Any:
        return outputs(img)

    @classmethod
    @batch
    def of_class(cls, img: Any) -> Any:
        return outputs(img)

    @batch
    @classmethod
    def bad_of_class(cls, x: Any) -> Any:
        return outputs(x)

    @staticmethod
    @batch
    def static(img: Any) -> Any:
        return outputs(img)

    @staticmethod
    @batch
    def bad_static(x: Any) -> Any:
        return outputs(x)


class Callable_:  # noqa: N801 - the builtin name is taken
    @batch
    def __call__(self, img: Any) -> Any:
        return outputs(img)


class BadCallable:
    @batch
    def __call__(self, x: Any) -> Any:
        return outputs(x)


class Plain:
    def __call__(self, img: Any) -> Any:
        return outputs(img)


class BadPlain:
    def __call__(self, x: Any) -> Any:
        return outputs(x)


def takes_img(img: Any) -> Any:
    return outputs(img)


def takes_x(x: Any) -> Any:
    return outputs(x)


async def coroutine(x: Any) -> Any:
    return outputs(x)


def generator(x: Any) -> Any:
    yield outputs(x)


def takes_two(img: Any, scale: Any) -> Any:
    return outputs(img * scale)


def renaming(func: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator of the user's that makes the arguments fit."""

    @functools.wraps(func)
    def wrapper(*args: Any, **inputs: Any) -> Any:
        return func(*args, **{"x": inputs.pop("img"), **inputs})

    return wrapper


@wrapt.decorator
def foreign(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, x=kwargs["img"])


def passing(func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    return wrapper


FITTING = {
    "function": batch(takes_img),
    "lambda": batch(lambda img: outputs(img)),
    "keyword only": batch(lambda *, img: outputs(img)),
    "collecting": batch(lambda **inputs: outputs(inputs["img"])),
    "one and others": batch(lambda img, **others: outputs(img)),
    "a default": batch(lambda img, scale=2: outputs(img)),
    "positional collector": batch(lambda *args, img: outputs(img)),
    "method": Model().good,
    "method of an object, decorated": batch(Model().plain),
    "class method": Model.of_class,
    "class method of an object": Model().of_class,
    "static method": Model.static,
    "object": Callable_(),
    "decorated object": batch(Plain()),
    "a partial of the function": batch(functools.partial(takes_two, scale=2)),
    "a partial of what is decorated": functools.partial(cast(Any, batch(takes_two)), scale=2),
    "context": Model().with_context,
    "context above": triton_context(batch(lambda img, triton_context: outputs(img))),
    "stack": group_by_keys(batch(group_by_values("img")(first_value("img", strict=False)(takes_img)))),
    "padded": batch(pad_batch(takes_img)),
    "renamed below": batch(renaming(takes_x)),
    "another wrapper below": batch(foreign(takes_x)),
    "requests": group_by_keys(lambda requests: [outputs(request) for request in requests]),
    "requests, filled": fill_optionals(mask=ONE)(lambda requests: [outputs(request) for request in requests]),
    "requests and context": triton_context(lambda requests, triton_context: [outputs(one) for one in requests]),
    "not decorated": lambda requests: [outputs(request) for request in requests],
    "another wrapper above": passing(batch(takes_img)),
}
REFUSED = {
    "function": batch(takes_x),
    "none": batch(lambda: outputs(None)),
    "one more": batch(takes_two),
    "positional only": batch(lambda img, /: outputs(img)),
    "only collects positional ones": batch(lambda *args: outputs(args)),
    "one more beside all": batch(lambda scale, **inputs: outputs(inputs["img"])),
    "method": Model().bad,
    "class method": Model.bad_of_class,
    "static method": Model.bad_static,
    "object": BadCallable(),
    "decorated object": batch(BadPlain()),
    "coroutine": batch(coroutine),
    "generator": batch(generator),
    "partial": batch(functools.partial(takes_x)),
    "partial of something else": functools.partial(cast(Any, batch(takes_img)), scale=2),
    "no context": batch(triton_context(takes_img)),
    "no context for requests": triton_context(lambda requests: [outputs(one) for one in requests]),
    "stack": group_by_keys(batch(first_value("img", strict=False)(takes_x))),
    "filled": fill_optionals(mask=ONE)(batch(takes_img)),
    "no requests": group_by_keys(lambda: outputs(None)),
}


def fails(infer_func: Any) -> bool:
    """Whether a call for one request with the required inputs cannot be made."""
    harness = Harness(infer_func, None, config=ModelConfig(max_batch_size=4))
    harness.model_config.inputs = Harness(takes_img, BOTH).model_config.inputs
    try:
        if inspect.iscoroutinefunction(infer_func):
            asyncio.run(harness.infer_async(dict(ROWS)))
        else:
            harness.infer(dict(ROWS))
    except TypeError:
        return True
    return False


def config_of(inputs: list[Tensor], name: str = "net", *, batching: bool = True) -> Any:
    return Harness(takes_img, inputs, config=ModelConfig(batching=batching), model_name=name).model_config


@pytest.mark.parametrize("name", FITTING)
def test_what_can_be_called_is_not_refused(name: str) -> None:
    check_callable(FITTING[name], config_of(BOTH if "filled" in name else IMG))
    assert not fails(FITTING[name])


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_called_is_refused(name: str) -> None:
    with pytest.raises(PyTritonValidationError, match="Model 'net'"):
        check_callable(REFUSED[name], config_of(BOTH if name == "filled" else IMG))
    assert fails(REFUSED[name])


def test_the_error_says_what_was_expected_what_came_and_what_to_do() -> None:
    with pytest.raises(PyTritonValidationError) as caught:
        check_callable(batch(takes_x), config_of(IMG))
    assert str(caught.value) == (
        "Model 'net': takes_x(x) cannot take the inputs of the model, which @batch hands over by name: it has no "
        "parameter for 'img', and nothing is given for its parameter 'x'. The inputs are 'img': give parameters and "
        'inputs the same names (def infer(x), Tensor(name="x", ...)), or take them all as **inputs.'
    )
    assert (caught.value.tensor, caught.value.expected, caught.value.received) == ("img", ["img"], ["x"])
    # An input without a name has one all the same.
    with pytest.raises(PyTritonValidationError, match="no parameter for 'INPUT_1'"):
        check_callable(batch(takes_x), config_of([Tensor(dtype=np.float32, shape=(1,))]))
    with pytest.raises(PyTritonValidationError, match="no parameter for 'img'"):
        Harness(batch(takes_x), IMG)
    with pytest.raises(PyTritonValidationError, match=r"takes_img\(img\).* Under @triton_context .* 'triton_context'"):
        check_callable(triton_context(takes_img), config_of(IMG))


def test_of_optional_inputs_it_is_not_known_whether_they_come(caplog: pytest.LogCaptureFixture) -> None:
    for fitting in (
        batch(lambda img, mask=None: outputs(img)),
        batch(lambda img, mask: outputs(img)),
        fill_optionals(mask=ONE)(batch(lambda img, mask: outputs(img))),
        batch(lambda **inputs: outputs(inputs)),
    ):
        check_callable(fitting, config_of(BOTH))
    assert caplog.text == ""
    check_callable(batch(takes_img), config_of(BOTH))
    told = "Model 'net': takes_img(img) has no parameter for the optional input 'mask': requests that have it fail."
    assert caplog.messages == [told]
    # With a default for it, each request has it.
    with pytest.raises(PyTritonValidationError, match="no parameter for 'mask'"):
        check_callable(fill_optionals(mask=ONE)(batch(takes_img)), config_of(BOTH))


def test_sample_is_held_to_the_same() -> None:
    check_callable(sample(takes_img), config_of(IMG, batching=False))
    with pytest.raises(PyTritonValidationError, match="@sample hands over"):
        check_callable(sample(takes_x), config_of(IMG, batching=False))


def test_models_without_inputs_want_no_parameters() -> None:
    check_callable(batch(lambda: outputs(None)), config_of([]))
    with pytest.raises(PyTritonValidationError, match=r"for its parameter 'img'\. The inputs are none"):
        check_callable(batch(takes_img), config_of([]))


class Shown:
    """An object that wants to look like another one."""

    def __call__(self, **inputs: Any) -> Any:
        return outputs(inputs["img"])


UNKNOWN = {
    "written in C": batch(max),
    "cached": batch(functools.lru_cache(takes_x)),
    "method of no object": Model.bad,
    "another wrapper above": passing(batch(takes_x)),
    "another wrapper of wrapt": foreign(batch(takes_x)),
    "partial of unknown arguments": functools.partial(cast(Any, batch(takes_x)), Model()),
    "class": batch(dict),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_known_is_not_refused(name: str) -> None:
    check_callable(UNKNOWN[name], config_of(IMG))


def test_a_signature_that_somebody_has_set_says_nothing() -> None:
    import inspect

    shown = Shown()
    shown.__signature__ = inspect.signature(takes_x)  # type: ignore[attr-defined]
    check_callable(batch(shown), config_of(IMG))
    assert not fails(batch(shown))


def test_a_model_whose_inputs_are_not_known_says_nothing() -> None:
    check_callable(batch(takes_x), Harness(takes_img).model_config)

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pytriton.decorators import TritonContext, batch, get_model_config, get_triton_context
from pytriton.decorators.serving import set_served_model
from pytriton.exceptions import PyTritonValidationError
from pytriton.model_config.triton_model_config import TensorSpec, TritonModelConfig


def config(name: str, output: str) -> TritonModelConfig:
    return TritonModelConfig(name, outputs=[TensorSpec(output, (1,), np.float32)])


def bound(infer_func: Any, model_config: TritonModelConfig, shared: TritonContext | None = None) -> contextvars.Context:
    context = contextvars.copy_context()
    context.run(set_served_model, infer_func, model_config, shared)
    return context


def test_one_function_serves_two_models(make_requests: Callable[..., Any]) -> None:
    @batch
    def infer(a: Any, b: Any) -> Any:
        return [a]

    first = bound(infer, config("first", "x"))
    second = bound(infer, config("second", "y"))
    assert list(first.run(infer, make_requests(1))[0]) == ["x"]
    assert list(second.run(infer, make_requests(1))[0]) == ["y"]
    assert "__triton_context__" not in vars(infer)


def test_a_function_below_an_undecorated_callable_sees_the_model(make_requests: Callable[..., Any]) -> None:
    inner = batch(lambda a, b: [a])

    def outer(requests: Any) -> Any:
        return inner(requests)

    assert list(bound(outer, config("m", "x")).run(outer, make_requests(1))[0]) == ["x"]


def test_the_served_model_comes_before_the_attribute(make_requests: Callable[..., Any]) -> None:
    infer: Any = batch(lambda a, b: [a])
    infer.__triton_context__ = TritonContext()
    infer.__triton_context__.model_configs[infer] = config("attribute", "old")
    assert list(bound(infer, config("served", "new")).run(infer, make_requests(1))[0]) == ["new"]
    assert list(infer(make_requests(1))[0]) == ["old"]


def test_the_context_shows_all_models_of_the_server_also_later_ones() -> None:
    shared = TritonContext()
    shared.model_configs[print] = config("shared print", "x")
    context = bound(print, config("own print", "x"), shared)
    shared.model_configs[len] = config("len", "x")
    seen = context.run(get_triton_context, print).model_configs
    assert (seen[print].model_name, seen[len].model_name) == ("own print", "len")
    assert shared.model_configs[print].model_name == "shared print"


def test_another_thread_needs_the_context() -> None:
    own = bound(print, config("m", "x"))
    found: list[Any] = []

    def look_up() -> None:
        found.append(get_model_config(print).model_name)

    def look_up_without() -> None:
        with pytest.raises(PyTritonValidationError, match="copy_context"):
            get_model_config(print)
        found.append("refused")

    for target in (lambda: own.run(look_up), look_up_without):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join(timeout=300)
    assert found == ["m", "refused"]

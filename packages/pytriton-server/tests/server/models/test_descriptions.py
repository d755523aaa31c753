"""What callers learn of a model from its docstring."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

from pytriton.decorators import TritonContext, batch, model
from pytriton.decorators.serving import DESCRIPTION_PARAMETER
from pytriton.model_config import ModelConfig, Tensor
from pytriton.server.models.definition import ModelDefinition
from pytriton.triton import ProcessWorker


@model
def shout(text: str) -> str:
    """Say it louder.

    And again.
    """
    return text.upper()


@batch
def plain(text: Any) -> Any:
    """Say it."""
    return {"said": text}


@model
class Greeter:
    """Greet somebody."""

    def __call__(self, text: str) -> str:
        return text


@model
@dataclasses.dataclass
class Tall:
    def __call__(self, text: str) -> str:
        """Say it from above."""
        return text


class Bare:
    """Is about the class."""

    def __call__(self, requests: Any) -> Any:
        return requests


def make() -> Any:
    """Make a callable."""
    return plain


def defined(infer_func: Any, config: ModelConfig | None = None, *, told: bool = False) -> ModelDefinition:
    tensors = [Tensor(name="text", dtype=bytes, shape=(1,))] if told else None
    outputs = [Tensor(name="said", dtype=bytes, shape=(1,))] if told else None
    return ModelDefinition(
        name="one", infer_func=infer_func, inputs=tensors, outputs=outputs, version=1, config=config, strict=False,
        triton_context=TritonContext(),
    )  # fmt: skip


def described(*arguments: Any, told: bool = False) -> str | None:
    return defined(*arguments, told=told).triton_config.backend_parameters.get(DESCRIPTION_PARAMETER)


def test_the_docstring_of_what_serves_a_model() -> None:
    assert described(shout) == "Say it louder.\n\nAnd again."
    assert described([shout, shout]) == described(shout)
    assert described(ProcessWorker(shout)) == described(shout)
    assert described(Greeter) == described(Greeter()) == "Greet somebody."
    assert described(Tall) == "Say it from above."
    assert described(plain, told=True) == "Say it."
    assert described(plain, ModelConfig(parameters={DESCRIPTION_PARAMETER: "Mine."}), told=True) == "Mine."


@pytest.mark.parametrize("other", [Bare(), functools.partial(plain), ProcessWorker(make), ProcessWorker("app:make")])
def test_docstrings_that_are_about_something_else(other: Any) -> None:
    assert described(other, told=True) is None


def test_the_description_makes_no_other_model() -> None:
    one = defined(plain, told=True)
    other = defined(plain, ModelConfig(parameters={DESCRIPTION_PARAMETER: "Mine."}), told=True)
    assert one.config_text != other.config_text
    assert one.differences(other) == []

"""Which models of type hints may read the parameters of requests."""

import sys
import types
from typing import Any

import pytest

from pytriton.decorators.serving import find_signature, reads_parameters

UTILS = """
import functools


def read_lines(lines):
    return list(lines)


def logged(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


def hidden(function):
    def call(text: str) -> str:
        return function(text)

    return call
"""
HELPERS = """
from pytriton.decorators import get_requests


def by() -> int:
    return get_requests()[0].parameters["by"]


class Base:
    def times(self) -> int:
        return by()
"""
BETWEEN = """
import parameters_helpers


def twice() -> int:
    return 2 * parameters_helpers.by()
"""

READERS = {
    "its own import": """
from pytriton.decorators import get_requests
@model
def found(text: str) -> str:
    return text * get_requests()[0].parameters["by"]
""",
    "an import inside": """
@model
def found(text: str) -> str:
    from pytriton.decorators import get_row_requests as rows
    return text * rows()[0].parameters["by"]
""",
    "another name of it": """
from pytriton.decorators import get_requests as ask
@model
def found(text: str) -> str:
    return text * ask()[0].parameters["by"]
""",
    "the package": """
import pytriton.decorators as pt
@model
def found(text: str) -> str:
    return text * pt.get_requests()[0].parameters["by"]
""",
    "a closure": """
def make():
    from pytriton.decorators import get_requests as ask
    @model
    def found(text: str) -> str:
        return text * ask()[0].parameters["by"]
    return found
found = make()
""",
    "a function in a closure": """
def make():
    from pytriton.decorators import get_requests as ask
    def by():
        return ask()[0].parameters["by"]
    @model
    def found(text: str) -> str:
        return text * by()
    return found
found = make()
""",
    "triton_context": """
from pytriton.decorators import triton_context
@model
@triton_context
def found(text: str, *, triton_context: Any) -> str:
    return text * triton_context.requests[0].parameters["by"]
""",
    "a decorator of somebody else's": """
from parameters_utils import logged
@model
@logged
def found(text: str) -> str:
    return text
""",
    "one above it": """
from parameters_utils import logged
@logged
@model
def found(text: str) -> str:
    return text
""",
    "one of wrapt": """
import wrapt
@wrapt.decorator
def passed(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs)
@model
@passed
def found(text: str) -> str:
    return text
""",
    "one that says nothing of itself": """
from parameters_helpers import by
from parameters_utils import hidden
@model
@hidden
def found(text: str) -> str:
    return text * by()
""",
    "a function of another module": """
from parameters_helpers import by
@model
def found(text: str) -> str:
    return text * by()
""",
    "another module": """
import parameters_helpers as other
@model
def found(text: str) -> str:
    return text * other.by()
""",
    "a function that calls one": """
from parameters_between import twice
@model
def found(text: str) -> str:
    return text * twice()
""",
    "a function under a decorator": """
from functools import lru_cache, partial
from parameters_helpers import by
from parameters_utils import logged
cached = lru_cache(partial(logged(by)))
@model
def found(text: str) -> str:
    return text * cached()
""",
    "an inherited method": """
from parameters_helpers import Base
@model
class found(Base):
    def __call__(self, text: str) -> str:
        return text * self.times()
""",
    "an inherited method of an object": """
from parameters_helpers import Base
@model
class Found(Base):
    def __call__(self, text: str) -> str:
        return text * self.times()
found = Found()
""",
    "another method": """
from parameters_helpers import by
@model
class found:
    @property
    def by(self):
        return by()
    def __call__(self, text: str) -> str:
        return text * self.by
""",
    "a decorated method": """
from parameters_utils import logged
@model
class found:
    @logged
    def __call__(self, text: str) -> str:
        return text
""",
    "triton_context of a method": """
from pytriton.decorators import triton_context
@model
class Found:
    @triton_context
    def __call__(self, text: str, *, triton_context: Any) -> str:
        return text * triton_context.requests[0].parameters["by"]
found = Found()
""",
}
OTHERS = {
    "a function": """
import os
import numpy as np
from parameters_utils import read_lines
@model(max_batch_size=8)
def found(text: str, times: int = 1) -> str:
    return os.path.join(*read_lines(text)) * int(np.abs(times))
""",
    "a function of a function": """
def make(by):
    @model
    def found(text: str) -> str:
        return text * by + later
    if by < 0:
        later = ""
    return found
found = make(2)
""",
    "a class": """
@model
class found:
    def __init__(self):
        self.times = 2
    def __call__(self, text: str) -> str:
        return text * self.times
""",
    "an object": """
import functools
@model
class Found:
    @functools.cached_property
    def times(self):
        return 2
    def __call__(self, text: str) -> str:
        return text * self.times
found = Found()
""",
    "a decorator of ours": """
import numpy as np
from pytriton.decorators import fill_optionals, pad_batch
@model(batched=True, max_batch_size=8)
@pad_batch
def found(x: Annotated[NDArray[np.float32], Shape("batch", 2)]) -> Annotated[NDArray[np.float32], Shape("batch", 2)]:
    return x
""",
}
BEGIN = """
from typing import Annotated, Any
from numpy.typing import NDArray
from pytriton.decorators import Shape, model
"""


def found(text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what a module of that text has under that name."""
    sources = {"utils": UTILS, "helpers": HELPERS, "between": BETWEEN, "model": BEGIN + text}
    for name, source in sources.items():
        module = types.ModuleType(f"parameters_{name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(source, vars(module))
    assert find_signature(module.found) is not None
    return module.found


@pytest.mark.parametrize("name", READERS)
def test_models_that_may_read_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reads_parameters(found(READERS[name], monkeypatch))


@pytest.mark.parametrize("name", OTHERS)
def test_models_that_read_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not reads_parameters(found(OTHERS[name], monkeypatch))


def test_what_does_not_like_to_be_looked_at_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
class Shy:
    def __getattribute__(self, name):
        raise RuntimeError("outside of a request")
    __hash__ = None
    def __eq__(self, other):
        raise RuntimeError("outside of a request")
shy = Shy()
@model
def found(text: str) -> str:
    return text + str(shy)
"""
    assert not reads_parameters(found(text, monkeypatch))

"""How the server tells the decorators which model a callable serves.

Not for inference callables: this is the seam between pytriton-server and this distribution, public so that another
runner of callables can use it, too. The model is a context variable, so the caller chooses where it holds:

```python
context = contextvars.copy_context()
context.run(set_served_model, infer_func, model_config, triton_context)
context.run(infer_func, requests)
```

Before that, `check_callable` says whether the callable can take what the decorators on it would hand to it. A model of
type hints is found by `find_signature`, and made a callable of requests by `load_infer_func`; `reads_parameters` says
whether it may read the parameters of requests, and `docstring_of` what its author says about it.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from pytriton.decorators._calls.context import SERVED_MODEL, ModelConfigDict, ServedModel, TritonContext
from pytriton.decorators._calls.parameters import reads_parameters
from pytriton.decorators._calls.signatures import check_callable
from pytriton.decorators._hints.model import find_signature, load_infer_func
from pytriton.decorators._hints.signatures import describe_tensors, is_file, json_example
from pytriton.model_config.triton_model_config import TritonModelConfig

__all__ = [
    "DESCRIPTION_PARAMETER",
    "check_callable",
    "describe_tensors",
    "docstring_of",
    "find_signature",
    "is_file",
    "json_example",
    "load_infer_func",
    "reads_parameters",
    "set_served_model",
]

DESCRIPTION_PARAMETER = "pytriton_description"
"""The parameter of a model's configuration that says to callers what the model does."""

_MOST_OF_DOCSTRING = 4000


def docstring_of(infer_func: Any) -> str:
    """Return the docstring of a function, or of a class under `@model`; empty if it has none.

    Other objects have the docstrings of their classes, which say something else.
    """
    if isinstance(infer_func, functools.partial):  # for `inspect`, a routine from Python 3.14 on
        return ""
    target = infer_func
    if not inspect.isroutine(infer_func):
        target = infer_func if isinstance(infer_func, type) else type(infer_func)
        if find_signature(infer_func) is None:
            return ""
        own = vars(target).get("__doc__")
        # A class may have left its docstring to the function that answers; dataclasses then have their signature.
        if not isinstance(own, str) or own.startswith(f"{target.__name__}("):
            target = target.__call__
    text = target.__doc__
    return inspect.cleandoc(text)[:_MOST_OF_DOCSTRING] if isinstance(text, str) else ""


def set_served_model(
    infer_func: Callable[..., Any], model_config: TritonModelConfig, triton_context: TritonContext | None = None
) -> None:
    """Make `model_config` the model that is being served, in the current `contextvars.Context`.

    Nothing is written on `infer_func` or into `triton_context`.
    """
    configs = ModelConfigDict(base=None if triton_context is None else triton_context.model_configs)
    configs[infer_func] = model_config
    SERVED_MODEL.set(ServedModel(model_config, TritonContext(configs)))

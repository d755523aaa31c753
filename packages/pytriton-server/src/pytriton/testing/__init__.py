"""Tests of models without a server: of bound callables, and of a `model.py` for Triton's Python backend.

`Harness` calls what is given to `Triton.bind`; it comes from `pytriton.decorators.testing`, which is there without this
distribution, too. `ModelHarness` runs a `model.py` with its `config.pbtxt`, by the code of the workers that serve it.
"""

from pytriton.decorators.testing import Harness, HarnessRequest, Result, make_request
from pytriton.testing.errors import ModelError
from pytriton.testing.model_harness import ModelHarness

__all__ = ["Harness", "HarnessRequest", "ModelError", "ModelHarness", "Result", "make_request"]

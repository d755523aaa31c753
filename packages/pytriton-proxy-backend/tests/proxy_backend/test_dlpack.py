"""Capsules of DLPack in the hands of code in C."""

from types import SimpleNamespace

import numpy as np
import pytest

from pytriton.proxy_backend import ModelSpec, TensorSpec
from pytriton.proxy_backend.dlpack import _alive
from pytriton.proxy_backend.python_proxy.model import TensorCodec


def test_a_capsule_that_is_refused_leaves_the_reason() -> None:
    """A temporary one would be freed while the error is on its way, and the error be lost."""
    tensor = TensorSpec(name="y", dtype=np.dtype("float32"), shape=(3,))
    model = ModelSpec(name="m", version=1, inputs=(), outputs=(tensor,), batching=False, max_batch_size=0)
    # Written in C as a stub is, and takes two arguments, of which it refuses these.
    codec = TensorCodec(SimpleNamespace(Tensor=SimpleNamespace(from_dlpack=divmod)), model)
    codec._plain = False
    with pytest.raises(TypeError, match="divmod"):
        codec.write("y", np.zeros(3, np.float32))
    assert _alive == {}

"""Arrays into and out of tritonclient's request and result objects, alike for both protocols."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.utils import np_to_triton_dtype

from ._dtypes import dtype_of
from ._requests import InferRequest

__all__ = ["make_inputs", "read_output"]


def make_inputs(input_class: Any, request: InferRequest) -> list[Any]:
    """Return tritonclient's inputs for a request.

    Args:
        input_class: ``InferInput`` of ``tritonclient.http`` or ``tritonclient.grpc``.
        request: The request.
    """
    inputs = []
    for tensor, array in request.inputs:
        datatype = tensor.datatype
        if datatype == "BF16" and np_to_triton_dtype(array.dtype) != "BF16":
            # Before 2.70, tritonclient takes float32 and cuts it to bfloat16 itself, which is exact for these values.
            array = array.astype(np.float32)
        item = input_class(tensor.name, list(array.shape), datatype)
        item.set_data_from_numpy(array)
        inputs.append(item)
    return inputs


def read_output(result: Any, name: str, datatype: str) -> npt.NDArray[Any]:
    """Return an output of tritonclient's ``InferResult`` as an array that the caller may keep and change."""
    array: npt.NDArray[Any] = result.as_numpy(name)
    if datatype == "BF16":
        array = array.astype(dtype_of("BF16"), copy=False)
    return array if array.flags.writeable else array.copy()

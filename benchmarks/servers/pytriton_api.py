"""The models behind PyTriton's interface: the same file serves ours and nvidia-pytriton.

Plain functions under `@batch`, or a coroutine generator for a stream; the controller has its default settings, on
127.0.0.1. Where outputs are large and the library has memory for them, they are made there, as it recommends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from models import ACCESS_TOKEN, Model, dump, load  # type: ignore[import-not-found,unused-ignore]

from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig, TritonSecurityConfig

try:
    from pytriton.proxy.outputs import empty_outputs
except ImportError:  # nvidia-pytriton
    empty_outputs = None  # type: ignore[assignment]

Array = npt.NDArray[Any]
_LARGE_BYTES = 2 << 20


def make(model: Model) -> Callable[..., Any]:
    """Make the callable of a model."""
    if model.responses:

        async def stream(requests: Any) -> Any:
            for _ in range(model.responses):
                yield [{"y": request["a"]} for request in requests]

        return stream

    if len(model.inputs) > 1 and model.width * model.item_bytes > _LARGE_BYTES and empty_outputs is not None:

        @batch
        def add_large(a: Array, b: Array) -> dict[str, Array]:
            outputs = empty_outputs({"y": (a.shape, a.dtype)})
            np.add(a, b, out=outputs["y"])
            return outputs

        return add_large

    if len(model.inputs) > 1:

        @batch
        def add(a: Array, b: Array) -> dict[str, Array]:
            return {"y": model.compute([a, b])}

        return add

    @batch
    def same(a: Array) -> dict[str, Array]:
        return {"y": model.compute([a])}

    return same


def make_from(text: str) -> Callable[..., Any]:
    """Make the callable of a model in a process of its own, which is sent no more than JSON."""
    return make(load(text)[0])


def workers(model: Model, kind: str, copies: int) -> Any:
    """Make what `bind` takes as `infer_func`."""
    if kind == "processes":
        from pytriton.triton import ProcessWorker

        return ProcessWorker(make_from, (dump([model]),), copies=copies)
    callables = [make(model) for _ in range(copies)]
    return callables if copies > 1 else callables[0]


def main() -> None:
    """Serve what the command line says."""
    models = load(sys.argv[1])
    kind, copies = sys.argv[2], int(sys.argv[3])
    http_port, grpc_port, metrics_port = map(int, sys.argv[4:7])
    config = TritonConfig(
        http_address="127.0.0.1",
        grpc_address="127.0.0.1",
        metrics_address="127.0.0.1",
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        allow_gpu_metrics=False,
    )
    triton = Triton(config=config, security_config=TritonSecurityConfig(access_token=ACCESS_TOKEN))
    for model in models:
        triton.bind(
            model_name=model.name,
            infer_func=workers(model, kind, copies),
            inputs=[Tensor(name=name, dtype=model.numpy_type, shape=(model.width,)) for name in model.inputs],
            outputs=[Tensor(name="y", dtype=model.numpy_type, shape=(model.width,))],
            config=ModelConfig(max_batch_size=model.max_batch_size, decoupled=model.responses > 0),
        )
    # The runner reads this; CLOCK_MONOTONIC is one clock for all processes of a machine.
    print("run", time.monotonic(), flush=True)
    triton.run()
    triton.serve()


if __name__ == "__main__":
    main()

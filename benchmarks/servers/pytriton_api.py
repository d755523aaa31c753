"""The models behind PyTriton's interface: the same file serves ours and nvidia-pytriton.

`model.add` and `model.delay` are plain functions under `@batch`; the controller has its default settings, on 127.0.0.1.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

Floats = npt.NDArray[np.float32]


@batch
def add(a: Floats, b: Floats) -> dict[str, Floats]:
    return {"total": a + b}


def make_delay(delay_s: float) -> Callable[..., Any]:
    @batch
    def delay(a: Floats, b: Floats) -> dict[str, Floats]:
        time.sleep(delay_s)
        return {"total": a + b}

    return delay


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("width", type=int)
    parser.add_argument("max_batch_size", type=int)
    parser.add_argument("delay_s", type=float)
    parser.add_argument("http_port", type=int)
    parser.add_argument("grpc_port", type=int)
    parser.add_argument("metrics_port", type=int)
    options = parser.parse_args()
    config = TritonConfig(
        http_address="127.0.0.1",
        grpc_address="127.0.0.1",
        metrics_address="127.0.0.1",
        http_port=options.http_port,
        grpc_port=options.grpc_port,
        metrics_port=options.metrics_port,
        allow_gpu_metrics=False,
    )
    triton = Triton(config=config)
    triton.bind(
        model_name=options.model,
        infer_func=add if options.model == "add" else make_delay(options.delay_s),
        inputs=[Tensor(name=name, dtype=np.float32, shape=(options.width,)) for name in ("a", "b")],
        outputs=[Tensor(name="total", dtype=np.float32, shape=(options.width,))],
        config=ModelConfig(max_batch_size=options.max_batch_size),
    )
    # The runner reads this; CLOCK_MONOTONIC is one clock for all processes of a machine.
    print("run", time.monotonic(), flush=True)
    triton.run()
    triton.serve()


if __name__ == "__main__":
    main()

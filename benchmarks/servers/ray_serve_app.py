"""The models on one cluster of Ray twice: as `pytriton.ray` serves them, and plainly, with `@serve.batch`."""

# Ray is not in the environment of every type checker.
# mypy: ignore-errors
import asyncio
import os
import signal
import sys
from typing import Annotated, NamedTuple

import numpy as np
from models import load
from numpy.typing import NDArray

MAX_ONGOING_REQUESTS = 64
_ACTOR = {"num_cpus": 0.1}


def plain(model):
    """Return a deployment of one model, which takes the bytes of its inputs or JSON, and answers in the same form."""
    from ray import serve
    from starlette.responses import Response

    @serve.deployment(name=model.name, max_ongoing_requests=MAX_ONGOING_REQUESTS, ray_actor_options=_ACTOR)
    class Plain:
        # It does not wait for more requests, as ours does not: what has come while a batch runs is the next one.
        @serve.batch(max_batch_size=model.max_batch_size, batch_wait_timeout_s=0)
        async def compute(self, rows):
            batch = np.stack(rows, axis=1)
            await asyncio.sleep((model.batch_us + model.row_us * len(rows)) / 1e6)
            return list(batch[0] + batch[1])

        async def __call__(self, request):
            if request.headers["content-type"] == "application/json":
                (row,) = (await request.json())["rows"]
                return [(await self.compute(np.array(row, np.float32))).tolist()]
            row = np.frombuffer(await request.body(), np.float32).reshape(len(model.inputs), model.width)
            return Response((await self.compute(row)).tobytes())

    return Plain.bind()


def ours(models):
    """Return the application of all models."""
    from pytriton.decorators import Shape
    from pytriton.decorators import model as as_model
    from pytriton.model_config import DynamicBatcher
    from pytriton.ray import application

    def make(model):
        rows = Annotated[NDArray[np.float32], Shape("batch", model.width)]

        class Sum(NamedTuple):
            y: rows

        def compute(a: rows, b: rows) -> Sum:
            return Sum(model.compute([a, b]))

        compute.__name__ = model.name
        return as_model(batched=True, max_batch_size=model.max_batch_size, batcher=DynamicBatcher())(compute)

    return application(
        [make(model) for model in models], max_ongoing_requests=MAX_ONGOING_REQUESTS, ray_actor_options=_ACTOR
    )


def main():
    """Serve until an interrupt: models, port and a folder for what Ray writes come from the command line."""
    models, port, folder = load(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    import ray
    from ray import serve

    os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))  # for the processes of Ray
    stop = [signal.SIGINT, signal.SIGTERM]
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    ray.init(
        include_dashboard=False,
        num_cpus=os.cpu_count(),
        object_store_memory=80 << 20,
        log_to_driver=False,
        _temp_dir=os.path.abspath(folder),
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(ours(models), name="ours", route_prefix="/")
    for model in models:
        serve.run(plain(model), name=model.name, route_prefix=f"/{model.name}")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop)
    try:
        signal.pause()
    except KeyboardInterrupt:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()

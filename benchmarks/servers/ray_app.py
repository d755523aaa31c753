"""The models as Ray Serve deployments that take and give raw bytes, one replica each."""

# Ray is not in the environment of the type checker.
# mypy: ignore-errors
import asyncio
import os
import signal
import sys

import numpy as np
import ray
from models import load
from ray import serve
from starlette.responses import Response

BATCH_TIMEOUT_S = 0.002
MAX_ONGOING_REQUESTS = 1000


def deploy(model):
    def split(body):
        return np.frombuffer(body, np.float32).reshape(len(model.inputs), 1, model.width)

    @serve.deployment(num_replicas=1, max_ongoing_requests=MAX_ONGOING_REQUESTS, ray_actor_options={"num_cpus": 0.1})
    class Direct:
        async def __call__(self, request):
            return Response(model.compute(split(await request.body())).tobytes())

    @serve.deployment(num_replicas=1, max_ongoing_requests=MAX_ONGOING_REQUESTS, ray_actor_options={"num_cpus": 0.1})
    class Batched:
        @serve.batch(max_batch_size=model.max_batch_size, batch_wait_timeout_s=BATCH_TIMEOUT_S)
        async def compute(self, bodies):
            rows = np.concatenate([split(body) for body in bodies], axis=1)
            await asyncio.sleep((model.batch_us + model.row_us * len(bodies)) / 1e6)
            return list(rows[0] + rows[1])

        async def __call__(self, request):
            return Response((await self.compute(await request.body())).tobytes())

    takes_time = model.batch_us or model.row_us
    app = (Batched if takes_time else Direct).options(name=model.name).bind()
    serve.run(app, name=model.name, route_prefix=f"/{model.name}")


def main():
    models, port = load(sys.argv[1]), int(sys.argv[2])
    stop = [signal.SIGINT, signal.SIGTERM]
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    ray.init(
        include_dashboard=False,
        num_cpus=os.cpu_count(),
        log_to_driver=False,
        _temp_dir=os.path.abspath("ray"),
        runtime_env={"env_vars": {"PYTHONPATH": os.path.dirname(os.path.abspath(__file__))}},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"enable_access_log": False})
    for model in models:
        deploy(model)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop)
    try:
        signal.pause()
    except KeyboardInterrupt:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()

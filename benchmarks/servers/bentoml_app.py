"""The models as a BentoML service. Run as a program it becomes the server.

A model that takes no time is a route of a mounted ASGI application with raw bytes, BentoML's way without JSON. One that
does has BentoML's adaptive batching, which is there for its own API alone: numbers as JSON, one argument.
"""

# BentoML is not in the environment of the type checker.
# mypy: ignore-errors
import os
import sys
from pathlib import Path

import bentoml
import numpy as np
from models import load
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

MODELS = load(os.environ.get("BENCH_MODELS", "[]"))
MAX_LATENCY_MS = 1000
SETTINGS = "api_server: {logging: {access: {enabled: false}}, metrics: {enabled: false}, traffic: {timeout: 120}}\n"


def route(model):
    async def direct(request):
        rows = np.frombuffer(await request.body(), np.float32).reshape(len(model.inputs), 1, model.width)
        return Response(model.compute(rows).tobytes(), media_type="application/octet-stream")

    return Route(f"/{model.name}", direct, methods=["POST"])


def batched(model):
    def compute(self, rows: np.ndarray) -> np.ndarray:
        return model.compute(rows.astype(np.float32).swapaxes(0, 1))

    compute.__name__ = model.name
    options = {"max_batch_size": model.max_batch_size, "max_latency_ms": MAX_LATENCY_MS}
    return bentoml.api(batchable=True, route=f"/{model.name}", **options)(compute)


slow = [model for model in MODELS if model.batch_us or model.row_us]
routes = [route(model) for model in MODELS if model not in slow]
Bench = type("Bench", (), {model.name: batched(model) for model in slow})
if routes:
    Bench = bentoml.asgi_app(Starlette(routes=routes))(Bench)
Bench = bentoml.service(workers=1)(Bench)


if __name__ == "__main__":
    settings = Path("bentoml.yaml").absolute()
    settings.write_text(SETTINGS)
    environment = {
        **os.environ,
        "BENCH_MODELS": sys.argv[1],
        "BENTOML_CONFIG": str(settings),
        "BENTOML_HOME": str(settings.parent),
        "BENTOML_DO_NOT_TRACK": "true",
    }
    command = ["serve", "bentoml_app:Bench", "--working-dir", str(Path(__file__).parent), "--host", "127.0.0.1"]
    program = "from bentoml_cli.cli import cli; cli()"
    os.execve(sys.executable, [sys.executable, "-c", program, *command, "--port", sys.argv[2]], environment)

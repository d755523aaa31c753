"""The models as FastAPI routes that take and give raw bytes, under uvicorn with uvloop and httptools.

A model that takes no time computes in the event loop, as a careful author would for so little work. One that does has
the dynamic batcher that such an author would write: it takes what has gathered while the last batch ran, and runs it in
a thread, so that parsing goes on.
"""

# FastAPI is not in the environment of the type checker.
# mypy: ignore-errors
import asyncio
import sys

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from models import load


def split(body, model):
    return np.frombuffer(body, np.float32).reshape(len(model.inputs), model.width)


def add_direct(app, model):
    @app.post(f"/{model.name}")
    async def direct(request: Request):
        y = model.compute(split(await request.body(), model)[:, np.newaxis])
        return Response(y.tobytes(), media_type="application/octet-stream")


def add_batched(app, model):
    waiting, tasks = [], []
    wake = asyncio.Event()

    async def run_batches():
        while True:
            await wake.wait()
            taken, waiting[:] = waiting[: model.max_batch_size], waiting[model.max_batch_size :]
            if not waiting:
                wake.clear()
            rows = np.frombuffer(b"".join(body for body, _ in taken), np.float32)
            rows = rows.reshape(-1, len(model.inputs), model.width).swapaxes(0, 1)
            for (_, future), row in zip(taken, await asyncio.to_thread(model.compute, rows), strict=True):
                if not future.done():
                    future.set_result(row.tobytes())

    @app.post(f"/{model.name}")
    async def batched(request: Request):
        if not tasks:
            tasks.append(asyncio.create_task(run_batches()))
        future = asyncio.get_running_loop().create_future()
        waiting.append((await request.body(), future))
        wake.set()
        return Response(await future, media_type="application/octet-stream")


def main():
    app = FastAPI()
    for model in load(sys.argv[1]):
        (add_batched if model.batch_us or model.row_us else add_direct)(app, model)
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=int(sys.argv[2]),
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=5,
    )


if __name__ == "__main__":
    main()

"""The models as FastAPI routes that take and give raw bytes, under uvicorn with uvloop and httptools.

`/add` computes in the event loop, as a careful author would for so little work. `/delay` has the dynamic batcher that
such an author would write: it takes what has gathered while the last batch ran, and runs it in a thread, so that
parsing goes on.
"""

# FastAPI is not in the environment of the type checker.
# mypy: ignore-errors
import argparse
import asyncio
import time

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response


def make_app(width, max_batch_size, delay_s):
    app = FastAPI()
    waiting = []
    wake = asyncio.Event()

    def compute(rows):
        time.sleep(delay_s)
        return rows[:, 0] + rows[:, 1]

    async def run_batches():
        while True:
            await wake.wait()
            taken, waiting[:] = waiting[:max_batch_size], waiting[max_batch_size:]
            if not waiting:
                wake.clear()
            rows = np.frombuffer(b"".join(body for body, _ in taken), np.float32).reshape(-1, 2, width)
            for (_, future), row in zip(taken, await asyncio.to_thread(compute, rows), strict=True):
                if not future.done():
                    future.set_result(row.tobytes())

    tasks = []

    @app.post("/add")
    async def add(request: Request):
        rows = np.frombuffer(await request.body(), np.float32).reshape(2, width)
        return Response((rows[0] + rows[1]).tobytes(), media_type="application/octet-stream")

    @app.post("/delay")
    async def delay(request: Request):
        if not tasks:
            tasks.append(asyncio.create_task(run_batches()))
        future = asyncio.get_running_loop().create_future()
        waiting.append((await request.body(), future))
        wake.set()
        return Response(await future, media_type="application/octet-stream")

    return app


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("width", type=int)
    parser.add_argument("max_batch_size", type=int)
    parser.add_argument("delay_s", type=float)
    parser.add_argument("http_port", type=int)
    options = parser.parse_args()
    app = make_app(options.width, options.max_batch_size, options.delay_s)
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=options.http_port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=5,
    )


if __name__ == "__main__":
    main()

"""What NVIDIA Dynamo's hop costs: `python3 tools/dev.py bench dynamo`.

One front end of Dynamo has two workers: a server of ours, `pytriton serve --dynamo`, and NVIDIA's own, `python -m
dynamo.triton` on `pytriton.inprocess`. Each serves the sum of two rows of float32; h2load asks our server itself, and
both through the front end, in turns. benchmarks/README.md says how it measures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks.harness.environments import installed_versions
from benchmarks.harness.generators import find_generator, load_grpc, version
from benchmarks.harness.processes import Launch, adopt_orphans, free_ports, machine_busy_s, scratch_folder, serve
from benchmarks.harness.report import render
from benchmarks.harness.results import RATE, Cell, Results

COLUMNS = 4
APP = f"""
from typing import Annotated
import numpy as np
from numpy.typing import NDArray
from pytriton.decorators import Shape, model

Rows = Annotated[NDArray[np.float32], Shape("batch", {COLUMNS})]

@model(batched=True, max_batch_size=32)
def ours(a: Rows, b: Rows) -> Rows:
    return a + b
"""
MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        pairs = [[pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in "ab"] for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("output", a + b)]) for a, b in pairs]
"""
CONFIG = f"""
backend: "python"
max_batch_size: 32
dynamic_batching {{ }}
input [{{ name: "a" data_type: TYPE_FP32 dims: [{COLUMNS}] }}, {{ name: "b" data_type: TYPE_FP32 dims: [{COLUMNS}] }}]
output [{{ name: "output" data_type: TYPE_FP32 dims: [{COLUMNS}] }}]
"""
TITLES = {
    "direct": "our server itself", "ours": "our server, through Dynamo", "theirs": "NVIDIA's worker, through Dynamo"
}  # fmt: skip
_WARM_UP_REQUESTS = 300
_ANSWER_S = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line says, and print the table."""
    options = _parse(arguments)
    adopt_orphans()
    h2load = find_generator("h2load")
    results = Results(options=vars(options), titles=TITLES)
    packages = ["pytriton-server", "ai-dynamo", "ai-dynamo-runtime", "numpy"]
    results.versions["environment"] = installed_versions(sys.executable, packages)
    results.versions["h2load"] = {"version": version(h2load)}
    with scratch_folder() as scratch:
        (scratch / "app.py").write_text(APP)
        model = scratch / "models" / "theirs"
        (model / "1").mkdir(parents=True)
        (model / "1" / "model.py").write_text(MODEL)
        (model / "config.pbtxt").write_text(CONFIG)
        http, direct, metrics, front, front_metrics = free_ports(5)
        settings = {
            "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(scratch / "workers"), "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_LOG": "error",
        }  # fmt: skip
        python = [sys.executable, "-m"]
        ours = [*python, "pytriton", "serve", str(scratch / "app.py"), "--dynamo", "--address=127.0.0.1"]
        ours += [f"--http-port={http}", f"--grpc-port={direct}", f"--metrics-port={metrics}"]
        theirs = [*python, "pytriton.inprocess", "-m", "dynamo.triton", f"--model-repository={model.parent}"]
        end = [*python, "dynamo.frontend", "--kserve-grpc-server", f"--http-port={front}"]
        end += [f"--grpc-metrics-port={front_metrics}"]
        ways = {"direct": (direct, "ours"), "ours": (front, "ours"), "theirs": (front, "theirs")}
        for name in ("end", "ours", "theirs"):
            (scratch / name).mkdir()
        with (
            serve(Launch(end, settings), scratch / "end") as front_end,
            serve(Launch(ours, settings), scratch / "ours") as our_server,
            serve(Launch(theirs, settings), scratch / "theirs") as their_worker,
        ):
            sizes: dict[str, int] = {}

            def ask(way: str) -> None:
                sizes[way] = _answer_bytes(*ways[way])

            for way, server in (("direct", our_server), ("ours", our_server), ("theirs", their_worker)):
                server.wait_for_answer(partial(ask, way))
            for number, callers in product(range(1, options.rounds + 1), options.callers):
                for way in sorted(TITLES, reverse=number % 2 == 0):
                    port, name = ways[way]
                    asked: dict[str, Any] = {"connections": callers, "scratch": scratch}
                    body = _request(name).SerializeToString()
                    warm = load_grpc(h2load, port, body, sizes[way], requests=_WARM_UP_REQUESTS, **asked)
                    count = max(_WARM_UP_REQUESTS, int(warm.requests_per_s * options.seconds))
                    servers = (front_end, our_server, their_worker)
                    busy, cpu = machine_busy_s(), sum(server.cpu_s() for server in servers)
                    run = load_grpc(h2load, port, body, sizes[way], requests=count, **asked)
                    busy, cpu = machine_busy_s() - busy, sum(server.cpu_s() for server in servers) - cpu
                    numbers = {
                        RATE: run.requests_per_s, "p50 ms": run.p50_ms, "p99 ms": run.p99_ms,
                        "all servers us/req": cpu / run.requests * 1e6,
                    }  # fmt: skip
                    others = max(0.0, (busy - cpu - run.cpu_s) / run.wall_s)
                    results.cells.append(Cell("dynamo", f"{callers} callers", way, number, numbers, others))
                    print(f"round {number}: {callers} callers, {way}: {run.requests_per_s:,.0f}", file=sys.stderr)
    results.load_after = os.getloadavg()
    print(render(results))
    if options.json is not None:
        options.json.write_text(json.dumps(results.to_json(), indent=1, default=str) + "\n")
    return 0


def _request(model: str) -> Any:
    message = service_pb2.ModelInferRequest(model_name=model)
    for name in ("a", "b"):
        message.inputs.add(name=name, datatype="FP32", shape=[1, COLUMNS])
        message.raw_input_contents.append(np.arange(COLUMNS, dtype=np.float32).tobytes())
    return message


def _answer_bytes(port: int, model: str) -> int:
    """Ask once, check the answer, and return its size with the frame of gRPC."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(_request(model), timeout=_ANSWER_S)
        except grpc.RpcError as error:
            raise ConnectionError(str(error)) from None
    found = np.frombuffer(answer.raw_output_contents[0], np.float32)
    np.testing.assert_array_equal(found, 2 * np.arange(COLUMNS, dtype=np.float32))
    return 5 + int(answer.ByteSize())


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":", 1)[0] + ".")
    parser.add_argument("--rounds", type=int, default=5, help="how often everything is measured (default: 5)")
    parser.add_argument("--seconds", type=float, default=3, help="length of a timed cell (default: 3)")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 8], help="default: 1 8")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all raw results there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

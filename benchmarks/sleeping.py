"""What it costs that models sleep: `python3 tools/dev.py bench sleeping`.

Wake-ups, from the request of a model that sleeps to its answer, in turns: of models with 200 MB of weights that a new
process reads from a file, or whose parent has them; and of models with a session of onnxruntime, which a fork would
lack the threads of, from a new process and from a parent with the imports. Then the memory of these models (PSS, of
all their processes together), requests per second of two models that are awake, one of which may sleep, in turns; and
with `--counts`, each in a process of its own, how long the start of so many models takes, and what each takes asleep.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.processes import cpu_s, descendants, name_of
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import ProcessWorker, Triton, TritonConfig

IDLE_S, DEADLINE_S = 0.2, 300.0
WEIGHTS = 50_000_000
SIDE = 512
# Some versions of onnxruntime keep a database open that forks cannot share.
ENVIRONMENT = {"ORT_DISABLE_TELEMETRY": "1"}
TENSORS = [Tensor((-1,), np.float32, "x")], [Tensor((-1,), np.float32, "y")]
Factory = Callable[..., Any]


def make_weights(path: str) -> Factory:
    """Make a model of 200 MB of float32, read from a file."""
    weights = np.load(path)

    @batch
    def infer(x: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
        return {"y": x * weights[:: WEIGHTS // 64].sum()}

    return infer


def make_session(path: str) -> Factory:
    """Make a model of a session of onnxruntime, whose threads a fork lacks."""
    session = importlib.import_module("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])

    @batch
    def infer(x: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
        rows = np.repeat(x[:, :1], SIDE, 1)
        return {"y": session.run(None, {"x": rows})[0][:, :1]}

    return infer


def make_heavy(_path: str) -> Factory:
    """Make a model in place of onnxruntime where that is not installed: imports that take long, and a thread."""
    signals, stats = map(importlib.import_module, ("scipy.signal", "scipy.stats"))
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return batch(lambda x: {"y": x * signals.get_window("hann", 7)[3] * len(stats.norm.name) / 4})


def make_filled(number: float) -> Factory:
    """Make a model of 200 MB of one number, by which it multiplies."""
    weights = np.full(WEIGHTS, number, np.float32)
    return batch(lambda x: {"y": x * weights[:: WEIGHTS // 64].mean()})


def make_small() -> Factory:
    """Make a model of nothing."""
    return batch(lambda x: {"y": x})


def write_files(folder: Path) -> tuple[str, Factory, str]:
    """Write the weights, and a model for onnxruntime if that is installed; return the paths and the factory for it."""
    weights = folder / "weights.npy"
    np.save(weights, np.ones(WEIGHTS, np.float32))
    try:
        onnx, _ = map(importlib.import_module, ("onnx", "onnxruntime"))
    except ImportError:
        return str(weights), make_heavy, ""
    matrix = onnx.numpy_helper.from_array(np.eye(SIDE, dtype=np.float32), "w")
    shape = [None, SIDE]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)],
        [matrix],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "session.onnx")
    return str(weights), make_session, str(folder / "session.onnx")


# ---- callers --------------------------------------------------------------------------------------------------------


class Caller:
    """One connection to the server, over HTTP."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._socket = socket.create_connection((str(address.hostname), int(address.port or 0)), DEADLINE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, model: str) -> float:
        """Ask a model, which answers with one number, and return that."""
        tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [3.0]}
        body = json.dumps({"inputs": [tensor]}).encode()
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)
        text = b""
        while not text.endswith(b"}"):
            piece = self._socket.recv(65536)
            if not piece:
                raise ConnectionError(text)
            text += piece
        answer = json.loads(text[text.index(b"{") :])
        if "error" in answer:
            raise ValueError(answer["error"])
        return float(answer["outputs"][0]["data"][0])


def is_asleep(triton: Triton, name: str) -> bool:
    """Return whether a model sleeps."""
    return next(model.is_asleep for model in triton.describe().models if model.name == name)


def await_sleep(triton: Triton, name: str) -> None:
    """Wait until a model sleeps and its processes are gone."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_asleep(triton, name):
        if time.monotonic() > deadline:
            raise TimeoutError(name)
        time.sleep(0.01)
    while workers() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)


def pss_mb(pids: list[int]) -> float:
    """Return what processes take together, in MB: of memory that several share, each counts its part."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1e3


def processes() -> tuple[list[int], list[int]]:
    """Return the processes of tritonserver, and those of workers with their parents."""
    found = descendants(os.getpid())[1:]
    servers = [pid for pid in found if name_of(pid) == "tritonserver"]
    return servers, [pid for pid in found if pid not in servers]


def spent_s() -> float:
    """Return the processor time of this process and of all that it has started, in seconds."""
    return sum(os.times()[:4]) + sum(map(cpu_s, descendants(os.getpid())[1:]))


def workers() -> list[int]:
    """Return the processes that serve."""
    found = []
    for pid in processes()[1]:
        with contextlib.suppress(OSError):
            found += [pid] if b"worker_main" in Path(f"/proc/{pid}/cmdline").read_bytes() else []
    return found


# ---- measurements ---------------------------------------------------------------------------------------------------


def server(**options: Any) -> Triton:
    """Return a server without models."""
    return Triton(config=TritonConfig(http_port=0, grpc_port=0, metrics_port=0, log_verbose=0), **options)


def wake_ups(rounds: int, folder: Path) -> None:
    """Print how long wake-ups take, in milliseconds, and what the models take, in MB."""
    weights, session, path = write_files(folder)
    models = {
        "weights, new process": (make_weights, weights, "process"),
        "weights, parent": (make_weights, weights, "parent"),
        "imports, new process": (session, path, "process"),
        "imports, parent": (session, path, "parent"),
    }
    names = {what: f"model{number}" for number, what in enumerate(models)}
    took: dict[str, list[float]] = {what: [] for what in models}
    with server() as triton:
        triton.run()
        config = ModelConfig(attach_timeout_s=DEADLINE_S)
        memory: dict[str, tuple[float, float]] = {}
        for what, (factory, file, sleep) in models.items():
            before = pss_mb(processes()[1])
            worker = ProcessWorker(factory, args=(file,), idle_timeout_s=IDLE_S, sleep=sleep, env=ENVIRONMENT)
            triton.bind(names[what], worker, *TENSORS, config=config)
            caller = Caller(triton.describe().urls["http"])
            caller.ask(names[what])
            awake = pss_mb(processes()[1]) - before
            await_sleep(triton, names[what])
            memory[what] = awake, pss_mb(processes()[1]) - before
        for _ in range(rounds):
            # In turns, so that a machine that is busy for a while is busy for all.
            for what, name in names.items():
                await_sleep(triton, name)
                began = time.perf_counter()
                answer = caller.ask(name)
                took[what].append((time.perf_counter() - began) * 1e3)
                if abs(answer - {"w": 64.0 * 3.0, "i": 3.0}[what[0]]) > 0.5 * answer:
                    raise ValueError(f"{what}: {answer}")
    print(f"{'wake-up to first answer':26}{'p50 ms':>9}{'p95 ms':>9}{'ratio':>8}{'awake MB':>10}{'asleep MB':>11}")
    for what, found in took.items():
        kind = what.partition(",")[0]
        fresh = took[f"{kind}, new process"]
        ratio = statistics.median(a / b for a, b in zip(fresh, found, strict=True))
        awake, asleep = memory[what]
        found = sorted(found)
        p95 = found[min(len(found) - 1, int(0.95 * len(found)))]
        print(f"{what:26}{statistics.median(found):9.1f}{p95:9.1f}{ratio:7.1f}x{awake:10.0f}{asleep:11.0f}")


def awake(rounds: int, seconds: float) -> None:
    """Print requests per second of two models that are awake, one of which may sleep."""
    with server() as triton:
        triton.bind("always", ProcessWorker(make_small), *TENSORS)
        triton.bind("sleepy", ProcessWorker(make_small, idle_timeout_s=600.0), *TENSORS)
        triton.run()
        caller = Caller(triton.describe().urls["http"])
        rates: dict[str, list[float]] = {"always": [], "sleepy": []}
        for turn in range(rounds):
            for name in list(rates)[:: 1 if turn % 2 else -1]:
                count, began = 0, time.perf_counter()
                while time.perf_counter() - began < seconds:
                    caller.ask(name)
                    count += 1
                rates[name].append(count / (time.perf_counter() - began))
    ratio = statistics.median(b / a for a, b in zip(rates["always"], rates["sleepy"], strict=True))
    told = ", ".join(f"{name} {statistics.median(each):.0f}/s" for name, each in rates.items())
    print(f"awake, one caller: {told}; with idle_timeout_s {ratio:.3f}x")


def measure_asleep(count: int) -> None:
    """Start with so many models asleep; print how long start and stop take, in s, and the memory, in MB."""
    triton = server(memory_budget="2GiB")
    for number in range(count):
        triton.bind(f"model{number}", ProcessWorker(make_small, idle_timeout_s=1.0, starts_asleep=True), *TENSORS)
    began, spent = time.monotonic(), spent_s()
    triton.run()
    start_s, start_cpu_s = time.monotonic() - began, spent_s() - spent
    if not all(model.is_asleep for model in triton.describe().models):
        raise ValueError("not all models sleep")
    servers, workers = processes()
    memory = pss_mb(servers), pss_mb([os.getpid()]), len(workers)
    began, spent = time.monotonic(), spent_s()
    triton.stop()
    print(json.dumps([*memory, start_s, start_cpu_s, time.monotonic() - began, spent_s() - spent]))


def asleep(counts: list[int]) -> None:
    """Print what models take that sleep: the difference between the counts."""
    found = {}
    for count in counts:
        command = [sys.executable, __file__, "--measure", str(count)]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found[count] = json.loads(said.splitlines()[-1])
        theirs, ours, left, start_s, start_cpu_s, stop_s, stop_cpu_s = found[count]
        took = f"start {start_s:.1f} s ({start_cpu_s:.1f} s of processors), stop {stop_s:.1f} s ({stop_cpu_s:.1f} s)"
        print(f"{count} models asleep: {took}; tritonserver {theirs:.0f} MB, this one {ours:.0f} MB, {left} workers")
    least, most = min(counts), max(counts)
    if least < most:
        theirs, ours = ((found[most][place] - found[least][place]) / (most - least) for place in (0, 1))
        print(f"each model asleep: tritonserver {theirs:.2f} MB, this process {ours:.2f} MB")


def zipf(minutes: float, kill_every_s: float | None) -> None:
    """Print what becomes of the requests of Zipf callers to 40 models of 200 MB within a budget of 2 GiB."""
    budget, over = 2 << 30, threading.Event()
    counts = dict.fromkeys(("answered", "told", "lost", "wrong"), 0)
    killed: list[int] = []
    told: list[str] = []
    peaks = [0.0]
    lock = threading.Lock()

    def sample() -> None:
        while not over.wait(0.1):
            peaks.append(pss_mb(processes()[1]))

    def kill() -> None:
        chance = random.Random(1)
        while not over.wait(kill_every_s):
            if pids := workers():
                killed.append(chance.choice(pids))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(killed[-1], signal.SIGKILL)

    def call(url: str, seed: int) -> None:
        chance, caller = random.Random(seed), Caller(url)
        while not over.is_set():
            number = chance.choices(range(40), [1 / (place + 1) for place in range(40)])[0]
            try:
                answer = caller.ask(f"model{number}")
                outcome = "answered" if answer == 3.0 * number else "wrong"
            except (OSError, ValueError) as error:
                # An error of the server tells the caller; without one, nobody knows what became of the request.
                outcome = "told" if isinstance(error, ValueError) else "lost"
                caller = Caller(url)
                told.append(repr(error))
            with lock:
                counts[outcome] += 1

    with server(memory_budget=budget) as triton:
        for number in range(40):
            worker = ProcessWorker(make_filled, args=(float(number),), starts_asleep=True)
            # One that was killed may have begun with a request, which another process may do again.
            config = ModelConfig(attach_timeout_s=DEADLINE_S, repeatable=kill_every_s is not None)
            triton.bind(f"model{number}", worker, *TENSORS, config=config)
        triton.run()
        url = triton.describe().urls["http"]
        threads = [threading.Thread(target=sample)]
        threads += [threading.Thread(target=kill)] if kill_every_s is not None else []
        threads += [threading.Thread(target=call, args=(url, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(60.0 * minutes)
        over.set()
        for thread in threads:
            thread.join()
        wakes = sum(model.wake_ups for model in triton.describe().models)
    peak = max(peaks)
    kills = f", {len(killed)} workers killed" if kill_every_s is not None else ""
    print(f"{minutes:g} minutes of Zipf callers: {counts}, {wakes} wake-ups{kills}; peak PSS {peak:.0f} MB, ", end="")
    print(f"{peak * 1e6 / budget:.3f} of the budget, at {len(peaks)} looks; first errors: {told[:3]}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn of the models that are awake")
    parser.add_argument("--counts", type=int, nargs="*", default=[20, 400], help="models that sleep; none for none")
    parser.add_argument("--zipf-minutes", type=float, help="ask 40 models of 200 MB for so long, and nothing else")
    parser.add_argument("--kill-every", type=float, help="with it, kill a worker that often, in seconds")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure_asleep(arguments.measure)
        return
    if arguments.zipf_minutes:
        zipf(arguments.zipf_minutes, arguments.kill_every)
        return
    with tempfile.TemporaryDirectory() as folder:
        wake_ups(arguments.rounds, Path(folder))
    awake(arguments.rounds, arguments.seconds)
    if arguments.counts:
        asleep(arguments.counts)


if __name__ == "__main__":
    main()

"""How a callable that needs the processor scales with its workers: `python benchmarks/scaling.py`.

A loop of pure Python of 2 ms for each request is served by one worker and by two: as threads of the server's process,
which share its interpreter lock, and as processes of their own (`ProcessWorker`); with `--peer` also by NVIDIA PyTriton
with a list of callables. Four connections ask all the time. The first row is what the machine has to give: the loop in
processes that serve nobody.

Servers take turns, and the table has the best of the rounds, since others can only make it slower. Client and
tritonserver share the cores with the workers, so quieten everything else.
"""

from __future__ import annotations

import argparse
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.environments import PeerMissingError
from benchmarks.harness.processes import Launch, free_ports, scratch_folder, serve
from benchmarks.peers.nvidia_pytriton import NvidiaPyTritonEnvironment
from benchmarks.servers.scaling_api import spin

CALL_S = 0.002
CONNECTIONS = 4
_ALONE = "the loop alone, no server"
_WARM_UP_S = 1.0
_TIMEOUT_S = 30.0
_BODY = b'{"inputs":[{"name":"x","shape":[1,1],"datatype":"FP32","data":[1.5]}]}'
_REQUEST = b"POST /v2/models/spin/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (
    len(_BODY),
    _BODY,
)


def calibrate() -> int:
    """Find how many rounds of the loop take 2 ms here; the best of many, since others only make it slower."""
    rounds = 20_000
    best_s = min(_timed(rounds) for _ in range(50))
    return max(1, round(rounds * CALL_S / best_s))


def _timed(rounds: int) -> float:
    started = time.perf_counter()
    spin(rounds)
    return time.perf_counter() - started


def connect(port: int) -> socket.socket:
    """Connect, without a delay for small packets."""
    connection = socket.create_connection(("127.0.0.1", port), _TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def receive(connection: socket.socket, expected: bytes = b'"data":[1.5]') -> None:
    """Read one answer, which has to contain some bytes.

    Raises:
        ValueError: It is an error, or not the value that was sent.
    """
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += _piece(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
    while len(body) < length:
        body += _piece(connection)
    if b" 200 " not in head.partition(b"\r\n")[0] or expected not in body:
        raise ValueError(f"expected the value that was sent, got {head[:60]!r} {body[:300]!r}")


def _piece(connection: socket.socket) -> bytes:
    piece = connection.recv(65536)
    if not piece:
        raise ConnectionError("the server closed the connection")
    return piece


def ask(port: int) -> None:
    """Ask once."""
    with connect(port) as connection:
        connection.sendall(_REQUEST)
        receive(connection)


def measure(port: int, seconds: float) -> float:
    """Ask with all connections at once, and give the answers per second."""
    count = 0
    started = time.monotonic()
    counted_from = started + _WARM_UP_S
    with selectors.DefaultSelector() as selector:
        connections = [connect(port) for _ in range(CONNECTIONS)]
        try:
            for connection in connections:
                selector.register(connection, selectors.EVENT_READ)
                connection.sendall(_REQUEST)
            while (now := time.monotonic()) < counted_from + seconds:
                ready = selector.select(_TIMEOUT_S)
                if not ready:
                    raise TimeoutError(f"no answer for {_TIMEOUT_S:g} s")
                for key, _ in ready:
                    one = connections[[connection.fileno() for connection in connections].index(key.fd)]
                    receive(one)
                    count += now >= counted_from
                    one.sendall(_REQUEST)
        finally:
            for connection in connections:
                connection.close()
    return count / seconds


def run_once(python: str, variables: Mapping[str, str], kind: str, workers: int, rounds: int, seconds: float) -> float:
    """Start a server, and give its answers per second."""
    (port,) = free_ports(1)
    script = str(Path(__file__).with_name("servers") / "scaling_api.py")
    launch = Launch([python, script, kind, str(workers), str(rounds), str(port)], variables)
    with scratch_folder() as scratch, serve(launch, scratch) as server:
        server.wait_for_answer(lambda: ask(port))
        return measure(port, seconds)


def run_alone(workers: int, rounds: int, seconds: float) -> float:
    """Return how often so many processes run the loop in a second when there is no server at all."""
    script = str(Path(__file__).with_name("servers") / "scaling_api.py")
    command = [sys.executable, script, "alone", str(workers), str(rounds), str(seconds)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(workers)]
    return sum(float(process.communicate(timeout=seconds + _TIMEOUT_S)[0]) for process in processes)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each timing (5)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each server is measured (3)")
    parser.add_argument("--peer", action="store_true", help="also NVIDIA PyTriton, which is installed for it")
    parser.add_argument("--peer-python", metavar="PATH", help="the interpreter for it")
    options = parser.parse_args()
    own: tuple[str, Mapping[str, str]] = (sys.executable, {})
    servers = {"ours, threads": (own, "threads"), "ours, processes": (own, "processes")}
    if options.peer:
        environment = NvidiaPyTritonEnvironment(options.peer_python)
        try:
            environment.prepare()
        except PeerMissingError as error:
            print(f"NVIDIA PyTriton is missing: {error}", file=sys.stderr)
        else:
            peer = (str(environment.python), environment.stub_environment())
            servers["NVIDIA PyTriton, a list of callables"] = (peer, "threads")
    spins = calibrate()
    print(f"{CALL_S * 1e3:g} ms are {spins} rounds; {os.cpu_count()} cores; load before {os.getloadavg()[0]:.1f}")
    names = [_ALONE, *servers]
    rates: dict[tuple[str, int], list[float]] = {(name, count): [] for name in names for count in (1, 2)}
    for _ in range(options.rounds):
        for (name, count), found in rates.items():
            if name == _ALONE:
                found.append(run_alone(count, spins, options.seconds))
                continue
            (python, variables), kind = servers[name]
            found.append(run_once(python, variables, kind, count, spins, options.seconds))
    print(f"{'requests/s':38}{'1 worker':>10}{'2 workers':>11}{'ratio':>8}")
    for name in names:
        one, two = (max(rates[name, count]) for count in (1, 2))
        print(f"{name:38}{one:10.0f}{two:11.0f}{two / one:8.2f}")


if __name__ == "__main__":
    main()

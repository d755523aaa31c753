"""Mixed traffic for a given time: is anything lost, wrong or growing? `python benchmarks/soak/run.py --seconds 60`.

Linux only. One program has the server, the callables in threads and all callers; other callables are in processes of
their own, which are killed every few seconds, while a further model gets a new callable.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Also for the worker processes, which import the factories.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.soak.calls import Generations, RequestFactory
from benchmarks.soak.growth import Watch, children_of, compare
from benchmarks.soak.models import bind_all, make_bytes
from benchmarks.soak.tally import Tally
from benchmarks.soak.traffic import Callers
from pytriton.triton import RestartPolicy, Triton, TritonConfig

_END_S = 20.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak and print what came of it.

    Returns:
        0; 1 when a request was lost, got a wrong answer or an error that it should not have got, or something grew.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options = _parse(arguments)
    # Raising callables and killed workers fill a log; what only the server says is kept for the report.
    logging.basicConfig(level=logging.WARNING)
    if not options.verbose:
        for handler in logging.getLogger().handlers:
            handler.setLevel(logging.CRITICAL + 1)
    # The callers of a run cannot be told the same twice; the seed settles what they ask, not when.
    print(f"soak of {options.seconds:g} s, seed {options.seed}", flush=True)
    report = run(options.seconds, options.seed, options.kill_server)
    _print(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2), encoding="utf-8")
    return 1 if report["violations"] else 0


def run(seconds: float, seed: int, kill_server_s: float = 0.0) -> dict[str, Any]:
    """Serve, ask, kill and rebind for so many seconds; gives what is to be reported."""
    tally = Tally()
    generations = Generations()
    shared_memory = set(os.listdir("/dev/shm"))
    server_log = LastLines()
    for name in ("pytriton.tritonserver", "pytriton.server", "pytriton.triton"):
        logging.getLogger(name).addHandler(server_log)
    with tempfile.TemporaryDirectory(prefix="soak") as home:
        os.environ["PYTRITON_HOME"] = home
        config = TritonConfig(
            http_address="127.0.0.1", grpc_address="127.0.0.1", http_port=0, grpc_port=0, allow_metrics=False
        )
        triton = Triton(config=config, restart=RestartPolicy())
        bind_all(triton)
        began = time.monotonic()
        triton.run()
        try:
            server = _server()
            deaths: list[float] = []
            kills = 0
            print(f"served after {time.monotonic() - began:.1f} s, pid {server}", flush=True)
            watch = Watch({"server": server or 0, "program": os.getpid()})
            callers = Callers(
                str(triton.http_url),
                str(triton.grpc_url),
                lambda name: RequestFactory(f"{seed}/{name}", generations),
                tally,
            )
            chaos = Chaos(triton, generations, tally, random.Random(f"{seed}/chaos"))
            began = time.monotonic()
            for part in (watch, callers, chaos):
                part.start()
            try:
                while time.monotonic() - began < seconds:
                    time.sleep(0.2)
                    if server is not None and kill_server_s and time.monotonic() - began > (kills + 1) * kill_server_s:
                        os.kill(server, signal.SIGKILL)
                        kills += 1
                    if server is not None and _server() != server:
                        deaths.append(time.monotonic())
                        print(f"tritonserver has died, {deaths[-1] - began:.0f} s after the begin", flush=True)
                    server = _server()
                took_s = time.monotonic() - began
            finally:
                # Also where SIGTERM ends it early: the callers would ask for ever.
                for part in (watch, chaos, callers):
                    part.end()
            tally.close(deaths)
            if len(deaths) > kills:
                tally.note(f"tritonserver died {len(deaths)} times: " + " | ".join(server_log.lines))
        finally:
            triton.stop()
        _look_for_leftovers(tally, shared_memory, Path(home))
    violations = list(tally.problems)
    if tally.lost:
        violations.append(f"{tally.lost} requests are lost: nothing ever became of them")
    growth = {}
    for name, samples in watch.samples.items():
        if deaths:
            continue  # there were several servers, and the workers had nothing while there was none
        growth[name], grown = compare(samples, warm_up_s=max(5.0, 0.25 * seconds))
        violations += [f"{name}: {problem}" for problem in grown]
    return {
        "seconds": round(took_s, 1),
        "seed": seed,
        "sent": sum(tally.sent.values()),
        "answered": tally.totals["answered"],
        "lost": tally.lost,
        "outcomes": dict(tally.totals),
        "by_caller": {name: dict(counts) for name, counts in sorted(tally.outcomes.items())},
        "server_died": len(deaths),
        "killed": chaos.killed,
        "rebound": generations.done,
        "growth": growth,
        "violations": violations,
    }


class LastLines(logging.Handler):
    """Keeps what was logged last."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: collections.deque[str] = collections.deque(maxlen=12)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        self.lines.append(record.getMessage())


class Chaos:
    """A thread that kills worker processes and binds a model anew, every few seconds."""

    def __init__(self, triton: Triton, generations: Generations, tally: Tally, random_numbers: random.Random) -> None:
        self._triton = triton
        self._generations = generations
        self._tally = tally
        self._random = random_numbers
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=run, name="soak-chaos") for run in (self._kill, self._rebind)]
        self.killed = 0

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """End, and wait for what it was about."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _kill(self) -> None:
        while not self._stop.wait(self._random.uniform(1.0, 4.0)):
            workers = [pid for pid, name in children_of(os.getpid()).items() if name != "tritonserver"]
            if workers:
                os.kill(self._random.choice(sorted(workers)), signal.SIGKILL)
                self.killed += 1

    def _rebind(self) -> None:
        while not self._stop.wait(self._random.uniform(1.0, 4.0)):
            generation = self._generations.begun + 1
            self._generations.begun = generation
            try:
                callables = [make_bytes(generation)] * self._random.choice([1, 2])
                self._triton.rebind("bytes", callables)
            except Exception as error:
                self._tally.trouble(f"rebind: {type(error).__name__}: {error}")
                continue
            self._generations.done = generation


def _server() -> int | None:
    """Return the process id of tritonserver, where there is one."""
    return next((pid for pid, name in children_of(os.getpid()).items() if name == "tritonserver"), None)


def _look_for_leftovers(tally: Tally, shared_memory: set[str], home: Path) -> None:
    """Note what is still there after the end: processes, threads, shared memory, files."""
    deadline = time.monotonic() + _END_S
    while True:
        # An error that a callable raised may hold its frames, and these the inputs, in a cycle.
        gc.collect()
        left = [f"process {pid} ({name})" for pid, name in children_of(os.getpid()).items()]
        left += [f"thread {t.name}" for t in threading.enumerate() if t.name.startswith(("pytriton", "soak"))]
        left += [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - shared_memory if "triton" in name]
        left += [f"file {path.name}" for path in home.iterdir()]
        maps = Path("/proc/self/maps").read_text()
        left += ["a mapped arena"] * ("memfd:pytriton-arena" in maps)
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for item in left:
        tally.note(f"left behind: {item}")


def _print(report: dict[str, Any]) -> None:
    print(f"\n{'caller':<22}{'sent':>8}  outcomes")
    for name, counts in report["by_caller"].items():
        listed = ", ".join(f"{outcome} {number}" for outcome, number in sorted(counts.items()))
        print(f"{name:<22}{sum(counts.values()):>8}  {listed}")
    print(f"\n{'sent':<22}{report['sent']:>8}")
    for outcome, number in sorted(report["outcomes"].items()):
        print(f"{outcome:<22}{number:>8}")
    print(f"{'lost':<22}{report['lost']:>8}")
    print(f"\ntritonserver died {report['server_died']} times")
    print(f"workers killed {report['killed']}, model bound anew {report['rebound']} times\n")
    for name, table in report["growth"].items():
        print(f"{name}: " + ", ".join(f"{what} {first:g} -> {last:g}" for what, (first, last) in table.items()))
    for violation in report["violations"]:
        print(f"VIOLATION: {violation}")
    print("ok" if not report["violations"] else "not ok", flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to ask (default: 60)")
    parser.add_argument("--seed", type=int, default=None, help="what the requests are made from (default: the time)")
    parser.add_argument("--kill-server", type=float, default=0.0, help="kill tritonserver, too, every so many seconds")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    parser.add_argument("--verbose", action="store_true", help="show warnings of the server and the workers")
    options = parser.parse_args(arguments)
    if options.seconds < 10:
        parser.error(f"--seconds {options.seconds:g} is too short to see growth: take at least 10")
    if options.seed is None:
        options.seed = time.time_ns() & 0xFFFFFF
    return options


if __name__ == "__main__":
    sys.exit(main())

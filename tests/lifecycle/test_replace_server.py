"""A server that another one replaces while it serves: callers, callables, options, and what fails on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.client import DecoupledModelClient, FuturesModelClient, ModelClient
from pytriton.exceptions import PyTritonInvalidOperationError, PyTritonValidationError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy_backend.transport.calls import Calls
from pytriton.server.lifecycle.files import ServerFiles
from pytriton.server.lifecycle.replacement import Replacement, wait_standing_by
from pytriton.server.lifecycle.self_test import GuardTest
from pytriton.triton import (
    GuardConfig,
    ProcessWorker,
    RestartPolicy,
    Triton,
    TritonConfig,
    TritonServerError,
    TritonServerExitedError,
    TritonServerStartError,
)
from support import process_models
from support.callables import X, Y, identity
from support.faults.hostile_grpc import GOAWAY, PREFACE, SETTINGS, frame, read_frame
from support.http import call, infer
from support.python_models import worker_processes
from support.servers import fetch_older_server, other_server
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, eventually, wait_for_threads

LENGTH = 5
REPLACEMENT = "pytriton.server.lifecycle.replacement"
TENSORS = [Tensor((1,), np.int64, name="x")], [Tensor((1,), np.int64, name="y")]


@pytest.fixture(autouse=True)
def _home() -> Iterator[None]:
    with short_home():
        yield
    wait_for_threads()


class Counting:
    """Has a state that a second construction would lose."""

    made = 0

    def __init__(self) -> None:
        Counting.made += 1
        self.count = 0

    def __call__(self, requests: Any) -> Any:
        self.count += len(requests)
        return [{"y": np.array([self.count])} for _ in requests]


def rising(requests: Any) -> Any:
    for step in range(LENGTH):
        yield [{"y": request["x"] + step} for request in requests]


@contextlib.contextmanager
def counting(config: TritonConfig) -> Iterator[tuple[Triton, Callable[[], list[int]]]]:
    """Serve a counter; also gives what asks it over clients of HTTP and gRPC that keep their connections."""
    Counting.made = 0
    triton = Triton(config=config)
    triton.bind("m", Counting(), *TENSORS, config=ModelConfig(batching=False))
    with (
        running(triton),
        ModelClient(str(triton.http_url), "m") as http,
        ModelClient(str(triton.grpc_url), "m") as grpc,
    ):

        def ask() -> list[int]:
            return [int(client.infer_sample(np.array([1]))["y"][0]) for client in (http, grpc)]

        yield triton, ask


def pid_of(triton: Triton) -> int:
    process = triton._server.server.process if triton._server is not None else None
    assert process is not None
    return int(process.pid or 0)


def options_of(triton: Triton) -> set[str]:
    return set(Path(f"/proc/{pid_of(triton)}/cmdline").read_text().split("\0"))


def left_files(triton: Triton) -> list[Path]:
    """Return what only a replacement makes in the workspace."""
    workspace = triton._workspace.path
    return [
        *workspace.glob("endpoints/*.last"),
        *[path for path in workspace.glob("backends*") if any(path.iterdir())][1:],
    ]


def after_standing_by(monkeypatch: pytest.MonkeyPatch, act: Callable[[Any, Any], None]) -> None:
    """Call something with the new process and the old one when the first could take over."""

    def wrapped(new: Any, *arguments: Any, old: Any, **options: Any) -> None:
        wait_standing_by(new, *arguments, old=old, **options)
        act(new, old)

    monkeypatch.setattr(f"{REPLACEMENT}.wait_standing_by", wrapped)


def kill(process: Any) -> None:
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(PATIENCE_S)


def test_a_server_is_replaced_and_its_callable_keeps_its_state() -> None:
    config = local_config(allow_metrics=None, metrics_address="127.0.0.1", metrics_port=0)
    with counting(config) as (triton, ask):
        assert ask() == [1, 2]
        urls, first = (triton.http_url, triton.grpc_url, triton.metrics_url), pid_of(triton)

        triton.replace_server(dataclasses.replace(config, http_thread_count=3))

        assert ask() == [3, 4]
        assert Counting.made == 1
        assert pid_of(triton) != first
        assert not Path(f"/proc/{first}").exists()
        assert (triton.http_url, triton.grpc_url, triton.metrics_url) == urls
        assert (
            "nv_inference_request_success"
            in call(str(triton.metrics_url).removesuffix("/metrics"), "GET", "/metrics")[1]
        )
        assert "--http-thread-count=3" in options_of(triton)
        assert not left_files(triton)
        assert not triton._workspace.is_damaged

        triton.replace_server()

        assert ask() == [5, 6]
        assert "--http-thread-count=3" in options_of(triton)


def test_a_server_that_does_not_start_leaves_the_old_one_in_service() -> None:
    config = local_config()
    with counting(config) as (triton, ask):
        assert ask() == [1, 2]
        first = pid_of(triton)
        with pytest.raises(TritonServerStartError, match=r"that was to replace the running one .*goes on") as error:
            triton.replace_server(dataclasses.replace(config, cache_config=["nosuch,size=1048576"]))
        assert "nosuch" in str(error.value)
        assert pid_of(triton) == first
        assert ask() == [3, 4]
        assert not left_files(triton)
        triton.replace_server()
        assert ask() == [5, 6]
        assert pid_of(triton) != first


def test_a_server_that_is_too_old_is_told_and_the_old_one_goes_on(tmp_path: Path) -> None:
    too_old = tmp_path / "bin" / "tritonserver"
    too_old.parent.mkdir()
    too_old.write_text("#!/bin/sh\necho 'Usage: tritonserver [options]'\necho '  --model-repository <text>'\nexit 1\n")
    too_old.chmod(0o755)
    with counting(local_config()) as (triton, ask):
        assert ask() == [1, 2]
        with pytest.raises(TritonServerStartError, match=r"goes on.* has no option --.*Expected tritonserver 2\.44 or"):
            triton.replace_server(server_dir=tmp_path)
        assert ask() == [3, 4]


def test_the_old_server_goes_on_where_the_new_one_is_killed_while_callers_move(monkeypatch: pytest.MonkeyPatch) -> None:
    with counting(local_config()) as (triton, ask):
        assert ask() == [1, 2]
        first = pid_of(triton)
        after_standing_by(monkeypatch, lambda new, old: kill(new))
        with pytest.raises(TritonServerStartError, match="was killed by signal 9"):
            triton.replace_server()
        assert pid_of(triton) == first
        assert ask() == [3, 4]
        with ModelClient(str(triton.http_url), "m") as client:
            assert client.infer_sample(np.array([1]))["y"][0] == 5
        assert not left_files(triton)


def test_the_new_server_serves_where_the_old_one_is_killed_while_callers_move(monkeypatch: pytest.MonkeyPatch) -> None:
    with counting(local_config()) as (triton, ask):
        assert ask() == [1, 2]
        first = pid_of(triton)
        after_standing_by(monkeypatch, lambda new, old: kill(old))
        triton.replace_server()
        assert pid_of(triton) != first
        assert triton.is_alive()
        assert ask() == [3, 4]


def test_the_old_server_goes_on_after_an_interrupt_while_the_new_one_is_adopted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with counting(local_config()) as (triton, ask):
        assert ask() == [1, 2]
        first = pid_of(triton)
        belong_to = ServerFiles.belong_to
        started: list[int] = []

        def interrupted(files: ServerFiles, *arguments: Any) -> None:
            if not started:
                started.append(pid_of(triton))
                raise KeyboardInterrupt
            belong_to(files, *arguments)

        monkeypatch.setattr(ServerFiles, "belong_to", interrupted)
        with pytest.raises(KeyboardInterrupt):
            triton.replace_server()
        assert started != [first]
        assert not Path(f"/proc/{started[0]}").exists()
        assert pid_of(triton) == first
        assert triton.is_alive()
        assert ask() == [3, 4]
        assert not left_files(triton)
        triton.replace_server()
        assert ask() == [5, 6]


def test_the_new_server_serves_where_the_old_one_hangs_when_it_is_to_unload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{REPLACEMENT}._UNLOAD_TIMEOUT_S", 0.5)
    with counting(local_config()) as (triton, ask):
        assert ask() == [1, 2]
        first = pid_of(triton)

        def connect_and_stop(*arguments: Any) -> Any:
            calls = Calls(*arguments)
            os.kill(first, signal.SIGSTOP)
            return calls

        monkeypatch.setattr(f"{REPLACEMENT}.Calls", connect_and_stop)
        triton.replace_server()
        assert pid_of(triton) != first
        assert not Path(f"/proc/{first}").exists()
        assert ask() == [3, 4]


def test_a_server_that_dies_while_the_new_one_starts_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = Triton(config=local_config())
    triton.bind("m", identity, *TENSORS, config=ModelConfig(batching=False))

    def killing(*arguments: Any, old: Any, **options: Any) -> None:
        kill(old)
        wait_standing_by(*arguments, old=old, **options)

    monkeypatch.setattr(f"{REPLACEMENT}.wait_standing_by", killing)
    with running(triton):
        with pytest.raises(TritonServerStartError, match="while the one that was to replace it was starting"):
            triton.replace_server()
        with pytest.raises(TritonServerExitedError):
            triton.serve()


@pytest.mark.parametrize(
    ("owner", "step", "restart"),
    [(Replacement, "take_over", RestartPolicy()), (GuardTest, "run", RestartPolicy()), (GuardTest, "run", None)],
)
def test_a_new_server_that_dies_when_it_has_taken_over_is_reported(
    owner: type, step: str, restart: RestartPolicy | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = Triton(config=local_config(), restart=restart)
    triton.bind("m", identity, *TENSORS, config=ModelConfig(batching=False))
    with running(triton):
        real = getattr(owner, step)

        def dying(*arguments: Any) -> None:
            monkeypatch.setattr(owner, step, real)
            real(*arguments)
            kill(triton._server.server.process)  # type: ignore[union-attr] # it is there

        monkeypatch.setattr(owner, step, dying)
        with pytest.raises(TritonServerError, match="was killed by signal 9"):
            triton.replace_server()
        if restart is None:
            with pytest.raises(TritonServerExitedError, match="although nobody stopped it"):
                triton.serve()
            return
        eventually(triton.is_alive)
        with ModelClient(str(triton.http_url), "m") as client:
            assert client.infer_sample(np.array([7]))["y"][0] == 7


@contextlib.contextmanager
def called(config: TritonConfig) -> Iterator[tuple[Triton, Callable[[], None]]]:
    """Serve to eight callers, over both protocols, a fourth of them with streams; fails where one misses an answer.

    Also gives what waits until each of them has got an answer to what it asked from now on.
    """
    triton = Triton(config=config)
    triton.bind("m", identity, *TENSORS, config=ModelConfig(batching=False))
    triton.bind("s", rising, *TENSORS, config=ModelConfig(batching=False, decoupled=True))
    ending = threading.Event()
    failures: list[str] = []
    answered = [0] * 8

    def ask(place: int, url: str) -> None:
        number = 0
        model, expected = ("s", LENGTH) if place % 4 == 3 else ("m", 1)
        kind = DecoupledModelClient if expected > 1 else ModelClient
        with kind(url, model, inference_timeout_s=PATIENCE_S) as client:
            while not ending.is_set():
                number += 1
                try:
                    answer: Any = client.infer_sample(np.array([number]))
                    got = [int(each["y"][0]) for each in ([answer] if expected == 1 else answer)]
                    if got != list(range(number, number + expected)):
                        failures.append(f"asked {number}, got {got}")
                except Exception as error:
                    failures.append(repr(error))
                answered[place] += 1

    def wait_for_answers() -> None:
        before = list(answered)
        eventually(lambda: failures or all(now > then for now, then in zip(answered, before, strict=True)))

    with running(triton):
        urls = [str(triton.http_url), str(triton.grpc_url)] * 4
        callers = [threading.Thread(target=ask, args=(place, url)) for place, url in enumerate(sorted(urls))]
        for caller in callers:
            caller.start()
        try:
            wait_for_answers()
            yield triton, wait_for_answers
        finally:
            ending.set()
            for caller in callers:
                caller.join()
    assert not failures


def version_of(triton: Triton) -> str:
    return str(call(triton.http_url, "GET", "/v2")[1]["version"])


def swap_versions(other: Path) -> None:
    """Let a server of another version take over, and the one before again, while callers ask."""
    config = local_config()
    with called(config) as (triton, wait_for_answers):
        first = version_of(triton)
        for _ in range(3):
            triton.replace_server(server_dir=other)
            wait_for_answers()
            assert version_of(triton) != first
            triton.replace_server(dataclasses.replace(config, http_thread_count=4))
            wait_for_answers()
            assert version_of(triton) == first


def test_callers_over_both_protocols_lose_nothing_while_servers_are_replaced() -> None:
    with called(local_config()) as (triton, wait_for_answers):
        for _ in range(3):
            triton.replace_server()
            # Everybody has asked the server that is there since the last replacement.
            wait_for_answers()


def test_callers_lose_nothing_while_servers_of_two_versions_replace_each_other() -> None:
    swap_versions(other_server())


@pytest.mark.ci
def test_callers_lose_nothing_while_an_older_server_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swap_versions(fetch_older_server(tmp_path, monkeypatch))


def test_what_waits_in_the_queue_of_a_replaced_server_is_answered_however_busy_others_are() -> None:
    took_s, count = 0.6, 8

    def slow(requests: Any) -> Any:
        time.sleep(took_s)
        return identity(requests)

    with called(local_config()) as (triton, wait_for_answers):
        triton.bind("slow", slow, *TENSORS, config=ModelConfig(batching=False, attach_timeout_s=PATIENCE_S))
        with contextlib.ExitStack() as stack:
            clients = [
                stack.enter_context(FuturesModelClient(url, "slow", max_workers=count, inference_timeout_s=PATIENCE_S))
                for url in (str(triton.http_url), str(triton.grpc_url))
            ]
            futures = [client.infer_sample(np.array([place])) for place in range(count // 2) for client in clients]
            futures[0].result()
            triton.replace_server()
            assert [int(future.result()["y"][0]) for future in futures] == [at // 2 for at in range(count)]
        wait_for_answers()


def test_workers_that_wake_or_are_started_again_serve_the_server_that_still_has_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next one has the paths of their sockets already, and nobody asks it yet."""
    triton = Triton(config=local_config())
    config = ModelConfig(attach_timeout_s=PATIENCE_S)
    for name, is_asleep in (("asleep", True), ("killed", False)):
        worker = ProcessWorker(process_models.make, starts_asleep=is_asleep)
        triton.bind(name, worker, X, Y, config=config)
    answers: list[list[float]] = []

    def ask(*_: Any) -> None:
        (pid,) = worker_processes()
        os.kill(pid, signal.SIGKILL)
        answers.extend(infer(triton.http_url, name, 2.0) for name in ("killed", "asleep"))

    after_standing_by(monkeypatch, ask)
    with running(triton):
        triton.replace_server()
        assert answers == [[4.0], [4.0]]
        assert [infer(triton.http_url, name, 3.0) for name in ("killed", "asleep")] == [[6.0], [6.0]]


def test_a_replaced_server_waits_until_grpc_clients_have_read_its_goodbye() -> None:
    """Its end would make the next call fail of a client that reads only during calls, as gRPC's do."""
    held_s, longest_s = 1.5, 2.0
    triton = Triton(config=local_config())
    triton.bind("m", identity, *TENSORS, config=ModelConfig(batching=False))
    ended_at: list[float] = []

    def replace() -> None:
        triton.replace_server()
        ended_at.append(time.monotonic())  # the server before is gone

    with running(triton):
        host, _, port = str(triton.grpc_url).partition("//")[2].rpartition(":")
        with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
            connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
            with connection.makefile("rb") as reader:
                replacing = threading.Thread(target=replace)
                replacing.start()
                while read_frame(reader)[0] != GOAWAY:
                    pass
                said_at = time.monotonic()
                replacing.join(held_s)
            left_at = time.monotonic()
        replacing.join()
    assert ended_at[0] > left_at or ended_at[0] - said_at >= longest_s


def test_what_cannot_be_replaced_is_refused() -> None:
    config = local_config()
    triton = Triton(config=config)
    with pytest.raises(PyTritonInvalidOperationError, match="No server runs"):
        triton.replace_server()
    asked: list[str] = []

    def asks(requests: Any) -> Any:
        try:
            triton.replace_server()
        except PyTritonInvalidOperationError as error:
            asked.append(str(error))
        return identity(requests)

    triton.bind("m", asks, *TENSORS, config=ModelConfig(batching=False))
    with running(triton):
        with pytest.raises(PyTritonValidationError, match="http_port"):
            triton.replace_server(dataclasses.replace(config, http_port=1))
        with ModelClient(str(triton.http_url), "m") as client:
            assert client.infer_sample(np.array([7]))["y"][0] == 7
        assert "own server" in asked[0]
    unguarded = Triton(config=config, guard=GuardConfig(enabled=False))
    with running(unguarded), pytest.raises(PyTritonInvalidOperationError, match="needs the guard"):
        unguarded.replace_server()

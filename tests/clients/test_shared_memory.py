"""Tensors through shared memory, with the real server: what comes back, what is used again, and what is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.client import (
    AsyncioDecoupledModelClient,
    AsyncioModelClient,
    DecoupledModelClient,
    FuturesModelClient,
    ModelClient,
)
from pytriton.client._core.startup import Ask, Question
from pytriton.client._shm import plans, regions
from pytriton.client.exceptions import (
    PyTritonClientInferenceServerError,
    PyTritonClientSharedMemoryError,
    PyTritonClientTimeoutError,
    PyTritonClientValueError,
)
from pytriton.client.warnings import SharedMemoryWarning
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy.types import Request
from pytriton.triton import Triton, TritonSecurityConfig
from support.callables import X, Y
from support.processes import forked
from support.servers import needs_arrays_in_streams
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S, eventually

TOKEN = "a-token"
LARGE = np.arange(1 << 18, dtype=np.float32)

N = [Tensor((1,), np.int64, "n")]

# How often the callables were called, and what holds them up.
calls: list[str] = []
gate = threading.Event()


@batch
def double(x: np.ndarray[Any, Any]) -> dict[str, Any]:
    calls.append("double")
    return {"y": 2 * x}


@batch
def fixed(x: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"y": x + 1, "name": np.array([[b"fixed"]] * len(x), object)}


def sized(requests: list[Request]) -> list[dict[str, Any]]:
    calls.append("sized")
    return [{"y": np.full((1, int(request["n"].item())), 7, np.float32)} for request in requests]


def join(requests: list[Request]) -> list[dict[str, Any]]:
    return [{"text": np.array([[b"|".join(request["words"].ravel().tolist())]], object)} for request in requests]


def held(requests: list[Request]) -> list[dict[str, Any]]:
    calls.append("held")
    gate.wait(PATIENCE_S)
    return [{"y": 3 * request["x"]} for request in requests]


def fail(requests: list[Request]) -> Any:
    calls.append("fail")
    # The second half is what a server says that does not know a region, about one of somebody else.
    raise ValueError(
        "nothing to see here: Unable to find shared memory region: 'a', and no request in flight has so many, "
        "unexpected inference output 'y'"
    )


def sums(requests: list[Request]) -> Iterator[list[dict[str, Any]]]:
    (request,) = requests
    for number in range(3):
        yield [{"y": np.array([[request["x"].sum(dtype=np.float64) + number]], np.float32)}]


def bind(server: Triton) -> None:
    server.bind("double", double, X, Y, config=ModelConfig(max_batch_size=8))
    server.bind(
        "fixed",
        fixed,
        [Tensor(LARGE.shape, np.float32, "x")],
        [Tensor((1,), bytes, "name"), Tensor(LARGE.shape, np.float32, "y")],
        config=ModelConfig(max_batch_size=8),
    )
    server.bind("sized", sized, N, Y, config=ModelConfig(max_batch_size=1))
    server.bind("join", join, [Tensor((-1,), bytes, "words")], [Tensor((1,), bytes, "text")])
    server.bind("held", held, X, Y, config=ModelConfig(max_batch_size=1))
    server.bind("fail", fail, X, Y)
    server.bind("sums", sums, X, Y, config=ModelConfig(decoupled=True, max_batch_size=1))


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    with short_home():
        server = Triton(config=local_config(), security_config=TritonSecurityConfig(access_token=TOKEN))
        bind(server)
        with running(server):
            yield server


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, triton: Triton) -> str:
    return str(triton.http_url if request.param == "http" else triton.grpc_url)


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Neither a name on this host nor a region in the server stays after a test."""
    calls.clear()
    gate.clear()
    yield
    gate.set()
    assert names_on_host() == []
    if "triton" in request.fixturenames:
        assert eventually(lambda: registered(request.getfixturevalue("triton").http_url) == [] or tidy(request))


def tidy(request: pytest.FixtureRequest) -> bool:
    """Give what the server held for a request that is over the chance to go, as the next client would."""
    with client_of(request.getfixturevalue("triton").http_url, "double") as client:
        client.infer_sample(LARGE)
    return False


def names_on_host(process: int | None = None) -> list[str]:
    """Return the names of the regions of this process, or of another one; tests run beside each other."""
    mark = f".{process or os.getpid()}."
    return [name for name in os.listdir("/dev/shm") if name.startswith("pytriton-client") and mark in name]


def registered(url: str) -> list[str]:
    """Return the regions that the server has mapped."""
    with ModelClient(url, "double", access_token=TOKEN) as client:
        names: list[str] = client._transport.ask(Ask(Question.LIST_REGIONS, PATIENCE_S), client._target)
        return names


def client_of(url: str, model: str, **options: Any) -> ModelClient:
    return ModelClient(url, model, **{"access_token": TOKEN, "shared_memory": True, **options})


def assert_right(client: ModelClient) -> None:
    assert np.array_equal(client.infer_sample(LARGE)["y"], 2 * LARGE)


def test_every_answer_is_right_whatever_its_shape_and_layout(url: str) -> None:
    pair = LARGE.reshape(2, -1)
    with client_of(url, "double") as client:
        for _ in range(4):
            for rows in (pair, pair.T[:8], pair[:, ::-3], LARGE[:1, np.newaxis]):
                result = client.infer_batch(rows)["y"]
                assert np.array_equal(result, 2 * rows)
                assert result.flags.writeable
                assert result.flags.aligned
        assert client.infer_batch(np.zeros((1, 0), np.float32))["y"].shape == (1, 0)
        assert registered(url)
        assert names_on_host() == []


def test_outputs_of_fixed_shapes_come_through_shared_memory_at_once(url: str) -> None:
    with client_of(url, "fixed") as client:
        results = [client.infer_batch(np.stack([LARGE, LARGE])) for _ in range(3)]
        assert len(client._shared_memory._pool._lent) == 3  # type: ignore[union-attr] # it has some
        for result in results:
            assert np.array_equal(result["y"], np.stack([LARGE, LARGE]) + 1)
            assert result["name"].tolist() == [[b"fixed"], [b"fixed"]]
        view = results[0]["y"][1, ::2]
        del result, results
        client.infer_batch(np.stack([LARGE, LARGE]) + 5)
        client.infer_batch(np.stack([LARGE, LARGE]) + 6)
        # A region is not used again as long as anything refers to it.
        assert np.array_equal(view, LARGE[::2] + 1)
    assert np.array_equal(view, LARGE[::2] + 1)


def test_strings(url: str) -> None:
    words = [b"", b"a" * 1000, "ü".encode()] * 1000
    with client_of(url, "join") as client:
        assert client.infer_sample(words)["text"].tolist() == [b"|".join(words)]
        assert registered(url)


@pytest.mark.parametrize("kind", [FuturesModelClient, AsyncioModelClient])
def test_other_clients(url: str, kind: Any) -> None:
    if kind is FuturesModelClient:
        with kind(url, "double", access_token=TOKEN, shared_memory=True) as client:
            futures = [client.infer_sample(LARGE + number) for number in range(20)]
            results = [future.result(PATIENCE_S)["y"] for future in futures]
    else:

        async def use() -> list[Any]:
            async with kind(url, "double", access_token=TOKEN, shared_memory=True) as client:
                answers = await asyncio.gather(*(client.infer_sample(LARGE + number) for number in range(20)))
                assert registered(url)
            return [answer["y"] for answer in answers]

        results = asyncio.run(use())
    assert all(np.array_equal(result, 2 * (LARGE + number)) for number, result in enumerate(results))


def test_inputs_of_streams(triton: Triton) -> None:
    expected = [[float(np.float32(LARGE.sum(dtype=np.float64) + number))] for number in range(3)]
    url = str(triton.grpc_url)
    with DecoupledModelClient(url, "sums", access_token=TOKEN, shared_memory=True) as client:
        for _ in range(2):
            assert [result["y"].tolist() for result in client.infer_sample(LARGE)] == expected
        assert len(registered(url)) == 1
        results = client.infer_sample(LARGE)
        assert next(results)["y"].tolist() == expected[0]
        results.close()  # the server may still read the input
        assert [result["y"].tolist() for result in client.infer_sample(LARGE)] == expected

    async def use() -> None:
        async with AsyncioDecoupledModelClient(url, "sums", access_token=TOKEN, shared_memory=True) as client:
            assert [result["y"].tolist() async for result in client.infer_sample(LARGE)] == expected
            assert registered(url)

    asyncio.run(use())


def test_streams_over_http_are_json(triton: Triton) -> None:
    needs_arrays_in_streams()
    for kind in (DecoupledModelClient, AsyncioDecoupledModelClient):
        with pytest.raises(PyTritonClientValueError, match="JSON"):
            kind(str(triton.http_url), "sums", shared_memory=True)
    with DecoupledModelClient(str(triton.http_url), "sums", access_token=TOKEN, shared_memory="auto") as client:
        assert len(list(client.infer_sample(LARGE[:4]))) == 3


def test_threads_never_see_the_tensors_of_each_other(url: str) -> None:
    with client_of(url, "double") as client, ThreadPoolExecutor(6) as threads:

        def ask(number: int) -> Any:
            rows = np.full(1 << (8 + number % 9), number, np.float32)
            result = client.infer_sample(rows)["y"]
            assert (result == 2 * number).all()
            return result

        results = list(threads.map(ask, range(120)))
        # More than what may lie in shared memory at a time: some of them are copies.
        assert all((result == 2 * number).all() for number, result in enumerate(results))
        assert len(client._shared_memory._pool._lent) <= 32  # type: ignore[union-attr] # it has some


def test_views_share_the_regions(url: str) -> None:
    with client_of(url, "double") as client:
        for number in range(4):
            view = client.with_options(request_id=f"r{number}", timeout_s=PATIENCE_S)
            result = view.infer_sample(LARGE)
            assert result.request_id == f"r{number}"
            assert np.array_equal(result["y"], 2 * LARGE)
        assert len(registered(url)) <= 3
        with ModelClient.from_existing_client(client) as other:
            assert np.array_equal(other.infer_sample(LARGE)["y"], 2 * LARGE)
            assert len(registered(url)) > 3 - 1


def test_output_that_outgrows_its_region_comes_whole(url: str) -> None:
    with client_of(url, "sized") as client:
        for size in (1000, 1000, 1000, 200_000, 200_000, 10, 300_000):
            result = client.infer_sample([size])["y"]
            assert result.shape == (size,)
            assert (result == 7).all()
        # The fourth one was too large for the region that the model had been given.
        assert calls == ["sized"] * 8


def test_output_of_a_sequence_is_not_asked_for_twice(url: str) -> None:
    with client_of(url, "sized") as client:
        for size in (1000, 1000, 1000, 200_000):
            assert client.infer_sample([size], parameters={"sequence_id": 7})["y"].shape == (size,)
    assert calls == ["sized"] * 4


def test_what_goes_wrong_in_the_model_is_told(url: str) -> None:
    with client_of(url, "fail") as client:
        for _ in range(3):
            with pytest.raises(PyTritonClientInferenceServerError, match="nothing to see here"):
                client.infer_sample(LARGE)
    assert calls == ["fail"] * 3


def test_region_of_a_call_that_timed_out_is_left_to_the_server(url: str) -> None:
    with client_of(url, "held") as client:
        client.with_options(timeout_s=PATIENCE_S).model_config  # noqa: B018 - asks the server
        with pytest.raises(PyTritonClientTimeoutError):
            client.with_options(timeout_s=0.5).infer_sample(LARGE)
        left = registered(url)
        with client_of(url, "double") as other:
            assert np.array_equal(other.infer_sample(LARGE + 1)["y"], 2 * (LARGE + 1))
            # The server has it until the callable is done.
            assert set(left) <= set(registered(url))
        gate.set()
        assert np.array_equal(client.infer_sample(LARGE)["y"], 3 * LARGE)


def test_region_of_a_call_that_was_cancelled_is_left_to_the_server(url: str) -> None:
    async def use() -> None:
        async with AsyncioModelClient(url, "held", access_token=TOKEN, shared_memory=True) as client:
            call = asyncio.ensure_future(client.infer_sample(LARGE))
            while not calls:
                await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            gate.set()
            assert np.array_equal((await client.infer_sample(LARGE + 1))["y"], 3 * (LARGE + 1))

    asyncio.run(use())


KILLED = """
import sys
import numpy as np
from pytriton.client import ModelClient
from pytriton.client._shm.regions import Region
url, model, token, size = sys.argv[1:]
client = ModelClient(url, "double", access_token=token, shared_memory=True)
for _ in range(3):
    kept = client.infer_sample(np.ones(int(size), np.float32))
if model == "unregistered":
    region = Region(1 << 20)  # which the server has not been told of
    print("ready", flush=True)
    sys.stdin.read()
held = ModelClient(url, "held", access_token=token, shared_memory=True)
print("ready", flush=True)
held.infer_sample(np.ones(int(size), np.float32))
"""


@pytest.mark.parametrize("moment", ["in flight", "unregistered"])
def test_killed_client_leaves_nothing(url: str, moment: str) -> None:
    command = [sys.executable, "-c", KILLED, url, moment, TOKEN, str(LARGE.size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if moment == "in flight":
            eventually(lambda: "held" in calls)
            assert names_on_host(process.pid) == []
        else:
            assert len(names_on_host(process.pid)) == 1
        process.kill()
        process.wait()
        left = registered(url)
        assert len(left) >= 2
        # The next client clears away, and what the server still uses, it keeps.
        with client_of(url, "double") as client:
            assert np.array_equal(client.infer_sample(LARGE)["y"], 2 * LARGE)
            assert names_on_host(process.pid) == []
            still = set(left) & set(registered(url))
        assert len(still) == (1 if moment == "in flight" else 0)
        gate.set()


def test_client_that_lives_is_left_alone(url: str) -> None:
    with client_of(url, "double") as client, client_of(url, "double") as other:
        for _ in range(3):
            kept = client.infer_sample(LARGE)["y"]
        mine = registered(url)
        waiting = regions.Region(1 << 16)
        for _ in range(3):
            assert np.array_equal(other.infer_sample(LARGE + 2)["y"], 2 * (LARGE + 2))
        assert set(mine) <= set(registered(url))
        assert names_on_host() == [waiting.name]
        waiting.unlink()
        assert np.array_equal(kept, 2 * LARGE)


def test_client_that_is_dropped_leaves_its_regions_to_the_next_one(url: str) -> None:
    client = client_of(url, "double")
    client.infer_sample(LARGE)
    left = registered(url)
    client._transport.close()
    del client
    gc.collect()
    with client_of(url, "double") as client:
        client.infer_sample(LARGE)
        assert left
        assert not set(left) & set(registered(url))


def test_child_of_a_fork_has_regions_of_its_own(triton: Triton) -> None:
    url = str(triton.http_url)
    with client_of(url, "fixed") as client:
        mine = [client.infer_sample(LARGE)["y"]]
        parent = registered(url)
        ready, tell = os.pipe()

        def child() -> None:
            theirs = client.infer_sample(LARGE + 1)["y"]
            del theirs
            assert all(np.array_equal(client.infer_sample(LARGE + n)["y"], LARGE + n + 1) for n in range(3))
            client.close()
            # The parent has asked for other things meanwhile, in other regions than that of this array.
            os.read(ready, 1)
            assert np.array_equal(mine[0], LARGE + 1)

        with forked(child):
            mine.clear()
            for number in range(5):
                assert np.array_equal(client.infer_sample(LARGE + number)["y"], LARGE + number + 1)
            os.write(tell, b".")
        os.close(ready)
        os.close(tell)
        assert set(registered(url)) & set(parent)


def test_without_the_token_it_is_an_error_or_one_warning(url: str) -> None:
    with (
        ModelClient(url, "double", shared_memory=True) as client,
        pytest.raises(PyTritonClientSharedMemoryError, match=r"restricted.*access_token=") as caught,
    ):
        client.infer_sample(LARGE)
    assert (caught.value.url, caught.value.model_name, caught.value.size) == (url, "double", LARGE.nbytes)
    with ModelClient(url, "double", shared_memory="auto") as client:
        with pytest.warns(SharedMemoryWarning, match=r"restricted.*access_token="):
            assert_right(client)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_right(client)


@pytest.mark.parametrize("reason", ["full", "no folder"])
def test_region_that_cannot_be_made(url: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def break_it(patch: pytest.MonkeyPatch) -> str:
        if reason == "full":
            patch.setattr(regions, "room", lambda: (1 << 30, 1 << 16))
            return "No space left on device"
        patch.setattr(regions, "FOLDER", str(tmp_path / "nothing"))
        return "No such file"

    with client_of(url, "double") as client, client_of(url, "double", shared_memory="auto") as auto:
        with monkeypatch.context() as patch:
            text = break_it(patch)
            with pytest.raises(PyTritonClientSharedMemoryError, match=text):
                client.infer_sample(LARGE)
            with pytest.warns(SharedMemoryWarning, match=text):
                assert_right(auto)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert_right(auto)
        assert np.array_equal(client.infer_sample(LARGE)["y"], 2 * LARGE)
        assert np.array_equal(auto.infer_sample(LARGE)["y"], 2 * LARGE)
        # One that was full may have room again.
        assert bool(auto._shared_memory._pool._known) == (reason == "full")  # type: ignore[union-attr]


def test_server_that_sees_other_shared_memory(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(regions, "FOLDER", str(tmp_path))  # as in a container of its own
    with client_of(url, "double") as client, client_of(url, "double", shared_memory="auto") as auto:
        with pytest.raises(PyTritonClientSharedMemoryError, match="Unable to open"):
            client.infer_sample(LARGE)
        with pytest.warns(SharedMemoryWarning, match="Unable to open"):
            assert_right(auto)
        assert list(tmp_path.iterdir()) == []


def test_small_tensors_and_other_hosts_are_none_of_its_business(url: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ModelClient(url, "double", shared_memory="auto") as client:
            for _ in range(3):
                assert np.array_equal(client.infer_sample(LARGE[:1000])["y"], 2 * LARGE[:1000])
    for address in ("http://192.0.2.1", "grpc://triton.example", "https://[2001:db8::1]"):
        with ModelClient(address, "double", shared_memory="auto") as client:
            assert client._shared_memory is None


def test_auto_takes_large_tensors(url: str) -> None:
    with ModelClient(url, "double", access_token=TOKEN, shared_memory="auto") as client:
        for _ in range(3):
            result = client.infer_sample(LARGE)["y"]
            assert np.array_equal(result, 2 * LARGE)
        assert len(client._shared_memory._pool._lent) == 1  # type: ignore[union-attr] # it has some
        assert registered(url)


def test_regions_grow_and_are_given_back(url: str) -> None:
    with client_of(url, "double") as client:
        for power in range(10, 22):
            rows = np.full(1 << power, power, np.float32)
            assert (client.infer_sample(rows)["y"] == 2 * power).all()
        for _ in range(3):
            assert (client.infer_sample(rows)["y"] == 2 * power).all()
        # Of the smaller ones, none is kept beside what grew out of it.
        assert len(registered(url)) <= 4


@pytest.mark.parametrize("value", ["yes", 2, None])
def test_values_that_mean_nothing(value: Any) -> None:
    with pytest.raises(PyTritonClientValueError, match="shared_memory"):
        ModelClient("localhost", "double", shared_memory=value)


def test_least_size_is_the_one_that_the_page_tells() -> None:
    page = Path(__file__).parents[2] / "docs" / "clients.md"
    assert f"{plans.LEAST_BYTES >> 10} KiB" in page.read_text()

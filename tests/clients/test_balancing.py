"""One gRPC client for several servers behind one name; what that stands for is said here, not by a resolver."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from pytriton.client import AsyncioModelClient, ModelClient
from pytriton.client._core.url import TritonUrl
from pytriton.client.exceptions import PyTritonClientError, PyTritonClientValueError
from pytriton.triton import Triton
from support.callables import X, Y
from support.serving import local_config, running, short_home
from support.waiting import eventually

URL = "grpc://servers:8001?load_balancing=round_robin"
ONE = np.ones(1, np.float32)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Triton]]:
    """Two servers, whose models multiply by 2 and by 3."""
    with short_home():
        servers = [Triton(config=local_config()) for _ in range(2)]
        for factor, server in enumerate(servers, 2):
            server.bind("m", lambda requests, factor=factor: [{"y": factor * it["x"]} for it in requests], X, Y)
        with running(*servers):
            addresses = ",".join(str(server.grpc_url).removeprefix("grpc://") for server in servers)
            monkeypatch.setattr(TritonUrl, "without_scheme", f"ipv4:{addresses}")
            yield servers


def test_calls_go_to_all_of_them_in_turn(servers: list[Triton]) -> None:
    def ask(client: ModelClient) -> float:
        return float(client.infer_sample(ONE)["y"][0])

    with ModelClient("grpc://servers:8001", "m") as client:
        assert len({ask(client) for _ in range(20)}) == 1
    with ModelClient(URL, "m") as client:
        # From when both are connected on.
        eventually(lambda: {ask(client) for _ in range(4)} == {2.0, 3.0})
        answers = [ask(client) for _ in range(20)]
        assert answers.count(2.0) == answers.count(3.0)

        servers[0].stop()

        def is_left_alone() -> bool:
            try:
                return {ask(client) for _ in range(20)} == {3.0}
            except PyTritonClientError:
                return False

        eventually(is_left_alone)


@pytest.mark.usefixtures("servers")
def test_so_do_those_of_asyncio_clients() -> None:
    async def main() -> None:
        async with AsyncioModelClient(URL, "m") as client:
            found: set[float] = set()
            while found != {2.0, 3.0}:
                results = await asyncio.gather(*(client.infer_sample(ONE) for _ in range(4)))
                found |= {float(result["y"][0]) for result in results}

    asyncio.run(main())


def test_shared_memory_is_for_one_server() -> None:
    with pytest.raises(PyTritonClientValueError, match="address of one server with shared_memory=True"):
        ModelClient(URL, "m", shared_memory=True)

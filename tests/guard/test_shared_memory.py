"""Files of shared memory that their owner makes shorter while they are registered: errors, and no server ends."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton
from support.callables import identity
from support.serving import local_config, running, server_pid, short_home
from support.waiting import PATIENCE_S, eventually

LIBRARIES: dict[str, Any] = {"http": tritonclient.http, "grpc": tritonclient.grpc}
PAGE = os.sysconf("SC_PAGE_SIZE")
# Of the input, behind which the output lies: several pages each.
SIZE = 4 * PAGE
numbers = itertools.count()


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    with short_home(), running(Triton(config=local_config())) as server:
        for name, dtype in (("numbers", np.float32), ("texts", bytes)):
            tensors = [[Tensor(name=tensor, dtype=dtype, shape=(-1,))] for tensor in "xy"]
            server.bind(name, identity, *tensors, config=ModelConfig(batching=False))
        yield server


class Region:
    """A file in shared memory that is registered, with an input and room for an output."""

    def __init__(self, triton: Triton, protocol: str) -> None:
        self._library = LIBRARIES[protocol]
        url = str(triton.http_url if protocol == "http" else triton.grpc_url).partition("//")[2]
        self._client = self._library.InferenceServerClient(url)
        prefix = "" if protocol == "http" else "triton-grpc-protocol-"
        self._headers = {f"{prefix}triton-access-token": str(triton.get_access_token())}
        self.name = f"test_region_{os.getpid()}_{next(numbers)}"
        self.path = Path("/dev/shm") / self.name

    def register(self, name: str | None = None) -> None:
        self._client.register_system_shared_memory(name or self.name, f"/{self.name}", 2 * SIZE, headers=self._headers)

    def unregister(self) -> None:
        """Unregister it once the server has done with the last request that used it."""

        def is_done() -> bool:
            with contextlib.suppress(InferenceServerException):
                self._client.unregister_system_shared_memory(headers=self._headers)
            return not self._status()

        eventually(is_done)

    def _status(self) -> Any:
        told = self._client.get_system_shared_memory_status(headers=self._headers)
        return told.regions if hasattr(told, "regions") else told

    def fill(self, data: bytes) -> None:
        self.path.write_bytes(data.ljust(SIZE, b"\0") + bytes(SIZE))

    def infer(self, model: str = "numbers", size: int = SIZE, elements: int = SIZE // 4) -> Any:
        x = self._library.InferInput("x", [elements], "FP32" if model == "numbers" else "BYTES")
        x.set_shared_memory(self.name, size)
        y = self._library.InferRequestedOutput("y")
        y.set_shared_memory(self.name, SIZE, offset=SIZE)
        return self._client.infer(model, [x], outputs=[y])

    def output(self) -> bytes:
        return self.path.read_bytes()[SIZE:]

    def close(self) -> None:
        self.unregister()
        self._client.close()
        self.path.unlink()


@pytest.fixture(params=LIBRARIES)
def region(request: pytest.FixtureRequest, triton: Triton) -> Iterator[Region]:
    with contextlib.closing(Region(triton, request.param)) as made:
        made.fill(np.arange(SIZE // 4, dtype=np.float32).tobytes())
        made.register()
        yield made


def check_well(triton: Triton, pid: int, region: Region) -> None:
    """Check that the server is the same, and serves the region once it is whole and registered again."""
    values = np.arange(SIZE // 4, dtype=np.float32).tobytes()
    region.unregister()
    region.fill(values)
    region.register()
    region.infer()
    assert region.output() == values
    assert server_pid(triton) == pid


@pytest.mark.parametrize(
    ("length", "said"),
    [
        (0, "input 'x'"),
        (PAGE, "input 'x'"),
        (SIZE - PAGE, "input 'x'"),
        (SIZE, "an output"),
        (2 * SIZE - PAGE, "an output"),
    ],
)
def test_a_file_that_is_shorter_is_an_error(triton: Triton, region: Region, length: int, said: str) -> None:
    pid = server_pid(triton)
    region.infer()
    os.truncate(region.path, length)
    for _ in range(3):
        with pytest.raises(
            InferenceServerException, match=f"{said} lies behind the end of the file of its shared memory"
        ):
            region.infer()
    # What is there still is served.
    os.truncate(region.path, 2 * SIZE)
    region.infer()
    check_well(triton, pid, region)


def test_texts_in_a_file_that_is_shorter(triton: Triton, region: Region) -> None:
    pid = server_pid(triton)
    texts = serialize_byte_tensor(np.array([b"a" * 100, b"b" * 5000], object)).item()
    region.fill(texts)
    region.infer("texts", len(texts), 2)
    assert region.output().startswith(texts)
    os.truncate(region.path, PAGE)
    with pytest.raises(InferenceServerException, match="input 'x' lies behind the end of the file"):
        region.infer("texts", len(texts), 2)
    check_well(triton, pid, region)


def test_a_file_whose_length_changes_all_the_time(triton: Triton, region: Region) -> None:
    pid = server_pid(triton)
    end = threading.Event()
    turns = itertools.count()

    def change() -> None:
        while not end.is_set():
            os.truncate(region.path, next(turns) % 3 * SIZE // 2)
            os.truncate(region.path, 2 * SIZE)

    thread = threading.Thread(target=change)
    thread.start()
    refused: list[str] = []
    try:
        for turn in range(600):
            try:
                region.infer()
            except InferenceServerException as error:
                refused.append(str(error))
            if turn % 50 == 49:
                # What was touched while it was too short is not used again before it is registered anew.
                region.unregister()
                with contextlib.suppress(InferenceServerException):
                    region.register()
    finally:
        end.set()
        thread.join(PATIENCE_S)
    # Or it was too short to be registered.
    assert {text for text in refused if "shorter" not in text and "Unable to find" not in text} == set()
    assert any("shorter" in text for text in refused)
    check_well(triton, pid, region)


def test_one_file_in_two_regions(triton: Triton, region: Region) -> None:
    """The server has closed its descriptor, whose number may be that of any other file by now."""
    pid = server_pid(triton)
    with contextlib.ExitStack() as others:
        for _ in range(20):
            # They take the numbers that are free.
            http = tritonclient.http.InferenceServerClient(str(triton.http_url).partition("//")[2], concurrency=1)
            others.callback(http.close)
            http.is_server_live()
        for number in range(20):
            with pytest.raises(InferenceServerException, match=r"[Ii]nvalid|unable|failed to register"):
                region.register(f"{region.name}_{number}")
    check_well(triton, pid, region)

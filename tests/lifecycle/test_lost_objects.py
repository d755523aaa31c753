"""A `Triton` that the program has lost, as the one of a notebook's cell that was run again, and its server."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.client import ModelClient
from pytriton.decorators import batch
from pytriton.model_config import Tensor
from pytriton.triton import PortInUseError, RestartPolicy, Triton, TritonConfig, running
from support.serving import local_config, server_pid, short_home
from support.waiting import PATIENCE_S, eventually

Array = np.ndarray[Any, Any]

# As it stands in a notebook: no variable but those of the notebook refers to the objects.
CELL = """
def make(factor):
    return batch(lambda x: {"y": x * factor})

triton = Triton(config=config)
triton.bind("m", make(factor), [Tensor((1,), np.float32, "x")], [Tensor((1,), np.float32, "y")])
triton.run()
"""


class Cells:
    """The name space of a notebook, and its cells."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {
            "Triton": Triton, "Tensor": Tensor, "batch": batch, "np": np, "config": local_config(), "factor": 1,
        }  # fmt: skip

    def run(self, **names: Any) -> str:
        """Runs the cell with new values of some names; gives the address of its server."""
        self.names.update(names)
        exec(compile(CELL, "<cell>", "exec"), self.names)
        return str(self.names["triton"].http_url)

    def lose(self) -> None:
        """What a restart of everything but the kernel does, or a name that is used for something else."""
        self.names["triton"] = None


@pytest.fixture
def cells() -> Iterator[Cells]:
    with short_home():
        made = Cells()
        yield made
        made.names.clear()
        for triton in running():
            triton.stop()
        assert running() == []


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel has: IPython, and a shell of it that talks to a kernel."""
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)


def same_ports(url: str) -> TritonConfig:
    return local_config(http_port=int(url.rpartition(":")[2]))


def ask(url: str) -> float:
    with ModelClient(url, "m") as client:
        return float(client.infer_sample(np.ones(1, np.float32))["y"][0])


def test_a_cell_that_is_run_again_replaces_the_server_of_its_first_run(
    cells: Cells, notebook: None, caplog: pytest.LogCaptureFixture
) -> None:
    url = cells.run(factor=2)
    assert ask(url) == 2
    for factor in (3, 4):
        caplog.clear()
        assert cells.run(factor=factor, config=same_ports(url)) == url
        assert ask(url) == factor
        assert running() == [cells.names["triton"]]
        [warning] = [record.getMessage() for record in caplog.records if "takes its place" in record.getMessage()]
        assert url in warning


def test_an_object_that_somebody_refers_to_keeps_its_server(cells: Cells, notebook: None) -> None:
    url = cells.run(factor=2)
    mine = cells.names["triton"]
    with pytest.raises(PortInUseError, match="a server of this very process"):
        cells.run(factor=3, config=same_ports(url))
    assert ask(url) == 2
    assert running() == [mine]


def test_a_server_on_other_ports_is_left_alone(cells: Cells, notebook: None) -> None:
    first = cells.run(factor=2)
    second = cells.run(factor=3)
    assert (ask(first), ask(second)) == (2, 3)
    assert [triton.http_url for triton in running()] == [first, second]


def test_outside_of_a_notebook_a_lost_object_keeps_its_server(cells: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    url = cells.run(factor=2)
    cells.lose()
    gc.collect()
    assert ask(url) == 2
    for shell in (None, types.SimpleNamespace()):  # IPython is imported, or runs in a terminal
        ipython = types.ModuleType("IPython")
        ipython.get_ipython = lambda shell=shell: shell  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        with pytest.raises(PortInUseError) as caught:
            cells.run(factor=3, config=same_ports(url))
    error = caught.value
    port = int(url.rpartition(":")[2])
    assert (error.setting, error.port) == ("http_port", port)
    assert "a server of this very process, that of another Triton object, listens on it already" in str(error)
    assert f"process {server_pid(running()[0])}" in str(error)
    assert "Call stop() on that object, which pytriton.triton.running() gives" in str(error)
    # As the error says.
    [found] = running()
    assert found.http_url == url
    assert running() == [found]
    assert found.stop()
    assert cells.run(factor=3, config=same_ports(url)) == url
    assert ask(url) == 3


def test_an_object_that_was_found_again_is_not_lost(cells: Cells, notebook: None) -> None:
    url = cells.run(factor=2)
    cells.lose()
    [found] = running()
    with pytest.raises(PortInUseError):
        cells.run(factor=3, config=same_ports(url))
    assert ask(url) == 2
    found.rebind("m", batch(lambda x: {"y": x * 5}))
    assert ask(url) == 5
    del found
    cells.run(factor=3, config=same_ports(url))
    assert ask(url) == 3


def test_the_server_of_a_lost_object_is_started_again_when_it_dies(
    cells: Cells, caplog: pytest.LogCaptureFixture
) -> None:
    triton = Triton(config=local_config(), restart=RestartPolicy())
    triton.bind("m", batch(lambda x: {"y": x * 7}), [Tensor((1,), np.float32, "x")], [Tensor((1,), np.float32, "y")])
    triton.run()
    pid = server_pid(triton)
    del triton
    gc.collect()
    os.kill(pid, 9)
    eventually(lambda: "tritonserver was started again" in caplog.text)
    assert server_pid(running()[0]) != pid
    assert ask(str(running()[0].http_url)) == 7


def test_an_object_without_a_server_goes_with_its_last_reference() -> None:
    triton = Triton(config=local_config())
    triton.bind("m", batch(lambda x: {"y": x}), [Tensor((1,), np.float32, "x")], [Tensor((1,), np.float32, "y")])
    assert running() == []
    own, alias = weakref.ref(triton), weakref.ref(triton._alias)
    del triton
    gc.collect()
    assert (own(), alias()) == (None, None)


LOST = """
import sys
from pytriton.triton import Triton, TritonConfig

def start():
    triton = Triton(config=TritonConfig(
        http_address="127.0.0.1", grpc_address="127.0.0.1", http_port=0, grpc_port=0, allow_metrics=False
    ))
    triton.run()

start()
print("up")
"""


def test_the_server_of_a_lost_object_ends_with_the_process(tmp_path: Path) -> None:
    # The server is a child that shares the pipe of its parent: the end of the output is the end of both.
    done = subprocess.run(
        [sys.executable, "-c", LOST],
        env={**os.environ, "PYTRITON_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "up\n"), done.stderr
    assert os.listdir(tmp_path) == []


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)

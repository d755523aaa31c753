"""A server in a notebook, by a real kernel: cells that are run again, what is shown, and where errors appear."""

from pathlib import Path
from typing import Any

import pytest

from support.processes import free_ports
from support.waiting import PATIENCE_S

pytest.importorskip("ipykernel")
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

START = """
import numpy as np
from pytriton.client import ModelClient
from pytriton.decorators import batch
from pytriton.model_config import Tensor
from pytriton.triton import Triton, TritonConfig

X, Y, Z = (Tensor((-1,), np.float32, name) for name in "xyz")
triton = Triton(config=TritonConfig(http_port=0, grpc_port=0, metrics_port=0))
"""
BIND = """
@batch
def scale(x):
    return {{"y": {factor} * x}}

triton.bind("scale", scale, [X], [{output}], replace=True)
"""
ASK = """
with ModelClient(triton.http_url, "scale") as client:
    print(client.infer_sample([1, 2, 3]))
"""
FAIL = """
def divide(x):
    return x / {}["<missing>"]

@batch
def fail(x):
    return {"y": divide(x)}

triton.bind("scale", fail, [X], [Y], replace=True)
"""


class Notebook:
    """A kernel, and the cells that it has run."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def run(self, source: str) -> Any:
        """Run a cell; return what it has put out."""
        self._client.nb.cells.append(nbformat.v4.new_code_cell(source))
        return self._client.execute_cell(self._client.nb.cells[-1], len(self._client.nb.cells) - 1).outputs


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    client = nbclient.NotebookClient(
        nbformat.v4.new_notebook(), kernel_name="python3", timeout=PATIENCE_S, startup_timeout=PATIENCE_S,
        allow_errors=True,
    )  # fmt: skip
    with client.setup_kernel():
        yield Notebook(client)


def test_cells_are_run_again_and_errors_appear_below_the_call(notebook: Notebook) -> None:
    notebook.run(START)
    [shown] = notebook.run("triton")
    assert "Triton, not running" in shown.data["text/html"]
    assert notebook.run(BIND.format(factor=2, output="Y")) == []
    assert notebook.run(BIND.format(factor=3, output="Y")) == []
    assert notebook.run("triton.run()") == []
    [answer] = notebook.run(ASK)
    assert answer.text == "{'y': array([3., 6., 9.], dtype=float32)}\n"

    # The callable alone, then its output, too.
    assert notebook.run(BIND.format(factor=4, output="Y")) == []
    [answer] = notebook.run(ASK)
    assert answer.text == "{'y': array([ 4.,  8., 12.], dtype=float32)}\n"
    assert notebook.run(BIND.format(factor=5, output="Z").replace('"y"', '"z"')) == []
    [answer] = notebook.run(ASK)
    assert answer.text == "{'z': array([ 5., 10., 15.], dtype=float32)}\n"

    [shown] = notebook.run("triton")
    for part in ("served at http://", "<td>scale</td><td>x: FP32[-1]</td><td>z: FP32[-1]</td>", "<td>attached</td>"):
        assert part in shown.data["text/html"]

    assert notebook.run(FAIL) == []
    [error] = notebook.run(ASK)
    assert error.output_type == "error"
    assert "the inference callable raised KeyError: '<missing>'" in error.evalue
    # The line of the cell that is to blame.
    assert 'return x / {}["<missing>"]' in error.evalue

    # As a cell that is run again says it.
    [told] = notebook.run(BIND.format(factor=6, output="Y").replace(", replace=True", ""))
    assert told.text == "Model 'scale' was bound already: it is replaced, as by bind(..., replace=True).\n"
    [answer] = notebook.run(ASK)
    assert answer.text == "{'y': array([ 6., 12., 18.], dtype=float32)}\n"
    assert [output.text for output in notebook.run("print(triton.stop())")] == ["True\n"]


def test_the_cell_of_the_server_is_run_again(notebook: Notebook) -> None:
    ports = free_ports(3)
    config = "http_port={}, grpc_port={}, metrics_port={}".format(*ports)
    notebook.run(START.replace("triton = Triton(config=TritonConfig(http_port=0, grpc_port=0, metrics_port=0))", ""))
    start = f"triton = Triton(config=TritonConfig({config}))\ntriton.run()\ntriton"
    for factor in (1, 2, 3):
        # The outputs of the kernel still have the object that the cell has shown.
        outputs = notebook.run(start)
        shown = [output.data["text/html"] for output in outputs if output.output_type == "execute_result"]
        assert ["served at http" in text for text in shown] == [True], outputs
        told = "".join(output.text for output in outputs if output.output_type == "stream")
        assert ("the old server is stopped" in told) == (factor > 1), outputs
        notebook.run(BIND.format(factor=factor, output="Y"))
        [answer] = notebook.run(ASK)
        assert answer.text == f"{{'y': array([{factor}., {2 * factor}., {3 * factor}.], dtype=float32)}}\n"
    # One that the program has in hand is nobody's to stop.
    notebook.run("mine = triton")
    [error] = notebook.run(start)
    assert (error.ename, "that of another Triton object" in error.evalue) == ("PortInUseError", True)
    assert [output.text for output in notebook.run("print(mine.stop())")] == ["True\n"]

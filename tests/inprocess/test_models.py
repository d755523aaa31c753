"""Models of other backends, ensembles, caches and sequences in a server in process, beside bound callables."""

from __future__ import annotations

import asyncio
import json
import os
import py_compile
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pytriton import inprocess
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from support.processes import is_run_alone
from support.python_models.python_backend import why_no_python_backend
from support.servers import since
from support.waiting import PATIENCE_S

Array = npt.NDArray[Any]

SEQUENCE_START, SEQUENCE_END = 1, 2


pytestmark = pytest.mark.skipif(bool(why_no_python_backend()), reason=why_no_python_backend() or "it can run")

# One file for several models, so that few stubs have to be started: what it does follows from the inputs of a request.
MODEL = """
import json
import pathlib

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.config = json.loads(args["model_config"])
        self.folder = pathlib.Path(args["model_repository"]) / args["model_version"]
        self.outputs = [output["name"] for output in self.config["output"]]

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if arrays.get("x") is not None and (arrays["x"] < 0).any():
            raise ValueError("not below zero")
        return pb_utils.InferenceResponse([pb_utils.Tensor(f"{name}_out", array) for name, array in arrays.items()])

    def finalize(self):
        marker = self.config["parameters"].get("finalized")
        if marker:
            pathlib.Path(marker["string_value"]).write_text("finalized")
"""

DOUBLE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        doubled = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() * 2 for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", array)]) for array in doubled]
"""

# Sums what the requests of a sequence bring, and tells what Triton said about the sequence.
SEQUENCE = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x, start, end = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy().item() for name in ("x", "START", "END")
        )
        key = request.correlation_id()
        if start:
            self.sums[key] = 0
        self.sums[key] += x
        total = self.sums[key]
        if end:
            del self.sums[key]
        told = {"y": total, "open": len(self.sums)}
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.array([[told[name]]])) for name in told])
"""

STREAM = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(pb_utils.get_input_tensor_by_name(request, "n").as_numpy().item()):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("i", np.array([number], np.int64))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

# Asks a model of the same server: "business logic scripting", as Triton calls it.
ASKING = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x")
        asked = pb_utils.InferenceRequest(model_name="add_one", requested_output_names=["y"], inputs=[x])
        answer = asked.exec()
        if answer.has_error():
            raise pb_utils.TritonModelException(answer.error().message())
        y = pb_utils.get_output_tensor_by_name(answer, "y").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", y * 10)])
"""

TYPES = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "INT16": np.int16,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}


def tensors(*named: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "data_type": f"TYPE_{datatype}", "dims": [-1]} for name, datatype in named]


def python_config(inputs: list[dict[str, Any]], outputs: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"backend": "python", "max_batch_size": 8, "input": inputs, "output": outputs, **more}


FLOATS = {"inputs": tensors(("x", "FP32")), "outputs": tensors(("y", "FP32"))}


@batch
def add_one(x: Array) -> dict[str, Array]:
    if (x == 13).any():
        raise ValueError("not thirteen")
    return {"y": x + 1}


def bind_floats(server: inprocess.Server, name: str, infer_func: Any, **config: Any) -> None:
    server.bind(
        name,
        infer_func,
        [Tensor((-1,), np.float32, "x")],
        [Tensor((-1,), np.float32, "y")],
        config=ModelConfig(max_batch_size=8, **config),
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[inprocess.Server]:
    """A server with a model of Triton's Python backend from a folder, and a bound callable."""
    repository = tmp_path_factory.mktemp("models")
    source = repository / "double" / "1" / "model.py"
    source.parent.mkdir(parents=True)
    source.write_text(DOUBLE)
    # If the stub did that, Triton would take it for a change, and load the model again with the first ensemble.
    py_compile.compile(str(source), str(source.parent / f"__pycache__/model.{sys.implementation.cache_tag}.pyc"))
    (repository / "double" / "config.pbtxt").write_text(
        'backend: "python" max_batch_size: 8 dynamic_batching {} '
        'input { name: "x" data_type: TYPE_FP32 dims: -1 } output { name: "y" data_type: TYPE_FP32 dims: -1 }'
    )
    options = inprocess.Options(
        model_repository=str(repository),
        model_control_mode=inprocess.ModelControlMode.EXPLICIT,
        startup_models=["double"],
        cache_config={"local": {"size": 1 << 24}},
        backend_configuration={"python": {"shm-region-prefix-name": f"pt{os.getpid()}"}},
    )
    before = shared_memory()
    with inprocess.Server(options) as server:
        bind_floats(server, "add_one", add_one)
        yield server
    assert shared_memory() - before == set()


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"pt{os.getpid()}")}


@contextmanager
def loaded(server: inprocess.Server, name: str, config: Any, source: str | None = None) -> Iterator[inprocess.Model]:
    """A model in memory while a block runs, and the process of its stub no longer than that."""
    model = server.load(name, config=config, files={"1/model.py": source} if source else None)
    try:
        yield model
    finally:
        server.unload(name, wait_until_unloaded=True, timeout=PATIENCE_S)


def ask(server: inprocess.Server, model: str, **inputs: Any) -> dict[str, Array]:
    (response,) = server.model(model).infer(inputs=inputs)
    return {name: np.from_dlpack(tensor) for name, tensor in response.outputs.items()}


def row(*values: float) -> Array:
    return np.array([values], np.float32)


def test_a_model_of_the_python_backend_answers(server: inprocess.Server) -> None:
    assert ask(server, "double", x=row(1, 2))["y"].tolist() == [[2, 4]]
    assert server.models()["double", 1].state == "READY"
    assert server.model("double").config()["backend"] == "python"


@pytest.fixture(scope="module")
def echo(server: inprocess.Server, tmp_path_factory: pytest.TempPathFactory) -> inprocess.Model:
    """A model of Triton's Python backend that is given in memory, and gives back what it gets."""
    named = [(datatype.lower(), datatype) for datatype in [*TYPES, "STRING"]] + [("x", "FP32")]
    config = python_config(
        [{**tensor, "optional": True} for tensor in tensors(*named)],
        tensors(*((f"{name}_out", datatype) for name, datatype in named)),
        response_cache={"enable": True},
    )
    return server.load("echo", config=config, files={"1/model.py": MODEL})


def test_numbers_of_every_type_pass_through_a_model_in_memory(server: inprocess.Server, echo: inprocess.Model) -> None:
    """With numpy 1, and with numpy 2 under a stub that was built for 1."""
    for shape in ((2, 3), (8, 1), (1, 0), (1, 100_000)):
        arrays: dict[str, Array] = {
            name.lower(): (np.arange(np.prod(shape)) % 5).reshape(shape).astype(dtype) for name, dtype in TYPES.items()
        }
        answers = ask(server, "echo", **arrays)
        for name, array in arrays.items():
            assert answers[f"{name}_out"].dtype == array.dtype
            np.testing.assert_array_equal(answers[f"{name}_out"], array)


@pytest.mark.parametrize("texts", [["hello world!"], ["", "zażółć", "x" * 5000], ["a\0b\0"]])
def test_strings_pass_through_a_model_in_memory(
    server: inprocess.Server, echo: inprocess.Model, texts: list[str]
) -> None:
    for response in echo.infer(inputs={"string": [texts]}):
        output = response.outputs["string_out"]
        assert output.to_string_array().tolist() == [texts]
        assert output.to_bytes_array().tolist() == [[text.encode() for text in texts]]


def test_many_strings_leave_the_stub_well(server: inprocess.Server, echo: inprocess.Model) -> None:
    for number in range(200):
        texts = [[f"{number} {place}" for place in range(number % 7 + 1)]]
        (response,) = echo.infer(inputs={"string": texts})
        assert response.outputs["string_out"].to_string_array().tolist() == texts


BIG_ENDIAN = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        arrays = {"f": x.astype(">f4"), "i": x.astype(">i8")[:, ::-1]}
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in arrays.items()])
"""


def test_numbers_in_the_other_byte_order_are_swapped(server: inprocess.Server) -> None:
    config = python_config(FLOATS["inputs"], tensors(("f", "FP32"), ("i", "INT64")))
    with loaded(server, "swapping", config, BIG_ENDIAN):
        answers = ask(server, "swapping", x=row(1, 2, 300))
        assert answers["f"].tolist() == [[1, 2, 300]]
        assert answers["i"].tolist() == [[300, 2, 1]]


def test_an_error_of_a_model_reaches_the_caller(server: inprocess.Server, echo: inprocess.Model) -> None:
    with pytest.raises(inprocess.TritonError, match="not below zero"):
        ask(server, "echo", x=row(-1))
    assert ask(server, "echo", x=row(1))["x_out"].tolist() == [[1]]


def test_a_file_of_a_model_in_memory_is_what_was_given(server: inprocess.Server) -> None:
    weights = bytes(range(256)) * 10
    source = DOUBLE.replace("* 2", "* len(self.weights)").replace(
        "    def execute",
        "    def initialize(self, args):\n"
        "        folder = args['model_repository'] + '/' + args['model_version']\n"
        "        self.weights = open(folder + '/weights.bin', 'rb').read()\n"
        "        assert self.weights == bytes(range(256)) * 10\n\n"
        "    def execute",
    )
    config = python_config(FLOATS["inputs"], FLOATS["outputs"])
    server.load("weighed", config=config, files={"1/model.py": source, "1/weights.bin": weights})
    assert ask(server, "weighed", x=row(1))["y"].tolist() == [[2560]]
    server.load("weighed", config=config, files={"1/model.py": DOUBLE})
    assert ask(server, "weighed", x=row(1))["y"].tolist() == [[2]]
    server.unload("weighed", wait_until_unloaded=True, timeout=PATIENCE_S)
    with pytest.raises(inprocess.TritonError, match="weighed"):
        ask(server, "weighed", x=row(1))


FAILED_RELOAD = """
import json, sys
import numpy as np
from pytriton import inprocess

source, config, prefix = json.loads(sys.argv[1])
options = inprocess.Options(
    model_control_mode=inprocess.ModelControlMode.EXPLICIT,
    backend_configuration={"python": {"shm-region-prefix-name": prefix}},
)
with inprocess.Server(options) as server:
    server.load("double", config=config, files={"1/model.py": source})
    # Triton's own names for the same, and other content.
    parameters = {"config": '{"backend": "python", "input": [], "output": []}'}
    try:
        server.load("double", {**parameters, "file:1/model.py": b"syntax error"})
    except inprocess.TritonError:
        (response,) = server.model("double").infer(inputs={"x": np.ones((1, 1), np.float32)})
        print(np.from_dlpack(response.outputs["y"]).tolist())
"""


def test_a_reload_that_fails_leaves_what_was_loaded(tmp_path: Path) -> None:
    # In a process of its own: Triton never lets go of a server with such a model, nor of its cache.
    config = python_config(FLOATS["inputs"], FLOATS["outputs"])
    given = json.dumps([DOUBLE, config, f"pt{os.getpid()}x"])
    done = subprocess.run(
        [sys.executable, "-c", FAILED_RELOAD, given],
        env={**os.environ, "PYTRITON_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[[2.0]]\n"), done.stderr


def test_why_a_model_does_not_load_is_told(server: inprocess.Server) -> None:
    config = python_config(FLOATS["inputs"], FLOATS["outputs"])
    broken = DOUBLE.replace(
        "    def execute",
        "    def initialize(self, args):\n        raise ValueError('no such weights')\n\n    def execute",
    )
    with pytest.raises(inprocess.TritonError, match="no such weights"):
        server.load("broken", config=config, files={"1/model.py": broken})
    assert server.ready() in (True, False)
    assert ask(server, "double", x=row(1))["y"].tolist() == [[2]]


def ensemble(*steps: str) -> dict[str, Any]:
    """A chain of models with an input x and an output y."""
    names = ["x", *(f"between_{number}" for number in range(1, len(steps))), "y"]
    return {
        "platform": "ensemble",
        "max_batch_size": 8,
        "input": FLOATS["inputs"],
        "output": FLOATS["outputs"],
        "ensemble_scheduling": {
            "step": [
                {
                    "model_name": step,
                    "model_version": -1,
                    "input_map": {"x": names[number]},
                    "output_map": {"y": names[number + 1]},
                }
                for number, step in enumerate(steps)
            ]
        },
    }


@pytest.mark.parametrize(
    ("steps", "answer"),
    [
        (("double", "add_one"), 7),
        (("add_one", "double"), 8),
        (("add_one", "add_one", "double", "add_one"), 11),
    ],
)
def test_an_ensemble_of_a_bound_callable_and_a_python_model(
    server: inprocess.Server, steps: tuple[str, ...], answer: float
) -> None:
    with loaded(server, "chain", ensemble(*steps)):
        for shape in ((1, 1), (8, 3), (1, 300_000)):
            answers = ask(server, "chain", x=np.full(shape, 3, np.float32))
            assert answers["y"].shape == shape
            assert (answers["y"] == answer).all()
        with pytest.raises(inprocess.TritonError, match="not thirteen"):
            ask(server, "chain", x=np.full((1, 1), 13 if steps[0] == "add_one" else 6.5, np.float32))


def test_many_callers_of_an_ensemble_get_their_own_answers(server: inprocess.Server) -> None:
    async def one(model: inprocess.Model, number: int) -> float:
        response = await anext(model.async_infer(inputs={"x": row(number)}))
        return float(np.asarray(response.outputs["y"])[0, 0])

    async def all_of_them(model: inprocess.Model) -> list[float]:
        return await asyncio.wait_for(asyncio.gather(*(one(model, number) for number in range(100, 200))), PATIENCE_S)

    with loaded(server, "chain", ensemble("add_one", "double")) as model:
        assert asyncio.run(all_of_them(model)) == [2.0 * (number + 1) for number in range(100, 200)]


def test_a_python_model_asks_a_bound_callable(server: inprocess.Server) -> None:
    with loaded(server, "asking", python_config(FLOATS["inputs"], FLOATS["outputs"]), ASKING):
        assert ask(server, "asking", x=row(1, 2))["y"].tolist() == [[20, 30]]
        with pytest.raises(inprocess.TritonError, match="not thirteen"):
            ask(server, "asking", x=row(13))


def test_the_cache_answers_for_a_bound_callable(server: inprocess.Server) -> None:
    calls = []

    @batch
    def square(x: Array) -> dict[str, Array]:
        calls.append(x.copy())
        return {"y": x * x}

    bind_floats(server, "square", square, response_cache=True)
    answers = [ask(server, "square", x=row(3, value))["y"].tolist() for value in (1, 1, 2, 1, 2)]
    assert answers == [[[9, 1]], [[9, 1]], [[9, 4]], [[9, 1]], [[9, 4]]]
    assert len(calls) == 2
    (statistics,) = server.model("square").statistics()["model_stats"]
    assert (statistics["execution_count"], statistics["inference_stats"]["success"]["count"]) == (2, 5)


def test_the_cache_answers_for_a_python_model(server: inprocess.Server, echo: inprocess.Model) -> None:
    def hits() -> int:
        (statistics,) = echo.statistics()["model_stats"]
        return int(statistics["inference_stats"]["cache_hit"]["count"])

    before = hits()
    for _ in range(3):
        assert ask(server, "echo", x=row(1, 2, 3, 4, 5))["x_out"].tolist() == [[1, 2, 3, 4, 5]]
    assert hits() - before == 2


@pytest.mark.parametrize("keys", [(1, 2), ("one", "two")], ids=["numbers", "texts"])
def test_sequences_are_kept_apart(server: inprocess.Server, keys: tuple[Any, Any]) -> None:
    controls = [
        {"name": "START", "control": [{"kind": "CONTROL_SEQUENCE_START", "int32_false_true": [0, 1]}]},
        {"name": "END", "control": [{"kind": "CONTROL_SEQUENCE_END", "int32_false_true": [0, 1]}]},
    ]
    config = python_config(
        [{"name": "x", "data_type": "TYPE_INT64", "dims": [1]}],
        [{"name": name, "data_type": "TYPE_INT64", "dims": [1]} for name in ("y", "open")],
        # On a busy machine more than the second may pass after which Triton forgets a sequence by itself.
        sequence_batching={
            "control_input": controls,
            "oldest": {"max_candidate_sequences": 4},
            "max_sequence_idle_microseconds": 600_000_000,
        },
    )

    def say(model: inprocess.Model, key: Any, value: int, flags: int = 0) -> list[int]:
        (response,) = model.infer(inputs={"x": np.array([[value]])}, correlation_id=key, flags=flags)
        return [int(np.asarray(response.outputs[name])[0, 0]) for name in ("y", "open")]

    first, second = keys
    with loaded(server, "sums", config, SEQUENCE) as model:
        assert say(model, first, 1, SEQUENCE_START) == [1, 1]
        assert say(model, second, 10, SEQUENCE_START) == [10, 2]
        assert say(model, first, 2) == [3, 2]
        assert say(model, second, 20) == [30, 2]
        assert say(model, first, 3, SEQUENCE_END) == [6, 1]
        assert say(model, second, 30, SEQUENCE_END) == [60, 0]
        with pytest.raises(inprocess.InvalidArgumentError, match="START"):
            say(model, first, 1)


def test_streams_of_a_python_model(server: inprocess.Server) -> None:
    config = {
        "backend": "python",
        "max_batch_size": 0,
        "input": tensors(("n", "INT64")),
        "output": tensors(("i", "INT64")),
        "model_transaction_policy": {"decoupled": True},
    }

    async def count(model: inprocess.Model, length: int) -> int:
        return len([response async for response in model.async_infer(inputs={"n": [length]}) if response.outputs])

    async def both(model: inprocess.Model) -> list[int]:
        return list(await asyncio.wait_for(asyncio.gather(count(model, 3), count(model, 40)), PATIENCE_S))

    numbers: list[Any] = []
    with loaded(server, "stream", config, STREAM) as model:
        for response in model.infer(inputs={"n": [5]}):
            numbers.append(np.from_dlpack(response.outputs["i"]).item() if response.outputs else None)
            assert response.final == (not response.outputs)
        assert numbers == [0, 1, 2, 3, 4, None]
        assert asyncio.run(both(model)) == [3, 40]


def test_stop_with_results_held_ends_a_python_model_in_order(tmp_path: Path) -> None:
    """NVIDIA's waits out `exit_timeout` here and never calls `finalize`."""
    marker = tmp_path / "finalized"
    options = inprocess.Options(
        model_control_mode=inprocess.ModelControlMode.EXPLICIT,
        exit_timeout=3600,
        backend_configuration={"python": {"shm-region-prefix-name": f"pt{os.getpid()}stop"}},
    )
    server = inprocess.Server(options).start()
    try:
        config = python_config(
            tensors(("x", "FP32")),
            tensors(("x_out", "FP32")),
            parameters={"finalized": {"string_value": str(marker)}},
        )
        model = server.load("held", config=config, files={"1/model.py": MODEL})
        held = list(model.infer(inputs={"x": row(1, 2, 3)}))
    finally:
        # Soon, though an output is held: exit_timeout is longer than a test may take.
        server.stop()
    assert marker.read_text() == "finalized"
    assert np.from_dlpack(held[0].outputs["x_out"]).tolist() == [[1, 2, 3]]


CRASHING = """
import os
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        x = pb_utils.get_input_tensor_by_name(requests[0], "x").as_numpy()
        if x.flat[0] < 0:
            os._exit(1)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]) for _ in requests]
"""


# An older server does not notice that the process is gone, and its caller waits for ever.
@since(2, 51)
@pytest.mark.parametrize("count", [1, 2])
def test_stop_after_a_crash_of_a_python_model(
    count: int, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    """Triton never unloads such a model; `stop` used to wait for it, and to raise."""
    # Nor does it let go of the server, and with it of the one response cache of a process.
    if is_run_alone(request.node, PATIENCE_S):
        return
    prefix = f"pt{os.getpid()}crash{count}"
    options = inprocess.Options(
        model_control_mode=inprocess.ModelControlMode.EXPLICIT,
        exit_timeout=3600,
        backend_configuration={"python": {"shm-region-prefix-name": prefix}},
    )
    config = python_config(tensors(("x", "FP32")), tensors(("y", "FP32")), instance_group=[{"count": count}])
    server = inprocess.Server(options).start()
    try:
        for _ in range(2):
            model = server.load("crashing", config=config, files={"1/model.py": CRASHING})
            (response,) = model.infer(inputs={"x": np.ones((1, 1), np.float32)})
            assert np.from_dlpack(response.outputs["y"]).tolist() == [[1]]
            with pytest.raises(inprocess.TritonError, match="not healthy"):
                list(model.infer(inputs={"x": -np.ones((1, 1), np.float32)}))
            server.stop()
            assert "Triton holds on to models that are not unloaded: crashing version 1" in caplog.text
            caplog.clear()
            assert not [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]
            # It may be started again, with the same model.
            server.start()
    finally:
        server.stop()

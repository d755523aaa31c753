"""`ModelHarness`: what a test may pass in, what it gets, and what is left behind. tests/python_models compares it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.exceptions import PyTritonInvalidOperationError, PyTritonModelConfigError, PyTritonValidationError
from pytriton.proxy_backend.wire import dtypes
from pytriton.testing import ModelError, ModelHarness, make_request

MakeModel = Callable[..., Path]

CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "y" data_type: TYPE_FP32 dims: -1 }
"""
DECOUPLED = CONFIG + "model_transaction_policy { decoupled: true }\n"
HEAD = """
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def x_of(request):
    return pb_utils.get_input_tensor_by_name(request, "x").as_numpy()


def answer(array):
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.asarray(array, np.float32))])


def ask(model, request, decoupled=False):
    return pb_utils.InferenceRequest(
        model_name=model,
        inputs=request.inputs(),
        requested_output_names=["y"],
        parameters={"key": "value"},
    ).exec(decoupled=decoupled)
"""


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Writes the folder of a model whose `execute` has a body."""

    def make(body: str, config: str = CONFIG, *, name: str = "model", more: str = "", **files: str) -> Path:
        folder = tmp_path / name
        (folder / "1").mkdir(parents=True)
        lines = "\n".join(f"        {line}" for line in body.splitlines())
        source = f"{HEAD}\n\nclass TritonPythonModel:\n    def execute(self, requests):\n{lines}\n{more}"
        (folder / "1" / "model.py").write_text(source)
        for file, text in files.items():
            (folder / "1" / f"{file}.py").write_text(text)
        (folder / "config.pbtxt").write_text(config)
        return folder

    return make


DOUBLE = "return [answer(2 * x_of(request)) for request in requests]"


def test_plain_lists_become_arrays_of_the_declared_type(make_model: MakeModel) -> None:
    with ModelHarness(make_model(DOUBLE)) as model:
        assert model.name == "model"
        assert model.infer({"x": [[1, 2]]})["y"].tolist() == [[2, 4]]
        results = model.infer([{"x": [[1]]}, {"x": [[2], [3]]}])
        assert [result["y"].tolist() for result in results] == [[[2]], [[4], [6]]]


def test_a_file_and_a_configuration_are_enough(make_model: MakeModel) -> None:
    folder = make_model(DOUBLE, "this is no configuration")
    with ModelHarness(folder / "1" / "model.py", config=CONFIG) as model:
        assert model.infer({"x": [[1]]})["y"].tolist() == [[2]]
    with ModelHarness(folder, config={**model.model_config, "name": "other"}) as model:
        assert model.name == "other"
    with pytest.raises(PyTritonModelConfigError, match="expected ':'"):
        ModelHarness(folder)
    (folder / "config.pbtxt").unlink()
    with pytest.raises(PyTritonModelConfigError, match=r"ModelHarness\(config=\.\.\.\)"):
        ModelHarness(folder)


def test_a_version_is_the_highest_or_the_one_that_is_named(make_model: MakeModel) -> None:
    folder = make_model(DOUBLE)
    (folder / "12").mkdir()
    (folder / "12" / "model.py").write_text((folder / "1" / "model.py").read_text().replace("2 *", "3 *"))
    with ModelHarness(folder) as model:
        assert model.infer({"x": [[1]]})["y"].tolist() == [[3]]
    with ModelHarness(folder, version=1) as model:
        assert model.infer({"x": [[1]]})["y"].tolist() == [[2]]


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ({}, "lacks the inputs"),
        ({"x": [[1]], "z": [[1]]}, "none of the model's inputs"),
        ({"x": np.zeros((1, 1), np.float64)}, "float64"),
        ({"x": [[1]] * 5}, "max_batch_size"),
        (make_request({"x": [[1]]}, requested_output_names=["z"]), "outputs \\['z'\\]"),
    ],
)
def test_what_a_server_refuses_is_refused(make_model: MakeModel, request_: Any, text: str) -> None:
    with ModelHarness(make_model(DOUBLE)) as model, pytest.raises(PyTritonValidationError, match=text):
        model.infer(request_)


def test_a_failure_is_the_error_of_its_caller(make_model: MakeModel) -> None:
    body = """
if x_of(requests[0])[0, 0] < 0:
    raise ValueError("negative")
return [
    answer(x_of(request)) if x_of(request)[0, 0] else
    pb_utils.InferenceResponse(error=pb_utils.TritonError("zero", pb_utils.TritonError.INVALID_ARG))
    for request in requests
]
""".strip()
    with ModelHarness(make_model(body)) as model:
        with pytest.raises(ModelError, match=r"for model 'model_0', message: ValueError: negative") as failed:
            model.infer({"x": [[-1]]})
        assert failed.value.code == "INTERNAL"
        first, second = model.infer([{"x": [[1]]}, {"x": [[0]]}], return_exceptions=True)
        assert first["y"].tolist() == [[1]]
        assert (second.message, second.code) == ("zero", "INVALID_ARG")
        with pytest.raises(ModelError, match="zero"):
            model.infer([{"x": [[1]]}, {"x": [[0]]}])


def test_decoupled_responses_are_a_list_those_of_other_threads_too(make_model: MakeModel) -> None:
    body = """
import threading
for request in requests:
    sender = request.get_response_sender()
    count = int(x_of(request)[0, 0])
    def send(sender=sender, count=count):
        for number in range(count):
            sender.send(answer([[number]]))
        sender.send(flags=FINAL)
    threading.Thread(target=send).start() if count > 1 else send()
return None
""".strip()
    with ModelHarness(make_model(body, DECOUPLED)) as model:
        assert [response["y"].item() for response in model.infer({"x": [[3]]})] == [0, 1, 2]
        assert [len(responses) for responses in model.infer([{"x": [[0]]}, {"x": [[1]]}, {"x": [[5]]}])] == [0, 1, 5]


def test_a_request_that_nobody_answers_is_told(make_model: MakeModel) -> None:
    with ModelHarness(make_model("return None", DECOUPLED)) as model, pytest.raises(ModelError, match="no last resp"):
        model.infer({"x": [[1]]})
    folder = make_model("self.kept = [request.get_response_sender() for request in requests]", DECOUPLED, name="kept")
    with (
        ModelHarness(folder, timeout_s=0.05) as model,
        pytest.raises(TimeoutError, match=r"'kept_0': the requests \[0\]"),
    ):
        model.infer({"x": [[1]]})


def test_calls_are_answered_by_functions(make_model: MakeModel) -> None:
    seen: list[Any] = []

    def embed(request: Any) -> Any:
        seen.append((request["x"].tolist(), dict(request.parameters), request.requested_output_names))
        if request["x"][0, 0] < 0:
            raise ValueError("nothing below zero")
        return {"y": request["x"] + 1, "unwanted": [1]}

    body = """
responses = []
for request in requests:
    got = ask("embed", request)
    responses.append(got if got.has_error() else answer(got.output_tensors()[0].as_numpy() * 10))
return responses
""".strip()
    with ModelHarness(make_model(body), calls={"embed": embed}) as model:
        assert model.infer({"x": [[1]]})["y"].tolist() == [[20]]
        with pytest.raises(ModelError, match="nothing below zero"):
            model.infer({"x": [[-1]]})
    assert seen[0] == ([[1]], {"key": "value"}, ["y"])
    with ModelHarness(make_model(body, name="alone")) as model, pytest.raises(ModelError, match="'embed' is not ready"):
        model.infer({"x": [[1]]})
    with (
        ModelHarness(make_model(body, name="wrong"), calls={"embed": lambda request: 5}) as model,
        pytest.raises(ModelError, match="returned a int: expected a mapping"),
    ):
        model.infer({"x": [[1]]})


def test_calls_of_decoupled_models_are_lists(make_model: MakeModel) -> None:
    folder = make_model(
        "got = [r.output_tensors()[0].as_numpy().item() for r in ask('numbers', requests[0], True) if "
        "r.output_tensors()]\nreturn [answer([got])]"
    )
    for numbers in (
        lambda request: [{"y": [[1.0]]}, {"y": [[2.0]]}],
        lambda request: ({"y": [[number]]} for number in (1.0, 2.0)),
    ):
        with ModelHarness(folder, calls={"numbers": numbers}) as model:
            assert model.infer({"x": [[1]]})["y"].tolist() == [[1, 2]]
    with ModelHarness(folder, calls={"numbers": lambda request: []}) as model:
        assert model.infer({"x": [[1]]})["y"].shape == (1, 0)
    plain = make_model("return [ask('numbers', requests[0])]", name="plain")
    with (
        ModelHarness(plain, calls={"numbers": lambda request: [{"y": [[1.0]]}]}) as model,
        pytest.raises(ModelError, match="decoupled=True"),
    ):
        model.infer({"x": [[1]]})


@pytest.mark.parametrize("kind", ["list", "O", "T"])
def test_strings_of_answers_reach_the_model_whole(make_model: MakeModel, kind: str) -> None:
    """numpy cuts zero bytes at the end of bytes in lists."""
    if kind == "T" and not hasattr(np.dtypes, "StringDType"):
        pytest.skip("numpy has these strings since 2.0")
    body = "got = ask('words', requests[0]).output_tensors()[0].as_numpy()\nreturn [answer([[len(t) for t in got[0]]])]"
    words: Any = [["a", "b\0", ""]]
    with ModelHarness(
        make_model(body), calls={"words": lambda request: {"y": words if kind == "list" else np.array(words, kind)}}
    ) as model:
        assert model.infer({"x": [[1]]})["y"].tolist() == [[1, 2, 0]]


def test_a_thread_of_the_model_makes_calls_after_execute_has_returned(make_model: MakeModel) -> None:
    returned = threading.Event()
    body = """
import threading
def work(request, sender):
    pb_utils.returned.wait(60)
    got = ask("embed", request)
    sender.send(got if got.has_error() else answer(got.output_tensors()[0].as_numpy()), FINAL)
for request in requests:
    threading.Thread(target=work, args=(request, request.get_response_sender()), daemon=True).start()
return None
""".strip()

    with ModelHarness(make_model(body, DECOUPLED), calls={"embed": lambda request: {"y": request["x"] + 1}}) as model:
        utils = sys.modules["triton_python_backend_utils"]
        utils.returned = returned  # type: ignore[attr-defined]
        timer = threading.Timer(0.2, returned.set)
        timer.start()
        assert [response["y"].tolist() for response in model.infer({"x": [[1]]})] == [[[2]]]
        timer.join()
        del utils.returned


def test_types_of_numpy_are_what_they_were(make_model: MakeModel) -> None:
    """Models get the bits of BF16 tensors, as in Triton's Python backend; nobody else in the process does."""
    with ModelHarness(make_model(DOUBLE)), ModelHarness(make_model(DOUBLE, name="other")) as other:
        other.close()
        assert dtypes.dtype_of(dtypes.BF16_CODE) == dtypes.BF16_BITS
    assert dtypes.BF16_BITS not in dtypes._NUMPY_OF_CODE.values()


def test_what_a_test_has_imported_stays(make_model: MakeModel) -> None:
    folder = make_model("import helper\nreturn [answer(helper.TWICE * x_of(r)) for r in requests]", helper="TWICE = 2")
    (folder / "checks.py").write_text("class Check:\n    pass\n")
    sys.path.insert(0, str(folder))
    try:
        import checks  # type: ignore[import-not-found]

        with ModelHarness(folder) as model:
            assert model.infer({"x": [[1]]})["y"].tolist() == [[2]]
        assert sys.modules["checks"] is checks
        assert "helper" not in sys.modules
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("checks", None)


def test_one_harness_answers_another(make_model: MakeModel) -> None:
    inner = make_model(DOUBLE, name="inner")
    outer = make_model(
        "return [answer(ask('inner', r).output_tensors()[0].as_numpy() + 1) for r in requests]", name="o"
    )
    with ModelHarness(inner) as below, ModelHarness(outer, calls={"inner": below.infer}) as above:
        assert above.infer({"x": [[1]]})["y"].tolist() == [[3]]
        assert below.infer({"x": [[1]]})["y"].tolist() == [[2]]


def test_models_are_loaded_and_unloaded(make_model: MakeModel) -> None:
    body = """
ready = [pb_utils.is_model_ready("other")]
pb_utils.unload_model("other")
ready.append(pb_utils.is_model_ready("other"))
pb_utils.load_model("other")
ready.append(pb_utils.is_model_ready("other"))
try:
    pb_utils.load_model("nobody")
except pb_utils.TritonModelException as error:
    ready.append("Failed to load model" in str(error))
return [answer([ready])]
""".strip()
    with ModelHarness(make_model(body), calls={"other": lambda request: {}}) as model:
        assert model.infer({"x": [[1]]})["y"].tolist() == [[1, 0, 1, 1]]


def test_metrics_have_values(make_model: MakeModel) -> None:
    body = """
if not hasattr(self, "families"):
    kinds = pb_utils.MetricFamily
    self.families = [kinds("calls", "", kinds.COUNTER), kinds("level", "", kinds.GAUGE)]
    self.families.append(kinds("sizes", "", kinds.HISTOGRAM))
    self.calls = self.families[0].Metric({"b": "2", "a": "1"})
    self.level = self.families[1].Metric()
    self.sizes = self.families[2].Metric(buckets=[1.0])
self.calls.increment(2)
self.level.set(self.calls.value() + 0.5)
self.sizes.observe(3)
return [answer([[0]]) for _ in requests]
""".strip()
    with ModelHarness(make_model(body)) as model:
        model.infer({"x": [[1]]})
        model.infer({"x": [[1]]})
    assert model.metrics == {'calls{a="1",b="2"}': 4, "level": 4.5, "sizes": [3, 3]}


def test_a_request_that_is_cancelled_says_so(make_model: MakeModel) -> None:
    with ModelHarness(make_model("return [answer([[request.is_cancelled()]]) for request in requests]")) as model:
        cancelled = make_request({"x": [[1]]})
        cancelled.cancel()
        assert [result["y"].item() for result in model.infer([{"x": [[1]]}, cancelled])] == [0, 1]


def test_the_life_of_a_model(make_model: MakeModel, caplog: pytest.LogCaptureFixture) -> None:
    more = """
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(4)
        return config

    def initialize(self, args):
        self.args = args
        pb_utils.Logger.log_warn(f"begins in {pb_utils.get_model_dir()}")

    def is_ready(self):
        return "no answer" if hasattr(self, "asked") else not setattr(self, "asked", True)

    def finalize(self):
        raise RuntimeError("at the end")
"""
    folder = make_model(DOUBLE, more=more)
    before = list(sys.path), set(sys.modules)
    with ModelHarness(folder) as model:
        assert f"begins in {folder / '1'}" in caplog.text
        assert model.is_ready()
        with pytest.raises(ModelError, match="must return a boolean"):
            model.is_ready()
    assert "finalize failed: RuntimeError: at the end" in caplog.text
    model.close()
    with pytest.raises(PyTritonInvalidOperationError, match="closed"):
        model.infer({"x": [[1]]})
    assert [entry for entry in sys.path if entry not in before[0] and str(folder) in entry] == []
    assert {name for name in set(sys.modules) - before[1] if name.startswith("1.")} == set()


def test_each_model_imports_what_lies_beside_it(make_model: MakeModel) -> None:
    body = "import helper\nreturn [answer([[helper.VALUE]]) for _ in requests]"
    for name, value in (("first", 1), ("second", 2)):
        with ModelHarness(make_model(body, name=name, helper=f"VALUE = {value}")) as model:
            assert model.infer({"x": [[1]]})["y"].item() == value
    assert "helper" not in sys.modules


def test_a_model_that_cannot_be_loaded(make_model: MakeModel) -> None:
    more = "    def initialize(self, args):\n        raise ValueError('no')\n"
    path = list(sys.path)
    with pytest.raises(ModelError, match="ValueError: no"):
        ModelHarness(make_model(DOUBLE, more=more))
    assert [entry for entry in sys.path if entry not in path and "model" in Path(entry).parts] == []
    folder = make_model(DOUBLE, name="empty")
    (folder / "1" / "model.py").unlink()
    with pytest.raises(ModelError, match="Python model file not found"):
        ModelHarness(folder)
    (folder / "1").rmdir()
    with pytest.raises(ModelError, match="a folder for each version"):
        ModelHarness(folder)


@pytest.mark.parametrize("more", ["reshape { shape: [ 1, 1 ] }", "batch"])
def test_what_a_server_alone_has_is_refused(make_model: MakeModel, more: str) -> None:
    config = CONFIG.replace("dims: -1 }", f"dims: 1 {more} }}", 1) if more != "batch" else CONFIG + "batch_input { }\n"
    with pytest.raises(PyTritonModelConfigError, match="try the model on a server"):
        ModelHarness(make_model(DOUBLE, config))


def test_coroutines_leave_no_loop_behind(make_model: MakeModel) -> None:
    folder = make_model("pass", more=f"    async def execute(self, requests):\n        {DOUBLE}\n")
    with ModelHarness(folder) as model:
        assert model.infer({"x": [[1]]})["y"].tolist() == [[2]]
        assert any(thread.name == "pytriton-coroutines" for thread in threading.enumerate())
    assert not any(thread.name == "pytriton-coroutines" for thread in threading.enumerate())

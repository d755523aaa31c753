"""Models of type hints under real servers: threads, processes, in process, on a server of somebody else."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import pytest

from pytriton import inprocess
from pytriton.client import DecoupledModelClient, FuturesModelClient, ModelClient
from pytriton.client.exceptions import PyTritonClientInferenceServerError, PyTritonClientValueError
from pytriton.decorators import Shape, TritonContext, batch, get_model_signature, model, triton_context
from pytriton.exceptions import PyTritonInvalidOperationError, PyTritonValidationError
from pytriton.model_config import DynamicBatcher, ModelConfig, QueuePolicy, Tensor
from pytriton.triton import ProcessWorker, RemoteTriton, Triton, TritonModelLoadError
from support.process_models import Greeter, Needs, count, count_async, describe, softmax, softmax_batch
from support.serving import local_config, running, short_home
from support.waiting import PATIENCE_S

LOGITS = np.zeros((3, 2), np.float32)


@pytest.fixture(scope="module")
def triton() -> Iterator[Triton]:
    with short_home():
        triton = Triton(config=local_config())
        for function in (softmax, softmax_batch, describe, count, count_async):
            triton.bind(function)
        with running(triton):
            yield triton


def text_of(result: Any) -> str:
    return str(result["output"].item().decode())


@pytest.mark.parametrize("name", ["softmax", "softmax_batch"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_model_is_called_by_the_names_of_its_function(triton: Triton, name: str, protocol: str) -> None:
    with ModelClient(str(triton.http_url if protocol == "http" else triton.grpc_url), name) as client:
        assert client.infer_batch(logits=LOGITS)["output"].tolist() == [[0.5, 0.5]] * 3
        assert client.infer_sample(LOGITS[0])["output"].tolist() == [0.5, 0.5]
        config = client.model_config
        assert (config.max_batch_size, config.inputs[0].name, config.outputs[0].name) == (64, "logits", "output")
    assert softmax(LOGITS[0]).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_callers_read_the_words_of_the_author(triton: Triton, protocol: str) -> None:
    url = str(triton.http_url if protocol == "http" else triton.grpc_url)

    @model(name="author")
    def first(text: str, options: dict[str, Any] | None = None) -> float:
        return float(len(text))

    @model(name="author")
    def second(text: bytes, options: list[dict[str, Any]] | None = None) -> float:
        return 0.0

    def hints() -> list[str]:
        with ModelClient(url, "author") as client:
            config = client.model_config
            return [tensor.hint for tensor in (*config.inputs, *config.outputs)]

    triton.bind(first)
    try:
        assert hints() == ["str", "dict[str, Any]", "float"]
        with ModelClient(url, "author") as client:
            with pytest.raises(
                PyTritonClientValueError, match=r"expected bytes or str \(its hint is str\), received int 5\."
            ):
                client.infer_sample(5)
            with pytest.raises(PyTritonClientValueError, match=r"expected the shape \(1\), as its hint str says"):
                client.infer_sample(["a", "b"])
            with pytest.raises(PyTritonClientValueError, match=r"'text' \(str\), 'options' \(dict\[.*, optional\);"):
                client.infer_sample(txet="a")
        # Other words for the same tensors are no other model: versions of a name share them.
        triton.bind("author", second, model_version=2)
        # Triton does not load a version again that stays, and keeps the words of the first one.
        endpoint = triton._models["author", 2].endpoint(triton._workspace.endpoints_path)
        inode = endpoint.stat().st_ino
        triton.unbind("author", model_version=1)
        assert hints() == ["str", "dict[str, Any]", "float"]
        triton.bind(first)
        assert endpoint.stat().st_ino == inode
        triton.unbind("author", model_version=2)
        triton.rebind("author", second)
        assert hints() == ["bytes", "list[dict[str, Any]]", "float"]
    finally:
        triton.unbind("author")


def test_scalars_and_inputs_that_are_left_out(triton: Triton) -> None:
    with ModelClient(str(triton.http_url), "describe") as client:
        result = client.infer_sample(text=np.array(["zwölf Möwen"]), raw=np.array([b"ab"]), count=np.array([1]))
        facts = {name: array.tolist() for name, array in result.items()}
        assert facts["text"] == ["zwölf Möwen!".encode()]
        assert facts["words"] == [word.encode() for word in ("zwölf", "Möwen")]
        assert (facts["raw"], facts["number"], facts["share"], facts["known"]) == ([b"ba"], [2], [-1.0], [False])
        given = client.infer_sample(
            text=np.array(["a"]), raw=np.array([b""]), count=np.array([1]), known=np.array([False]),
            share=np.array([0.25]),
        )  # fmt: skip
        assert (given["share"].tolist(), given["known"].tolist()) == ([0.25], [True])
        with pytest.raises(PyTritonClientInferenceServerError, match="Input 'text': its hint is str, received bytes"):
            client.infer_sample(text=np.array([b"\xff"]), raw=np.array([b""]), count=np.array([1]))


@pytest.mark.parametrize("name", ["count", "count_async"])
def test_generators_stream(triton: Triton, name: str) -> None:
    with DecoupledModelClient(str(triton.grpc_url), name) as client:
        assert [result["output"].tolist() for result in client.infer_sample(np.array([3]))] == [[0], [1], [2]]


def test_values_of_an_array_that_its_hint_has_not_are_told_of(triton: Triton, caplog: pytest.LogCaptureFixture) -> None:
    @model
    def wide(x: float) -> Annotated[np.ndarray[Any, np.dtype[np.float32]], Shape(1)]:
        return np.array([x * 1e300])

    triton.bind(wide)
    try:
        with ModelClient(str(triton.http_url), "wide") as client:
            assert client.infer_sample(np.array([2.0]))["output"].tolist() == [float("inf")]
    finally:
        triton.unbind("wide")
    assert "got 2e+300 of dtype float64, which becomes inf" in caplog.text


def test_a_generator_that_is_called_per_sample_has_a_queue_limit(triton: Triton) -> None:
    started, go_on = threading.Event(), threading.Event()

    @model(batcher=DynamicBatcher(default_queue_policy=QueuePolicy(max_queue_size=1)))
    def limited(number: int) -> Iterator[int]:
        started.set()
        assert go_on.wait(PATIENCE_S)
        yield number

    def ask(number: int) -> Any:
        with DecoupledModelClient(str(triton.grpc_url), "limited", inference_timeout_s=PATIENCE_S) as client:
            return [result["output"].tolist() for result in client.infer_sample(np.array([number]))]

    triton.bind(limited)
    try:
        with ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(ask, 1)]
            assert started.wait(PATIENCE_S)
            futures += [pool.submit(ask, number) for number in (2, 3)]
            # One of the two finds the queue full; the other one waits.
            full = next(as_completed(futures[1:], PATIENCE_S))
            assert "Exceeds maximum queue size" in str(full.exception())
            go_on.set()
            served = [future.result(PATIENCE_S) for future in futures if future is not full]
        assert served in ([[[1]], [[2]]], [[[1]], [[3]]])
    finally:
        go_on.set()
        triton.unbind("limited")


def test_each_worker_has_an_object_of_the_class(triton: Triton) -> None:
    before = Greeter.made
    triton.bind([Greeter, Greeter("Hi")])
    try:
        assert Greeter.made == before + 2
        with ModelClient(str(triton.http_url), "greeter") as client:
            # Which of the two workers gets a request is the proxy's to say.
            assert text_of(client.infer_sample(np.array(["you"]))).startswith("H")
            triton.rebind("greeter", Greeter("Hi"))
            assert text_of(client.infer_sample(np.array(["you"]))) == f"Hi, you, from {os.getpid()}"
            with pytest.raises(PyTritonClientInferenceServerError, match="ValueError: nobody to greet"):
                client.infer_sample(np.array([""]))
    finally:
        triton.unbind("greeter")


def test_an_error_of_a_sample_is_that_of_its_caller_alone(triton: Triton, caplog: pytest.LogCaptureFixture) -> None:
    # Both requests are one batch: it is sent when it is full.
    batcher = DynamicBatcher(max_queue_delay_microseconds=600_000_000, preferred_batch_size=[2])
    config = replace(get_model_signature(Greeter).config, batcher=batcher, max_batch_size=2)
    triton.bind("polite", Greeter, config=config)
    try:
        with FuturesModelClient(str(triton.http_url), "polite") as client:
            good, bad = (client.infer_sample(np.array([name])) for name in ("you", ""))
            assert text_of(good.result(PATIENCE_S)).startswith("Hello, you")
            with pytest.raises(PyTritonClientInferenceServerError, match="ValueError: nobody to greet"):
                bad.result(PATIENCE_S)
    finally:
        triton.unbind("polite")
    # As that of any other callable.
    assert 'raise ValueError("nobody to greet")' in caplog.text


@pytest.mark.parametrize("target", [Greeter, "support.process_models:Greeter"])
def test_a_process_makes_the_object_and_serves_it(triton: Triton, target: Any) -> None:
    before = Greeter.made
    worker = ProcessWorker(target, ["Good morning"])
    if isinstance(target, str):
        with pytest.raises(PyTritonValidationError, match="what is named as text is not imported here"):
            triton.bind(worker)
        signature = get_model_signature(Greeter)
        triton.bind("greeter", worker, signature.inputs, signature.outputs, config=signature.config)
    else:
        triton.bind(worker)
    try:
        with ModelClient(str(triton.http_url), "greeter") as client:
            greeting, _, pid = text_of(client.infer_sample(np.array(["you"]))).rpartition(" ")
        assert greeting == "Good morning, you, from"
        assert int(pid) != os.getpid()
        assert Greeter.made == before
    finally:
        triton.unbind("greeter")


def test_a_process_serves_a_function(triton: Triton) -> None:
    triton.bind("elsewhere", ProcessWorker(softmax_batch))
    try:
        with ModelClient(str(triton.http_url), "elsewhere") as client:
            assert client.infer_batch(LOGITS)["output"].tolist() == [[0.5, 0.5]] * 3
    finally:
        triton.unbind("elsewhere")


def test_a_process_finds_another_description_than_its_hints(triton: Triton) -> None:
    inputs, outputs = [Tensor((1,), bytes, "name")], [Tensor((2,), bytes, "output")]
    worker = ProcessWorker("support.process_models:Greeter", max_crashes=1)
    with pytest.raises(
        TritonModelLoadError, match=r"outputs are output: str as BYTES\[1\]; given were output: BYTES\[2\]"
    ):
        triton.bind("wrong", worker, inputs, outputs, config=ModelConfig(max_batch_size=8))


def test_a_server_that_runs_already_serves_them(triton: Triton) -> None:
    with RemoteTriton(str(triton.http_url), access_token=triton.get_access_token()) as remote:
        remote.bind("remote", softmax)
        remote.bind(ProcessWorker(Greeter))
        with ModelClient(str(triton.http_url), "remote") as client:
            assert client.infer_batch(LOGITS)["output"].tolist() == [[0.5, 0.5]] * 3
        with ModelClient(str(triton.http_url), "greeter") as client:
            assert text_of(client.infer_sample(np.array(["you"]))).startswith("Hello, you")


def test_a_server_in_process_serves_them() -> None:
    with inprocess.Server() as server:
        server.bind(softmax_batch)
        softmax_model = server.bind("each", softmax)
        for name in ("softmax_batch", "each"):
            (response,) = server.model(name).infer(inputs={"logits": LOGITS})
            assert np.from_dlpack(response.outputs["output"]).tolist() == [[0.5, 0.5]] * 3
        assert softmax_model.name == "each"
        greeter = server.bind(Greeter("Hi"))
        (response,) = greeter.infer(inputs={"name": np.array([[b"you"]], object)})
        assert response.outputs["output"].to_bytes_array()[0][0].startswith(b"Hi, you")
        # The last one says only that there are no more.
        responses = list(server.bind(count).infer(inputs={"up_to": np.array([2])}))
        numbers = [np.from_dlpack(response.outputs["output"]).tolist() for response in responses if response.outputs]
        assert numbers == [[0], [1]]


def test_functions_find_the_configurations_of_each_other(triton: Triton) -> None:
    @model(batched=True)
    @triton_context
    def sizes(x: list[float], triton_context: TritonContext) -> list[str]:
        configs = triton_context.model_configs
        return [
            f"{configs[softmax].model_name} {configs[sizes].model_name} {configs[Greeter].max_batch_size}" for _ in x
        ]

    triton.bind(sizes)
    triton.bind(Greeter)
    try:
        with ModelClient(str(triton.http_url), "sizes") as client:
            assert text_of(client.infer_sample(1.0)) == "softmax sizes 8"
    finally:
        triton.unbind("sizes")
        triton.unbind("greeter")


def test_rebind_takes_the_hints_of_the_new_function(triton: Triton) -> None:
    triton.bind("changing", softmax)
    try:
        with ModelClient(str(triton.http_url), "changing") as client:
            assert client.infer_sample(LOGITS[0])["output"].tolist() == [0.5, 0.5]
        triton.rebind("changing", Greeter)
        with ModelClient(str(triton.http_url), "changing") as client:
            assert text_of(client.infer_sample(np.array(["you"]))).startswith("Hello, you")
    finally:
        triton.unbind("changing")


@pytest.mark.parametrize("make", [Triton, inprocess.Server])
def test_what_is_wrong_is_said_at_once(make: Callable[[], Any]) -> None:
    server = make()

    def plain(requests: Any) -> Any:
        return requests

    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((plain,), {}, r"bind\(\) of a callable alone expects one that is decorated with @model"),
        (("m", plain), {}, "Model 'm': inputs and outputs have to be said"),
        (("m", plain, [Tensor((1,), float)]), {}, "Model 'm': outputs have to be said"),
        (("m",), {}, "Model 'm': inputs and outputs have to be said"),
        ((batch(softmax),), {}, "expects one that is decorated"),
        (("m", [softmax, plain]), {}, "Model 'm': inputs and outputs have to be said"),
        (([softmax, Greeter],), {}, "the hints say that its inputs are name"),
        (("no name", softmax), {}, "Model name can only contain"),
        ((softmax,), {"config": ModelConfig(batching=False)}, "served with batching=True"),
        ((softmax,), {"config": 3}, "config has to be a ModelConfig"),
        (("m", softmax, [Tensor((1,), float, "x")]), {}, r"its inputs are logits: FP32\[-1\]; given were x"),
        (("m", softmax, 3), {}, "inputs has to be a list of Tensor"),
        ((Needs,), {}, r"Needs cannot be made without arguments \(missing a required argument: 'path'\)"),
    ]
    for arguments, options, text in wrong:
        with pytest.raises(PyTritonValidationError, match=text):
            server.bind(*arguments, **options)
    server.bind(Needs("path"))
    with pytest.raises(PyTritonInvalidOperationError, match="needs"):
        server.bind(Needs("path"))


def test_arguments_for_a_function_fail_the_worker(triton: Triton) -> None:
    with pytest.raises(TritonModelLoadError, match="softmax is a function, which serves requests itself"):
        triton.bind("args", ProcessWorker(softmax, [1], max_crashes=1))

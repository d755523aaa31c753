"""`Server` and `Model` in process: life, models from folders and from memory, modes of control, and their errors."""

from __future__ import annotations

import gc
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton import inprocess
from pytriton.inprocess import Model, ModelControlMode, Server
from pytriton.inprocess.capi import process
from pytriton.model_config import ModelConfig, Tensor
from support.callables import identity
from support.inprocess import IDENTITY_CONFIG, IDENTITY_SOURCE, chain_config, write_chain, write_identity
from support.waiting import PATIENCE_S, Held, eventually

X = np.array([[1, 2, 3]], dtype=np.float32)

# What stop() is allowed with results held.
# Longer than a test may take: a stop that waits for it is found.
LONG_S = 3600


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    write_chain(folder, "chain", "identity")
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    """A server with the model `identity` from memory, and `chain` in a folder and not loaded."""
    with Server(model_repository=str(repository), model_control_mode=ModelControlMode.EXPLICIT) as running:
        running.load("identity", config=IDENTITY_CONFIG, files={"1/model.py": IDENTITY_SOURCE})
        yield running


def answer(model: Model) -> Any:
    (response,) = model.infer(inputs={"x": X})
    return np.asarray(response.outputs["y"])


# -- life -------------------------------------------------------------------------------------------------------------


USES: list[Callable[[Server], object]] = [
    Server.live,
    Server.ready,
    Server.metadata,
    Server.models,
    Server.metrics,
    Server.poll_model_repository,
    lambda server: server.model("identity"),
    lambda server: server.load("identity"),
    lambda server: server.unload("identity"),
    lambda server: server.register_model_repository("somewhere"),
    lambda server: server.unregister_model_repository("somewhere"),
]


def test_server_that_was_never_started_refuses_everything() -> None:
    server = Server()

    for use in [*USES, Server.stop]:
        with pytest.raises(inprocess.InvalidArgumentError, match="Server not started"):
            use(server)


def test_server_can_be_stopped_twice_and_started_again() -> None:
    server = Server()
    for _ in range(2):
        assert server.start(wait_until_ready=True) is server
        assert server.live()
        assert server.ready()
        server.stop()
        server.stop()
        for use in USES:
            with pytest.raises(inprocess.InvalidArgumentError, match="Server not started"):
                use(server)


def test_second_start_is_refused_and_changes_nothing() -> None:
    with Server() as server:
        with pytest.raises(inprocess.InvalidArgumentError, match="already started"):
            server.start()
        assert server.ready()


def test_with_statement_takes_a_started_server_and_stops_it_after_an_error() -> None:
    server = Server().start()

    def fail() -> None:
        with server as entered:
            assert entered is server
            assert server.ready()
            raise KeyError("of the test")

    with pytest.raises(KeyError, match="of the test"):
        fail()
    with pytest.raises(inprocess.InvalidArgumentError, match="not started"):
        server.ready()


def test_metadata_is_of_this_server() -> None:
    with Server(server_id="mine") as server:
        metadata = server.metadata()

    assert metadata["name"] == "mine"
    assert metadata["version"].count(".") == 2
    assert "statistics" in metadata["extensions"]


def test_two_servers_do_not_share_models(server: Server) -> None:
    with Server(server_id="other") as other:
        assert not other.models()
        assert not other.model("identity").ready()
        assert server.model("identity").ready()
    assert np.array_equal(answer(server.model("identity")), X)


def test_end_of_one_server_leaves_the_others_their_memory(server: Server, tmp_path: Path) -> None:
    """Triton deletes what all servers share when it deletes one, or when one fails to start."""
    (tmp_path / "broken" / "1").mkdir(parents=True)
    server.load("chained", config=chain_config("identity"))
    try:
        with Server():
            assert np.array_equal(answer(server.model("chained")), X)
        assert np.array_equal(answer(server.model("chained")), X)
        with pytest.raises(inprocess.InternalError, match="broken"):
            Server(model_repository=tmp_path).start()
        with pytest.raises(inprocess.InternalError, match="did not start"):
            Server(cache_config={"no_such_cache": {"size": 1}}).start()
        assert np.array_equal(answer(server.model("chained")), X)
    finally:
        server.unload("chained", wait_until_unloaded=True, timeout=PATIENCE_S)


def test_second_server_with_a_cache_is_refused_with_the_reason(server: Server) -> None:
    cached = Server(cache_config={"local": {"size": 1 << 20}})
    with cached:
        pass

    # Triton keeps the cache until the server is deleted, which waits for the other one.
    with pytest.raises(inprocess.InternalError, match="one response cache"):
        cached.start()


def test_use_during_stop_is_refused_or_served() -> None:
    """No call meets a server that is being deleted: each is either answered or refused."""
    server = Server().start()
    stopped = threading.Event()
    strange: list[BaseException] = []

    def ask() -> None:
        while not stopped.is_set():
            try:
                server.ready()
                server.models()
            except (inprocess.InvalidArgumentError, inprocess.UnavailableError):
                pass
            except BaseException as error:
                strange.append(error)
                return

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            server.stop()
            server.start()
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
        server.stop()
    assert not strange


def test_dropped_server_is_reported_and_stopped() -> None:

    def drop() -> None:
        Server(server_id="dropped").start()
        gc.collect()

    with pytest.warns(ResourceWarning, match="dropped"):
        drop()

    eventually(lambda: not any(session.name == "dropped" for session in process._state.servers))


# -- models -----------------------------------------------------------------------------------------------------------


def test_model_is_not_looked_up_before_it_is_used(server: Server) -> None:
    model = server.model("nobody")

    assert (model.name, model.version, model.state, model.reason) == ("nobody", -1, None, None)
    assert not model.ready()
    for use in (Model.metadata, Model.config, Model.statistics, Model.batch_properties, Model.transaction_properties):
        with pytest.raises(inprocess.NotFoundError, match="nobody") as caught:
            use(model)
        assert caught.value.where == "model 'nobody'"
    with pytest.raises(inprocess.NotFoundError, match="nobody"):
        next(model.infer(inputs={"x": X}))


@pytest.mark.parametrize("arguments", [(1,), ("identity", "1"), ("identity", 1.0), ("identity", True), (None,)])
def test_model_checks_its_arguments(server: Server, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(inprocess.InvalidArgumentError, match="model_"):
        server.model(*arguments)


def test_model_tells_about_itself(server: Server) -> None:
    model = server.model("identity")

    assert model.ready()
    assert model.metadata()["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}]
    assert model.config()["max_batch_size"] == 8
    assert model.batch_properties() == inprocess.ModelBatchFlag.FIRST_DIM
    assert model.transaction_properties() == inprocess.ModelTxnPropertyFlag.ONE_TO_ONE
    before = model.statistics()["model_stats"][0]["inference_count"]
    answer(model)
    # Triton counts after it has sent the response.
    eventually(lambda: model.statistics()["model_stats"][0]["inference_count"] == before + 1)
    with pytest.raises(inprocess.InvalidArgumentError, match="version 2"):
        model.config(config_version=2)
    for version in ("1", -1, 1 << 32):
        with pytest.raises(inprocess.InvalidArgumentError, match="config_version"):
            model.config(version)  # type: ignore[arg-type]
    assert server.model("identity", np.int64(1)).ready()


def test_models_are_listed_by_name_and_version(server: Server) -> None:
    models = server.models()

    # "chain" has no version before it is loaded for the first time.
    assert {name for name, _ in models} >= {"identity", "chain"}
    assert repr(models["identity", 1]) == "{'name': 'identity', 'version': 1, 'state': 'READY'}"
    assert models["chain"].state != "READY"
    assert models["identity"].version == -1
    assert models["identity"] == server.model("identity")
    assert models["identity", 1] != server.model("identity")
    assert len({models["identity"], server.model("identity")}) == 1
    assert models.get("identity") == server.model("identity")
    assert models.get("nobody") is None
    names: list[object] = ["identity", ("identity", 1), "nobody", ("identity", 2), 1]
    assert [name in models for name in names] == [True, True, False, False, False]
    with pytest.raises(KeyError, match="nobody"):
        models["nobody"]
    with pytest.raises(KeyError):
        models["identity", 2]
    assert set(server.models(exclude_not_ready=True)) == {("identity", 1)}
    assert np.array_equal(answer(models["identity"]), X)


def test_request_and_fields_exclude_each_other(server: Server) -> None:
    model = server.model("identity")
    request = model.create_request(inputs={"x": X})

    with pytest.raises(inprocess.InvalidArgumentError, match="received both"):
        model.infer(request, inputs={"x": X})
    with pytest.raises(inprocess.InvalidArgumentError, match="InferenceRequest"):
        model.infer({"x": X})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="colour"):
        model.infer(inputs={"x": X}, colour="red")


# -- load and unload --------------------------------------------------------------------------------------------------


def test_model_is_loaded_from_its_folder_and_unloaded(server: Server) -> None:
    model = server.load("chain")
    assert (model.name, model.version) == ("chain", -1)
    assert server.models()["chain", 1].state == "READY"
    assert np.array_equal(answer(model), X)

    server.unload(model, wait_until_unloaded=True, timeout=PATIENCE_S)

    assert server.models()["chain", 1].state == "UNAVAILABLE"
    assert not model.ready()
    with pytest.raises(inprocess.NotFoundError):
        model.metadata()


@pytest.mark.parametrize(
    "arguments",
    [
        {"config": chain_config("identity")},
        {"config": json.dumps(chain_config("identity"))},
        {"parameters": {"config": json.dumps(chain_config("identity")), "file:1/unused": b"\0content"}},
        {"config": chain_config("identity"), "files": {"1/unused": "content", "extra/unused": b""}},
    ],
    ids=["config", "config text", "parameters", "files"],
)
def test_model_is_given_in_memory(server: Server, arguments: dict[str, Any]) -> None:
    model = server.load("memory", **arguments)
    try:
        assert np.array_equal(answer(model), X)
        assert server.models()["memory", 1].state == "READY"
        # An ensemble that is loaded later finds it.
        outer = server.load("outer", config=chain_config("memory"))
        assert np.array_equal(answer(outer), X)
    finally:
        server.unload("outer", wait_until_unloaded=True, timeout=PATIENCE_S)
        server.unload("memory", wait_until_unloaded=True, timeout=PATIENCE_S)


def test_model_in_memory_is_loaded_anew_with_another_configuration(server: Server) -> None:
    for size in (2, 3, 4):
        server.load("resized", config={**chain_config("identity"), "max_batch_size": size})
        assert server.model("resized").config()["max_batch_size"] == size
    server.unload("resized", wait_until_unloaded=True, timeout=PATIENCE_S)
    server.load("resized")
    assert server.model("resized").config()["max_batch_size"] == 4
    server.unload("resized", wait_until_unloaded=True, timeout=PATIENCE_S)


def test_configuration_can_override_that_of_a_folder(server: Server) -> None:
    server.load("chain", config={**chain_config("identity"), "name": "chain", "max_batch_size": 3})
    try:
        assert server.model("chain").config()["max_batch_size"] == 3
    finally:
        server.unload("chain", wait_until_unloaded=True, timeout=PATIENCE_S)


LOAD_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"parameters": {"config": 1.5}}, "config"),
    ({"parameters": {1: "x"}}, "parameter"),
    ({"parameters": [("config", "{}")]}, "dict"),
    ({"parameters": {"colour": "red"}}, "colour"),
    ({"parameters": {"config": "{}"}, "config": {}}, "twice"),
    ({"config": 1}, "JSON"),
    ({"config": "no JSON"}, "JSON"),
    ({"config": "[]"}, "JSON object"),
    ({"config": {"a": b"bytes"}}, "JSON"),
    ({"config": {"colour": "red"}}, "colour"),
    ({"config": {"max_batch_size": "many"}}, "max_batch_size|many"),
    ({"config": {}, "files": {"../outside": b""}}, "outside"),
    ({"config": {}, "files": {"/outside": b""}}, "outside"),
    ({"config": {}, "files": {"1/model.py": 1}}, "bytes"),
    ({"config": {}, "files": ["1/model.py"]}, "files"),
]


@pytest.mark.parametrize(("arguments", "complaint"), LOAD_ERRORS, ids=str)
def test_load_checks_its_arguments(server: Server, arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(inprocess.InvalidArgumentError, match=complaint):
        server.load("wrong", **arguments)

    assert server.models(exclude_not_ready=True).get("wrong") is None


def test_model_that_cannot_be_loaded_is_an_error(server: Server) -> None:
    with pytest.raises(inprocess.ModelNotFoundError, match="nobody") as caught:
        server.load("nobody")
    assert isinstance(caught.value, inprocess.InternalError)
    assert (caught.value.received, caught.value.where) == ("nobody", "model 'nobody'")
    with pytest.raises(inprocess.InternalError, match="log_error") as unusable:
        server.load("broken", config={})
    assert unusable.value.where == "model 'broken'"
    with pytest.raises(inprocess.TritonError, match="broken"):
        server.load("broken", config={"backend": "there_is_none"}, files={"1/file": b""})
    with pytest.raises(inprocess.InvalidArgumentError, match="model_name"):
        server.load(1)  # type: ignore[arg-type]
    assert server.model("identity").ready()


def test_unload_checks_its_argument(server: Server) -> None:
    with pytest.raises(inprocess.InvalidArgumentError, match="model"):
        server.unload(1)  # type: ignore[arg-type]
    with pytest.raises(inprocess.ModelNotFoundError, match="nobody"):
        server.unload("nobody")
    with pytest.raises(inprocess.InvalidArgumentError, match="timeout"):
        server.unload("identity", wait_until_unloaded=True, timeout="long")  # type: ignore[arg-type]
    assert server.model("identity").ready()


@pytest.mark.parametrize("wait", [{"timeout": "long"}, {"timeout": -1}, {"polling_interval": None}])
def test_start_checks_how_to_wait(wait: dict[str, Any]) -> None:
    server = Server()

    with pytest.raises(inprocess.InvalidArgumentError, match=next(iter(wait))):
        server.start(wait_until_ready=True, **wait)
    with pytest.raises(inprocess.InvalidArgumentError, match="not started"):
        server.live()


def test_repository_is_registered_with_names(server: Server, tmp_path: Path) -> None:
    write_chain(tmp_path, "folder", "identity")

    server.register_model_repository(str(tmp_path), {"folder": "renamed"})
    with pytest.raises(inprocess.AlreadyExistsError):
        server.register_model_repository(str(tmp_path))
    assert np.array_equal(answer(server.load("renamed")), X)
    server.unload("renamed", wait_until_unloaded=True, timeout=PATIENCE_S)
    server.unregister_model_repository(str(tmp_path))

    with pytest.raises(inprocess.InvalidArgumentError):
        server.unregister_model_repository(tmp_path)
    with pytest.raises(inprocess.ModelNotFoundError):
        server.load("renamed")
    with pytest.raises(inprocess.InvalidArgumentError, match="not found"):
        server.register_model_repository(str(tmp_path / "nothing"))
    with pytest.raises(inprocess.InvalidArgumentError, match="name_mapping"):
        server.register_model_repository(tmp_path, {"a": 1})  # type: ignore[dict-item]
    with pytest.raises(inprocess.InvalidArgumentError, match="name_mapping"):
        server.register_model_repository(tmp_path, 3)  # type: ignore[arg-type]
    with pytest.raises(inprocess.InvalidArgumentError, match="repository_path"):
        server.register_model_repository(3)  # type: ignore[arg-type]


# -- modes of control -------------------------------------------------------------------------------------------------


def test_without_control_all_models_are_loaded_and_stay(tmp_path: Path) -> None:
    write_identity(tmp_path, "identity")
    write_chain(tmp_path, "chain", "identity")

    with Server(model_repository=tmp_path) as server:
        assert {key: model.state for key, model in server.models().items()} == {
            ("identity", 1): "READY",
            ("chain", 1): "READY",
        }
        for use, error in (
            (lambda: server.load("identity"), inprocess.UnavailableError),
            (lambda: server.unload("identity"), inprocess.UnavailableError),
            (server.poll_model_repository, inprocess.UnavailableError),
            (lambda: server.register_model_repository(str(tmp_path)), inprocess.UnsupportedError),
            (lambda: server.unregister_model_repository(str(tmp_path)), inprocess.UnsupportedError),
        ):
            with pytest.raises(error):
                use()
        held = [next(server.model("chain").infer(inputs={"x": X + number})) for number in range(5)]
    for number, response in enumerate(held):
        assert np.array_equal(np.asarray(response.outputs["y"]), X + number)


def test_polling_loads_what_is_new_and_unloads_what_is_gone(tmp_path: Path) -> None:
    with Server(model_repository=tmp_path, model_control_mode=ModelControlMode.POLL) as server:
        assert not server.models()
        with pytest.raises(inprocess.UnavailableError, match="EXPLICIT"):
            server.load("identity")
        write_identity(tmp_path, "identity")
        assert not server.model("identity").ready()

        server.poll_model_repository()

        assert np.array_equal(answer(server.model("identity")), X)
        shutil.rmtree(tmp_path / "identity")
        server.poll_model_repository()
        eventually(lambda: not server.model("identity").ready())


def test_model_that_fails_at_the_start_fails_the_start(tmp_path: Path) -> None:
    """More than once, too: NVIDIA's package leaves the number of retries of the second start to chance."""
    folder = tmp_path / "broken" / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text('backend: "there_is_none"\n')
    server = Server(model_repository=tmp_path)

    for _ in range(3):
        with pytest.raises(inprocess.InternalError, match="there_is_none"):
            server.start()
        with pytest.raises(inprocess.InvalidArgumentError, match="not started"):
            server.live()


def test_failing_models_can_be_tolerated(tmp_path: Path) -> None:
    folder = tmp_path / "broken" / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text('backend: "there_is_none"\n')
    server = Server(model_repository=tmp_path, exit_on_error=False, strict_readiness=True)

    with server:
        assert server.live()
        assert "there_is_none" in (server.models()["broken"].reason or "")
    with pytest.raises(inprocess.UnavailableError, match="ready") as caught:
        server.start(wait_until_ready=True, polling_interval=0.01, timeout=0.1)
    assert isinstance(caught.value, TimeoutError)
    with pytest.raises(inprocess.InvalidArgumentError, match="not started"):
        server.live()


# -- stop and unload with requests in flight ---------------------------------------------------------------------------


def endless(requests: Any) -> Iterator[Any]:
    while True:
        yield [{"y": request.data["x"]} for request in requests]


TENSORS: dict[str, Any] = {
    "inputs": [Tensor(name="x", dtype=np.float32, shape=(-1,))],
    "outputs": [Tensor(name="y", dtype=np.float32, shape=(-1,))],
}


@pytest.mark.parametrize("mode", [ModelControlMode.NONE, ModelControlMode.EXPLICIT])
def test_results_outlive_the_server_and_do_not_hold_it(mode: ModelControlMode) -> None:
    """With NVIDIA's package, any output that is held keeps the server up until its exit timeout, and then fails it."""
    server = Server(model_control_mode=mode, exit_timeout=LONG_S).start()
    model = server.bind("bound", identity, **TENSORS)
    held = [next(model.infer(inputs={"x": X + number})).outputs["y"] for number in range(20)]
    arrays = [np.asarray(output) for output in held]
    unread = [model.infer(inputs={"x": X}) for _ in range(5)]

    server.stop()

    for number, (output, array) in enumerate(zip(held, arrays, strict=True)):
        assert np.array_equal(array, X + number)
        assert np.array_equal(np.from_dlpack(output), X + number)
    del unread


def test_repository_that_has_gone_does_not_hold_the_server(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    repository.mkdir()
    server = Server(model_repository=repository).start()
    shutil.rmtree(repository)

    server.stop()

    with pytest.raises(inprocess.InvalidArgumentError, match="not started"):
        server.live()


def test_request_that_never_ends_does_not_hold_the_server() -> None:
    server = Server(exit_timeout=LONG_S).start()
    model = server.bind("endless", endless, config=ModelConfig(decoupled=True, batching=False), **TENSORS)
    responses = model.infer(inputs={"x": X[0]})
    assert np.array_equal(np.asarray(next(responses).outputs["y"]), X[0])

    server.stop()

    with pytest.raises(inprocess.TritonError):
        for _ in responses:
            pass


def test_stop_that_cannot_finish_says_so_and_can_be_repeated() -> None:
    gate = Held(identity)
    server = Server(exit_timeout=1).start()
    model = server.bind("gate", gate, **TENSORS)
    responses = model.infer(inputs={"x": X})
    assert gate.entered.wait(PATIENCE_S)

    with pytest.raises(inprocess.TimedOutError, match="1 requests in flight") as caught:
        server.stop()
    assert isinstance(caught.value, TimeoutError)
    with pytest.raises(inprocess.UnavailableError, match="being stopped"):
        model.infer(inputs={"x": X})
    with pytest.raises(inprocess.UnavailableError, match="being stopped"):
        server.ready()

    gate.release.set()
    server.stop()
    with pytest.raises(inprocess.InvalidArgumentError, match="not started"):
        server.ready()
    responses.close()


def test_unload_that_takes_too_long_is_an_error() -> None:
    """NVIDIA's package says nothing then."""
    gate = Held(identity)
    with Server(model_control_mode=ModelControlMode.EXPLICIT) as server:
        model = server.bind("gate", gate, **TENSORS)
        responses = model.infer(inputs={"x": X})
        assert gate.entered.wait(PATIENCE_S)

        with pytest.raises(inprocess.TimedOutError, match="unloaded model 'gate'"):
            server.unload("gate", wait_until_unloaded=True, polling_interval=0.01, timeout=0.1)

        gate.release.set()
        assert np.array_equal(np.asarray(next(responses).outputs["y"]), X)

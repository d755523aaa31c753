"""`Triton` with real servers and real workers, asked over plain HTTP."""

import asyncio
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.exceptions import PyTritonInvalidOperationError, PyTritonUnrecoverableError, PyTritonValidationError
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.proxy_backend import EndpointError
from pytriton.triton import (
    PortInUseError,
    Triton,
    TritonConfig,
    TritonModelLoadError,
    TritonSecurityConfig,
    TritonServerExitedError,
    TritonServerStartError,
    VertextAILifecyclePolicy,
    Workspace,
)
from support.processes import in_child
from support.waiting import eventually, wait_for_threads

MakeTriton = Callable[..., Triton]

TENSORS: dict[str, Any] = {
    "inputs": [Tensor((-1,), np.float32, "x")],
    "outputs": [Tensor((-1,), np.float32, "y")],
}


def double(requests: Any) -> Any:
    return [{"y": request.data["x"] * 2} for request in requests]


def negate(requests: Any) -> Any:
    return [{"y": -request.data["x"]} for request in requests]


def call(url: str | None, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    assert url is not None
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=300)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        text = response.read().decode()
        return response.status, json.loads(text) if text.startswith(("{", "[")) else text
    finally:
        connection.close()


def infer(url: str | None, model: str, values: list[float], version: int | None = None) -> Any:
    """Gives the result, or the text of the error."""
    tensor = {"name": "x", "shape": [1, len(values)], "datatype": "FP32", "data": values}
    place = f"/v2/models/{model}" + ("" if version is None else f"/versions/{version}")
    status, answer = call(url, "POST", f"{place}/infer", {"inputs": [tensor]})
    return answer["outputs"][0]["data"] if status == 200 else answer["error"]


def server_pid(triton: Triton) -> int:
    session = triton._server
    assert session is not None
    assert session.server.process is not None
    assert session.server.process.pid is not None
    return session.server.process.pid


def home() -> list[Path]:
    folder = Path(os.environ["PYTRITON_HOME"])
    return list(folder.iterdir()) if folder.exists() else []


def workspaces() -> list[Path]:
    return [path for path in home() if path.name.startswith("server-")]


@pytest.fixture(autouse=True)
def short_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A place for the sockets, whose paths must be short; it has to be empty again in the end."""
    with tempfile.TemporaryDirectory(prefix="pt") as folder:
        monkeypatch.setenv("PYTRITON_HOME", folder)
        yield
        assert os.listdir(folder) == []


@pytest.fixture
def make_triton(local_config: TritonConfig) -> Iterator[MakeTriton]:
    made: list[Triton] = []

    def make(config: TritonConfig = local_config, **options: Any) -> Triton:
        made.append(Triton(config=config, **options))
        return made[-1]

    yield make
    for triton in made:
        triton.stop()
    # A worker or a pump that stays is a leak.
    wait_for_threads()


# ---- life ----------------------------------------------------------------------------------------------------------


def test_run_answer_stop(make_triton: MakeTriton) -> None:
    triton = make_triton()
    triton.bind("double", double, **TENSORS)
    assert not triton.is_alive()
    assert triton.http_url is None
    triton.run()
    triton.run()
    assert triton.is_alive()
    assert triton.is_connected()
    assert infer(triton.http_url, "double", [1, 2.5]) == [2, 5]
    assert triton.stop()
    assert not triton.stop()
    assert not triton.is_alive()
    assert home() == []


def test_a_server_without_models_is_alive(make_triton: MakeTriton) -> None:
    triton = make_triton()
    triton.run()
    assert triton.is_alive()


def test_models_bound_in_the_with_block_are_served_at_once(make_triton: MakeTriton) -> None:
    with make_triton() as triton:
        assert triton.is_connected()
        triton.bind("double", double, **TENSORS)
        assert infer(triton.http_url, "double", [3]) == [6]
        triton.bind("negate", negate, **TENSORS)
        assert infer(triton.http_url, "negate", [3]) == [-3]
    assert not triton.is_connected()


def test_the_vertex_policy_starts_late(make_triton: MakeTriton) -> None:
    with make_triton(triton_lifecycle_policy=VertextAILifecyclePolicy) as triton:
        assert not triton.is_connected()
        triton.bind("double", double, **TENSORS)
        triton.run()
        assert infer(triton.http_url, "double", [3]) == [6]


def test_run_again_after_stop(make_triton: MakeTriton) -> None:
    triton = make_triton()
    triton.bind("double", double, **TENSORS)
    for _ in range(2):
        triton.run()
        assert infer(triton.http_url, "double", [3]) == [6]
        assert triton.stop()


def test_a_name_is_bound_again_after_stop(make_triton: MakeTriton) -> None:
    """As in a notebook: the second one replaces the first, and the other model stays."""
    triton = make_triton()
    triton.bind("model", double, **TENSORS)
    triton.bind("other", double, **TENSORS)
    triton.run()
    assert infer(triton.http_url, "model", [3]) == [6]
    with pytest.raises(PyTritonInvalidOperationError, match="twice"):
        triton.bind("model", negate, **TENSORS)
    triton.stop()
    triton.bind("MODEL", negate, [Tensor((1,), np.float32, "x")], [Tensor((1,), np.float32, "y")])
    with pytest.raises(PyTritonInvalidOperationError, match="twice"):
        triton.bind("model", double, **TENSORS)
    triton.run()
    assert infer(triton.http_url, "MODEL", [3]) == [-3]
    assert infer(triton.http_url, "other", [3]) == [6]
    # What callables see.
    assert {config.model_name for config in triton._context.model_configs.values()} == {"MODEL", "other"}
    with pytest.raises(PyTritonInvalidOperationError, match="twice"):
        triton.bind("model", double, **TENSORS)


def test_two_servers_side_by_side(make_triton: MakeTriton) -> None:
    first, second = make_triton(), make_triton()
    first.bind("model", double, **TENSORS)
    second.bind("model", negate, **TENSORS)
    first.run()
    second.run()
    assert infer(first.http_url, "model", [3]) == [6]
    assert infer(second.http_url, "model", [3]) == [-3]
    first.stop()
    assert infer(second.http_url, "model", [3]) == [-3]


def test_a_given_workspace_is_made_and_removed(make_triton: MakeTriton, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="pt") as folder:
        path = Path(folder) / "mine"
        triton = make_triton(workspace=path)
        triton.bind("double", double, **TENSORS)
        triton.run()
        assert (path / "models" / "double" / "config.pbtxt").exists()
        with pytest.raises(FileExistsError):
            Triton(workspace=path)
        triton.stop()
        assert not path.exists()
        assert make_triton(workspace=Workspace(path)).stop() is False


def test_in_a_thread_with_a_running_event_loop(make_triton: MakeTriton) -> None:
    async def main() -> Any:
        triton = make_triton()
        triton.bind("double", double, **TENSORS)
        triton.run()
        return await asyncio.to_thread(infer, triton.http_url, "double", [3])

    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(asyncio.run(main())))
    thread.start()
    thread.join(300)
    assert results == [[6]]


def test_stop_from_another_thread_ends_serve(make_triton: MakeTriton) -> None:
    triton = make_triton()
    triton.bind("double", double, **TENSORS)
    server = threading.Thread(target=triton.serve)
    server.start()
    eventually(triton.is_alive)
    assert triton.stop()
    server.join(300)
    assert not server.is_alive()


def test_a_hung_server_does_not_hang_stop(make_triton: MakeTriton) -> None:
    triton = make_triton()
    triton.bind("double", double, **TENSORS)
    triton.run()
    os.kill(server_pid(triton), signal.SIGSTOP)
    assert triton.stop()
    assert not triton.is_alive()


def test_only_two_processes(make_triton: MakeTriton) -> None:
    triton = make_triton()
    triton.bind("double", double, **TENSORS)
    triton.run()
    assert infer(triton.http_url, "double", [3]) == [6]
    pid = server_pid(triton)
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    assert [int(child) for file in children for child in file.read_text().split()].count(pid) == 1
    assert "".join(file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children")) == ""


# ---- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "Model name cannot be empty"),
        ("a b", "Model name can only contain alphanumeric characters, dots, underscores and dashes"),
        ("a\n", "can only contain"),
        ("a/b", "can only contain"),
        ("..", "not only dots"),
    ],
)
def test_bad_names(make_triton: MakeTriton, name: str, message: str) -> None:
    with pytest.raises(PyTritonValidationError, match=message):
        make_triton().bind(name, double, **TENSORS)


def test_bad_models(make_triton: MakeTriton) -> None:
    triton = make_triton(security_config=TritonSecurityConfig(restricted_endpoints=[]))
    x, y = TENSORS["inputs"], TENSORS["outputs"]
    with pytest.raises(PyTritonValidationError, match=r"Output tensors cannot be optional\."):
        triton.bind("model", double, x, [Tensor((1,), np.int8, optional=True)])
    for wrong in (None, [], [double, 1], "double"):
        with pytest.raises(PyTritonValidationError, match="infer_func has to be a callable"):
            triton.bind("model", wrong, x, y)  # type: ignore[arg-type]
    for version in (0, -1, True, "1"):
        with pytest.raises(PyTritonValidationError, match="model_version must be an integer"):
            triton.bind("model", double, x, y, model_version=version)  # type: ignore[arg-type]
    with pytest.raises(PyTritonValidationError, match="two inputs of the name 'x'"):
        triton.bind("model", double, x + x, y)
    with pytest.raises(PyTritonValidationError, match="'INPUT_2'"):
        triton.bind("model", double, [Tensor((1,), bytes, "INPUT_2"), Tensor((1,), bytes)], y)
    with pytest.raises(PyTritonValidationError, match="must be a Tensor"):
        triton.bind("model", double, [np.float32], y)  # type: ignore[list-item]
    with pytest.raises(PyTritonValidationError, match=r"Declare shape=\(1,\)"):
        triton.bind("model", double, [Tensor((), np.float32)], y)
    triton.run()
    assert call(triton.http_url, "POST", "/v2/repository/index", {}) == (200, [])


def test_one_name_twice(make_triton: MakeTriton) -> None:
    triton = make_triton()
    triton.bind("Model", double, **TENSORS)
    with pytest.raises(PyTritonInvalidOperationError, match=r"Cannot add model with the same name twice\."):
        triton.bind("mODEL", double, **TENSORS)
    triton.bind("Model", double, **TENSORS, model_version=2)


def test_a_socket_path_that_is_too_long(make_triton: MakeTriton, tmp_path: Path) -> None:
    triton = make_triton(workspace=tmp_path / ("long" * 20))
    with pytest.raises(EndpointError, match=r"\d+ bytes, Linux allows 107"):
        triton.bind("model", double, **TENSORS)
    assert triton.is_alive() is False


def test_names_that_are_longer_than_the_path_of_a_socket(make_triton: MakeTriton) -> None:
    triton = make_triton()
    names = ["n" * 200, "n" * 199 + "m"]
    for name in names:
        triton.bind(name, double, **TENSORS)
    triton.run()
    triton.rebind(names[0], negate)
    triton.rebind(names[0], negate, config=ModelConfig(max_batch_size=8))
    assert [infer(triton.http_url, name, [3]) for name in names] == [[-3], [6]]


def test_unnamed_tensors(make_triton: MakeTriton) -> None:
    triton = make_triton()
    triton.bind("model", double, [Tensor((1,), np.int8), Tensor((2,), "int64", "b")], [Tensor((1,), bytes)])
    triton.run()
    _, metadata = call(triton.http_url, "GET", "/v2/models/model")
    assert [(tensor["name"], tensor["datatype"]) for tensor in metadata["inputs"]] == [
        ("INPUT_1", "INT8"),
        ("b", "INT64"),
    ]
    assert [(tensor["name"], tensor["datatype"]) for tensor in metadata["outputs"]] == [("OUTPUT_1", "BYTES")]


def test_what_clients_see_of_the_configuration(make_triton: MakeTriton) -> None:
    triton = make_triton()
    config = ModelConfig(max_batch_size=8, batcher=DynamicBatcher(max_queue_delay_microseconds=5))
    triton.bind("model", [double, double], **TENSORS, config=config)
    config.max_batch_size = 1
    triton.run()
    _, seen = call(triton.http_url, "GET", "/v2/models/model/config")
    assert seen["backend"] == "pytriton"
    assert seen["max_batch_size"] == 8
    assert seen["dynamic_batching"]["max_queue_delay_microseconds"] == 5
    assert [(group["kind"], group["count"]) for group in seen["instance_group"]] == [("KIND_CPU", 1)]
    assert os.environ["PYTRITON_HOME"] not in json.dumps(seen)


def test_several_callables_run_in_parallel(make_triton: MakeTriton) -> None:
    both = threading.Barrier(2)

    def first(requests: Any) -> Any:
        both.wait(300)
        return double(requests)

    def second(requests: Any) -> Any:
        both.wait(300)
        return double(requests)

    triton = make_triton()
    triton.bind("model", [first, second], **TENSORS, config=ModelConfig(batching=False))
    triton.run()
    results: list[Any] = []

    def ask() -> None:
        tensor = {"name": "x", "shape": [1], "datatype": "FP32", "data": [3]}
        results.append(call(triton.http_url, "POST", "/v2/models/model/infer", {"inputs": [tensor]})[0])

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert results == [200, 200]


def test_versions_bound_before_the_start(make_triton: MakeTriton) -> None:
    triton = make_triton()
    triton.bind("model", double, **TENSORS, model_version=1)
    triton.bind("model", negate, **TENSORS, model_version=3)
    triton.run()
    assert infer(triton.http_url, "model", [3], 1) == [6]
    assert infer(triton.http_url, "model", [3], 3) == [-3]
    assert infer(triton.http_url, "model", [3]) == [-3]


def test_a_version_bound_on_a_running_server(make_triton: MakeTriton) -> None:
    triton = make_triton()
    triton.bind("model", double, **TENSORS, model_version=1)
    triton.run()
    triton.bind("model", negate, **TENSORS, model_version=2)
    assert infer(triton.http_url, "model", [3], 1) == [6]
    assert infer(triton.http_url, "model", [3], 2) == [-3]
    assert triton.is_alive()


def test_versions_that_differ_in_their_configuration(make_triton: MakeTriton) -> None:
    triton = make_triton()
    triton.bind("model", double, **TENSORS, model_version=1)
    with pytest.raises(PyTritonInvalidOperationError, match="version 2 differs from version 1"):
        triton.bind("model", double, **TENSORS, model_version=2, config=ModelConfig(max_batch_size=9))


@pytest.fixture
def foreign_repository(tmp_path: Path) -> Path:
    """A repository with one model that no server can load."""
    folder = tmp_path / "foreign"
    (folder / "foreign" / "1").mkdir(parents=True)
    (folder / "foreign" / "config.pbtxt").write_text('name: "foreign"\nbackend: "missing"\n')
    return folder


def test_a_model_that_a_running_server_refuses(
    make_triton: MakeTriton, local_config: TritonConfig, foreign_repository: Path
) -> None:
    config = TritonConfig(model_repository=foreign_repository, exit_on_error=False).merged_over(local_config)
    triton = make_triton(config)
    triton.bind("double", double, **TENSORS)
    triton.run()
    # Two repositories have a model of this name.
    with pytest.raises(TritonModelLoadError, match="did not load model 'foreign'") as caught:
        triton.bind("foreign", double, **TENSORS)
    assert caught.value.model_name == "foreign"
    assert caught.value.reason
    assert infer(triton.http_url, "double", [3]) == [6]
    assert triton.is_alive()
    assert [path.name for path in workspaces()[0].glob("models/*")] == ["double"]
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("pytriton-foreign")]
    assert names == []


def test_a_model_that_a_starting_server_refuses(
    make_triton: MakeTriton, local_config: TritonConfig, foreign_repository: Path
) -> None:
    triton = make_triton(TritonConfig(model_repository=foreign_repository).merged_over(local_config))
    triton.bind("double", double, **TENSORS)
    with pytest.raises(TritonModelLoadError, match="unable to find backend library for backend 'missing'"):
        triton.run()
    assert not triton.is_connected()
    assert home() == []


# ---- settings ------------------------------------------------------------------------------------------------------


def test_settings_win_over_the_environment(make_triton: MakeTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTRITON_TRITON_CONFIG_ALLOW_GRPC", "false")
    monkeypatch.setenv("PYTRITON_TRITON_CONFIG_HTTP_PORT", "1")
    triton = make_triton()
    triton.run()
    assert triton.grpc_url is None
    assert triton.http_url != "http://127.0.0.1:1"


def test_a_taken_port(make_triton: MakeTriton, local_config: TritonConfig) -> None:
    first = make_triton()
    first.run()
    assert first.grpc_url is not None
    port = int(first.grpc_url.rpartition(":")[2])
    second = make_triton(TritonConfig(grpc_port=port).merged_over(local_config))
    with pytest.raises(PortInUseError, match=rf"grpc_port={port} .*process \d+ \(tritonserver\)"):
        second.run()
    assert len(workspaces()) == 1


def test_the_log_file_is_quoted_too(
    make_triton: MakeTriton, local_config: TritonConfig, tmp_path: Path, foreign_repository: Path
) -> None:
    settings = TritonConfig(log_file=tmp_path / "log", model_repository=foreign_repository, exit_on_error=True)
    triton = make_triton(settings.merged_over(local_config))
    with pytest.raises(TritonServerStartError, match=r"unable to find backend library for backend 'missing'") as caught:
        triton.run()
    assert caught.value.exit_code == 1


def test_without_http(make_triton: MakeTriton, local_config: TritonConfig) -> None:
    triton = make_triton(TritonConfig(allow_http=False).merged_over(local_config))
    triton.bind("double", double, **TENSORS)
    triton.run()
    triton.bind("negate", negate, **TENSORS)
    assert triton.is_alive()
    assert triton.http_url is None
    assert triton.grpc_url is not None
    assert triton.stop()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the certificate is made with openssl")
def test_with_tls_only(make_triton: MakeTriton, local_config: TritonConfig, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    # Made for the name that clients use, which is not the address that the controller calls.
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=model.example -addext"
    names = "subjectAltName=DNS:model.example"
    subprocess.run([*command.split(), names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    tls = TritonConfig(allow_http=False, grpc_use_ssl=True, grpc_server_cert=certificate, grpc_server_key=key)
    triton = make_triton(tls.merged_over(local_config))
    triton.bind("double", double, **TENSORS)
    triton.run()
    triton.bind("negate", negate, **TENSORS)
    assert triton.is_alive()


def test_metrics_are_there_after_run(make_triton: MakeTriton, local_config: TritonConfig) -> None:
    triton = make_triton(
        TritonConfig(allow_metrics=True, metrics_port=0, metrics_interval_ms=50).merged_over(local_config)
    )
    triton.run()
    assert triton.metrics_url is not None
    base, _, path = triton.metrics_url.rpartition("/")
    assert "nv_cpu_utilization" in call(base, "GET", "/" + path)[1]


def test_a_token_on_everything(make_triton: MakeTriton) -> None:
    security = TritonSecurityConfig(
        access_token="token",
        restricted_endpoints=["health", "metadata", "model-config", "model-repository", "inference"],
    )
    triton = make_triton(security_config=security)
    triton.bind("double", double, **TENSORS)
    triton.run()
    triton.bind("negate", negate, **TENSORS)
    assert triton.get_access_token() == "token"
    assert "restricted" in infer(triton.http_url, "double", [3])
    assert call(triton.http_url, "GET", "/v2/health/ready")[0] == 403
    assert triton.is_alive()


# ---- ends nobody wanted --------------------------------------------------------------------------------------------


def test_a_killed_server_ends_serve_with_an_error(make_triton: MakeTriton) -> None:
    triton = make_triton()
    triton.bind("double", double, **TENSORS)
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            triton.serve()
        except TritonServerExitedError as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    eventually(triton.is_alive)
    os.kill(server_pid(triton), signal.SIGKILL)
    thread.join(300)
    assert not triton.is_alive()
    (error,) = errors
    assert isinstance(error, TritonServerExitedError)
    assert error.exit_code == -signal.SIGKILL
    assert "SIGKILL" in str(error)
    assert any("Started HTTPService" in line for line in error.log_lines)


def test_serve_tells_of_a_server_that_ended_before(make_triton: MakeTriton) -> None:
    triton = make_triton()
    triton.bind("double", double, **TENSORS)
    triton.run()
    os.kill(server_pid(triton), signal.SIGKILL)
    eventually(lambda: not triton.is_connected())
    with pytest.raises(TritonServerExitedError, match=r"SIGKILL|signal 9"):
        triton.serve()
    # Told once: from here on it is as before the first start.
    triton.run()
    assert infer(triton.http_url, "double", [2.0]) == [4.0]


def test_a_killed_background_server_is_cleaned_up(make_triton: MakeTriton) -> None:
    triton = make_triton()
    triton.bind("double", double, **TENSORS)
    triton.run()
    os.kill(server_pid(triton), signal.SIGKILL)
    eventually(lambda: home() == [])
    assert not triton.is_alive()
    triton.run()
    assert infer(triton.http_url, "double", [3]) == [6]


def test_an_unrecoverable_error_answers_and_stops(make_triton: MakeTriton) -> None:
    def fail(requests: Any) -> Any:
        raise PyTritonUnrecoverableError("no further inferences possible")

    triton = make_triton()
    triton.bind("double", double, **TENSORS)
    triton.bind("fail", fail, **TENSORS)
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            triton.serve()
        except PyTritonUnrecoverableError as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    eventually(triton.is_alive)
    assert "no further inferences possible" in infer(triton.http_url, "fail", [1])
    thread.join(300)
    assert not thread.is_alive()
    assert [str(error) for error in errors] == ["no further inferences possible"]
    assert not triton.is_alive()


def test_a_server_that_does_not_start(make_triton: MakeTriton, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "server" / "bin" / "tritonserver"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho not today\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PYTRITON_TRITONSERVER_DIR", str(tmp_path / "server"))
    triton = make_triton()
    triton.bind("double", double, **TENSORS)
    with pytest.raises(TritonServerStartError, match="not today") as caught:
        triton.run()
    assert caught.value.exit_code == 9
    assert home() == []
    assert not triton.stop()


@pytest.fixture
def silent_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A server that starts and never answers; the file shows that it was started."""
    started = tmp_path / "started"
    program = tmp_path / "server" / "bin" / "tritonserver"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\ntouch {started}\nexec sleep 1000\n")
    program.chmod(0o755)
    monkeypatch.setenv("PYTRITON_TRITONSERVER_DIR", str(tmp_path / "server"))
    return started


def test_stop_ends_a_start(make_triton: MakeTriton, silent_server: Path) -> None:
    triton = make_triton()
    triton.bind("double", double, **TENSORS)
    errors: list[str] = []

    def run() -> None:
        try:
            triton.run()
        except TritonServerStartError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    eventually(silent_server.exists)
    triton.stop()
    thread.join(300)
    assert errors == ["The server was stopped from another thread while it was starting."]
    assert home() == []


def test_a_signal_ends_a_start(make_triton: MakeTriton, silent_server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    triton = make_triton()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        eventually(silent_server.exists)
        signal.pthread_kill(main, signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    triton.serve()
    thread.join(300)
    assert not triton.is_connected()
    assert home() == []
    assert signal.getsignal(signal.SIGTERM) is handler
    # It was for that start only.
    monkeypatch.delenv("PYTRITON_TRITONSERVER_DIR")
    triton.run()
    assert triton.is_alive()


def test_the_end_of_a_fork_leaves_the_server_alone(make_triton: MakeTriton) -> None:
    triton = make_triton()
    triton.bind("double", double, **TENSORS)
    triton.run()

    def child() -> None:
        # A child that ran Python's exit handlers would do the same.
        assert not triton.stop()

    in_child(child)
    assert infer(triton.http_url, "double", [3]) == [6]


def test_statistics(make_triton: MakeTriton) -> None:
    triton = make_triton()
    triton.bind("double", double, **TENSORS)
    triton.run()
    infer(triton.http_url, "double", [3])
    session = triton._server
    assert session is not None
    assert session.server.control.statistics("double", 1)["inference_count"] == 1


# ---- whole programs ------------------------------------------------------------------------------------------------

PROGRAM = """
import signal, sys, threading, time
import numpy as np
from pytriton.exceptions import PyTritonUnrecoverableError
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

def slow(requests):
    print("called", flush=True)
    time.sleep(float(sys.argv[2]))
    return [{"y": request.data["x"]} for request in requests]

def fail(requests):
    raise PyTritonUnrecoverableError("lost")

config = TritonConfig(
    http_address="127.0.0.1", grpc_address="127.0.0.1", http_port=0, grpc_port=0, allow_metrics=False,
    exit_timeout_secs=600,
)
triton = Triton(config=config)
tensors = dict(inputs=[Tensor((-1,), np.float32, "x")], outputs=[Tensor((-1,), np.float32, "y")])
triton.bind("slow", slow, **tensors)
triton.bind("fail", fail, **tensors)
mode = sys.argv[1]

def announce():
    while not triton.is_alive():
        time.sleep(0.01)
    print(triton.http_url, triton._life.session.server.process.pid, flush=True)

def handle(*_):
    print("mine", flush=True)
    triton.stop()

if mode == "forget":
    triton.run()
    announce()
else:
    if mode == "own handler":
        signal.signal(signal.SIGTERM, handle)
    # `serve` handles signals from its beginning on, so it does when the server is up.
    threading.Thread(target=announce, daemon=True).start()
    triton.serve()
    print("served", flush=True)
"""


class Program:
    def __init__(self, mode: str, slow_s: float = 1.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, mode, str(slow_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        url, pid = self.process.stdout.readline().split()
        self.url, self.server = url, int(pid)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=300)
        return self.process.returncode, out, err


@pytest.fixture
def start_program() -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def start(*arguments: Any) -> Program:
        programs.append(Program(*arguments))
        return programs[-1]

    yield start
    for program in programs:
        program.process.kill()
        program.process.communicate()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_answers_what_is_in_flight_and_exits_with_0(
    start_program: Callable[..., Program], number: signal.Signals
) -> None:
    program = start_program("serve")
    answers: list[Any] = []
    caller = threading.Thread(target=lambda: answers.append(infer(program.url, "slow", [5])))
    caller.start()
    assert program.process.stdout is not None
    assert program.process.stdout.readline() == "called\n"
    program.process.send_signal(number)
    code, out, err = program.end()
    caller.join(300)
    assert answers == [[5]]
    assert (code, out) == (0, "served\n"), err
    assert is_gone(program.server)


def test_a_second_signal_ends_the_patience(start_program: Callable[..., Program]) -> None:
    program = start_program("serve", 600.0)
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(infer(program.url, "slow", [5]))
        except (OSError, http.client.HTTPException) as error:
            answers.append(error)

    caller = threading.Thread(target=ask)
    caller.start()
    assert program.process.stdout is not None
    assert program.process.stdout.readline() == "called\n"
    # Two equal signals at once are one.
    for number in (signal.SIGINT, signal.SIGTERM):
        program.process.send_signal(number)
    code, out, err = program.end()
    caller.join(300)
    assert (code, out) == (0, "served\n"), err
    assert "SIGKILL" in err
    assert len(answers) == 1
    assert answers != [[5]]
    assert is_gone(program.server)


def test_a_handler_of_the_program_is_left_alone(start_program: Callable[..., Program]) -> None:
    program = start_program("own handler")
    program.process.send_signal(signal.SIGTERM)
    code, out, err = program.end()
    assert (code, out) == (0, "mine\nserved\n"), err


def test_the_end_of_the_interpreter_stops_the_server(start_program: Callable[..., Program]) -> None:
    program = start_program("forget")
    code, _, err = program.end()
    assert (code, err) == (0, "")
    assert is_gone(program.server)


def test_a_killed_server_ends_the_program_with_an_error(start_program: Callable[..., Program]) -> None:
    program = start_program("serve")
    os.kill(program.server, signal.SIGKILL)
    code, out, err = program.end()
    assert code == 1
    assert "TritonServerExitedError: tritonserver was killed by signal 9 (SIGKILL" in err
    assert "served" not in out


def test_an_unrecoverable_error_ends_the_program_with_an_error(start_program: Callable[..., Program]) -> None:
    program = start_program("serve")
    assert "lost" in infer(program.url, "fail", [1])
    code, _, err = program.end()
    assert code == 1
    assert "PyTritonUnrecoverableError: lost" in err


def test_a_killed_program_leaves_nothing_running(
    start_program: Callable[..., Program], make_triton: MakeTriton
) -> None:
    program = start_program("serve")
    (left,) = workspaces()
    assert len(list(left.glob("endpoints/*.sock"))) == 2
    program.process.kill()
    eventually(lambda: is_gone(program.server))
    assert list(left.glob("endpoints/*.sock")) == []
    # Its folder goes with the next start.
    triton = make_triton()
    triton.run()
    assert left not in home()

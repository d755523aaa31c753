"""A replica of Ray Serve, without a cluster: what it hands on to its Triton, and what it gives back."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import pickle
import socket
import sys
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from tritonclient.grpc import InferInput, service_pb2
from typer.testing import CliRunner

pytest.importorskip("starlette")
pytest.importorskip("httptools")

from starlette.requests import Request
from starlette.responses import Response

from pytriton.cli.app import app
from pytriton.decorators import model
from pytriton.exceptions import PyTritonBadParameterError
from pytriton.ray import application, command, serve_forever
from pytriton.ray._grpc import Message
from pytriton.ray._replica import Replica
from pytriton.triton import TritonConfig

HAS_RAY = importlib.util.find_spec("ray") is not None

Result = TypeVar("Result")


@model
class Count:
    """Made once per replica."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, text: str) -> str:
        if text == "bad":
            raise ValueError("this text is bad")
        self.calls += 1
        return f"{text} {self.calls}"


@model
def words(text: str) -> Iterator[str]:
    yield from text.split()


class Context:
    """What Ray gives a method of gRPC."""

    def __init__(self, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self.metadata = metadata
        self.code: grpc.StatusCode | None = None
        self.details = ""

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self.metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details


class Asked:
    """A replica, and the loop that it runs in."""

    def __init__(self, replica: Replica, loop: asyncio.AbstractEventLoop) -> None:
        self.replica = replica
        self.loop = loop

    def wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self.loop.run_until_complete(work)

    def grpc(self, method: str, request: Any, context: Context | None = None) -> Any:
        """Call a method as Ray's proxy for gRPC does."""
        # Between the processes of Ray they are pickled.
        sent = pickle.loads(pickle.dumps(Message(request.SerializeToString())))
        answer = self.wait(getattr(self.replica, method)(sent, context or Context()))
        return getattr(service_pb2, f"{method}Response").FromString(answer.SerializeToString())

    def http(
        self, method: str, path: str, body: bytes = b"", headers: Sequence[tuple[bytes, bytes]] = (), prefix: str = ""
    ) -> tuple[int, dict[str, str], bytes]:
        """Send an HTTP request as Ray's proxy hands it over; gives status, headers and body of the answer."""
        return self.wait(self._http(method, path, body, headers, prefix))

    async def _http(
        self, method: str, path: str, body: bytes, headers: Sequence[tuple[bytes, bytes]], prefix: str
    ) -> tuple[int, dict[str, str], bytes]:
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "method": method,
            "headers": [*headers, (b"host", b"cluster:8000"), (b"connection", b"keep-alive")],
            "path": f"{prefix}{path}",
            "root_path": prefix,
            "query_string": query.encode(),
            "scheme": "http",
            "server": ("cluster", 8000),
        }
        received = iter([{"type": "http.request", "body": body, "more_body": False}])
        over = asyncio.Event()

        async def receive() -> Any:
            for message in received:
                return message
            await over.wait()
            return {"type": "http.disconnect"}

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        answer: Response = await self.replica(Request(scope, receive))
        await answer(scope, receive, send)
        over.set()
        found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], found, b"".join(message.get("body", b"") for message in sent[1:])


@pytest.fixture(params=["asyncio", "uvloop"])
def asked(request: pytest.FixtureRequest) -> Iterator[Asked]:
    # Ray takes uvloop where it is installed.
    loop = asyncio.new_event_loop() if request.param == "asyncio" else pytest.importorskip("uvloop").new_event_loop()
    # As Ray makes it.
    replica = Replica.__new__(Replica)
    made: Any = replica.__init__([Count, words], TritonConfig(http_port=1, grpc_address="0.0.0.0"))  # type: ignore
    loop.run_until_complete(made)
    try:
        yield Asked(replica, loop)
    finally:
        loop.run_until_complete(replica.close())
        loop.close()


def test_http_is_handed_on_as_it_is(asked: Asked) -> None:
    status, headers, body = asked.http("GET", "/v2/models/Count")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(body)["name"] == "Count"
    assert asked.http("GET", "/v2/health/ready")[0] == 200
    # Below a prefix of the application, and with a query.
    assert asked.http("GET", "/v2/models/words/ready?a=b%20c", prefix="/app")[0] == 200

    ask = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}
    status, headers, body = asked.http("POST", "/v2/models/Count/infer", json.dumps(ask).encode())
    assert status == 200
    assert json.loads(body)["outputs"][0]["data"] == ["a 1"]
    status, _, body = asked.http("POST", "/v2/models/Count/generate", b'{"text": "b"}')
    assert (status, json.loads(body)["output"]) == (200, "b 2")


def test_binary_tensors_go_both_ways(asked: Asked) -> None:
    text = json.dumps(
        {
            "inputs": [
                {"name": "text", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}},
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    length = (b"inference-header-content-length", str(len(text)).encode())
    status, headers, body = asked.http("POST", "/v2/models/Count/infer", text + b"\1\0\0\0a", [length])
    assert status == 200
    assert body[int(headers["inference-header-content-length"]) :] == b"\3\0\0\0a 1"


def test_streams_come_in_parts(asked: Asked) -> None:
    status, headers, body = asked.http("POST", "/v2/models/words/generate_stream", b'{"text": "to be or"}')
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    events = [json.loads(line.removeprefix(b"data: ")) for line in body.splitlines() if line]
    assert [event["output"] for event in events] == ["to", "be", "or"]


def test_errors_are_those_of_triton(asked: Asked) -> None:
    status, _, body = asked.http("POST", "/v2/models/Count/generate", b'{"text": "bad"}')
    assert status >= 400
    assert "this text is bad" in json.loads(body)["error"]
    status, _, body = asked.http("POST", "/v2/models/none/infer", b"{}")
    assert status in (400, 404)
    assert "none" in json.loads(body)["error"]
    # A replica is not to be changed by itself.
    assert asked.http("POST", "/v2/repository/models/Count/unload", b"{}")[0] == 403


def test_grpc_is_handed_on_with_its_errors(asked: Asked) -> None:
    assert asked.grpc("ServerReady", service_pb2.ServerReadyRequest()).ready
    metadata = service_pb2.ModelMetadataRequest(name="Count")
    assert asked.grpc("ModelMetadata", metadata).name == "Count"

    def request(text: str) -> Any:
        tensor = InferInput("text", [1], "BYTES").set_data_from_numpy(np.array([text.encode()], object))
        return service_pb2.ModelInferRequest(
            model_name="Count", inputs=[tensor._get_tensor()], raw_input_contents=[tensor._get_content()]
        )

    answer = asked.grpc("ModelInfer", request("a"), Context([("triton-custom", "1")]))
    assert answer.raw_output_contents[0] == b"\3\0\0\0a 1"
    context = Context()
    with pytest.raises(grpc.aio.AioRpcError):
        asked.grpc("ModelInfer", request("bad"), context)
    assert context.code is not None
    assert "this text is bad" in context.details


def test_a_replica_whose_triton_has_ended_is_unhealthy_and_says_so(asked: Asked) -> None:
    asked.wait(asked.replica.check_health())
    asked.replica._triton.stop()
    with pytest.raises(RuntimeError, match="has ended"):
        asked.wait(asked.replica.check_health())
    status, _, body = asked.http("GET", "/v2/health/ready")
    assert status == 503
    assert "does not answer" in json.loads(body)["error"]


APP = """
from pytriton.decorators import model
from pytriton.triton import Triton

@model
def shout(text: str) -> str:
    return text.upper()

def own():
    return Triton()
"""


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["app.py", "--ray", "local", "--check"], 0, "app.py can be served."),
        (
            ["app.py", "--ray", "local", "--workers", "2", "--reload", "--console"],
            2,
            "--console, --reload, --workers: not together with --ray",
        ),
        (["app.py:own", "--ray", "local"], 2, "name a file or models under @model"),
        (["app.py", "--replicas", "2"], 2, "--replicas is for --ray"),
        (["none.py", "--ray", "local"], 1, "none.py"),
    ],
)
def test_what_cannot_be_served_on_ray_is_told_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(command, "find_spec", lambda _: object())
    Path("app.py").write_text(APP)
    done = CliRunner().invoke(app, ["serve", *arguments], env={"COLUMNS": "300"})
    assert done.exit_code == code, done.output
    assert said in done.output.replace("\n", " ")


def test_without_ray_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    done = CliRunner().invoke(app, ["serve", "app.py", "--ray", "local"], env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert 'pip install "pytriton-server[ray]"' in done.output


UNSENDABLE = """
import threading

from pytriton.decorators import model

lock = threading.Lock()

@model
def locked(text: str) -> str:
    with lock:
        return text
"""


@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray
def test_what_cannot_be_sent_is_imported_where_it_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import cloudpickle

    sent: list[bytes] = []
    dumps: Any = cloudpickle.dumps
    monkeypatch.setattr("pytriton.ray.serve_forever", lambda made, **_: sent.append(dumps(made)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("sendable_app.py").write_text(APP)
    Path("locked_app.py").write_text(UNSENDABLE)
    try:
        for target, code in (("sendable_app.py", 0), ("locked_app.py", 1), ("locked_app", 0)):
            done = CliRunner().invoke(app, ["serve", target, "--ray", "local"])
            assert done.exit_code == code, (target, done.output, done.exception)
            assert ("locked_app.py cannot be sent to the replicas (TypeError: " in done.stderr) == bool(code)
    finally:
        sys.modules.pop("locked_app", None)
    by_value, by_name = sent
    assert b"upper" in by_value
    assert b"locked_app" in by_name


@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray
def test_a_cluster_that_is_not_there_is_told_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(address: str) -> None:
        raise ConnectionError(f"Could not find {address}.")

    # The real one finds any cluster of this machine.
    monkeypatch.setattr("ray.init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("app.py").write_text(APP)
    done = CliRunner().invoke(app, ["serve", "app.py", "--ray", "auto"])
    told = "Error: --ray auto: Could not find auto. With --ray local it is started here.\n"
    assert (done.exit_code, done.stderr) == (1, told)


@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray
@pytest.mark.parametrize("where", ["{}", "ray://{}", "auto"])
def test_an_address_where_nothing_listens_is_told_before_ray_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # and does not listen
        at = f"127.0.0.1:{holder.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", at if where == "auto" else "")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [*sys.path])
        Path("app.py").write_text(APP)
        done = CliRunner().invoke(app, ["serve", "app.py", "--ray", where.format(at)])
    assert done.exit_code == 1, done.output
    prefix = f"Error: --ray {where.format(at)}: {'RAY_ADDRESS: ' if where == 'auto' else ''}"
    assert done.stderr.startswith(f"{prefix}expected a cluster at {at}, where nothing listens (")
    assert "`ray start --head` starts one" in done.stderr


@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray
def test_serve_forever_asks_for_the_application_where_it_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr("ray.init", lambda address: done.append(address))
    monkeypatch.setattr("ray.serve.start", lambda **_: None)
    monkeypatch.setattr("ray.serve.run", lambda made, blocking: done.append((made, blocking)))
    made = application(words)

    def make() -> Any:
        done.append("asked for")
        return made

    serve_forever(make)
    serve_forever(made, address="auto")
    # Not any cluster that is there, unless it is asked for.
    assert done == ["local", "asked for", (made, True), "auto", (made, True)]


@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray
def test_replicas_share_a_loop_with_ray_and_keep_the_runtime_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def environment(**options: Any) -> Any:
        made: Any = application(words, **options)
        return made._bound_deployment.ray_actor_options.get("runtime_env")

    shared = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
    job = {"working_dir": "gcs://a.zip", "env_vars": {"A": "1"}}
    # Before there is a connection, the job's is not known, which it would take the place of.
    assert environment() is None
    own = environment(ray_actor_options={"num_cpus": 1, "runtime_env": {"env_vars": {"B": "2"}}})
    assert own == {"env_vars": {**shared, "B": "2"}}
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(runtime_env=job))
    assert environment() == {"working_dir": "gcs://a.zip", "env_vars": {**shared, "A": "1"}}
    job["env_vars"] = dict.fromkeys(shared, "1")
    assert environment()["env_vars"] == dict.fromkeys(shared, "1")


@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray
def test_an_application_is_a_deployment_with_rays_options() -> None:
    made: Any = application([Count, words], num_replicas=2, max_ongoing_requests=7, health_check_period_s=3)
    deployment = made._bound_deployment
    assert (deployment.name, deployment.num_replicas, deployment.max_ongoing_requests) == ("triton", 2, 7)
    assert deployment._deployment_config.health_check_period_s == 3
    made = application(words, autoscaling_config={"min_replicas": 1, "max_replicas": 3}, name="other")
    assert made._bound_deployment.name == "other"
    assert made._bound_deployment._deployment_config.autoscaling_config.max_replicas == 3
    made = application(words, num_replicas="auto", autoscaling_config={"max_replicas": 5})
    assert made._bound_deployment._deployment_config.autoscaling_config.max_replicas == 5


@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray
@pytest.mark.parametrize(
    ("models", "options", "error", "said"),
    [
        ([], {}, TypeError, "got none"),
        (len, {}, PyTritonBadParameterError, "is no model"),
        (words, {"config": {"http_port": 1}}, TypeError, "config: expected a TritonConfig, got dict"),
        (words, {"num_replicas": 0}, ValueError, 'num_replicas: expected a number from 1 on or "auto", got 0'),
        (words, {"num_replicas": "many"}, ValueError, "got 'many'"),
        (words, {"max_ongoing_requests": 0}, ValueError, "max_ongoing_requests: expected a number from 1 on, got 0"),
        (words, {"num_replicas": 2, "autoscaling_config": {}}, ValueError, "num_replicas=2 and autoscaling_config"),
        (words, {"autoscaling_config": {"max": 2}}, ValueError, "autoscaling_config: max: not known to this Ray"),
        (words, {"autoscaling_config": {"max_replicas": -1}}, ValueError, "autoscaling_config: .*max_replicas"),
        (words, {"autoscaling_config": {"min_replicas": 3, "max_replicas": 2}}, ValueError, "autoscaling_config: "),
        (words, {"user_config": {"a": 1}}, TypeError, "user_config: not an option"),
        (words, {"replicas": 2}, TypeError, "replicas: not an option"),
        (words, {"health_check_period_s": -1}, ValueError, "health_check_period_s"),
    ],
)
def test_what_cannot_be_deployed_is_told_before_it_is(
    models: Any, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=f"(?s){said}"):
        application(models, **options)

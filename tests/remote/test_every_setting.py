"""Every declared setting of a proxy is obeyed, or refused by name, by drop-in models of both kinds and by a `model.py`.

`test_options.py` does the same for the arguments of `bind`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

from pytriton.proxy_backend.cli.app import run as run_command
from pytriton.proxy_backend.settings import ProxySettings, PythonProxySettings
from pytriton.proxy_backend.wire.settings import ServingSettings, SettingField, setting_fields
from pytriton.triton import Triton
from support.faults.plain_server import PlainServer, plain_server
from support.http import infer
from support.python_models import TENSORS, ask, hosts, served, write
from support.python_models.python_backend import why_no_python_backend
from support.waiting import PATIENCE_S, eventually

SLOW, DIE, IDLE, COUNT = 14.0, 13.0, 15.0, 16.0
SHORT_S = 0.25

BEHAVIOUR = f"""
import gc
import itertools
import os
import time

import numpy as np

numbers = itertools.count()


def act(x):
    value = float(x.flat[0])
    if value == {SLOW}:
        time.sleep(1.0)
    if value == {DIE}:
        os._exit(3)
    if value == {IDLE}:
        told = [each.arena_idle_s for each in gc.get_objects() if type(each).__name__ == "Welcome"]
        return np.full_like(x[:, :1], told[0])
    if value == {COUNT}:
        return np.full_like(x, next(numbers))
    return 2 * x


def infer(requests):
    return [{{"y": act(request["x"])}} for request in requests]
"""
MODEL = f"""{BEHAVIOUR}
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        # The one that comes after the first waits for its file.
        begun, goes_on = (os.path.join(args["model_repository"], name) for name in ("begun", "goes_on"))
        while os.path.exists(begun) and not os.path.exists(goes_on):
            time.sleep(0.01)
        open(begun, "w").close()

    def execute(self, requests):
        read = pb_utils.get_input_tensor_by_name
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", act(read(request, "x").as_numpy()))])
            for request in requests
        ]
"""
names = (f"m{number}" for number in itertools.count())


class RefusedError(Exception):
    """A model is not added, or not loaded; the text says why."""


class Way(Protocol):
    """One way to serve."""

    url: str | None

    def add(self, **settings: Any) -> str:
        """Add a model with settings, and load it; return its name."""

    def without_worker(self, name: str) -> None:
        """See to it that no worker is attached to a model."""

    def worker(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Attach a worker for a block."""

    def parameter(self, field: SettingField) -> str:
        """Return what sets a setting of the other proxy here, and what an error has to name."""


class DropIn:
    """A model folder that `pytriton-proxy-backend add` writes, and a worker in a process of its own."""

    def __init__(self, flavour: str, server: PlainServer, repository: Path, sockets: Path) -> None:
        self.url: str | None = server.url
        self.flavour = flavour
        self._server, self._repository, self._sockets = server, repository, sockets

    def add(self, **settings: Any) -> str:
        name = next(names)
        kind = ProxySettings if self.flavour == "native" else PythonProxySettings
        fields = {each.name: each for each in (*setting_fields(ProxySettings), *setting_fields(PythonProxySettings))}
        options: list[str] = []
        for setting, value in settings.items():
            option = fields[setting].about.option
            options += [] if not option else [option] if value is True else [option, str(value)]
        told = io.StringIO()
        with contextlib.redirect_stderr(told), pytest.raises(SystemExit) as ended:
            run_command([
                "add", "--flavour", self.flavour, "--model-repository", str(self._repository), "--name", name,
                "--endpoint", str(self._sockets), "--input", "x:float32:-1", "--output", "y:float32:-1", *options,
            ])  # fmt: skip
        if ended.value.code:
            raise RefusedError(told.getvalue())
        for setting, value in settings.items():
            if not fields[setting].about.option:
                assert setting in {each.name for each in setting_fields(kind)}
                self._edit(name, fields[setting], value)
        status, text = self._server.load(name)
        if status != 200:
            raise RefusedError(str(text))
        return name

    def _edit(self, name: str, field: SettingField, value: Any) -> None:
        folder = self._repository / name / "1"
        if self.flavour == "native":
            with (folder / "pytriton.conf").open("a") as file:
                file.write(f"{field.key} = {field.to_conf(value)}\n")
        else:
            path = folder / "pytriton-proxy.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), field.name: value}))

    def conf(self, name: str) -> list[str]:
        """Return the lines of the file with the settings."""
        return (self._repository / name / "1" / "pytriton.conf").read_text().splitlines()

    def without_worker(self, name: str) -> None:
        """There is none."""

    @contextlib.contextmanager
    def worker(self, name: str) -> Iterator[object]:
        suffix = "zmq" if self.flavour == "python" else "sock"
        endpoint = f"{self._sockets}/{name}.1.{suffix}"
        (self._repository.parent / "behaviour.py").write_text(BEHAVIOUR)
        process = subprocess.Popen(
            [
                sys.executable, "-m", "pytriton.proxy_backend", "worker", "behaviour:infer",
                "--endpoint", f"ipc://{endpoint}" if self.flavour == "python" else endpoint,
                "--description", str(self._repository / name / "1" / "pytriton.json"),
            ],
            cwd=self._repository.parent,
        )  # fmt: skip
        try:
            eventually(lambda: self._server.call("GET", f"/v2/models/{name}/ready")[0] == 200)
            eventually(lambda: infer(self.url, name, 1.0) == [2.0])
            yield process
        finally:
            process.kill()
            process.wait(PATIENCE_S)

    def parameter(self, field: SettingField) -> str:
        return field.about.option


class ModelPy:
    """A `model.py` on workers, whose settings are parameters of its `config.pbtxt`."""

    def __init__(self, triton: Triton, repository: Path) -> None:
        self._triton, self._repository = triton, repository
        self._loaded: list[str] = []
        self.url = triton.http_url

    def add(self, **settings: Any) -> str:
        name = next(names)
        fields = {each.name: each for each in (*setting_fields(ProxySettings), *setting_fields(PythonProxySettings))}
        config = f'backend: "python"\nmax_batch_size: 4\n{TENSORS}'
        for setting, value in settings.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            key = self.parameter(fields[setting])
            config += f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}\n'
        write(self._repository, name, MODEL, config)
        status, text = ask(self._triton, "load", name)
        if status != 200:
            raise RefusedError(str(text))
        self._loaded.append(name)
        return name

    def unload_all(self) -> None:
        """Unload what was added, and wait for the ends of the hosts."""
        while self._loaded:
            assert ask(self._triton, "unload", self._loaded.pop())[0] == 200
        eventually(lambda: not hosts())

    def without_worker(self, name: str) -> None:
        """End the host. The next one waits."""
        eventually(lambda: infer(self.url, name, 1.0) == [2.0])
        assert "lost" in infer(self.url, name, DIE)
        (self._repository / name / "ended").touch()

    @contextlib.contextmanager
    def worker(self, name: str) -> Iterator[object]:
        try:
            # It may have been ended by `without_worker`.
            if not (self._repository / name / "ended").exists():
                eventually(lambda: infer(self.url, name, 1.0) == [2.0])
            yield None
        finally:
            (self._repository / name / "goes_on").touch()

    def parameter(self, field: SettingField) -> str:
        return "PYTRITON_RESPONSE_CACHE_BYTES" if field.name == "cache_bytes" else field.parameter


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("settings") / "models"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def plain(repository: Path) -> Iterator[tuple[PlainServer, Path]]:
    prefix = f"--backend-config=python,shm-region-prefix-name=pt{repository.parent.name}"
    with (
        tempfile.TemporaryDirectory(prefix="pt") as sockets,
        plain_server(repository.parent, repository, "--model-control-mode=explicit", prefix) as server,
    ):
        yield server, Path(sockets)


@pytest.fixture(scope="module")
def of_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelPy]:
    folder = tmp_path_factory.mktemp("model_py")
    with served(folder, model_control_mode="explicit") as triton:
        yield ModelPy(triton, folder)


@pytest.fixture(params=["native", "python", "model.py"])
def way(
    request: pytest.FixtureRequest, plain: tuple[PlainServer, Path], of_python: ModelPy, repository: Path
) -> Iterator[Way]:
    if request.param == "model.py":
        yield of_python
        of_python.unload_all()
        return
    if request.param == "python" and why_no_python_backend():
        pytest.skip(why_no_python_backend())
    server, sockets = plain
    yield DropIn(request.param, server, repository, sockets)


# ---- what shows that a setting is obeyed -----------------------------------------------------------------------------


def attach_timeout_s(way: Way) -> None:
    name = way.add(attach_timeout_s=SHORT_S)
    way.without_worker(name)
    told = infer(way.url, name, 1.0)
    assert "no worker is attached. Waited" in told
    assert "250 ms" in told or "0.25 s" in told
    with way.worker(name):
        pass


def arena_budget_bytes(way: Way) -> None:
    name = way.add(arena_budget_bytes=1 << 18)
    with way.worker(name):
        assert "arena_budget_bytes" in infer(way.url, name, *[1.0] * (1 << 17))
        assert infer(way.url, name, 1.0) == [2.0]


def arena_idle_s(way: Way) -> None:
    name = way.add(arena_idle_s=7.0)
    with way.worker(name):
        assert infer(way.url, name, IDLE) == [7.0]


def execution_timeout_s(way: Way) -> None:
    name = way.add(execution_timeout_s=SHORT_S)
    with way.worker(name):
        assert "execution timeout" in infer(way.url, name, SLOW)
        eventually(lambda: infer(way.url, name, 1.0) == [2.0])


def repeatable(way: Way) -> None:
    for is_repeatable, text in ((True, "No other worker attached"), (False, "may have been carried out")):
        name = way.add(attach_timeout_s=SHORT_S, **({"repeatable": True} if is_repeatable else {}))
        with way.worker(name):
            told = infer(way.url, name, DIE)
            assert "was lost while it worked on this request" in told
            assert text in told


def cache_bytes(way: Way) -> None:
    if isinstance(way, DropIn) and way.flavour == "python":
        with pytest.raises(RefusedError, match="the Python proxy keeps no answers"):
            way.add(cache_bytes=1 << 20)
        return
    name = way.add(cache_bytes=1 << 20)
    with way.worker(name):
        assert infer(way.url, name, COUNT) == infer(way.url, name, COUNT)
    name = way.add()
    with way.worker(name):
        assert infer(way.url, name, COUNT) != infer(way.url, name, COUNT)


def _of_streams(way: Way, setting: str, value: float, line: str) -> None:
    """What the setting does is tried in tests/streaming, where models have streams."""
    if isinstance(way, DropIn) and way.flavour == "python":
        with pytest.raises(RefusedError, match="the Python proxy does not see how fast"):
            way.add(**{setting: value})
        return
    name = way.add(**{setting: value})
    with way.worker(name):
        assert infer(way.url, name, 1.0) == [2.0]
    if isinstance(way, DropIn):
        assert line in way.conf(name)


def stream_backlog_bytes(way: Way) -> None:
    _of_streams(way, "stream_backlog_bytes", 8192, "stream_backlog_bytes = 8192")


def stream_stall_timeout_s(way: Way) -> None:
    _of_streams(way, "stream_stall_timeout_s", 2.5, "stream_stall_timeout_ms = 2500")


CHECKS: Mapping[str, Callable[[Way], None]] = {
    check.__name__: check
    for check in (
        attach_timeout_s, arena_budget_bytes, arena_idle_s, execution_timeout_s, repeatable, cache_bytes,
        stream_backlog_bytes, stream_stall_timeout_s,
    )
}  # fmt: skip
# What follows from the model, its configuration or where it is. Those of costs follow from a `Cost`; those of a
# `model.py` are in tests/python_models/test_cost.py, because they need an input of any shape.
OF_THE_MODEL = {
    *("endpoint", "batching", "decoupled", "max_waiting", "ignores_parameters", "tensors_digest", "address"),
    *("cost_limit", "cost_overhead", "cost_packed", "cost_alone", "cost_alike"),
}
OF_PYTHON_PROXY = {"link_timeout_s": 1.0, "secret_key_file": "/key", "workers_keys_dir": "/keys", "insecure": True}


def test_every_setting_has_its_check() -> None:
    declared = {each.name for each in (*setting_fields(ProxySettings), *setting_fields(PythonProxySettings))}
    assert declared == {*CHECKS, *OF_THE_MODEL, *OF_PYTHON_PROXY}
    assert {each.name for each in setting_fields(ServingSettings)} <= CHECKS.keys()


@pytest.mark.parametrize("setting", CHECKS)
def test_a_setting_is_obeyed_or_refused_by_name(setting: str, way: Way) -> None:
    CHECKS[setting](way)


@pytest.mark.parametrize("setting", OF_PYTHON_PROXY)
def test_what_the_python_proxy_alone_has_is_refused_elsewhere(setting: str, way: Way) -> None:
    if isinstance(way, DropIn) and way.flavour == "python":
        return
    with pytest.raises(RefusedError) as caught:
        way.add(**{setting: OF_PYTHON_PROXY[setting]})
    field = next(each for each in setting_fields(PythonProxySettings) if each.name == setting)
    assert way.parameter(field) in str(caught.value) or "for --flavour python" in str(caught.value)


def test_a_parameter_with_a_wrong_value_is_refused_by_name(of_python: ModelPy) -> None:
    for setting, value, rule in (
        ("execution_timeout_s", "soon", "must be a number of seconds"),
        ("execution_timeout_s", "-1", "must be a number from 0.001"),
        ("arena_budget_bytes", "1.5", "must be a whole number"),
        ("repeatable", "yes", "must be true or false"),
    ):
        with pytest.raises(RefusedError, match=f"parameter PYTRITON_{setting.upper()}: .*{rule}"):
            of_python.add(**{setting: value})

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from importlib import resources
from types import ModuleType

import pytest

import pytriton.client
from pytriton.client.client import DEFAULT_INFERENCE_TIMEOUT_S, BaseModelClient, ModelClient
from pytriton.client.exceptions import PyTritonClientTimeoutError

PUBLIC = ["asyncio_utils", "auth", "client", "exceptions", "utils", "warnings"]


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


HEAVY = "{'gevent', 'grpc', 'tritonclient', 'google', 'geventhttpclient', 'aiohttp'}"
LOADED = f"import sys; print(sorted({HEAVY} & {{name.partition('.')[0] for name in sys.modules}}))"


@pytest.mark.parametrize("module", ["", *(f".{name}" for name in PUBLIC)])
def test_import_is_light(module: str) -> None:
    # google is a namespace that a .pth file may create at start, so it is compared with a bare interpreter.
    assert run(f"import pytriton.client{module}; {LOADED}") == run(LOADED)


@pytest.mark.parametrize("name", ["gevent.monkey", "eventlet.patcher", "opentelemetry.trace"])
@pytest.mark.parametrize("url", ["http://localhost:9", "grpc://localhost:9"])
def test_a_module_that_another_thread_is_importing(name: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there, and has nothing in it yet."""
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with ModelClient(url, "m", init_timeout_s=0.2) as client, pytest.raises(PyTritonClientTimeoutError):
        client.infer_sample(1.0)


@pytest.mark.parametrize(
    ("url", "brought"), [("http://localhost", "{'google'}"), ("grpc://localhost", "{'google', 'grpc', 'tritonclient'}")]
)
def test_a_client_imports_its_own_protocol_only(url: str, brought: str) -> None:
    names = ("ModelClient", "DecoupledModelClient", "FuturesModelClient")
    code = "import pytriton.client, sys; "
    code += "; ".join(f"pytriton.client.{name}({url!r}, 'm').close()" for name in names)
    loaded = f"{HEAVY} & {{name.partition('.')[0] for name in sys.modules}} <= {brought}"
    assert run(f"{code}; print({loaded})") == "True\n"


def test_the_import_path_needs_nothing_of_linux() -> None:
    """What other systems lack is taken away first, and the import goes through."""
    code = """
import socket, ssl, sys, threading  # of the standard library, which knows on which system it is
import numpy
import pickle, queue, http.client, concurrent.futures, asyncio  # likewise

for name in ("fcntl", "grp", "pwd", "resource", "termios", "syslog", "_posixshmem", "_posixsubprocess", "readline"):
    sys.modules[name] = None  # makes its import fail
import os, signal
for module, names in (
    (os, ("fork", "forkpty", "register_at_fork", "memfd_create", "sched_getaffinity", "getuid", "eventfd", "sendfile")),
    (signal, ("SIGKILL", "SIGHUP", "pthread_sigmask")),
    (socket, ("AF_UNIX", "SCM_RIGHTS", "MSG_DONTWAIT", "MSG_NOSIGNAL", "SO_PEERCRED", "SO_REUSEPORT", "recv_fds")),
):
    for name in names:
        module.__dict__.pop(name, None)
sys.platform = "win32"
import pytriton.client, pytriton.client.utils, pytriton.client.asyncio_utils, pytriton.client.auth
import pytriton.client.client, pytriton.client.exceptions, pytriton.client.warnings
import pytriton.client._http.pool, pytriton.client._http.transport
for name in pytriton.client.__all__:
    getattr(pytriton.client, name)
with pytriton.client.ModelClient("localhost", "m"), pytriton.client.DecoupledModelClient("localhost", "m"):
    print("imported")
"""
    assert run(code) == "imported\n"


@pytest.mark.parametrize("name", ["pytriton.client", *(f"pytriton.client.{name}" for name in PUBLIC)])
def test_all_names_are_there(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__all__
    assert all(hasattr(module, item) for item in module.__all__)


@pytest.mark.parametrize("name", ["pytriton.client", "pytriton.client.client"])
def test_nothing_else_is_there(name: str) -> None:
    contents = vars(importlib.import_module(name))
    public = {key for key, value in contents.items() if not key.startswith("_") and not isinstance(value, ModuleType)}
    assert public - {"annotations"} == set(contents["__all__"])


def test_public_modules_are_those_promised() -> None:
    found = [item.name for item in pkgutil.iter_modules(pytriton.client.__path__) if not item.name.startswith("_")]
    assert sorted(found) == sorted([*PUBLIC, "management"])  # which is for sibling distributions
    assert resources.files("pytriton.client").joinpath("py.typed").is_file()


def test_names_of_pytriton() -> None:
    assert issubclass(ModelClient, BaseModelClient)
    assert pytriton.client.ModelClient is ModelClient
    assert DEFAULT_INFERENCE_TIMEOUT_S == 60.0

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from importlib import resources

import pytest

import pytriton.client
from pytriton.client.client import DEFAULT_INFERENCE_TIMEOUT_S, BaseModelClient, ModelClient

PUBLIC = ["asyncio_utils", "auth", "client", "exceptions", "utils", "warnings"]


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


HEAVY = "{'gevent', 'grpc', 'tritonclient', 'google', 'geventhttpclient', 'aiohttp'}"
LOADED = f"import sys; print(sorted({HEAVY} & {{name.partition('.')[0] for name in sys.modules}}))"


@pytest.mark.parametrize("module", ["", *(f".{name}" for name in PUBLIC)])
def test_import_is_light(module: str) -> None:
    # google is a namespace that a .pth file may create at start, so it is compared with a bare interpreter.
    assert run(f"import pytriton.client{module}; {LOADED}") == run(LOADED)


@pytest.mark.parametrize(("url", "other"), [("http://localhost", "grpc"), ("grpc://localhost", "gevent")])
def test_a_client_imports_its_own_protocol_only(url: str, other: str) -> None:
    code = f"from pytriton.client import ModelClient; ModelClient({url!r}, 'm').close(); import sys; "
    assert run(code + f"print({other!r} in sys.modules, 'tritonclient' in sys.modules)") == "False True\n"


@pytest.mark.parametrize("name", ["pytriton.client", *(f"pytriton.client.{name}" for name in PUBLIC)])
def test_all_names_are_there(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__all__
    assert all(hasattr(module, item) for item in module.__all__)


def test_public_modules_are_those_promised() -> None:
    found = [item.name for item in pkgutil.iter_modules(pytriton.client.__path__) if not item.name.startswith("_")]
    assert sorted(found) == PUBLIC
    assert resources.files("pytriton.client").joinpath("py.typed").is_file()


def test_names_of_pytriton() -> None:
    assert issubclass(ModelClient, BaseModelClient)
    assert pytriton.client.ModelClient is ModelClient
    assert DEFAULT_INFERENCE_TIMEOUT_S == 60.0

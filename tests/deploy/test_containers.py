"""The images of deploy/ in real containers: as they are built, read-only, without rights, balanced and replaced.

Not tried here: the official base image, whose place one of the same Debian packages takes, and NVIDIA's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.containers import Container, Images, Network, require_containers
from support.paths import ROOT, TESTS
from support.processes import envoy, require, while_running
from support.waiting import PATIENCE_S, eventually

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
IMAGE = "localhost/pytriton-app"
STEMS = "localhost/pytriton-stems"
APP = """
from typing import Annotated, TypedDict

import numpy as np
from numpy.typing import NDArray

from pytriton.decorators import Shape, model

Rows = Annotated[NDArray[np.float32], Shape("batch", -1)]

class Answer(TypedDict):
    y: Rows

@model(batched=True, max_batch_size=8)
def m(x: Rows) -> Answer:
    return {{"y": {factor} * x}}
"""
# A model whose worker takes as much memory as a caller asks for.
GREEDY = """
import numpy as np

from pytriton.decorators import batch
from pytriton.model_config import Tensor
from pytriton.triton import ProcessWorker, Triton

def make():
    @batch
    def take(mebibytes):
        taken = np.ones(int(mebibytes.max()) << 20, np.uint8)
        return {"bytes": np.full(mebibytes.shape, taken.size)}
    return take

if __name__ == "__main__":
    with Triton() as triton:
        inputs, outputs = [Tensor((1,), np.int64, "mebibytes")], [Tensor((1,), np.int64, "bytes")]
        triton.bind("greedy", ProcessWorker(make), inputs, outputs)
        triton.run()
        print("Serving.", flush=True)
        triton.serve()
"""
# Runs on the host of the network: asks for as long as nothing comes in, and tells what came of it.
LOAD = """
import json, sys
from support.load import under_load

with under_load(sys.argv[1], sys.argv[2], "m") as load:
    for line in sys.stdin:
        load.wait_for_more(200)
        print(json.dumps(sorted({factor for _, factor in load.answers[-200:]})), flush=True)
print(json.dumps([load.sent, len(load.answers), load.failures]), flush=True)
"""
ASK = """
import http.client, json, sys
connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=600)
name, tensor, datatype, count, value = sys.argv[1:]
tensors = [{"name": tensor, "shape": [1, int(count)], "datatype": datatype, "data": [json.loads(value)] * int(count)}]
connection.request("POST", f"/v2/models/{name}/infer", json.dumps({"inputs": tensors}))
response = connection.getresponse()
answer = json.loads(response.read())
if "outputs" in answer:
    data = answer["outputs"][0]["data"]
    answer = [len(data), sum(data)]
print(json.dumps([response.status, answer]))
"""


class Served:
    """The image, and what runs it."""

    def __init__(self, folder: Path, images: Images, files: Path, settings: dict[str, Any], network: Network) -> None:
        self.folder, self.images, self.settings, self.network = folder, images, settings, network
        self._files = files
        self._count = 0

    def container(self, place: tuple[Path, str], factor: int | None = None) -> Container:
        """Make a container, of a model that multiplies by a factor or else of the image's own."""
        self._count += 1
        made = Container(self.folder / f"c{self._count}", self._files, self.settings, *place)
        if factor is not None:
            app = self.folder / f"app{factor}.py"
            app.write_text(APP.format(factor=factor))
            made.add_file("/app/app.py", app)
        return made


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    require_containers()
    dockerfile = DOCKERFILE.read_text()
    [base] = {line.split()[1] for line in dockerfile.splitlines() if line.startswith("FROM ")}
    images = Images(tmp_path)
    with contextlib.ExitStack() as stack:
        stack.callback(images.remove)
        images.make_base(base)
        settings = images.build(DOCKERFILE, IMAGE)
        yield Served(tmp_path, images, stack.enter_context(images.mounted(IMAGE)), settings, Network(stack))


@pytest.mark.ci
@pytest.mark.slow(seconds=300)
@pytest.mark.timeout(3600)
def test_the_image_serves_in_containers(served: Served) -> None:
    # In one test, because the image takes minutes.
    check_one_as_it_is(served)
    check_too_little_memory(served)
    for balancer in ("haproxy", "envoy"):
        check_rolling_replacement(served, balancer)
    check_an_environment_of_a_model(served)


def check_one_as_it_is(served: Served) -> None:
    container = served.container(served.network.join())
    with container.running() as process:
        assert container.execute("id", "-u").stdout.strip() == "65532"
        assert container.execute("id", "-un").returncode != 0, "the user has no name, as on most clusters"
        assert "pytriton\0serve" in container.execute("cat", "/proc/1/cmdline").stdout
        assert container.execute("touch", "/app/written").returncode != 0
        kind, *health = served.settings["Healthcheck"]["Test"]
        assert kind == "CMD"
        assert container.execute(*health).returncode == 0
        assert container.execute(*[word.replace("8000", "8009") for word in health]).returncode == 1
        # More than what there is of /dev/shm, which nothing goes through.
        shared = container.execute("df", "--output=size", "--block-size=M", "/dev/shm").stdout.split()
        assert shared[-1] == "64M"
        answer = ask(container, "softmax", "logits", "FP32", 20 << 20, 0)
        assert answer == [200, [20 << 20, pytest.approx(1, rel=1e-3)]]
        container.send("TERM")
        assert process.wait(PATIENCE_S) == 0, container.read_log()
    assert "WARNING" not in container.read_log(), container.read_log()


def check_too_little_memory(served: Served) -> None:
    container = served.container(served.network.join())
    script = served.folder / "greedy.py"
    script.write_text(GREEDY)
    container.add_file("/app/greedy.py", script)
    container.start_with("python", "greedy.py")
    container.limit_memory(600 << 20)
    with container.running() as process:
        status, answer = ask(container, "greedy", "mebibytes", "INT64", 1, 900)
        assert (status, "was lost while it worked on this request" in answer["error"]) == (503, True), answer
        eventually(lambda: "the memory that its container (control group) may have was used up" in container.read_log())
        # Another worker has taken its place, in the same container.
        assert ask(container, "greedy", "mebibytes", "INT64", 1, 1) == [200, [1, 1 << 20]]
        container.send("TERM")
        assert process.wait(PATIENCE_S) == 0, container.read_log()


def check_rolling_replacement(served: Served, balancer: str) -> None:
    places = [served.network.join() for _ in range(2)]
    first, second = (address for _, address in places)
    environment = {
        **os.environ,
        "HTTP_BIND": "127.0.0.1:8080",
        "GRPC_BIND": "127.0.0.1:8081",
        "FIRST_HOST": first,
        "SECOND_HOST": second,
        "SECOND_HTTP_PORT": "8000",
        "SECOND_GRPC": f"{second}:8001",
    }
    if balancer == "haproxy":
        command = [require("haproxy"), "-db", "-f", str(ROOT / "deploy" / "haproxy" / "haproxy.cfg")]
    else:
        addresses = {port: f"127.0.0.1:{port}" for port in (8080, 8081)}
        addresses |= {8000: f"{first}:8000", 8001: f"{first}:8001", 8010: f"{second}:8000", 8011: f"{second}:8001"}
        command = envoy(served.folder, addresses)
    with contextlib.ExitStack() as stack:
        old = [served.container(place, factor=2) for place in places]
        processes = [stack.enter_context(container.running()) for container in old]
        log = stack.enter_context((served.folder / f"{balancer}.log").open("wb"))
        running = while_running(served.network.command(*command), env=environment, stdout=log, stderr=log)
        stack.enter_context(running)
        eventually(lambda: is_ready(served.network))
        with callers(served.network) as load:
            assert factors(load) == {2}
            for place, container, process in zip(places, old, processes, strict=True):
                container.send("TERM")
                assert process.wait(PATIENCE_S) == 0, container.read_log()
                stack.enter_context(served.container(place, factor=3).running())
                eventually(lambda: 3 in factors(load))
            assert factors(load) == {3}
            sent, answered, failures = finish(load)
    assert failures == []
    assert answered == sent > 1000


def check_an_environment_of_a_model(served: Served) -> None:
    settings = served.images.build(DOCKERFILE.with_name("Dockerfile.environment"), STEMS)
    with served.images.mounted(STEMS) as files:
        container = Container(served.folder / "stems", files, settings, *served.network.join())
        with container.running() as process:
            asked = container.execute("pytriton", "infer", "127.0.0.1:8000", "stems", "text=connected connections")
            assert asked.stdout == "stems: connect connect\n", asked.stderr + container.read_log()
            # The server's own Python has another numpy, and lacks what the model imports.
            versions = [
                container.execute(python, "-c", "import numpy; print(numpy.__version__)").stdout
                for python in ("/opt/environments/stems/bin/python", "python")
            ]
            assert [version.split(".")[0] for version in versions] == ["1", "2"]
            assert container.execute("python", "-c", "import snowballstemmer").returncode == 1
            container.send("TERM")
            assert process.wait(PATIENCE_S) == 0, container.read_log()


def ask(container: Container, *words: object) -> Any:
    """Ask a model from a program in its container."""
    done = container.execute("python", "-c", ASK, *map(str, words))
    assert done.returncode == 0, done.stderr + container.read_log()
    return json.loads(done.stdout)


def is_ready(network: Network) -> bool:
    program = "import http.client as c; h = c.HTTPConnection('127.0.0.1', 8080); h.request('GET', '/v2/health/ready')"
    command = network.command(sys.executable, "-c", f"{program}; exit(h.getresponse().status != 200)")
    return subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False).returncode == 0


@contextlib.contextmanager
def callers(network: Network) -> Iterator[subprocess.Popen[str]]:
    """Run callers on the host of the network, as long as the block."""
    command = network.command(sys.executable, "-c", LOAD, "http://127.0.0.1:8080", "grpc://127.0.0.1:8081")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=TESTS) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)


def factors(load: subprocess.Popen[str]) -> set[float]:
    """Wait for 200 more answers, and return the factors in them."""
    assert load.stdin is not None
    assert load.stdout is not None
    load.stdin.write("more\n")
    load.stdin.flush()
    return set(json.loads(load.stdout.readline()))


def finish(load: subprocess.Popen[str]) -> Any:
    """Return what became of all requests."""
    told, _ = load.communicate(timeout=PATIENCE_S)
    return json.loads(told)

"""What of the guard is in force is tried out at the start, and what is not is told by name."""

from __future__ import annotations

import logging
import re
import struct
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.cli.checks.examples import example_add_sub
from pytriton.cli.checks.steps import Steps
from pytriton.model_config import ModelConfig, Tensor
from pytriton.proxy_backend import guard_library_path
from pytriton.triton import GuardConfig, Triton, TritonSecurityConfig
from support.callables import identity
from support.serving import local_config, short_home
from support.waiting import PATIENCE_S

LOGGER = "pytriton.server.lifecycle.self_test"
OTHERS = ["HTTP_CALLERS", "COMPRESSED_BODIES", "SHAPES"]

# A function that the guard stands in front of, and what is lost with it.
LOST = {
    # Which threads read HTTP is known by it, and so what they unpack.
    "readv": {"HTTP_REQUESTS", "COMPRESSED_BODIES"},
    "writev": {"HTTP_RESPONSES"},
    "syscall": {"HTTP_CALLERS"},
    "TRITONSERVER_ServerInferAsync": {"HTTP_CALLERS"},
    "ioctl": {"HTTP_THREADS"},
    "send": {"HTTP_DEFERRALS"},
    "close": {"HTTP_ENDS"},
    "inflate": {"COMPRESSED_BODIES"},
    "TRITONSERVER_InferenceRequestAddInput": {"SHAPES"},
    "TRITONSERVER_InferenceRequestAddRequestedOutput": {"REQUESTED_OUTPUTS"},
    "TRITONSERVER_DataTypeByteSize": {"CLASSIFICATION"},
    "TRITONSERVER_InferenceRequestAppendInputData": {"INPUT_DATA"},
    "TRITONSERVER_InferenceRequestDelete": {"REQUEST_ENDS"},
    "shm_open": {"SHARED_MEMORY"},
    "mmap": {"SHARED_FILES"},
    "signal": {"CRASHES"},
    "bind": {"GRPC_FRONT_END", "GRPC_CALLS", "REPLACEMENT"},
    "setpriority": {"INSTANCES"},
    "pthread_create": {"MODEL_DELETION"},
}


def stream(requests: Any) -> Iterator[Any]:
    yield identity(requests)


def bind(triton: Triton, infer: Any = identity, **config: Any) -> None:
    x, y = (Tensor(name=name, dtype=np.float32, shape=(1,)) for name in "xy")
    triton.bind("same", infer, [x], [y], config=ModelConfig(**config))


def undefined(library: bytes, name: bytes) -> bytes:
    """Return a library in which a function that it exports is one that it expects from others (ELF, 64 bits)."""
    (sections,), (count,) = struct.unpack_from("<Q", library, 40), struct.unpack_from("<H", library, 60)
    headers = [struct.unpack_from("<IIQQQQIIQQ", library, sections + 64 * i) for i in range(count)]
    kind_of_symbols = 11
    symbols = next(header for header in headers if header[1] == kind_of_symbols)
    names = headers[symbols[6]][4]
    changed = bytearray(library)
    for place in range(symbols[4], symbols[4] + symbols[5], 24):
        start = names + struct.unpack_from("<I", library, place)[0]
        if library[start : library.index(b"\0", start)] == name:
            changed[place + 6 : place + 24] = bytes(18)
            return bytes(changed)
    raise AssertionError(name)


@contextmanager
def without(hook: str, folder: Path) -> Iterator[None]:
    """Have servers start with a guard that lacks a function, as one that was built without it does."""
    library = folder / guard_library_path().name
    library.write_bytes(undefined(guard_library_path().read_bytes(), hook.encode()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pytriton.server.tritonserver.guard.guard_library_path", lambda: library)
        yield


@contextmanager
def started(infer: Any, **config: Any) -> Iterator[Triton]:
    triton = Triton(config=local_config(**config))
    bind(triton, infer, decoupled=infer is stream)
    with triton:
        yield triton


def warned(caplog: pytest.LogCaptureFixture) -> set[str]:
    texts = [
        record.getMessage() for record in caplog.records if record.name == LOGGER and record.levelno > logging.INFO
    ]
    return {re.findall(r"not in force: (\w+)", text)[0] for text in texts}


def missing(triton: Triton) -> set[str]:
    return {name for name, is_in_force in triton.guard_states().items() if not is_in_force}


@pytest.mark.parametrize("hook", LOST)
def test_what_is_lost_is_named(hook: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with short_home(), without(hook, tmp_path), started(identity, allow_metrics=True, metrics_port=0) as triton:
        assert warned(caplog) == missing(triton) == LOST[hook]
        with urllib.request.urlopen(str(triton.metrics_url), timeout=PATIENCE_S) as page:
            samples = dict(
                re.findall(r'(?m)^pytriton_guard_protection\{protection="(\w+)"\} (.*)$', page.read().decode())
            )
    assert {name for name, value in samples.items() if value == "0.0"} == LOST[hook]
    assert {name for name, value in samples.items() if value == "1.0"} == set(samples) - LOST[hook]


def test_what_is_lost_of_triton_s_own_front_end_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    guard = GuardConfig(grpc_front_end=False)
    with short_home(), without("recvmsg", tmp_path), Triton(config=local_config(), guard=guard):
        assert warned(caplog) == {"GRPC_CONNECTIONS"}


def test_the_check_names_what_is_lost(tmp_path: Path) -> None:
    lines: list[str] = []
    with short_home(), without("inflate", tmp_path):
        example_add_sub(Steps(lines.append), tmp_path)
    told = next(i for i, line in enumerate(lines) if "that the guard is in force" in line)
    assert lines[told].lstrip().startswith("FAILED")
    assert lines[told + 1].endswith("These protections of the guard are not in force: COMPRESSED_BODIES.")


RESTRICTED = {
    "http_restricted_api": "inference,health,shared-memory,model-repository:secret=mine",
    "grpc_restricted_protocol": "inference,health,shared-memory,model-repository:secret=mine",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "all": {"allow_metrics": True, "metrics_port": 0},
    "HTTP": {"allow_grpc": False},
    "gRPC": {"allow_http": False},
    "gRPC and metrics": {"allow_http": False, "allow_metrics": True, "metrics_port": 0},
    "an own token": RESTRICTED,
    "an own token, gRPC": {"allow_http": False, **RESTRICTED},
    "traces": {"trace_config": ["level=TIMESTAMPS", "triton,file=/dev/null", "rate=1"]},
    "no threads to choose from": {"http_thread_count": 1},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("infer", [identity, stream])
def test_nothing_is_missed_where_all_is_in_force(name: str, infer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with short_home(), started(infer, **CONFIGS[name]) as triton:
        assert not warned(caplog)
        assert not missing(triton)
        assert "Refused" not in caplog.text
        # Where requests are traced, none is sent that a model would refuse.
        assert infer is stream or triton.guard_states().get("SHAPES", False) is (name != "traces")


def test_protections_that_take_a_model_are_tried_with_the_first(caplog: pytest.LogCaptureFixture) -> None:
    with short_home(), Triton(config=local_config()) as triton:
        triton.run()
        assert not set(OTHERS) & set(triton.guard_states())
        bind(triton)
        assert all(triton.guard_states()[name] for name in OTHERS)
    assert triton.guard_states() == {}


def test_without_a_guard_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with short_home(), Triton(config=local_config(), guard=GuardConfig(enabled=False)) as triton:
        assert triton.guard_states() == {}
        assert not warned(caplog)


@pytest.mark.parametrize("allow_http", [True, False])
def test_encrypted_grpc_is_no_loss(allow_http: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = pytest.importorskip("trustme").CA()
    own = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    own.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    own.private_key_pem.write_to_path(tmp_path / "key.pem")
    files = {"grpc_server_cert": tmp_path / "server.pem", "grpc_server_key": tmp_path / "key.pem"}
    root = {"grpc_root_cert": tmp_path / "ca.pem"}
    with short_home(), started(identity, allow_http=allow_http, grpc_use_ssl=True, **files, **root) as triton:
        assert not warned(caplog)
        assert not missing(triton)
        assert triton.guard_states()["GRPC_FRONT_END"]


def test_a_new_server_is_tried_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    with short_home(), started(identity) as triton:
        triton.replace_server()
        assert not missing(triton)
        assert triton.guard_states()["SHAPES"]
    assert [record.name for record in caplog.records].count(LOGGER) == 2


def test_all_is_protected_where_a_token_is(caplog: pytest.LogCaptureFixture) -> None:
    triton = Triton(config=local_config(), security_config=TritonSecurityConfig(access_token="a" * 20))
    bind(triton)
    with short_home(), triton:
        assert not missing(triton)
        assert not warned(caplog)

import re
from pathlib import Path
from typing import Any

import pytest

from pytriton.exceptions import PyTritonValidationError
from pytriton.server.settings import config
from pytriton.server.settings.config import TritonConfig
from pytriton.server.tritonserver import options as server_options
from pytriton.server.tritonserver.binary import BUNDLED_FOLDER, TritonServerBinary, find_tritonserver
from pytriton.server.tritonserver.command_line import OWN_SETTINGS
from pytriton.server.tritonserver.options import NEEDED_SERVER, check_options, explain_misfit, known_options
from pytriton.triton import Triton

needs_bundle = pytest.mark.skipif(not BUNDLED_FOLDER.is_dir(), reason="this build carries no tritonserver")
NEWER: dict[str, Any] = {
    "http_max_input_size": 1 << 40,
    "grpc_infer_thread_count": 4,
    "grpc_max_response_pool_size": 100,
    "allow_client_shm": True,
}


def fake_server(folder: Path, script: str) -> TritonServerBinary:
    executable = folder / "bin" / "tritonserver"
    executable.parent.mkdir(parents=True, exist_ok=True)
    executable.write_text(f"#!/bin/sh\n{script}\n")
    executable.chmod(0o755)
    return find_tritonserver(folder)


def help_text(*options: str) -> str:
    """A script that counts its calls in a file `asked` beside it, and lists options as tritonserver does."""
    lines = "\n".join(f"  --{option} <integer>\n\tWhat --it-does." for option in options)
    return f"echo asked >> $(dirname $0)/asked\ncat <<'.'\nUsage: tritonserver [options]\n{lines}\n.\nexit 1"


@needs_bundle
@pytest.mark.parametrize(("name", "value"), NEWER.items())
def test_the_bundled_server_is_named_with_its_version(name: str, value: Any) -> None:
    with pytest.raises(
        PyTritonValidationError,
        match=rf"TritonConfig\.{name} needs tritonserver 2\.\d\d or later; .* is version 2\.51\.0",
    ) as caught:
        check_options(TritonConfig(**{name: value}), find_tritonserver(BUNDLED_FOLDER))
    assert f"no option --{name.replace('_', '-')}" in str(caught.value)


@needs_bundle
def test_the_bundled_server_knows_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    known = known_options(find_tritonserver(BUNDLED_FOLDER))
    others = TritonConfig().to_dict().keys() - NEWER.keys() - OWN_SETTINGS
    assert {name.replace("_", "-") for name in others} <= known
    check_options(TritonConfig(trace_config=["rate=1"]), find_tritonserver(BUNDLED_FOLDER))


def test_options_that_a_server_lists_are_let_through(tmp_path: Path) -> None:
    server = fake_server(tmp_path, help_text(*(name.replace("_", "-") for name in NEWER)))
    assert known_options(server) == {name.replace("_", "-") for name in NEWER}
    check_options(TritonConfig(**NEWER), server)
    with pytest.raises(PyTritonValidationError, match=r"trace_config needs a tritonserver that was built with tracing"):
        check_options(TritonConfig(trace_config=["rate=1"]), server)


def test_a_server_is_asked_only_where_needed_and_again_when_it_changed(tmp_path: Path) -> None:
    server = fake_server(tmp_path, help_text("http-port"))
    asked = tmp_path / "bin" / "asked"
    check_options(TritonConfig(http_port=0, allow_metrics=False), server)
    assert not asked.exists()
    for _ in range(2):
        with pytest.raises(PyTritonValidationError, match=r"of a version that it does not tell"):
            check_options(TritonConfig(allow_client_shm=True), server)
    # The other calls ask for the version.
    assert known_options(server) == {"http-port"}
    fake_server(tmp_path, help_text("http-port", "allow-client-shm"))
    check_options(TritonConfig(allow_client_shm=True), server)


@pytest.mark.parametrize("script", ["exit 3", "echo starting", "exec sleep 1000000"])
def test_a_server_that_lists_nothing_decides_for_itself(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_options, "_DEADLINE_S", 0.2)
    check_options(TritonConfig(allow_client_shm=True), fake_server(tmp_path, script))


def test_a_server_that_cannot_be_run_lists_nothing(tmp_path: Path) -> None:
    server = fake_server(tmp_path, "")
    server.executable.write_bytes(b"\x7fELF is not here")
    assert known_options(server) == frozenset()
    server.executable.unlink()
    assert known_options(server) == frozenset()


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        (
            "failed to load 'm' version 1: Not found: unable to load shared library: /b/libtriton_pytriton.so: "
            "undefined symbol: TRITONBACKEND_ResponseSetDoubleParameter",
            "lacks the function TRITONBACKEND_ResponseSetDoubleParameter",
        ),
        (
            "Unsupported: this server has backend API 1.18, libtriton_pytriton.so needs 1.19 or a later minor: use a "
            "newer tritonserver",
            "has backend API 1.18",
        ),
    ],
)
def test_a_server_that_is_too_old_for_the_proxy_is_told(line: str, missing: str, tmp_path: Path) -> None:
    text = explain_misfit(fake_server(tmp_path, help_text("http-port")), ["tritonserver"], ["Loading", line])
    assert text is not None
    assert f"it {missing}. Expected tritonserver 2.44 or later" in text
    assert "PYTRITON_TRITONSERVER_DIR" in text


def test_options_that_an_ended_server_does_not_know_are_told_without_their_values(tmp_path: Path) -> None:
    server = fake_server(tmp_path, help_text("http-port", "grpc-port"))
    command = ["tritonserver", "--http-port=1", "--http-restricted-api=trace:token=secret", "--new=1", "--new=2"]
    text = explain_misfit(server, command, ["unable to bind"])
    assert text is not None
    assert "it has no option --http-restricted-api and no option --new." in text
    assert "secret" not in text
    assert explain_misfit(server, command[:2], ["unable to bind"]) is None
    assert explain_misfit(fake_server(tmp_path, "exit 3"), command, []) is None


@needs_bundle
def test_a_start_fails_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTRITON_TRITONSERVER_DIR", str(BUNDLED_FOLDER))
    workspace = tmp_path / "workspace"
    triton = Triton(config=TritonConfig(allow_client_shm=True), workspace=workspace)
    with pytest.raises(PyTritonValidationError, match=r"tritonserver 2\.68 or later"):
        triton.run()
    assert not workspace.exists()


def test_every_option_says_in_the_reference_which_server_it_needs() -> None:
    text = Path(config.__file__).read_text(encoding="utf-8")
    for name, needed in NEEDED_SERVER.items():
        if found := re.search(r"[\d.]+", needed):
            description = text.partition(f"    {name}: ")[2].partition('"""')[2].partition('"""')[0]
            assert f"Needs tritonserver {found[0]} or later" in " ".join(description.split())

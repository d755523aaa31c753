"""Which tritonserver the tests run with, and which tests hold for some servers alone.

It is the one that `PYTRITON_TRITONSERVER_DIR` names, or the bundled one. `dev.py test` runs the tests once more for
each folder that `PYTRITON_TEST_TRITONSERVERS` names.
"""

import functools
import os
from pathlib import Path

import pytest

from pytriton.server.tritonserver.binary import BUNDLED_FOLDER, find_tritonserver
from pytriton.server.tritonserver.options import known_options
from pytriton.server.tritonserver.version import parse_server_version, read_server_version
from support.paths import ROOT, load_program

__all__ = [
    "before",
    "fetch_older_server",
    "has_tracing",
    "needs_arrays_in_streams",
    "needs_tracing",
    "other_server",
    "server_version",
    "since",
]

# The newest of NVIDIA's wheels with a server before the bundled one, 2.50.0 (41 MB).
_OLDER_REQUIREMENT = "nvidia-pytriton==0.5.12"
_OLDER_WHEEL = "nvidia_pytriton-0.5.12-py3-none-manylinux_2_35_{arch}.whl"
_OLDER_SHA256 = {"x86_64": "a44e099c6c4a77bdef94632591077f8217f6996571daeab77430c0aa5dca515c"}


@functools.cache
def server_version() -> tuple[int, int, int]:
    """Return version of the server that the tests run with."""
    text = read_server_version(find_tritonserver())
    version = parse_server_version(text)
    assert version is not None, f"no version: {text!r}"
    return version


def since(major: int, minor: int) -> pytest.MarkDecorator:
    """Leave a test to servers of this version and later ones."""
    return pytest.mark.skipif(
        server_version() < (major, minor), reason=f"tritonserver {major}.{minor} and later do this"
    )


def before(major: int, minor: int) -> pytest.MarkDecorator:
    """Leave a test to servers before this version."""
    return pytest.mark.skipif(
        server_version() >= (major, minor), reason=f"tritonserver before {major}.{minor} does this"
    )


def needs_arrays_in_streams(url: str = "http") -> None:
    """Skip the test where the server takes arrays of one element alone in the JSON of streams over HTTP."""
    if url.startswith("http") and server_version() < (2, 51):
        pytest.skip("tritonserver 2.51 and later take arrays in generate and generate_stream")


@functools.cache
def has_tracing() -> bool:
    """Return whether the server was built with tracing."""
    return "trace-config" in known_options(find_tritonserver())


def needs_tracing() -> pytest.MarkDecorator:
    """Leave a test to servers that were built with tracing."""
    return pytest.mark.skipif(not has_tracing(), reason="this tritonserver was built without tracing")


def other_server() -> Path:
    """Return the folder of a server of another version than the one that the tests run with.

    It is one that `PYTRITON_TEST_TRITONSERVERS` names, or the bundled one; the test is skipped where there is none.
    """
    folders = [Path(name) for name in os.environ.get("PYTRITON_TEST_TRITONSERVERS", "").split(os.pathsep) if name]
    for folder in [*folders, *([BUNDLED_FOLDER] if BUNDLED_FOLDER.is_dir() else [])]:
        if parse_server_version(read_server_version(find_tritonserver(folder))) != server_version():
            return folder
    pytest.skip("PYTRITON_TEST_TRITONSERVERS names no tritonserver of another version")


def fetch_older_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fetch NVIDIA's wheel with an older server as a build fetches the one to ship, and take the server out of it.

    Args:
        folder: Where to.
        monkeypatch: Keeps what the environment says of builds out of it.

    Returns:
        The folder of the server. The test is skipped where the wheel cannot be had.
    """
    hook = load_program(ROOT / "packages" / "pytriton-server" / "hatch_build.py")
    for name in ("PYTRITON_TRITONSERVER_DIR", "PYTRITON_BUILD_ARCH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hook, "NVIDIA_REQUIREMENT", _OLDER_REQUIREMENT)
    monkeypatch.setattr(hook, "NVIDIA_WHEEL", _OLDER_WHEEL)
    monkeypatch.setattr(hook, "NVIDIA_SHA256", _OLDER_SHA256)
    try:
        source = hook.open_source(folder)
    except hook.BundleError as error:
        pytest.skip(f"no older tritonserver: {error}")
    hook.assemble(source, folder / "server")
    return folder / "server"

"""Which tritonserver the tests run with, and which tests hold for some servers alone.

It is the one that `PYTRITON_TRITONSERVER_DIR` names, or the bundled one. `dev.py test` runs the tests once more for
each folder that `PYTRITON_TEST_TRITONSERVERS` names.
"""

import functools

import pytest

from pytriton.server.tritonserver.binary import find_tritonserver
from pytriton.server.tritonserver.options import known_options
from pytriton.server.tritonserver.version import parse_server_version, read_server_version

__all__ = ["before", "has_tracing", "needs_tracing", "server_version", "since"]


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


@functools.cache
def has_tracing() -> bool:
    """Return whether the server was built with tracing."""
    return "trace-config" in known_options(find_tritonserver())


def needs_tracing() -> pytest.MarkDecorator:
    """Leave a test to servers that were built with tracing."""
    return pytest.mark.skipif(not has_tracing(), reason="this tritonserver was built without tracing")

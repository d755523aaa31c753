"""Tests that need an interpreter of their own, because what they do to it cannot be undone."""

import os
import subprocess
import sys

import pytest

_VARIABLE = "PYTRITON_TEST_ALONE"


def is_run_alone(node: pytest.Item, timeout_s: float) -> bool:
    """Run a test once more in a fresh process, and fail as it does there.

    Args:
        node: The test; `request.node` in it.
        timeout_s: How long it may take, in seconds.

    Returns:
        Whether that was done, so that nothing is left to do. False in the fresh process.
    """
    if os.environ.get(_VARIABLE) == node.nodeid:
        return False
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", node.nodeid],
        cwd=node.config.rootpath,
        env={**os.environ, _VARIABLE: node.nodeid},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return True

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A `PYTRITON_HOME` short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="pt") as folder:
        monkeypatch.setenv("PYTRITON_HOME", folder)
        yield Path(folder)

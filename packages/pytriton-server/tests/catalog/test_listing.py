"""How often a server is asked for what costs it most."""

from __future__ import annotations

from typing import Any, cast

import pytest

from pytriton.catalog.listing import ModelWatch
from pytriton.server.control.http import Control, ControlError, VersionState


class Server:
    """Stands in for the calls to a server."""

    def __init__(self) -> None:
        self.listed: list[str] | None = ["a"]
        self.uploaded: list[str] = []
        self.calls: list[str] = []

    def index(self) -> list[VersionState]:
        self.calls.append("index")
        if self.listed is None:
            raise ControlError("denied", reason="this API is restricted")
        return [VersionState(name, 1, "READY", "") for name in self.listed]

    def all_statistics(self) -> list[dict[str, Any]]:
        self.calls.append("statistics")
        return [{"name": name, "version": "1"} for name in [*(self.listed or ()), *self.uploaded]]

    def is_ready(self) -> bool:
        return True


def look(watch: ModelWatch, server: Server) -> tuple[list[str], list[str]]:
    server.calls.clear()
    return sorted(watch.known()), server.calls


def test_statistics_are_asked_for_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("pytriton.catalog.listing.time.monotonic", lambda: now[0])
    server = Server()
    watch = ModelWatch(cast(Control, server))
    assert look(watch, server) == (["a"], ["index", "statistics"])
    now[0] += 1
    server.listed = ["a", "b"]
    assert look(watch, server) == (["a", "b"], ["index"])
    # A model that was loaded with its files is in no list.
    server.uploaded = ["c"]
    now[0] += 10
    assert look(watch, server) == (["a", "b", "c"], ["index", "statistics"])
    # As long as there is one, its end is seen at once.
    now[0] += 1
    assert look(watch, server) == (["a", "b", "c"], ["index", "statistics"])
    server.uploaded = []
    now[0] += 1
    assert look(watch, server) == (["a", "b"], ["index", "statistics"])
    now[0] += 1
    assert look(watch, server) == (["a", "b"], ["index"])


def test_a_server_without_a_list_tells_by_its_statistics() -> None:
    server = Server()
    server.listed, server.uploaded = None, ["c"]
    watch = ModelWatch(cast(Control, server))
    for _ in range(3):
        assert look(watch, server) == (["c"], ["index", "statistics"])

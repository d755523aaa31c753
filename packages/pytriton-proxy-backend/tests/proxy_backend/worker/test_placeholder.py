"""Which requests a placeholder turns away where there is no room for the workers of a model."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytriton.proxy_backend.model import ModelSpec
from pytriton.proxy_backend.transport.activity import EndpointActivity
from pytriton.proxy_backend.worker import placeholder as placeholder_module
from pytriton.proxy_backend.worker.placeholder import Placeholder


class Proxy:
    """A proxy backend that has batches for each look, or for the first looks."""

    def __init__(self, waiting: int, looks: int) -> None:
        self.waiting = waiting
        self.looks = looks
        self.failed: list[int] = []
        self.is_open = True
        self.reading, self.writing = os.pipe()
        os.write(self.writing, b"x")

    def connect(self, *_: Any) -> Proxy:
        return self

    def activity(self, *_: Any) -> EndpointActivity:
        return EndpointActivity(in_flight=self.waiting, taken=0)

    def fileno(self) -> int:
        return self.reading

    def poll(self) -> list[Any] | None:
        if not self.is_open:
            return None
        if not self.looks:
            return []
        self.looks -= 1
        if not self.looks:
            os.read(self.reading, 1)
        return [SimpleNamespace(number=self.looks)]

    def fail(self, number: int, *_: Any) -> None:
        self.failed.append(number)

    def detach(self) -> None:
        os.close(self.writing)
        self.is_open = False

    def close(self) -> None:
        os.close(self.reading)


@pytest.fixture
def placeholder() -> Placeholder:
    spec = ModelSpec(name="m", version=1, inputs=(), outputs=(), batching=False, max_batch_size=0)
    return Placeholder(spec, Path("/nowhere"))


@pytest.mark.parametrize(
    ("waiting", "looks", "answered"),
    [
        # Others come all the time, and nobody has tried to serve them.
        (3, 10_000, 3),
        # Somebody else serves the rest.
        (5, 2, 2),
    ],
)
def test_only_those_that_have_waited_are_turned_away(
    placeholder: Placeholder, monkeypatch: pytest.MonkeyPatch, waiting: int, looks: int, answered: int
) -> None:
    proxy = Proxy(waiting, looks)
    monkeypatch.setattr(placeholder, "_connect", proxy.connect)
    monkeypatch.setattr(placeholder_module, "ask_activity", proxy.activity)
    placeholder.turn_away("no room")
    assert len(proxy.failed) == answered
    # It ends before its own time does, which only shows where that is over.
    assert not proxy.is_open

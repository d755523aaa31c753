"""Clients of a model that a ready server has not: told at once, and not waited for where none is to come."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pytriton.client.exceptions import PyTritonClientModelNotReadyError
from pytriton.model_config import ModelConfig
from pytriton.triton import Triton
from support.callables import X, Y, identity
from support.clients import KINDS, Kind, address_of
from support.http import call
from support.serving import is_ready, local_config, running, short_home
from support.waiting import PATIENCE_S, eventually, wait_for_threads

UNBATCHED = ModelConfig(batching=False)


@contextmanager
def serving() -> Iterator[Triton]:
    """Have a server whose script has bound all of its models, and serves."""
    with short_home():
        triton = Triton(config=local_config())
        triton.bind("same", identity, X, Y, config=UNBATCHED)
        thread = threading.Thread(target=triton.serve)
        thread.start()
        try:
            url = eventually(lambda: triton.http_url)
            eventually(lambda: is_ready(url))
            eventually(lambda: "has all of its models" in str(call(url, "GET", "/v2/models/none/config")[1]))
            yield triton
        finally:
            triton.stop()
            thread.join(PATIENCE_S)
            wait_for_threads()


def error_of(kind: Kind, url: str, **settings: Any) -> str:
    """Return what a client says that has misspelt the name."""
    client = kind.make(url, "smae", unknown_model_timeout_s=0.01, **settings)
    try:
        with pytest.raises(PyTritonClientModelNotReadyError) as caught:
            kind.ask(client)
    finally:
        closing = client.close()
        if asyncio.iscoroutine(closing):
            asyncio.run(closing)
    return str(caught.value)


def test_misspelt_name_is_told_at_once_and_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as triton:
        for kind in KINDS.values():
            for protocol in ("http", "grpc"):
                caplog.clear()
                url = address_of(triton, protocol)
                error = error_of(kind, url, access_token=triton.get_access_token())
                assert "has no model 'smae', but same. Did you mean 'same'?" in error
                assert [record for record in caplog.records if "has no model 'smae', but same." in record.message]
                # Over HTTP everybody sees the page of the server, which lists its models.
                refused = "the names that it has are for callers with its access token"
                assert ("but same. Did you mean" if protocol == "http" else refused) in error_of(kind, url)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_model_that_is_bound_late_is_waited_for(protocol: str, caplog: pytest.LogCaptureFixture) -> None:
    # As scripts for PyTriton do: `with Triton()` starts the server, models come one by one, clients are there before.
    caplog.set_level(logging.WARNING)
    with short_home():
        triton = Triton(config=local_config())
        triton.bind("first", identity, X, Y, config=UNBATCHED)
        with running(triton):
            answers: list[Any] = []

            def ask() -> None:
                kind = KINDS["sync"]
                with kind.make(address_of(triton, protocol), "same", unknown_model_timeout_s=0.01) as client:
                    answers.append(kind.ask(client))

            thread = threading.Thread(target=ask)
            thread.start()
            eventually(lambda: [record for record in caplog.records if "has no model 'same'" in record.message])
            triton.bind("same", identity, X, Y, config=UNBATCHED)
            thread.join(PATIENCE_S)
            assert len(answers) == 1

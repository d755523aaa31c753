"""Clients go to other processes: through a fork, which shares what they are, and as pickles, which say it."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Iterator

import pytest

from pytriton.client import ModelClient
from pytriton.client.exceptions import PyTritonClientValueError
from pytriton.model_config import ModelConfig
from pytriton.triton import Triton
from support.callables import X, Y, identity
from support.clients import KINDS, address_of, ask_all, serving_all
from support.processes import in_child
from support.waiting import PATIENCE_S, Held


@pytest.fixture(scope="module")
def served() -> Iterator[Triton]:
    with serving_all() as triton:
        yield triton


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_client_that_was_used_serves_parent_and_child(served: Triton, protocol: str, kind: str) -> None:
    made = KINDS[kind]
    client = made.make(address_of(served, protocol), made.model, inference_timeout_s=30)
    made.check(client)
    for _ in range(3):
        in_child(lambda: [made.check(client) for _ in range(3)])
        made.check(client)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_pickle_is_a_client_of_its_own(served: Triton, protocol: str, kind: str) -> None:
    made = KINDS[kind]
    client = made.make(address_of(served, protocol), made.model, inference_timeout_s=31, access_token="a-token")
    client = client.with_options(headers={"x-of-this": "test"}, timeout_s=30)
    made.check(client)
    other = pickle.loads(pickle.dumps(client))
    assert type(other) is made.make
    assert other._settings() == client._settings()
    assert other._own_settings() == client._own_settings()
    assert other._options == client._options
    assert other._model_info is not client._model_info
    made.check(other)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_first_call_that_waits_in_the_parent_does_not_make_the_child_wait(served: Triton, protocol: str) -> None:
    with ModelClient(address_of(served, protocol), "same", init_timeout_s=PATIENCE_S) as client:
        with client._prepare_lock:  # as another thread has it whose first call is under way
            in_child(lambda: KINDS["sync"].check(client))
            view = client.with_options(timeout_s=PATIENCE_S)
            in_child(lambda: KINDS["sync"].check(view))
        KINDS["sync"].check(client)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_call_over_grpc_under_way_leaves_the_child_http(served: Triton) -> None:
    """gRPC would end the child, now and then, with a failed check; over HTTP nothing is amiss."""
    held = Held(identity)
    served.bind("held", held, X, Y, config=ModelConfig(batching=False))
    grpc, http = address_of(served, "grpc"), address_of(served, "http")
    used = {name: kind.make(grpc, kind.model) for name, kind in KINDS.items()}

    def check_child() -> None:
        for name, kind in KINDS.items():
            with pytest.raises(PyTritonClientValueError, match="another thread was in a call over gRPC when"):
                kind.check(used[name])
            with pytest.raises(PyTritonClientValueError, match='with the method "spawn"'):
                kind.check(kind.make(grpc, kind.model))
        used["sync"].close()
        ask_all(http)

    with ModelClient(grpc, "held") as client:
        caller = threading.Thread(target=KINDS["sync"].check, args=(client,))
        caller.start()
        held.entered.wait(PATIENCE_S)
        try:
            in_child(check_child)
            # A child of such a child is no better off.
            in_child(lambda: in_child(check_child))
        finally:
            held.release.set()
            caller.join()
    # Now nobody waits in gRPC; the parent itself always could.
    for name, kind in KINDS.items():
        kind.check(used[name])
    in_child(lambda: KINDS["sync"].check(used["sync"]))
    for each in used.values():
        closing = each.close()
        if asyncio.iscoroutine(closing):
            asyncio.run(closing)
    served.unbind("held")

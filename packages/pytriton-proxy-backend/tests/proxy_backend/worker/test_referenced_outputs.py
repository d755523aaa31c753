"""Large outputs that are inputs: they stay where they are, unless somebody could still write to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pytriton.proxy_backend import ModelSpec, TensorSpec, Worker
from pytriton.proxy_backend.wire.layout import CAPABILITIES, Capability
from support.batch_callables import Columns, Listed
from support.waiting import PATIENCE_S

F4 = np.dtype("float32")
Array = np.ndarray[Any, Any]
Ask = Callable[..., tuple[Any, list[Any]]]
INPUT_RELEASED, BATCH_DONE = 1, 2
WIDTH = 300_000  # of which two rows have more than what is copied in any case
REFERENCES = CAPABILITIES | Capability.REFERENCES


@pytest.fixture
def serve(proxy: Any, golden: ModuleType) -> Iterator[Callable[..., Ask]]:
    """Starts a worker, and gives what asks it with the inputs of two requests, for the answer and its responses."""
    workers = []

    def start(infer_func: Any, *, capabilities: int = REFERENCES, names: tuple[str, ...] = ("y",)) -> Ask:
        tensors = {name: TensorSpec(name=name, dtype=F4, shape=(-1,)) for name in ("x", "w", "y", "z")}
        model = ModelSpec(
            name="model", version=1, inputs=(tensors["x"], tensors["w"]),
            outputs=tuple(tensors[name] for name in names), batching=True, max_batch_size=8,
        )  # fmt: skip
        proxy.listen()
        worker = Worker(infer_func, model, proxy.endpoint)
        workers.append(worker)
        worker.start()
        peer = proxy.accept()
        hello = peer.welcome(capabilities=capabilities)
        assert hello.kind == golden.HELLO
        worker.wait_attached(PATIENCE_S)

        def ask(number: int, x: Array, w: Array | None = None) -> tuple[Any, list[Any]]:
            inputs = {"x": x} if w is None else {"x": x, "w": w}
            requests = [golden.Request(outputs=list(names)) for _ in x]
            made = [
                golden.Tensor(name, golden.FP32, list(value.shape), value.tobytes()) for name, value in inputs.items()
            ]
            # Always the same block: the worker has given it back, or the test fails for what it reads.
            peer.batch(number, bytes(golden.batch_record(number, requests, made)), offset=0)
            packet = peer.answer()
            return packet, peer.responses(packet)

        return ask

    yield start
    proxy.close()
    for worker in workers:
        assert worker.stop(PATIENCE_S)


def rows(number: int) -> Array:
    return np.arange(2 * WIDTH, dtype=F4).reshape(2, WIDTH) + number


def in_place(x: Array) -> Any:
    x *= 2
    return {"y": x}


def is_referred(packet: Any) -> bool:
    """Whether a response has no payload of its own, and gives the inputs back."""
    if packet.length > 4096:
        return False
    assert packet.flags == BATCH_DONE | INPUT_RELEASED
    return True


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("kind", [Columns, Listed])
def test_inputs_stay_where_they_are(kind: Any, serve: Callable[..., Ask]) -> None:
    ask = serve(kind(in_place))
    for number in range(1, 6):
        packet, responses = ask(number, rows(number))
        assert is_referred(packet)
        found = np.concatenate([response.outputs["y"] for response in responses])
        np.testing.assert_array_equal(found, 2 * rows(number))


@pytest.mark.usefixtures("both_ways")
def test_several_that_lie_as_they_are_sent(serve: Callable[..., Ask]) -> None:
    ask = serve(Columns(lambda x, w: {"y": x, "z": w}), names=("y", "z"))
    packet, responses = ask(1, rows(1), rows(7)[:, :1000].copy())
    assert is_referred(packet)
    np.testing.assert_array_equal(responses[1].outputs["y"][0], rows(1)[1])
    np.testing.assert_array_equal(responses[1].outputs["z"][0], rows(7)[1, :1000])


def other_callables() -> dict[str, Callable[[list[Any]], Any]]:
    return {
        "kept": lambda kept: lambda x: kept.append(x) or {"y": x},
        "a view that is kept": lambda kept: lambda x: kept.append(x[:1, 5:]) or {"y": x},
        "another dtype": lambda kept: lambda x: {"y": x.view(">f4")},
        "reversed": lambda kept: lambda x: {"y": x[:, ::-1]},
        "a copy": lambda kept: lambda x: {"y": x.copy()},
    }


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("what", other_callables())
def test_what_is_copied(what: str, serve: Callable[..., Ask]) -> None:
    """Whoever keeps an input may write to it, while the server is still at it."""
    kept: list[Any] = []
    ask = serve(Columns(other_callables()[what](kept)))
    wanted: Callable[[int], Array] = {
        "another dtype": lambda number: rows(number).view(">f4").astype(F4),
        "reversed": lambda number: rows(number)[:, ::-1],
    }.get(what, rows)
    for number in range(1, 5):
        packet, responses = ask(number, rows(number))
        assert not is_referred(packet)
        assert bool(packet.flags & INPUT_RELEASED) is not bool(kept)
        found = np.concatenate([response.outputs["y"] for response in responses])
        np.testing.assert_array_equal(found, wanted(number))
        if kept:
            break  # the next batch would lie in a block that is in use


@pytest.mark.usefixtures("both_ways")
def test_outputs_in_another_order_are_copied(serve: Callable[..., Ask]) -> None:
    ask = serve(Columns(lambda x, w: {"y": w, "z": x}), names=("y", "z"))
    for number in range(1, 4):
        packet, responses = ask(number, rows(number), rows(7)[:, :1000].copy())
        assert not is_referred(packet)
        np.testing.assert_array_equal(responses[0].outputs["y"][0], rows(7)[0, :1000])
        np.testing.assert_array_equal(responses[1].outputs["z"][0], rows(number)[1])


@pytest.mark.usefixtures("both_ways")
def test_a_proxy_backend_that_cannot_look_there_gets_copies(serve: Callable[..., Ask]) -> None:
    ask = serve(Columns(in_place), capabilities=CAPABILITIES)
    for number in range(1, 4):
        packet, responses = ask(number, rows(number))
        assert not is_referred(packet)
        np.testing.assert_array_equal(responses[1].outputs["y"][0], 2 * rows(number)[1])


@pytest.mark.usefixtures("both_ways")
def test_small_ones_are_copied(serve: Callable[..., Ask]) -> None:
    ask = serve(Columns(in_place))
    for number in range(1, 4):
        x = rows(number)[:, : WIDTH // 2].copy()
        packet, responses = ask(number, x)
        assert not is_referred(packet)
        np.testing.assert_array_equal(responses[0].outputs["y"][0], 2 * x[0])

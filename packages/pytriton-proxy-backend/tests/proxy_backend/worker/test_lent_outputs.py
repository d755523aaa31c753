"""Outputs that a callable fills where they are sent from: never copied, never written again while somebody has them."""

import gc
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pytriton.proxy.outputs import empty_outputs
from pytriton.proxy_backend import ModelSpec, TensorSpec, Worker
from pytriton.proxy_backend.transport.connection import Connection
from pytriton.proxy_backend.wire.record import Record
from support.batch_callables import Columns
from support.waiting import PATIENCE_S

Array = np.ndarray[Any, Any]
WIDTH = 300_000  # of float32: more than is copied
MODEL = ModelSpec(
    name="model",
    version=1,
    inputs=(TensorSpec(name="x", dtype=np.dtype("f4"), shape=(-1,)),),
    outputs=(
        TensorSpec(name="y", dtype=np.dtype("f4"), shape=(-1,)),
        TensorSpec(name="z", dtype=np.dtype("f4"), shape=(-1,)),
    ),
    batching=True,
    max_batch_size=8,
)


class Listed:
    """A callable of requests."""

    def __init__(self, func: Callable[[Array], Any]) -> None:
        self.func = func

    def __call__(self, requests: list[Any]) -> Any:
        made = self.func(np.concatenate([request["x"] for request in requests]))
        return [{name: array[row : row + 1] for name, array in made.items()} for row in range(len(requests))]


class Awaited(Listed):
    """The same as a coroutine function."""

    async def __call__(self, requests: list[Any]) -> Any:
        return super().__call__(requests)


def filled(x: Array, **widths: int) -> dict[str, Array]:
    """What a callable returns: for each output the first column of x, and its name's."""
    made = empty_outputs({name: ((len(x), width), np.float32) for name, width in widths.items()})
    for name, array in made.items():
        array[:] = x[:, :1] + (name == "z")
    return made


class Caller:
    """The proxy backend's end, and what was copied at the other."""

    def __init__(self, peer: Any, golden: ModuleType) -> None:
        self.peer = peer
        self._golden = golden
        self._number = 0

    def ask(self, *values: float, outputs: tuple[str, ...] = ("y", "z"), read: bool = True) -> Any:
        """Sends a batch of one request per value; returns where the answer lies, and the answer of each."""
        golden, peer = self._golden, self.peer
        self._number += 1
        payload = np.array(values, "<f4").tobytes()
        requests = [golden.Request(outputs=list(outputs)) for _ in values]
        tensors = [golden.Tensor("x", golden.FP32, [len(values), 1], payload)]
        consumed = None if read else 0
        peer.batch(self._number, bytes(golden.batch_record(self._number, requests, tensors)), consumed=consumed)
        packet = peer.answer()
        assert packet.kind == golden.RESPONSE, packet
        return (packet.segment, packet.offset), [response.outputs for response in peer.responses(packet)]


Start = Callable[..., Caller]


@pytest.fixture
def start(proxy: Any, golden: ModuleType) -> Iterator[Start]:
    made = []

    def begin(infer_func: Any, **welcome: Any) -> Caller:
        proxy.listen()
        worker = Worker(infer_func, MODEL, proxy.endpoint)
        made.append(worker)
        worker.start()
        peer = proxy.accept()
        peer.welcome(**welcome)
        worker.wait_attached(PATIENCE_S)
        return Caller(peer, golden)

    yield begin
    proxy.close()
    for worker in made:
        assert worker.stop(PATIENCE_S)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Payload bytes of the records that Python copies."""
    sizes: list[int] = []
    write = Record.write

    def noted(self: Record, *where: Any) -> None:
        sizes.append(self.layout.payload_bytes)
        write(self, *where)

    monkeypatch.setattr(Record, "write", noted)
    return sizes


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("kind", [Columns, Listed, Awaited])
def test_they_are_not_copied(kind: Any, start: Start, copied: list[int]) -> None:
    """Neither those of one request, nor of several, nor in the other order, nor where they get larger and smaller."""
    widths = [{"y": WIDTH, "z": 3 * WIDTH}]
    caller = start(kind(lambda x: filled(x, **widths[0])))
    places = set()
    for value, count, widths[0] in [
        (1, 1, {"y": WIDTH, "z": 3 * WIDTH}),
        (2, 3, {"z": WIDTH, "y": WIDTH}),
        (3, 8, {"y": 1, "z": 2 * WIDTH}),
        *[(number, 2, {"y": WIDTH, "z": WIDTH}) for number in range(4, 12)],
    ]:
        place, answers = caller.ask(*range(value, value + count))
        places.add(place)
        for row, answer in enumerate(answers):
            for name, array in answer.items():
                assert array.shape == (1, widths[0][name])
                assert (array == value + row + (name == "z")).all()
        assert len(answers) == count
    assert copied == []
    # The memory is used again.
    assert len(places) < 8


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize(
    ("change", "outputs"),
    [
        (lambda made: {"y": made["z"], "z": made["y"]}, ("y", "z")),
        (lambda made: {"y": made["y"], "z": made["z"].copy()}, ("y", "z")),
        (lambda made: {"y": made["y"][:, ::-1], "z": made["z"]}, ("y", "z")),
        (lambda made: {"y": made["y"], "z": made["z"].astype("f8")}, ("y", "z")),
        (lambda made: {"y": made["z"], "z": made["z"]}, ("y", "z")),
        (lambda made: made, ("z",)),
        (lambda made: {name: array[:, 1:] for name, array in made.items()}, ("y", "z")),
    ],
    ids=["swapped", "another", "reversed", "cast", "twice", "the last alone", "a part"],
)
def test_others_are_copied(change: Any, outputs: tuple[str, ...], start: Start, copied: list[int]) -> None:
    kept: list[dict[str, Array]] = []

    def infer(x: Array) -> dict[str, Array]:
        made = filled(x, y=WIDTH, z=WIDTH)
        made["y"][:, -1] += 7
        made["z"][:, 0] += 9
        kept.append(made)
        returned: dict[str, Array] = change(made)
        return returned

    caller = start(Columns(infer))
    for number in range(1, 5):
        _, [answer] = caller.ask(number, outputs=outputs)
        wanted = change(kept[-1])
        for name in outputs:
            assert (answer[name] == wanted[name]).all()
        # What was not sent from its place stays as it is, and may be written to.
        assert (kept[-1]["y"][:, :-1] == number).all()
        kept[-1]["y"][:] = 0
    assert all(size > WIDTH for size in copied)


@pytest.mark.usefixtures("both_ways")
def test_the_first_alone_is_not_copied(start: Start, copied: list[int]) -> None:
    """A caller that does not want the others gets the first from where it is, and the others stay whole."""
    kept: list[dict[str, Array]] = []

    def infer(x: Array) -> dict[str, Array]:
        kept.append(filled(x, y=WIDTH, z=WIDTH))
        return kept[-1]

    caller = start(Columns(infer))
    for number in range(1, 5):
        _, [answer] = caller.ask(number, outputs=("y",))
        assert (answer["y"] == number).all()
        assert (kept[-1]["z"] == number + 1).all()
    assert copied == []


@pytest.mark.usefixtures("both_ways")
def test_what_is_kept_is_not_written_again(start: Start) -> None:
    kept: list[dict[str, Array]] = []

    def infer(x: Array) -> dict[str, Array]:
        kept.append(filled(x, y=WIDTH, z=WIDTH))
        return kept[-1]

    caller = start(Columns(infer))
    places = [caller.ask(number)[0] for number in range(1, 6)]
    assert len(set(places)) == 5
    assert all((made["y"] == number).all() for number, made in enumerate(kept, 1))
    with pytest.raises(ValueError, match="read-only"):
        kept[0]["y"][:] = 1
    # What nobody has any more is used again.
    while kept:
        kept.pop()
    gc.collect()
    assert caller.ask(7)[0] in places


@pytest.mark.usefixtures("both_ways")
def test_what_is_sent_again_is_copied_while_the_first_is_unread(start: Start, copied: list[int]) -> None:
    made: list[dict[str, Array]] = []

    def infer(x: Array) -> dict[str, Array]:
        if not made:
            made.append(filled(x, y=WIDTH, z=WIDTH))
        return made[0]

    caller = start(Columns(infer))
    first, _ = caller.ask(1)
    second, answers = caller.ask(1, read=False)
    assert second != first
    assert (answers[0]["z"] == 2).all()
    assert copied == [8 * WIDTH]
    third, _ = caller.ask(1)
    assert third == first


def test_what_is_not_read_yet_is_not_used_again(start: Start) -> None:
    caller = start(Columns(lambda x: filled(x, y=WIDTH, z=WIDTH)))
    places = [caller.ask(number, read=False)[0] for number in range(1, 6)]
    assert len(set(places)) == 5
    assert caller.ask(6)[0] in places  # as its batch says that they are read


@pytest.mark.usefixtures("both_ways")
def test_without_room_they_are_arrays_as_any_others(start: Start, copied: list[int]) -> None:
    caller = start(Columns(lambda x: filled(x, y=WIDTH, z=WIDTH)), arena_budget=8 * WIDTH + 4096)
    for number in range(1, 4):
        _, [answer] = caller.ask(number)
        assert (answer["z"] == number + 1).all()
    assert len(copied) >= 1


def test_small_ones_strings_and_those_of_other_threads_are_arrays_as_any_others(start: Start) -> None:
    seen: list[dict[str, Array]] = []

    def infer(x: Array) -> dict[str, Array]:
        seen.append(empty_outputs({"y": (4, np.float32)}))
        seen.append(empty_outputs({"y": ((2, 200_000), object), "z": ([2], "f8")}))
        thread = threading.Thread(target=lambda: seen.append(filled(x, y=WIDTH, z=WIDTH)))
        thread.start()
        thread.join()
        return filled(x, y=1, z=1)

    caller = start(Columns(infer))
    _, [answer] = caller.ask(1)
    assert answer["y"].tolist() == [[1]]
    assert all(array.flags.owndata for made in seen for array in made.values())
    assert [made["y"].shape for made in seen] == [(4,), (2, 200_000), (1, WIDTH)]
    assert seen[1]["z"].dtype == np.float64


def test_a_callable_that_keeps_nothing_leaves_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    arenas = []
    begin = Connection.__init__

    def noted(self: Any, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        arenas.append(self.outputs)

    monkeypatch.setattr(Connection, "__init__", noted)

    def infer(x: Array) -> dict[str, Array]:
        filled(x, y=WIDTH, z=WIDTH)  # and thrown away
        return filled(x, y=WIDTH, z=WIDTH)

    caller = start(Columns(infer))
    for number in range(1, 20):
        caller.ask(number)
    [arena] = arenas
    # One that is being read, one that was thrown away, and the spare.
    assert arena.in_use <= 4 * (8 * WIDTH + (32 << 10))

"""Requests that differ in length share batches which cost no more than they may, in every way to serve.

`support.isolation.reference` says how they are cut; tests of C++ hold the proxy's own cut against it.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from pytriton import inprocess
from pytriton.client import ModelClient
from pytriton.client.exceptions import PyTritonClientError, PyTritonClientInferenceServerError
from pytriton.decorators import Shape, batch, get_model_signature, get_requests, model
from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config import Cost, DynamicBatcher, ModelConfig, Tensor
from pytriton.model_config.common import ModelWarmup, WarmupInput
from pytriton.proxy_backend import Worker, read_description
from pytriton.proxy_backend.cli.app import run as run_command
from pytriton.proxy_backend.worker.context import make_context
from pytriton.triton import ProcessWorker, RemoteTriton, Triton
from support.faults.plain_server import plain_server
from support.isolation.raw_requests import HttpSender, strings
from support.isolation.reference import RawRequest, RawTensor, Sizes, cut
from support.serving import local_config, running
from support.waiting import PATIENCE_S, eventually

# Batches are full long before that.
LONG_US = 300_000_000
LIMIT, ROWS = 100, 8
Array = NDArray[Any]


@batch
def tag(input_ids: Array, lengths: Array, mask: Array) -> dict[str, Array]:
    """Twice each token, the sum of each row, and what the batch was: rows, longest, and the tokens in it."""
    rows, longest = input_ids.shape
    assert lengths.dtype == np.int64
    assert mask.dtype == np.bool_
    assert (mask == (np.arange(longest) < lengths[:, None])).all()
    # Padding and nothing else: callers send no -1.
    assert ((input_ids == -1) == ~mask).all()
    assert sum(request["input_ids"].size for request in get_requests()) == lengths.sum()
    sums = np.where(mask, input_ids, 0).sum(1, keepdims=True)
    return {"tags": 2 * input_ids, "sum": sums, "was": np.tile([rows, longest, lengths.sum()], (rows, 1))}


def make_tag() -> Any:
    return tag


IDS = Tensor((-1,), np.int64, "input_ids")
TAG = ([IDS], [Tensor((-1,), np.int64, "tags"), Tensor((1,), np.int64, "sum"), Tensor((3,), np.int64, "was")])
COST = Cost("input_ids", limit=LIMIT, pad=-1, lengths="lengths", mask="mask", outputs=["tags"], overhead=3)
signature = {"inputs": TAG[0], "outputs": TAG[1], "max_batch_size": 64, "cost": COST}


def config(cost: Cost = COST, *, full: int | None = None, **options: Any) -> ModelConfig:
    """Return a configuration whose batches go as they come, or are gathered until there are so many rows."""
    batcher = DynamicBatcher()
    if full is not None:
        batcher = DynamicBatcher(preferred_batch_size=[full], max_queue_delay_microseconds=LONG_US)
    return ModelConfig(max_batch_size=64, batcher=batcher, cost=cost, **options)


@batch
def pack(input_ids: Array, offsets: Array, lengths: Array) -> dict[str, Array]:
    assert input_ids.shape == (offsets[-1],)
    assert (np.diff(offsets) == lengths).all()
    rows = [input_ids[begin:end] for begin, end in itertools.pairwise(offsets)]
    was = np.tile([len(rows), max(lengths), offsets[-1]], (len(rows), 1))
    return {"tags": 2 * input_ids, "sum": np.array([[row.sum()] for row in rows]), "was": was}


PACKED = Cost("input_ids", LIMIT, layout="packed", offsets="offsets", lengths="lengths", outputs=["tags"])


@batch
def words(text: Array, image: Array, scale: Array, sizes: Array) -> dict[str, Array]:
    """Strings, and an input with two free sizes of its own, beside one that is never padded."""
    assert all((row[:size] != b"").all() and (row[size:] == b"").all() for row, size in zip(text, sizes, strict=True))
    return {"text_out": text, "area": image.sum((1, 2, 3), keepdims=True)[:, :, 0, 0] * scale}


WORDS = (
    [Tensor((-1,), bytes, "text"), Tensor((-1, 2, -1), np.float32, "image"), Tensor((1,), np.float32, "scale")],
    [Tensor((-1,), bytes, "text_out"), Tensor((1,), np.float32, "area")],
)


@batch
def pair(left: Array, right: Array) -> dict[str, Array]:
    return {"sum": (left + right).sum(1, keepdims=True)}


PAIR = ([Tensor((-1,), np.float32, "left"), Tensor((-1,), np.float32, "right")], [Tensor((1,), np.float32, "sum")])


def each(requests: Sequence[Any]) -> list[dict[str, Array]]:
    """A callable of requests, which gets them as they were sent."""
    total = sum(request["input_ids"].shape[1] for request in requests)
    return [{"sum": np.array([[request["input_ids"].sum()]]), "was": np.array([[total]])} for request in requests]


class Embedded(NamedTuple):
    vectors: Annotated[NDArray[np.float32], Shape("batch", "tokens", 2)]
    pooled: Annotated[NDArray[np.float32], Shape("batch", 1)]


@model(
    batched=True,
    max_batch_size=64,
    cost=Cost("input_ids", limit=LIMIT, lengths="lengths"),
    model_warmup=[ModelWarmup("long", 2, {"input_ids": WarmupInput(np.int64, (7,), zero_data=True)}, 1)],
)
def embed(
    input_ids: Annotated[NDArray[np.int64], Shape("batch", "tokens")], lengths: Annotated[Array, Shape("batch")]
) -> Embedded:
    vectors = np.stack([input_ids, -input_ids], 2).astype(np.float32)
    inside = np.arange(input_ids.shape[1]) < lengths[:, None]
    return Embedded(vectors, np.where(inside, input_ids, 0).sum(1, keepdims=True).astype(np.float32))


both = threading.Barrier(2)


@batch
def meet(input_ids: Array) -> dict[str, Array]:
    """Return when the other worker has a batch as well."""
    both.wait(PATIENCE_S)
    return {"sum": input_ids.sum(1, keepdims=True), "was": np.full((len(input_ids), 1), len(input_ids))}


SUM = [Tensor((1,), np.int64, "sum"), Tensor((1,), np.int64, "was")]
held, let_go = threading.Event(), threading.Event()


@batch
def hold(input_ids: Array) -> dict[str, Array]:
    """Wait with the first batch until somebody says so."""
    if not held.is_set():
        held.set()
        assert let_go.wait(PATIENCE_S)
    return {"sum": input_ids.sum(1, keepdims=True), "was": np.full((len(input_ids), 1), len(input_ids))}


@pytest.fixture(scope="module")
def served() -> Iterator[Triton]:
    """One server with the models of this module."""
    triton = Triton(config=local_config(cache_config=["local,size=1048576"]))
    triton.bind("threads", tag, *TAG, config=config())
    triton.bind("full", tag, *TAG, config=config(full=ROWS))
    triton.bind("processes", ProcessWorker(make_tag, copies=2), *TAG, config=config())
    triton.bind("alone", tag, *TAG, config=config(replace(COST, oversize="alone"), full=2))
    triton.bind("packed", pack, *TAG, config=config(PACKED))
    triton.bind("words", words, *WORDS, config=config(Cost("text", 500, lengths="sizes", outputs=["text_out"]), full=3))
    triton.bind("pair", pair, *PAIR, config=config(Cost(["left", "right"], LIMIT), full=3))
    triton.bind("each", each, [IDS], SUM, config=config(Cost("input_ids", LIMIT), full=2))
    triton.bind("meet", [meet, meet], [IDS], SUM, config=config(Cost("input_ids", 10), full=2))
    triton.bind("hold", hold, [IDS], SUM, config=config(Cost("input_ids", 10)))
    triton.bind(embed)
    with running(triton):
        yield triton


def url_of(triton: Triton, protocol: str) -> str:
    url = triton.http_url if protocol == "http" else triton.grpc_url
    assert url is not None
    return url


@contextlib.contextmanager
def clients(url: str, name: str, count: int) -> Iterator[list[ModelClient]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(ModelClient(url, name)) for _ in range(count)]


def check_answer(ids: Array, answer: dict[str, Array]) -> tuple[int, int, int]:
    """Hold the answer to one request against the request; return what its batch was."""
    assert answer["tags"].shape == ids.shape
    assert (answer["tags"] == 2 * ids).all()
    assert (answer["sum"][:, 0] == ids.sum(1)).all()
    assert (answer["was"] == answer["was"][0]).all()
    rows, longest, tokens = answer["was"][0].tolist()
    return rows, longest, tokens


def check_random_lengths(url: str, name: str, seed: int, *, packed: bool = False) -> tuple[int, int]:
    """Many callers with random lengths each get their own, of batches that cost no more than they may.

    Return what the batches cost in all, and what the requests cost by themselves.
    """

    def ask(numbered: tuple[int, ModelClient]) -> list[tuple[int, int, int, int, int]]:
        number, client = numbered
        chance = random.Random(f"{seed} {number}")
        found = []
        for _ in range(25):
            rows = chance.choice((1, 1, 1, 2, 3))
            length = chance.choice((0, 1, chance.randrange(LIMIT // rows + 1), chance.randrange(12)))
            ids = np.array([[chance.randrange(1000) for _ in range(length)] for _ in range(rows)], np.int64)
            found.append((*check_answer(ids, client.infer_batch(ids.reshape(rows, length))), rows, length))
        return found

    with clients(url, name, 12) as callers, ThreadPoolExecutor(len(callers)) as pool:
        batches = [found for answers in pool.map(ask, enumerate(callers)) for found in answers]
    for rows, longest, tokens, _, _ in batches:
        assert (tokens if packed else rows * longest) <= LIMIT
    own = sum(rows * max(length, 1) for _, _, _, rows, length in batches)
    # Each request's share of its batch.
    return own if packed else sum(rows * max(longest, 1) for _, longest, _, rows, _ in batches), own


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("name", ["threads", "processes", "packed"])
def test_each_gets_its_own_and_no_batch_costs_more_than_it_may(served: Triton, name: str, protocol: str) -> None:
    cost, padding = counted(served, name)
    told, own = check_random_lengths(url_of(served, protocol), name, seed=1, packed=name == "packed")
    assert counted(served, name) == (cost + told, padding + told - own)


def counted(triton: Triton, name: str) -> tuple[float, int]:
    """Return what the batches of a model cost so far, and how much of that was padding."""
    totals = [each.statistics for each in triton._models[name, 1].read_totals()]
    return sum(each.costs.sum for each in totals), sum(each.padding for each in totals)


def test_on_a_server_of_somebody_else(served: Triton) -> None:
    with RemoteTriton(str(served.http_url), access_token=served.get_access_token()) as triton:
        triton.bind("remote", tag, *TAG, config=config())
        check_random_lengths(str(served.http_url), "remote", seed=2)


def test_a_drop_in_model(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    repository.mkdir()
    with tempfile.TemporaryDirectory(prefix="pt") as sockets:
        options = ["--name", "tag", "--from", f"{__name__}:signature", "--endpoint", sockets]
        with pytest.raises(SystemExit) as ended:
            run_command(["add", "--model-repository", str(repository), *options])
        assert not ended.value.code
        described = read_description(repository / "tag" / "1" / "pytriton.json")
        with plain_server(tmp_path, repository) as server:
            worker = Worker(tag, described, Path(sockets) / "tag.1.sock", context=make_context(tag, described))
            worker.start()
            try:
                worker.wait_attached(PATIENCE_S)
                check_random_lengths(server.url, "tag", seed=3)
            finally:
                assert worker.stop(PATIENCE_S)


def test_the_python_proxy_says_that_it_does_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--name", "tag", "--from", f"{__name__}:signature", "--endpoint", str(tmp_path), "--flavour", "python"]
    with pytest.raises(SystemExit) as ended:
        run_command(["add", "--model-repository", str(tmp_path), *options])
    assert ended.value.code == 1
    assert "the Python proxy does not count what batches cost" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@batch
async def tag_async(**inputs: Array) -> dict[str, Array]:
    rows, longest = inputs["input_ids"].shape
    sums = np.where(inputs["mask"], inputs["input_ids"], 0).sum(1, keepdims=True)
    was = np.tile([rows, longest, inputs["lengths"].sum()], (rows, 1))
    return {"tags": 2 * inputs["input_ids"], "sum": sums, "was": was}


def test_in_process(tmp_path: Path) -> None:
    # Callers on a busy machine seldom ask at the same time by themselves.
    waiting = DynamicBatcher(max_queue_delay_microseconds=20_000)
    with inprocess.Server(inprocess.Options(str(tmp_path))) as server:
        for name, infer, cost in (("sync", tag, COST), ("packed", pack, PACKED), ("async", tag_async, COST)):
            server.bind(name, infer, *TAG, config=replace(config(cost), batcher=waiting))
            called = server.model(name)

            def ask(number: int, called: Any = called) -> list[tuple[int, int, int]]:
                chance = random.Random(number)
                found = []
                for _ in range(15):
                    ids = np.full((1, chance.choice((0, 1, LIMIT, chance.randrange(40)))), number, np.int64)
                    [response] = called.infer(inputs={"input_ids": ids})
                    outputs = {key: np.from_dlpack(tensor) for key, tensor in response.outputs.items()}
                    found.append(check_answer(ids, outputs))
                return found

            with ThreadPoolExecutor(12) as pool:
                batches = [found for answers in pool.map(ask, range(12)) for found in answers]
            assert all((tokens if name == "packed" else rows * longest) <= LIMIT for rows, longest, tokens in batches)
            assert any(rows > 1 for rows, _, _ in batches)
            with pytest.raises(inprocess.TritonError, match=f"may cost {LIMIT}, and this request costs {LIMIT + 1} "):
                list(called.infer(inputs={"input_ids": np.ones((1, LIMIT + 1), np.int64)}))


def ask_together(url: str, name: str, requests: Sequence[Sequence[Array]]) -> list[Any]:
    """Send requests that wait at the same time; return answers and errors."""

    def ask(arguments: tuple[ModelClient, Sequence[Array]]) -> Any:
        client, inputs = arguments
        try:
            return client.infer_batch(*inputs)
        except PyTritonClientError as error:
            return error

    with clients(url, name, len(requests)) as callers, ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(ask, zip(callers, requests, strict=True)))


def test_what_waits_together_is_cut_as_the_reference_says(served: Triton) -> None:
    lengths = [40, 3, 41, 90, 4, 5, 42, 8]
    requests = [np.full((1, length), length, np.int64) for length in lengths]
    answers = ask_together(str(served.http_url), "full", [[ids] for ids in requests])
    batches = cut([Sizes(1, ((length,),)) for length in lengths], LIMIT, 3)
    assert len(batches) > 2
    for places in batches:
        inside = [lengths[place] for place in places]
        for place in places:
            assert check_answer(requests[place], answers[place]) == (len(inside), max(inside), sum(inside))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_request_over_the_limit_fails_alone(served: Triton, protocol: str) -> None:
    shapes = [(1, LIMIT), (1, LIMIT + 1), (3, 34), (2, 33), (1, 1)]
    requests = [np.ones(shape, np.int64) for shape in shapes]
    answers = ask_together(url_of(served, protocol), "full", [[ids] for ids in requests])
    for place, shown in ((1, "costs 101 by itself: input 'input_ids' with 1 row of 101"), (2, "with 3 rows of 34")):
        assert isinstance(answers[place], PyTritonClientInferenceServerError)
        assert f"a batch of this model may cost {LIMIT}, and this request" in str(answers[place])
        assert shown in str(answers[place])
    for place in (0, 3, 4):
        check_answer(requests[place], answers[place])


def test_a_request_over_the_limit_is_served_alone_where_its_author_says_so(served: Triton) -> None:
    requests = [np.ones((1, 3 * LIMIT), np.int64), np.ones((1, 2), np.int64)]
    answers = ask_together(str(served.http_url), "alone", [[ids] for ids in requests])
    assert check_answer(requests[0], answers[0]) == (1, 3 * LIMIT, 3 * LIMIT)
    assert check_answer(requests[1], answers[1]) == (1, 2, 2)


def test_strings_and_inputs_of_several_free_sizes(served: Triton) -> None:
    requests = []
    for text, image in (((b"a", b"bc"), (1, 2, 5)), ((b"def",), (4, 2, 1)), ((), (2, 2, 2))):
        requests.append([np.array([text], object), np.ones((1, *image), np.float32), np.full((1, 1), 2, np.float32)])
    for asked, answer in zip(requests, ask_together(str(served.http_url), "words", requests), strict=True):
        assert answer["text_out"].tolist() == asked[0].tolist()
        assert answer["area"].item() == 2 * asked[1].size


def test_inputs_of_one_request_that_are_not_alike_are_its_own_mistake(served: Triton) -> None:
    ones = [np.ones((1, length), np.float32) for length in (3, 4, 5)]
    nan = np.full((1, 5), np.nan, np.float32)
    requests = [[ones[0], ones[0]], [ones[1], ones[2]], [nan, nan]]
    answers = ask_together(str(served.http_url), "pair", requests)
    assert answers[0]["sum"].item() == 6
    assert "input 'right' has the size 5 where input 'left' has 4: in each request" in str(answers[1])
    assert np.isnan(answers[2]["sum"].item())


def test_no_bytes_of_one_request_reach_another_one(served: Triton) -> None:
    """Requests that are not what they say fail alone, in a batch with honest ones."""
    image, scale = RawTensor("FP32", (1, 1, 2, 1), b"\0" * 8), RawTensor("FP32", (1, 1), b"\0\0\x80\x3f")
    texts = [
        RawTensor("BYTES", (1, 1), b"\x40\0\0\0abc"),
        RawTensor("BYTES", (1, 2), strings(b"own", b"words")),
        RawTensor("BYTES", (1, 3), strings(b"one", b"two", b"three")),
    ]
    requests = [
        RawRequest({"text": text, "image": image, "scale": scale}, outputs=["text_out", "area"]) for text in texts
    ]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(requests)) as pool:
        sender = stack.enter_context(contextlib.closing(HttpSender(str(served.http_url), "words")))
        answers = list(pool.map(sender, requests))
    assert "expected 64 bytes, as its length says, got 3" in answers[0].error
    for text, answer in zip(texts[1:], answers[1:], strict=True):
        assert answer.outputs["text_out"].payload == text.payload


@pytest.mark.parametrize(
    "shape", [(1, 1 << 40), (1 << 31, 1 << 31), (1, -1), (1 << 60, 2), (0, 3)], ids=lambda shape: str(shape)
)
def test_a_shape_that_is_none_costs_no_memory(served: Triton, shape: tuple[int, int]) -> None:
    request = RawRequest({"input_ids": RawTensor("INT64", shape, b"\0" * 8)}, outputs=["sum"])
    with contextlib.closing(HttpSender(str(served.http_url), "threads")) as send:
        assert send(request).error
        check_random_lengths(str(served.http_url), "threads", seed=4)


def test_callables_of_requests_get_them_as_they_were_sent(served: Triton) -> None:
    answers = ask_together(str(served.http_url), "each", [[np.ones((1, length), np.int64)] for length in (3, 4)])
    assert [answer["sum"].item() for answer in answers] == [3, 4]
    assert [answer["was"].item() for answer in answers] == [7, 7]


def test_hints(served: Triton) -> None:
    read = get_model_signature(embed)
    assert [tensor.name for tensor in read.inputs] == ["input_ids"]
    assert read.config.cost is not None
    assert read.config.cost.outputs == ["vectors"]
    requests = [np.arange(length, dtype=np.int64)[None] for length in (3, 9, 30, 1)]
    answers = ask_together(str(served.http_url), "embed", [[ids] for ids in requests])
    for ids, answer in zip(requests, answers, strict=True):
        assert (answer["vectors"] == np.stack([ids, -ids], 2)).all()
        assert answer["pooled"].item() == ids.sum()


def test_several_workers_each_get_a_batch_of_what_waits(served: Triton) -> None:
    answers = ask_together(str(served.http_url), "meet", [[np.ones((1, length), np.int64)] for length in (9, 8)])
    assert [answer["sum"].item() for answer in answers] == [9, 8]


def test_a_caller_that_leaves_while_it_waits_costs_nothing(served: Triton) -> None:
    """Its request is in no batch; those that were gathered with it are served."""
    url = str(served.http_url)

    def ask(length: int) -> int:
        with ModelClient(url, "hold") as client:
            return int(client.infer_batch(np.ones((1, length), np.int64))["sum"].item())

    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(ask, 1)
        assert held.wait(PATIENCE_S)
        with ModelClient(url, "hold", inference_timeout_s=0.3) as leaving:
            lost = pool.submit(leaving.infer_batch, np.full((1, 10), 7, np.int64))
            others = [pool.submit(ask, length) for length in (10, 9, 8)]
            assert lost.exception(PATIENCE_S) is not None
        let_go.set()
        assert first.result(PATIENCE_S) == 1
        assert [other.result(PATIENCE_S) for other in others] == [10, 9, 8]


def test_another_limit_is_obeyed_after_a_rebind(served: Triton) -> None:
    served.bind("changing", tag, *TAG, config=config())
    with ModelClient(str(served.http_url), "changing") as client:
        ids = np.ones((1, LIMIT + 5), np.int64)
        with pytest.raises(PyTritonClientInferenceServerError, match=f"may cost {LIMIT}"):
            client.infer_batch(ids)
        served.rebind("changing", tag, config=config(replace(COST, limit=LIMIT + 5)))

        def serves() -> bool:
            with contextlib.suppress(PyTritonClientInferenceServerError):
                check_answer(ids, client.infer_batch(ids))
                return True
            return False

        eventually(serves)
    served.unbind("changing")


def test_answers_that_are_given_again(served: Triton) -> None:
    """What the cache has is in no batch, and what it has not is cut with the others."""
    served.bind("cached", tag, *TAG, config=config(response_cache=True))
    for _ in range(3):
        check_random_lengths(str(served.http_url), "cached", seed=5)
    served.unbind("cached")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"batching": False}, "None for a model without batching"),
        ({"batcher": None}, "without a batcher"),
        ({"decoupled": True}, "None for a decoupled model"),
        ({"cost": 8192}, "a Cost, or None"),
    ],
)
def test_what_it_does_not_go_with(served: Triton, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(PyTritonBadParameterError, match=problem):
        served.bind("odd", tag, *TAG, config=replace(config(), **options))


def test_an_output_that_is_not_as_long_as_the_input_is_named(served: Triton) -> None:
    @batch
    def short(input_ids: Array, **_: Any) -> dict[str, Array]:
        return {"tags": input_ids[:, :1], "sum": input_ids[:, :1], "was": np.zeros((len(input_ids), 3), np.int64)}

    served.bind("short", short, *TAG, config=config())
    with ModelClient(str(served.http_url), "short") as client:
        expected = r"Output 'tags' of the batch has the shape \(1, 1\), expected \[3\] along the free sizes"
        with pytest.raises(PyTritonClientInferenceServerError, match=expected):
            client.infer_batch(np.ones((1, 3), np.int64))
    served.unbind("short")


def test_a_packed_output_that_is_no_array_is_named(served: Triton) -> None:
    @batch
    def listed(input_ids: Array, offsets: Array, **_: Any) -> dict[str, Any]:
        rows = len(offsets) - 1
        return {"tags": [input_ids], "sum": np.zeros((rows, 1), np.int64), "was": np.zeros((rows, 3), np.int64)}

    served.bind("listed", listed, *TAG, config=config(PACKED))
    with ModelClient(str(served.http_url), "listed") as client:
        expected = r"model 'listed': .*Output 'tags' .*expected a numpy array of shape \(3, \.\.\.\).*received list "
        with pytest.raises(PyTritonClientInferenceServerError, match=expected):
            client.infer_batch(np.ones((1, 3), np.int64))
    served.unbind("listed")

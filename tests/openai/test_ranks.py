"""Ranks of documents and scores of pairs, by models that compare two texts and by embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("fastapi")
pytest.importorskip("jinja2")

from pytriton.decorators import Shape, batch, model
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton
from support.language.endpoints import Served, error_of
from support.serving import local_config, running


@batch
def shared(**inputs: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """The share of the words of a query that a document has."""
    scores = []
    for query, document in zip(inputs["query"][:, 0], inputs["document"][:, 0], strict=True):
        words = set(query.decode().lower().split())
        scores.append([len(words & set(document.decode().lower().split())) / max(1, len(words))])
    return {"score": np.array(scores, np.float32)}


@model
def longer(first: str, second: str) -> Annotated[NDArray[np.float64], Shape(1)]:
    return np.array([np.nan if second == "nan" else len(first) - len(second)])


@model(max_batch_size=8)
def letters(text: str) -> Annotated[NDArray[np.float32], Shape(26)]:
    return np.array([text.lower().count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"], np.float32)


@model
def echo(text: str) -> str:
    return text


DOCUMENTS = ["a wolf", "The server sends", "the server sends the answer", "nothing"]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    triton = Triton(config=local_config())
    text: Any = {"dtype": bytes, "shape": (1,)}
    # The document comes first here: the name says what it is.
    triton.bind(
        "shared", shared,
        inputs=[Tensor(name="document", **text), Tensor(name="query", **text)],
        outputs=[Tensor(name="score", dtype=np.float32, shape=(1,))],
        config=ModelConfig(max_batch_size=3),
    )  # fmt: skip
    for each in (longer, letters, echo):
        triton.bind(each)
    with running(triton), Served(triton) as served:
        yield served


def asked(served: Served, path: str, **body: Any) -> dict[str, Any]:
    answer = served.post(path, body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_by_their_fit(served: Served, path: str) -> None:
    answer = asked(served, path, model="shared", query="the server answer", documents=DOCUMENTS)
    results = answer["results"]
    assert [it["index"] for it in results] == [2, 1, 0, 3]
    assert results[0]["relevance_score"] == pytest.approx(1)
    assert results[1]["relevance_score"] == pytest.approx(2 / 3)
    assert answer["model"] == "shared"
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 0
    if path == "/v2/rerank":
        assert "document" not in results[0]
        assert answer["meta"]["billed_units"] == {"search_units": 1}
    else:
        assert results[0]["document"] == {"text": DOCUMENTS[2]}
    few = asked(
        served, path, model="shared", query="wolf", documents=[{"text": it} for it in DOCUMENTS], top_n=1,
        return_documents=path == "/v2/rerank",
    )["results"]  # fmt: skip
    assert [it["index"] for it in few] == [0]
    assert ("document" in few[0]) is (path == "/v2/rerank")
    # Zero asks for all of them.
    assert len(asked(served, path, model="shared", query="wolf", documents=DOCUMENTS, top_n=0)["results"]) == 4


def test_ranks_and_scores_of_embeddings(served: Served) -> None:
    results = asked(served, "/v1/rerank", model="letters", query="tea", documents=["wolf", "eat", "eats"])["results"]
    assert [it["index"] for it in results] == [1, 2, 0]
    assert results[0]["relevance_score"] == pytest.approx(1)
    assert results[2]["relevance_score"] == 0
    scores = asked(served, "/v1/score", model="letters", text_1=["tea", "?"], text_2=["eat", "eat"])["data"]
    assert [it["score"] for it in scores] == [pytest.approx(1), 0]


def test_scores_of_pairs(served: Served) -> None:
    answer = asked(served, "/v1/score", model="longer", text_1="abc", text_2="a")
    assert answer["data"] == [{"index": 0, "object": "score", "score": 2.0}]
    assert (answer["object"], answer["usage"]["completion_tokens"]) == ("list", 0)
    many = asked(served, "/score", model="longer", text_1="abc", text_2=["a", "abcde", ""])
    assert [it["score"] for it in many["data"]] == [2, -2, 3]
    each = asked(served, "/v1/score", model="longer", queries=["a", "ab"], documents=["", "a"])
    assert [it["score"] for it in each["data"]] == [1, 1]


@pytest.mark.parametrize(
    ("path", "body", "param", "reason"),
    [
        ("/v1/rerank", {"documents": ["x"]}, "query", "required"),
        ("/v1/rerank", {"query": "x"}, "documents", "required"),
        ("/v1/rerank", {"query": "x", "documents": []}, "documents", "1 to 2048 texts; got 0"),
        ("/v1/rerank", {"query": "x", "documents": ["x"] * 2049}, "documents", "got 2049"),
        ("/v1/rerank", {"query": "x", "documents": [5]}, "documents", "documents[0]: expected a text"),
        ("/v1/rerank", {"query": "x", "documents": [{"content": []}]}, "documents", "documents[0]: expected a text"),
        ("/v1/rerank", {"query": "x", "documents": ["\ud800"]}, "documents", "UTF-8"),
        ("/v1/rerank", {"query": ["x"], "documents": ["x"]}, "query", "string"),
        ("/v1/rerank", {"query": "x", "documents": ["x"], "top_n": -1}, "top_n", "greater"),
        ("/v1/rerank", {"query": "x", "documents": ["x"], "model": "echo"}, "model", "gives texts: ask it at"),
        ("/v1/score", {"text_1": "x"}, "text_2", "expected a text"),
        ("/v1/score", {"queries": "x"}, "documents", "expected a text"),
        ("/v1/score", {"text_1": ["x", "y"], "text_2": "x"}, "text_1", "got 2 and 1"),
        ("/v1/score", {"text_1": [], "text_2": []}, "text_1", "1 to 2048"),
        ("/v1/score", {"text_1": 5, "text_2": "x"}, "text_1", "string"),
        ("/v1/embeddings", {"input": "x"}, "model", "gives scores of pairs of texts: ask it at /v1/rerank"),
    ],
)
def test_requests_that_are_refused(served: Served, path: str, body: dict[str, Any], param: str, reason: str) -> None:
    answer = served.post(path, {"model": "shared", **body})
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["param"] == param
    assert reason in error_of(answer)["message"]


def test_a_score_that_json_cannot_say(served: Served) -> None:
    answer = served.post("/v1/score", {"model": "longer", "text_1": "x", "text_2": ["a", "nan"]})
    assert answer.status_code == 500
    assert "for pair 1 numbers that are not finite" in error_of(answer)["message"]

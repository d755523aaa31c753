"""Which responses of a stream are like the one before, and may be kept for a moment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pytriton.proxy_backend.runtime.results.alike import AlikeResponses
from pytriton.proxy_backend.wire.response import ResponseData

Y, Z = np.ones((2, 3), np.float32), np.array([[b"a"], [b"bc"]], object)


def begun(given: Any, **fields: Any) -> AlikeResponses | None:
    return AlikeResponses.of([given], ResponseData(0, **{"outputs": given, **fields}))


def test_what_was_sent_as_it_came_may_come_again() -> None:
    assert begun({"y": Y}) is not None
    # Outputs may differ in all but their first axis.
    assert begun({"y": Y, "z": Z}) is not None
    # One may have been left out, as nobody asked for it.
    assert AlikeResponses.of([{"y": Y, "z": Z}], ResponseData(0, {"y": Y})) is not None


@pytest.mark.parametrize(
    ("result", "fields"),
    [
        (({"y": Y},), {}),
        ([{"y": Y}, {"y": Y}], {}),
        ([[Y]], {}),
        ([{"y": Y}], {"error": "so"}),
        ([{"y": Y}], {"parameters": {"a": 1}}),
        ([{"y": Y}], {"outputs": {}}),
        ([{"y": Y}], {"outputs": {"y": Y.copy()}}),
        ([{"y": Y[0, 0]}], {"outputs": {"y": Y[0, 0]}}),
        ([{"y": Y, "z": Z[:1]}], {}),
    ],
)
def test_after_what_nothing_is_kept(result: Any, fields: dict[str, Any]) -> None:
    [first] = result[:1]
    if isinstance(first, dict) and "outputs" not in fields:
        fields = {**fields, "outputs": first}
    assert AlikeResponses.of(result, ResponseData(0, **fields)) is None


def test_what_is_alike() -> None:
    for given, is_alike in (
        ({"y": Y + 1, "z": Z[::-1].copy()}, True),
        ({"y": Y.T.copy().T, "z": Z[::-1]}, True),
        ({"y": Y, "z": np.array([[b""], ["text"]], object)}, True),
        ({"y": Y}, False),
        ({"y": Y, "z": Z, "more": Y}, False),
        ({"y": Y.astype("f8"), "z": Z}, False),
        ({"y": Y[:1], "z": Z}, False),
        ({"y": Y.tolist(), "z": Z}, False),
        ({"y": Y, "z": np.array([[b"a"], [1]], object)}, False),
        ({"y": Y, "z": np.array([[b"a" * 2000], [b""]], object)}, False),
    ):
        alike = begun({"y": Y, "z": Z})
        assert alike is not None
        assert not alike
        assert alike.add([given]) is is_alike
        assert bool(alike) is is_alike
        assert not alike.add([given, given])
        assert not alike.add((given,))


@pytest.mark.parametrize(("count", "is_kept"), [(256, True), (257, False)])
def test_large_outputs_are_not_copied_twice(count: int, is_kept: bool) -> None:
    given = {"y": np.ones((count, 1), np.float32)}
    alike = begun(given)
    assert alike is not None
    assert alike.add([given]) is is_kept


def test_so_many_are_enough() -> None:
    alike = begun({"y": Y})
    assert alike is not None
    for _ in range(64):
        assert not alike.is_full
        assert alike.add([{"y": Y}])
    assert alike.is_full

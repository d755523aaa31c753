"""What the charts of the console show."""

from __future__ import annotations

import pytest

from pytriton.console.charts import batch_chart, lately, names_of, requests_chart
from pytriton.console.samples import Point


def point(requests_s: float = 1.0, latency_ms: float | None = None, padding: float | None = None) -> Point:
    return Point(requests_s, {}, latency_ms, None, None, None, None, False, 2.0, None, padding)


@pytest.mark.parametrize(("times", "span"), [([100_000.0], (40_000, 100_000)), ([0.0, 100_000.0], (0, 100_000))])
def test_a_minute_is_shown_at_least(times: list[float], span: tuple[int, int]) -> None:
    axis = requests_chart({"net": [(time_ms, point()) for time_ms in times]})["xAxis"]
    assert (axis["min"], axis["max"]) == span


@pytest.mark.parametrize("points", [[], [(1000.0, None)], [(1000.0, point(0.0))]])
def test_without_requests_there_are_no_axes(points: list[tuple[float, Point | None]]) -> None:
    made = requests_chart({"net": points})
    assert made["title"]["text"] == "no requests yet"
    assert "xAxis" not in made
    assert names_of(made) == []


def test_padding_is_shown_of_models_that_have_a_cost() -> None:
    assert names_of(batch_chart([(1000.0, point())])) == ["rows of a batch", "requests in the queue"]
    made = batch_chart([(1000.0, point()), (2000.0, point(padding=0.25))])
    assert names_of(made) == ["rows of a batch", "requests in the queue", "padding, %"]
    assert [row[-1] for row in made["dataset"]["source"][-2:]] == [None, 25.0]


def test_of_many_points_the_slowest_of_each_step_is_shown() -> None:
    history: list[tuple[float, Point | None]] = [(2000.0 * number, point(1.0, 5.0)) for number in range(5000)]
    history[1234] = (2000.0 * 1234, point(1.0, 900.0))
    shown = lately(history, 0)
    assert len(shown) <= 400
    assert history[1234] in shown
    assert [time_ms for time_ms, _ in lately(history, 300)] == [2000.0 * number for number in range(4849, 5000)]
    assert lately([], 300) == []


def test_each_line_has_a_name_and_a_colour() -> None:
    made = requests_chart({f"model {number}": [(1000.0, point())] for number in range(8)})
    assert names_of(made) == [f"model {number}" for number in range(8)]

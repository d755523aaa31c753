"""What the charts of the console show."""

from __future__ import annotations

import pytest

from pytriton.console.charts import requests_chart


@pytest.mark.parametrize(("times", "span"), [([100_000.0], (40_000, 100_000)), ([0.0, 100_000.0], (0, 100_000))])
def test_a_minute_is_shown_at_least(times: list[float], span: tuple[int, int]) -> None:
    axis = requests_chart({"net": [(time_ms, None) for time_ms in times]})["xAxis"]
    assert (axis["min"], axis["max"]) == span


def test_without_points_there_is_no_time() -> None:
    assert "min" not in requests_chart({"net": []})["xAxis"]

"""The charts of the page, as options of ECharts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from pytriton.console.samples import Point

MOST_LINES = 8
"""The chart of requests shows this many models separately."""

History: TypeAlias = Sequence[tuple[float, Point | None]]
Options: TypeAlias = dict[str, Any]

# These colours are visible on white and on black.
COLORS = ["#2f7ed8", "#e07b39", "#3aa76d", "#b05fc4", "#c9a227", "#d64550", "#4bb3c1", "#8a8f98"]
# A chart shows at least this long, because ECharts would stretch a single point over two days.
_LEAST_MS = 60_000.0
# A screen cannot show more points.
_MOST_POINTS = 400
_TEXT, _LINES = "#8a8f98", "rgba(138,143,152,0.25)"


def lately(history: History, seconds: float) -> list[tuple[float, Point | None]]:
    """Return the points of the last seconds, all if 0; of too many, the slowest of each step of time."""
    if not history:
        return []
    begin = history[-1][0] - seconds * 1e3 if seconds else 0.0
    points = [(time_ms, point) for time_ms, point in history if time_ms >= begin]
    step = -(-len(points) // _MOST_POINTS)
    if step == 1:
        return points
    return [max(points[at : at + step], key=_weight) for at in range(0, len(points), step)]


def _weight(entry: tuple[float, Point | None]) -> tuple[float, float]:
    _, point = entry
    return (-1.0, 0.0) if point is None else (point.latency_ms or 0.0, point.requests_s)


def names_of(options: Options) -> list[str]:
    """Return the lines of a chart, in the order of their colours."""
    return [str(series["name"]) for series in options["series"]]


def requests_chart(histories: Mapping[str, History]) -> Options:
    """Return the requests of each model a second, one line for each."""
    lines: dict[str, dict[float, float | None]] = {
        name: {time_ms: None if point is None else round(point.requests_s, 2) for time_ms, point in points}
        for name, points in histories.items()
    }
    times = sorted({time_ms for line in lines.values() for time_ms in line})
    rows = [[round(time_ms), *(line.get(time_ms) for line in lines.values())] for time_ms in times]
    return _options(list(lines), rows, empty="no requests yet")


def failures_chart(history: History) -> Options:
    """Return the requests that failed a second, by kind."""
    kinds = sorted({kind for _, point in history if point for kind, rate in point.failures_s.items() if rate})
    rows = [
        [round(time_ms), *(None if point is None else round(point.failures_s.get(kind, 0.0), 2) for kind in kinds)]
        for time_ms, point in history
    ]
    return _options(kinds or ["failed"], rows if kinds else _nothing(history), empty="no errors")


def latency_chart(history: History) -> Options:
    """Return the chart of where requests spend their time, in milliseconds."""
    of_callable = any(point is not None and point.of_callable for _, point in history)
    what = ", callable" if of_callable else ""
    parts: dict[str, Callable[[Point], float | None]] = {
        "request": lambda point: point.latency_ms,
        "queue": lambda point: point.queue_ms,
        "compute": lambda point: point.compute_ms,
        f"p50{what}": lambda point: point.p50_ms,
        f"p99{what}": lambda point: point.p99_ms,
    }
    rows = [[round(time_ms), *_values(point, parts.values())] for time_ms, point in history]
    return _options(list(parts), rows, empty="no requests yet")


def batch_chart(history: History) -> Options:
    """Return how large batches are, how many requests wait, and, where that is counted, how much of them is padding."""
    parts: dict[str, Callable[[Point], float | None]] = {
        "rows of a batch": lambda point: point.batch_rows,
        "requests in the queue": lambda point: point.pending,
    }
    if any(point is not None and point.padding is not None for _, point in history):
        parts["padding, %"] = lambda point: None if point.padding is None else 100 * point.padding
    rows = [[round(time_ms), *_values(point, parts.values())] for time_ms, point in history]
    return _options(list(parts), rows, empty="no requests yet")


def _values(point: Point | None, parts: Any) -> list[float | None]:
    found = [None if point is None else part(point) for part in parts]
    return [None if value is None else round(value, 3) for value in found]


def _nothing(history: History) -> list[list[float | None]]:
    return [[round(time_ms), None if point is None else 0.0] for time_ms, point in history]


def _options(names: Sequence[str], rows: Sequence[Sequence[float | None]], *, empty: str) -> Options:
    if not any(value for row in rows for value in row[1:]):
        # Without a text, axes without a line look broken.
        said = {"text": empty, "left": "center", "top": "middle", "textStyle": {"color": _TEXT, "fontWeight": "normal"}}
        return {"title": said, "series": []}
    # The columns have our own names, because names of models may contain anything.
    columns = ["time", *(f"line{number}" for number in range(len(names)))]
    # The rows are in the order of time.
    span = {"min": min(rows[0][0] or 0.0, (rows[-1][0] or 0.0) - _LEAST_MS), "max": rows[-1][0]} if rows else {}
    axis = {"axisLabel": {"color": _TEXT, "hideOverlap": True}, "splitLine": {"lineStyle": {"color": _LINES}}}
    return {
        "animation": False,
        "color": COLORS,
        "textStyle": {"color": _TEXT},
        "grid": {"left": 8, "right": 14, "top": 10, "bottom": 4, "containLabel": True},
        "tooltip": {"trigger": "axis", "confine": True, "renderMode": "richText"},
        "xAxis": {**axis, "type": "time", "splitLine": {"show": False}, "splitNumber": 4, **span},
        "yAxis": {**axis, "type": "value", "min": 0},
        "dataset": {"dimensions": columns, "source": [list(row) for row in rows]},
        "series": [
            {
                "type": "line",
                "name": name[:60],
                "encode": {"x": "time", "y": column},
                # Otherwise a point between two gaps would be invisible.
                "showSymbol": True,
                "symbolSize": 3,
                "lineStyle": {"width": 2},
            }
            for name, column in zip(names, columns[1:], strict=True)
        ],
    }

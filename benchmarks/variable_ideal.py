"""What no server of `bench variable` can surpass: `python benchmarks/variable_ideal.py`.

The same texts and callers, and a model of 2 ms for a call and 4 us for each token, in a simulation where nothing else
takes time. Callers wait for their answer, so a scheduler chooses among as many texts as there are callers, and a loop
over sorted texts among all. `gathered` cuts what waits into batches and serves them all before it looks again, as ours
does; `cut anew` does so for each batch. Both cut where padding and calls cost the least, and serve the oldest first.
"""

from __future__ import annotations

import argparse
import heapq
import importlib
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.report import table

# Without types, as it runs where the frameworks are.
ragged: Any = importlib.import_module("benchmarks.servers.ragged")
LENGTHS = [text.shape[1] for text in ragged.texts_of(1000, 1)]
ROWS = 128
SECONDS = 30.0


class Text(NamedTuple):
    """A text that waits: when it came, its number, and its length."""

    came: float
    number: int
    length: int


Batch = list[Text]


def cut(waiting: Batch, overhead: float) -> list[Batch]:
    """Return the batches whose padded tokens, and `overhead` for each, are the fewest; the oldest first."""
    texts = sorted(waiting, key=lambda text: -text.length)
    best = [(0.0, 0)]  # the tokens up to here, and where the last batch begins
    for stop in range(1, len(texts) + 1):
        most = (float("inf"), 0)
        for start in range(stop - 1, -1, -1):
            padded = texts[start].length * (stop - start)
            if padded > ragged.LIMIT and start + 1 < stop:
                break
            most = min(most, (best[start][0] + padded + overhead, start))
        best.append(most)
    batches, stop = [], len(texts)
    while stop > 0:
        batches.append(texts[best[stop][1] : stop])
        stop = best[stop][1]
    return sorted(batches, key=min)


def pack(waiting: Batch) -> Batch:
    """Return as many of the oldest texts as the limit allows."""
    batch: Batch = []
    tokens = 0
    for text in waiting:
        tokens += text.length
        if batch and tokens > ragged.LIMIT:
            break
        batch.append(text)
    return batch


def simulate(way: str, callers: int, overhead: float, turn_s: float) -> tuple[float, float, float]:
    """Return texts/s, the 99th percentile of the times of answers in ms, and the share of padding in percent."""
    coming = [Text(0.0, number, LENGTHS[number % len(LENGTHS)]) for number in range(callers)]
    now, sent, computed = 0.0, 0, 0
    waiting: Batch = []
    line: list[Batch] = []  # what is cut already
    times: list[float] = []
    while now < SECONDS:
        while coming and coming[0].came <= now:
            waiting.append(heapq.heappop(coming))
        if not (line or waiting):
            now = coming[0].came
            continue
        if not line:
            pool = sorted(waiting)[:ROWS]
            line = [pack(pool)] if way == "packed" else cut(pool, overhead)
            line = line[:1] if way == "padded, cut anew" else line
            chosen = {text for batch in line for text in batch}
            waiting = [text for text in waiting if text not in chosen]
        batch = line.pop(0)
        tokens = sum(text.length for text in batch)
        padded = tokens if way == "packed" else len(batch) * max(text.length for text in batch)
        now += ragged.CALL_S + ragged.TOKEN_S * padded
        sent, computed = sent + tokens, computed + padded
        for text in batch:
            times.append(now - text.came)
            number = callers + len(times) - 1
            heapq.heappush(coming, Text(now + turn_s, number, LENGTHS[number % len(LENGTHS)]))
    return len(times) / now, 1000 * sorted(times)[int(0.99 * len(times))], 100 * (1 - sent / computed)


def loop() -> tuple[float, float, float]:
    """Return the same of `ragged.offline`, whose texts do not wait."""
    texts, now, computed = sorted(LENGTHS, reverse=True), 0.0, 0
    at = 0
    while at < len(texts):
        rows = max(1, min(ROWS, ragged.LIMIT // texts[at], len(texts) - at))
        now += ragged.CALL_S + ragged.TOKEN_S * rows * texts[at]
        computed += rows * texts[at]
        at += rows
    return len(texts) / now, 0.0, 100 * (1 - sum(texts) / computed)


def main() -> None:
    """Print what each way comes to, and its share of the loop."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":", 1)[0] + ".")
    parser.add_argument("--callers", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--overhead", type=float, nargs="+", default=[ragged.CALL_S / ragged.TOKEN_S, 128])
    parser.add_argument("--turn-ms", type=float, default=1.0, help="from an answer to its caller's next text")
    options = parser.parse_args()
    alone = loop()
    rows = [["a loop over sorted texts", "", "", f"{alone[0]:,.0f}", "", f"{alone[2]:.0f}", "1.00"]]
    for callers in options.callers:
        ways = [(way, cost) for way in ("padded, gathered", "padded, cut anew") for cost in options.overhead]
        for way, overhead in [*ways, ("packed", 0.0)]:
            rate, p99, padding = simulate(way, callers, overhead, options.turn_ms / 1000)
            cost = "" if way == "packed" else f"{overhead:.0f}"
            rows.append(
                [way, str(callers), cost, f"{rate:,.0f}", f"{p99:.0f}", f"{padding:.0f}", f"{rate / alone[0]:.2f}"]
            )
    print(table(["way", "callers", "overhead", "texts/s", "p99 ms", "padding %", "of the loop"], rows))


if __name__ == "__main__":
    main()

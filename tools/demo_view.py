"""How the demo looks: on a terminal with colours and a moving progress bar, in a pipe or a file as plain text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

_SHADES = " ░▒▓█"
_INK = 16
"""The darkest pixel."""
_DRAWN = 4
_BAR_COLUMNS = 40


class View:
    """Prints what the demo does and found."""

    def __init__(self) -> None:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # words and shades on a terminal that has no such letters
        self._console = Console(highlight=False)

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, soft_wrap=True)

    def trained(self, learned: int, held_out: int, seconds: float) -> None:
        """Tell what was trained."""
        self.say(
            f"Trained a support vector machine on {learned} scanned digits in {seconds:.2f} s; {held_out} are held out."
        )

    def serving(self, urls: Mapping[str, str], seconds: float) -> None:
        """Tell what is served where."""
        self.say(f"Serving the models digits and spell at {' and '.join(urls.values())} after {seconds:.2f} s.")

    @contextmanager
    def progress(self, protocols: Iterable[str], total: int) -> Iterator[Callable[[str], None]]:
        """Show a bar for each protocol; the `with` block gets a function that moves the bar of one by a step."""
        columns = TextColumn("{task.description:>6}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=self._console) as progress:
            tasks = {name: progress.add_task(name, total=total, start=False) for name in protocols}

            def advance(name: str) -> None:
                progress.start_task(tasks[name])  # does nothing from the second time on
                progress.advance(tasks[name])

            yield advance

    def digits(
        self,
        images: npt.NDArray[Any],
        truth: npt.NDArray[np.int64],
        labels: npt.NDArray[np.int64],
        second_guesses: npt.NDArray[np.int64],
    ) -> None:
        """Draw a few images `(n, 8, 8)` above what the server read in them, the last one misread if any was."""
        right, wrong = np.flatnonzero(labels == truth), np.flatnonzero(labels != truth)
        chosen = [*right[: _DRAWN - len(wrong[:1])], *wrong[:1]]
        grid = Table.grid(padding=(0, 3))
        grid.add_row(*(_drawing(images[index]) for index in chosen))
        grid.add_row(*(_caption(labels[index], truth[index], second_guesses[index]) for index in chosen))
        self.say("\nAs the server read them:\n")
        self._console.print(grid)
        self._console.print()

    def words(self, digit: int, words: Mapping[str, str]) -> None:
        """Tell what the string model answered."""
        self.say(f"The model spell says {digit}: " + ", ".join(f"{word} ({code})" for code, word in words.items()))
        self._console.print()

    def speeds(self, measured: Mapping[str, tuple[float, Sequence[float]]], threads: int) -> None:
        """Print requests per second and latencies, in seconds, of each protocol."""
        table = Table(title=f"{threads} Python threads, one image per request", title_justify="left")
        for heading in ("protocol", "requests", "requests/s", "p50 ms", "p90 ms", "p99 ms"):
            table.add_column(heading, justify="left" if heading == "protocol" else "right")
        for name, (rate, latencies_s) in measured.items():
            percentiles = np.percentile(latencies_s, [50, 90, 99]) * 1e3
            table.add_row(name, f"{len(latencies_s):,}", f"{rate:,.0f}", *(f"{value:.2f}" for value in percentiles))
        self._console.print(table)

    def batches(self, batches: Mapping[int, int]) -> None:
        """Draw how many batches of each size there were."""
        table = Table(title="Batches that Triton formed", title_justify="left")
        table.add_column("batch size", justify="right")
        table.add_column("batches", justify="right")
        table.add_column("")
        most = max(batches.values())
        for size, count in sorted(batches.items()):
            table.add_row(str(size), f"{count:,}", Text("█" * max(1, round(_BAR_COLUMNS * count / most)), style="cyan"))
        images, calls = sum(size * count for size, count in batches.items()), sum(batches.values())
        self._console.print(table)
        self.say(f"{images:,} images in {calls:,} calls of the model: {images / calls:.1f} per call")
        self._console.print()

    def accuracy(self, right: int, total: int, answers: int, same: bool) -> None:
        """Tell how often the model is right, and whether the server answered what the model answers."""
        self.say(f"Accuracy: {right / total:.1%} ({right} of {total} held-out images)")
        if same:
            self._console.print(f"All {answers:,} answers are those of the model called directly.", style="bold green")
        else:
            self._console.print("The server answered differently from the model called directly.", style="bold red")


def _caption(label: int, truth: int, second_guess: int) -> Text:
    if label == truth:
        return Text(f"read as {label}", style="bold green")
    return Text(f"read as {label}, is {truth}\n(second: {second_guess})", style="bold red")


def _drawing(image: npt.NDArray[Any]) -> Text:
    """Return an image `(8, 8)` as text, two letters to a pixel, since a letter is about twice as high as wide."""
    levels = np.rint(image / _INK * (len(_SHADES) - 1)).astype(int)
    return Text("\n".join("".join(_SHADES[level] * 2 for level in row) for row in levels), no_wrap=True)

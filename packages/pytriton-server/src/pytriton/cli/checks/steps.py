"""What was tried, how long it took, and what became of it."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class StepFailed(Exception):
    """A step failed, which was recorded; steps that need it have to be skipped."""


class Steps:
    """Runs steps, prints a line for each, and keeps the lines."""

    def __init__(self, echo: Callable[[str], None]) -> None:
        self._echo = echo
        self._lines: list[str] = []
        self._failed = 0

    @property
    def failed(self) -> int:
        """How many steps failed."""
        return self._failed

    @property
    def text(self) -> str:
        """All lines."""
        return "".join(f"{line}\n" for line in self._lines)

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Run a block as a step. An error in it is recorded, and becomes `StepFailed`."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            self._failed += 1
            logger.exception("%s failed", title)
            self._print("FAILED", began, title)
            self._echo(f"        {type(error).__name__}: {error}")
            self._lines.append(f"{type(error).__name__}: {error}")
            raise StepFailed(title) from error
        self._print("ok", began, title)

    def heading(self, text: str) -> None:
        """Print a heading for the following steps."""
        self._echo(f"\n{text}")
        self._lines.append(text)

    def _print(self, result: str, began: float, title: str) -> None:
        line = f"{result:>6} {(time.monotonic() - began) * 1000:8.0f} ms  {title}"
        self._lines.append(line)
        self._echo(line)

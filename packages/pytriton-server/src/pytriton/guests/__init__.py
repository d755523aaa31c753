"""What stands beside the server: a guest adds options to `pytriton serve` and commands to `pytriton`.

An entry point of the group `pytriton.guests`, of any installed distribution, names a guest. Nothing else imports it:

```toml
[project.entry-points."pytriton.guests"]
dashboard = "my_dashboard:Dashboard"
```

```python
@dataclass
class Dashboard(Guest):
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Start the dashboard beside the server.")] = False

    def beside(self, triton, opened, *, address):
        if not self.dashboard:
            return nullcontext()
        return run_beside(triton, ["my-dashboard"], name="the dashboard")
```
"""

import contextlib
import importlib.metadata
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pytriton.exceptions._namespace import require_namespace_package as _require_namespace_package

if TYPE_CHECKING:
    from pytriton.triton import Triton

__all__ = ["GROUP", "Guest", "find_guests"]

_require_namespace_package()

GROUP = "pytriton.guests"
"""The group of entry points that name guests."""


@dataclass
class Guest:
    """The base of guests, which are dataclasses: their fields are options of `pytriton serve`, annotated for typer.

    `pytriton serve` makes an object of each guest and calls its methods in the order in which they stand here. An error
    of pytriton that one of them raises ends the command, with its text.
    """

    commands: ClassVar[Mapping[str, Callable[..., None]]] = {}
    """Commands of `pytriton`, by name: functions that typer takes."""
    in_file: ClassVar[Mapping[str, type | range]] = {}
    """Options that the file of `--config` may have, too: their types there, or the integers that they may be."""

    def check(self, given: Collection[str]) -> None:
        """Check the options, before anything of the user's is imported.

        Args:
            given: Names of all options, those of others included, that stand on the command line.

        Raises:
            typer.BadParameter: One of them is not acceptable.
        """

    def serve(self, target: str, load: "Callable[[], Triton | Mapping[str, Any]]", options: Mapping[str, Any]) -> bool:
        """Serve in another way than by a server of this process, until it ends, if the options say so.

        Args:
            target: What is to be served, as the command line names it.
            load: Imports it: returns a Triton, or models by the targets under which other processes find them.
            options: All options of the command by name, those of others included.

        Returns:
            Whether it has served; where no guest has, this process does.
        """
        return False

    def describe(self, triton: "Triton") -> Iterable[str]:
        """Check what the models and the server's settings mean for the guest; return lines for `--check`.

        Args:
            triton: The server with its models, not started yet.
        """
        return ()

    def beside(
        self, triton: "Triton", opened: contextlib.ExitStack, *, address: str
    ) -> contextlib.AbstractContextManager[object]:
        """Make what lives beside the server, and take what it needs before the server starts, such as a port.

        Args:
            triton: The server, not started yet.
            opened: Is closed after the server has stopped; for what is taken here.
            address: Where the server listens.

        Returns:
            Is entered when the models are served, and left before the server stops.
        """
        return contextlib.nullcontext()


def find_guests() -> list[type[Guest]]:
    """Import the guests of this installation, in the order of their names.

    A guest whose package is not there is left out.
    """
    guests = []
    for entry in sorted(importlib.metadata.entry_points(group=GROUP)):
        try:
            guests.append(entry.load())
        except ModuleNotFoundError as error:
            if not f"{entry.module}.".startswith(f"{error.name}."):
                raise
    return guests

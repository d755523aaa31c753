"""Options that several commands have, for `typer`."""

from pathlib import Path
from typing import Annotated

import typer

Token = Annotated[
    str | None,
    typer.Option(envvar="PYTRITON_ACCESS_TOKEN", help="The server's token. Others can see a command line."),
]
"""The token of a server that runs."""

AuthoritiesFile = Annotated[Path | None, typer.Option("--ca-file", help="Certificates of the authorities to trust.")]
"""Whom to trust where a server is reached by TLS."""


def given_options(context: typer.Context) -> set[str]:
    """Return the names of the options and arguments of a command that somebody has typed."""
    # Compared by name, because some versions of typer have an enumeration of their own.
    sources = {name: getattr(context.get_parameter_source(name), "name", None) for name in context.params}
    return {name for name, source in sources.items() if source == "COMMANDLINE"}

"""The command `serve-repository`."""

import signal
from typing import Any

import typer

from pytriton.cli.server_options import ServerOptions
from pytriton.server.settings.config import WORKERS


def serve_repository(options: ServerOptions, **settings: Any) -> None:
    """Serve a model repository until a signal ends it."""
    if options.memory_budget is not None and settings["python_models"].lower() != WORKERS:
        raise typer.BadParameter(
            f"--memory-budget is for --python-models {WORKERS}; processes of Triton's own Python backend never sleep"
        )
    options.start_log()
    with options.exit_on_errors():
        triton = options.make_triton(**settings)
        # The other commands raise an exception on SIGTERM. Here the server ends in order, with exit code 0.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        triton.serve(beside=lambda: options.telling_of_token(triton))

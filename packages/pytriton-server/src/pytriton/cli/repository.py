"""The command `serve-repository`."""

import signal
from typing import Any

from pytriton.cli.server_options import ServerOptions

__all__ = ["serve_repository"]


def serve_repository(options: ServerOptions, **settings: Any) -> None:
    """Serve a model repository until a signal ends it.

    Args:
        options: How it is served.
        **settings: Further fields of `TritonConfig`.

    Raises:
        typer.BadParameter: An option is not acceptable.
        typer.Exit: The server could not be started, or ended by itself.
    """
    options.start_log()
    with options.exit_on_errors():
        triton = options.make_triton(**settings)
        # Not as an exception, as for the other commands: the server ends in order, with exit code 0.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        triton.serve(beside=lambda: options.leaving_token(triton))

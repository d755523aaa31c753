"""The command `serve`."""

import logging
import signal
import time
from collections.abc import Collection

import typer

from pytriton.decorators import get_model_signature
from pytriton.server.cli.serving import ServerOptions
from pytriton.server.cli.targets import UserCodeError, load_served
from pytriton.server.lifecycle.stop_signals import end_on_sigterm
from pytriton.triton import ProcessWorker, Triton
from pytriton.triton._announcement import is_terminal

__all__ = ["serve"]

# What they tell at INFO of a start, the lines for a terminal tell in fewer words.
_TELL_OF_START = ("pytriton.tritonserver", "pytriton.proxy_backend", "pytriton.server", "pytriton.triton")
_TELL_OF_STOP = ("pytriton.server", "pytriton.triton")


def serve(target: str, options: ServerOptions, *, workers: int, given: Collection[str]) -> None:
    """Serve the models of a file or module until a signal ends it.

    Args:
        target: What to serve, see `load_served`.
        options: How it is served.
        workers: How many processes serve each model; 0 serves them in this one.
        given: Those options that somebody has given, as they are written: a `Triton` of the user's has settings of its
            own.

    Raises:
        typer.BadParameter: An option is not acceptable.
        typer.Exit: There is nothing to serve, the server could not be started, or ended by itself.
    """
    began = time.monotonic()
    options.start_log()
    # Until the server is served, which then ends in order, with exit code 0.
    end_on_sigterm()
    try:
        with options.exit_on_errors(UserCodeError):
            triton = _make_triton(target, options, workers, given)
            _start(triton, began)
            triton.serve()  # which says what is served
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


def _make_triton(target: str, options: ServerOptions, workers: int, given: Collection[str]) -> Triton:
    found = load_served(target)
    if isinstance(found, Triton):
        if given:
            raise typer.BadParameter(f"{target} is a Triton with settings of its own: leave out {', '.join(given)}")
        return found
    triton = options.make_triton()
    for place, model in found.items():
        if not workers:
            triton.bind(model)
            continue
        # By its place, since that is how the processes find an object, too.
        signature = get_model_signature(model)
        processes = ProcessWorker(place, copies=workers)
        triton.bind(signature.name, processes, signature.inputs, signature.outputs, config=signature.config)
    return triton


def _start(triton: Triton, began: float) -> None:
    """Start the server; for a terminal, without a log of what is going to be said in fewer words."""
    is_brief = is_terminal() and logging.getLogger().level == logging.INFO
    for name in _TELL_OF_START if is_brief else ():
        logging.getLogger(name).setLevel(logging.WARNING)
    triton.run()
    for name in _TELL_OF_STOP if is_brief else ():
        logging.getLogger(name).setLevel(logging.NOTSET)
    # With what the user's own file has loaded.
    triton._start_s = time.monotonic() - began

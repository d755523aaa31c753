"""`serve --ray`: the models of a file as an application of Ray Serve."""

import sys
from collections.abc import Collection, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import typer

from pytriton.cli.targets import UserCodeError, load_served
from pytriton.exceptions import PyTritonError
from pytriton.proxy_backend import TargetError
from pytriton.triton import Triton

__all__ = ["serve_on_ray"]

NEW_CLUSTER = "local"
# The other options are about one server.
_MEANT = frozenset(("ray", "replicas", "address", "http_port", "grpc_port", "check"))


def serve_on_ray(target: str, options: Mapping[str, Any], *, given: Collection[str]) -> None:
    """Serve the models of a file or module on a cluster of Ray until an interrupt.

    Args:
        target: What to serve, see `load_served`.
        options: Those of the command, by the names of its parameters.
        given: Names of those that somebody has given.

    Raises:
        typer.BadParameter: Something that is asked for is not for Ray, or not installed.
        typer.Exit: There is nothing to serve, or no cluster to serve it on.
    """
    if find_spec("ray") is None:
        raise typer.BadParameter('--ray needs ray: pip install "pytriton-server[ray]"')
    if others := sorted(set(given) - _MEANT):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise typer.BadParameter(f"{names}: not together with --ray, where each replica has a server of its own")
    try:
        found = load_served(target)
    except (PyTritonError, TargetError, UserCodeError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    if isinstance(found, Triton):
        raise typer.BadParameter(f"{target} is a Triton: name a file or models under @model, which replicas can make")
    models = list(found.values())
    if options["check"]:
        typer.echo(f"{target} can be served.")
        return

    from pytriton.ray import application, serve_forever

    _send_along(target, models)
    try:
        serve_forever(
            partial(application, models, num_replicas=options["replicas"]),
            address=None if options["ray"] == NEW_CLUSTER else options["ray"],
            host=options["address"],
            http_port=options["http_port"],
            grpc_port=options["grpc_port"],
        )
    except ConnectionError as error:
        problem = str(error).rstrip(". ")
        typer.echo(f"Error: --ray {options['ray']}: {problem}. With --ray {NEW_CLUSTER} it is started here.", err=True)
        raise typer.Exit(1) from None


def _send_along(target: str, models: list[Any]) -> None:
    """Have what models are made of sent to the nodes, which need not have it; what cannot be is imported there.

    Raises:
        typer.Exit: It is a file, which cannot be imported by a name.
    """
    from ray import cloudpickle

    modules = {sys.modules[model.__module__] for model in models}
    for module in modules:
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    try:
        cloudpickle.loads(cloudpickle.dumps(models))  # type: ignore[no-untyped-call]
    except Exception as error:  # a TypedDict, say, or whatever an object of the file raises
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)  # type: ignore[no-untyped-call]
        if not target.partition(":")[0].endswith(".py"):
            return
        typer.echo(
            f"Error: {target} cannot be sent to the replicas ({type(error).__name__}: {error}). Install it as a module "
            "on every node, and name that: package.module in place of the file.",
            err=True,
        )
        raise typer.Exit(1) from None

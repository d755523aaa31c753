"""The options `--ray` and `--replicas` of `serve`: the models of a file as an application of Ray Serve."""

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pytriton.guests import Guest

if TYPE_CHECKING:
    from pytriton.triton import Triton

_NEW_CLUSTER = "local"
# All other options concern a single server.
_MEANT = frozenset(("ray", "replicas", "address", "http_port", "grpc_port", "check"))
# Where the proxies of Ray listen unless the options of that name say so.
_LISTENING: dict[str, Any] = {"address": "0.0.0.0", "http_port": 8000, "grpc_port": 8001}


@dataclass
class RayGuest(Guest):
    """Ray Serve in place of a server of this process."""

    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Serve on Ray instead, each replica with a Triton of its own: the address of a cluster, auto for the "
            "one that this machine belongs to, local to start one.",
        ),
    ] = None
    replicas: Annotated[int, typer.Option(min=1, help="With --ray: how many replicas.")] = 1

    def check(self, given: Collection[str]) -> None:
        """Check that Ray is installed if it is asked for, and that the other options apply to it."""
        if self.ray is None:
            if "replicas" in given:
                raise typer.BadParameter(
                    "--replicas is for --ray: here, --workers says how many processes serve a model"
                )
            return
        if find_spec("ray") is None:
            raise typer.BadParameter('--ray needs ray: pip install "pytriton-server[ray]"')
        if others := sorted(set(given) - _MEANT):
            names = ", ".join(f"--{name.replace('_', '-')}" for name in others)
            raise typer.BadParameter(f"{names}: not together with --ray, where each replica has a server of its own")

    def serve(self, target: str, load: "Callable[[], Triton | Mapping[str, Any]]", options: Mapping[str, Any]) -> bool:
        """Serve the models on a cluster of Ray until an interrupt, if that is asked for."""
        if self.ray is None:
            return False
        found = load()
        if not isinstance(found, Mapping):
            raise typer.BadParameter(
                f"{target} is a Triton: name a file or models under @model, which replicas can make"
            )
        models = list(found.values())
        if options["check"]:
            typer.echo(f"{target} can be served.")
            return True

        from pytriton.ray import application, serve_forever

        _send_along(target, models)
        where = {name: default if options[name] is None else options[name] for name, default in _LISTENING.items()}
        try:
            serve_forever(
                partial(application, models, num_replicas=self.replicas),
                address=None if self.ray == _NEW_CLUSTER else self.ray,
                host=where["address"],
                http_port=where["http_port"],
                grpc_port=where["grpc_port"],
            )
        except ConnectionError as error:
            problem = str(error).rstrip(". ")
            typer.echo(f"Error: --ray {self.ray}: {problem}. With --ray {_NEW_CLUSTER} it is started here.", err=True)
            raise typer.Exit(1) from None
        return True


def _send_along(target: str, models: list[Any]) -> None:
    """Send the modules of the models to the nodes; the nodes import modules that cannot be sent."""
    from ray import cloudpickle

    modules = {sys.modules[model.__module__] for model in models}
    for module in modules:
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    try:
        cloudpickle.loads(cloudpickle.dumps(models))  # type: ignore[no-untyped-call]
    except Exception as error:  # for example a TypedDict, or an error of the user's object
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

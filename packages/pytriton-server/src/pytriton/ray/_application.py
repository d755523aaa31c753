"""The application that Ray Serve is given."""

from __future__ import annotations

import inspect
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytriton.decorators import get_model_signature
from pytriton.ray._replica import Replica
from pytriton.triton import TritonConfig

if TYPE_CHECKING:
    from ray.serve import Application

_SAME_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
"""What has a replica run on the event loop of Ray's own work in its process. It can, as while it serves it never keeps
a loop waiting; on one of its own, every request changes threads some times, and each answer may be sent in two."""
_CONNECT_S = 10.0

GRPC_SERVICER = "pytriton.ray._grpc.add_GRPCInferenceServiceServicer_to_server"
"""`grpc_servicer_functions` of Ray's `grpc_options` must name this, so that its gRPC proxies speak KServe v2."""


def application(
    models: Any,
    *,
    num_replicas: int | str | None = None,
    autoscaling_config: Mapping[str, Any] | None = None,
    max_ongoing_requests: int = 64,
    config: TritonConfig | None = None,
    **options: Any,
) -> Application:
    """Return an application of Ray Serve that serves models, for `ray.serve.run` or the command `serve run`.

    Args:
        models: A function or class under `pytriton.decorators.model`, or several. Every replica makes its own objects
            of the classes, once.
        num_replicas: How many replicas there are, or `"auto"`; 1 by default.
        autoscaling_config: How their number follows the load, as Ray Serve has it; in place of a number.
        max_ongoing_requests: How many requests a replica has at a time. Should be more than the largest batch, so that
            the next one gathers while one runs.
        config: Settings of each replica's Triton. Its addresses and ports are the replica's own.
        **options: More of Ray's options of a deployment, such as `ray_actor_options={"num_gpus": 1}`.

    Raises:
        TypeError: There is no model, something that is none, or an option that Ray does not have.
        ValueError: An option has a value that it cannot have, or does not go with another one.
    """
    from ray import serve

    found = list(models) if isinstance(models, Sequence) else [models]
    if not found:
        raise TypeError("expected a function or class under @model, or several, got none")
    for model in found:
        get_model_signature(model)  # raises an error if it is no model
    if config is not None and not isinstance(config, TritonConfig):
        raise TypeError(f"config: expected a TritonConfig, got {type(config).__name__}")
    _check_replicas(num_replicas, autoscaling_config, max_ongoing_requests)
    deployment: Any = serve.deployment(Replica)
    known = set(inspect.signature(deployment.options).parameters) - {"func_or_class", "version", "user_config"}
    if unknown := sorted(name for name in options if name not in known or name.startswith("_")):
        raise TypeError(
            f"{', '.join(unknown)}: not an option of a deployment of models. A replica is made anew for another model "
            "or config, so there is no user_config and no version."
        )
    if (actor := _actor_options(options.pop("ray_actor_options", None))) is not None:
        options["ray_actor_options"] = actor
    made: Application = deployment.options(
        max_ongoing_requests=max_ongoing_requests,
        **{"num_replicas": num_replicas} if num_replicas is not None else {},
        **{"autoscaling_config": dict(autoscaling_config)} if autoscaling_config is not None else {},
        **{"name": "triton", **options},
    ).bind(found, config)
    return made


def _actor_options(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Add `_SAME_LOOP` to the options if nothing is lost by that.

    A deployment with its own runtime environment does not inherit that of the job, so this repeats the job's settings.
    They are known only after a connection to a cluster.
    """
    import ray

    actor = dict(given or {})
    if "runtime_env" in actor:
        environment = dict(actor["runtime_env"] or {})
    elif ray.is_initialized():
        environment = dict(ray.get_runtime_context().runtime_env)
    else:
        return actor or None
    environment["env_vars"] = {**_SAME_LOOP, **(environment.get("env_vars") or {})}
    return {**actor, "runtime_env": environment}


def _check_replicas(
    num_replicas: int | str | None, autoscaling_config: Mapping[str, Any] | None, max_ongoing_requests: int
) -> None:
    """Check the number of replicas and of requests for each; Ray itself reports some errors only when it deploys."""
    from ray.serve.config import AutoscalingConfig

    def is_count(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value > 0

    if num_replicas not in (None, "auto") and not is_count(num_replicas):
        raise ValueError(f'num_replicas: expected a number from 1 on or "auto", got {num_replicas!r}')
    if not is_count(max_ongoing_requests):
        raise ValueError(f"max_ongoing_requests: expected a number from 1 on, got {max_ongoing_requests!r}")
    if autoscaling_config is None:
        return
    if num_replicas not in (None, "auto"):
        raise ValueError(
            f"num_replicas={num_replicas} and autoscaling_config say both how many replicas there are: leave "
            "num_replicas out, and give autoscaling_config initial_replicas if it is the number to begin with"
        )
    known = [name for name in inspect.signature(AutoscalingConfig).parameters if not name.startswith("_")]
    if unknown := sorted(set(autoscaling_config) - set(known)):
        raise ValueError(f"autoscaling_config: {', '.join(unknown)}: not known to this Ray; it has {', '.join(known)}")
    try:
        AutoscalingConfig(**autoscaling_config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"autoscaling_config: {error}") from None


def serve_forever(
    application: Application | Callable[[], Application],
    *,
    address: str | None = None,
    host: str = "0.0.0.0",
    http_port: int = 8000,
    grpc_port: int | None = None,
) -> None:
    """Run an application until an interrupt, on a cluster that is there or one of this machine.

    Args:
        application: What `application` returned, or what calls it. That is called when there is a connection, when more
            is known of the cluster, so that replicas can spare a change of threads per request.
        address: Address of the cluster, as `ray.init` takes it; `None` starts one.
        host: Where Ray's proxies listen.
        http_port: Their port for HTTP.
        grpc_port: Their port for gRPC; without it there is none.

    Raises:
        ConnectionError: There is no cluster at the address.
    """
    import ray
    from ray import serve

    if address is not None:
        _check_address(address)
    # Without an address, ray.init would look for a running cluster.
    ray.init(address=address or "local")
    made = application if isinstance(application, serve.Application) else application()
    serve.start(
        proxy_location="EveryNode",
        http_options={"host": host, "port": http_port},
        grpc_options=None if grpc_port is None else {"port": grpc_port, "grpc_servicer_functions": [GRPC_SERVICER]},
    )
    serve.run(made, blocking=True)


def _check_address(address: str) -> None:
    """Check that a cluster listens at an address; Ray itself would wait for minutes without a word."""
    # Ray prefers the variable to a cluster that it finds.
    from_environment = os.environ.get("RAY_ADDRESS") if address == "auto" else None
    host, colon, port = (from_environment or address).removeprefix("ray://").rpartition(":")
    if not (colon and port.isdecimal()):
        return  # Ray reports the error better
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConnectionError(
            f"{'RAY_ADDRESS: ' if from_environment else ''}expected a cluster at {host}:{port}, where nothing listens "
            f"({error}); `ray start --head` starts one and says its address"
        ) from None

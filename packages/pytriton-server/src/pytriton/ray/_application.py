"""The application that Ray Serve is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytriton.decorators import get_model_signature
from pytriton.ray._replica import Replica
from pytriton.triton import TritonConfig

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["GRPC_SERVICER", "application", "serve_forever"]

GRPC_SERVICER = "pytriton.ray._grpc.add_GRPCInferenceServiceServicer_to_server"
"""What `grpc_servicer_functions` of Ray's `grpc_options` must name, so that the proxies for gRPC speak KServe v2."""


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
        autoscaling_config: How their number follows the load, as Ray Serve has it.
        max_ongoing_requests: How many requests a replica has at a time. Should be more than the largest batch, so that
            the next one gathers while one runs.
        config: Settings of each replica's Triton. Its addresses and ports are the replica's own.
        **options: More of Ray's options of a deployment, such as `ray_actor_options={"num_gpus": 1}`.

    Raises:
        TypeError: There is no model, or something that is none.
    """
    from ray import serve

    found = list(models) if isinstance(models, Sequence) else [models]
    if not found:
        raise TypeError("expected a function or class under @model, or several, got none")
    for model in found:
        get_model_signature(model)  # which raises for what is none
    deployment: Any = serve.deployment(Replica)
    made: Application = deployment.options(
        name="triton",
        max_ongoing_requests=max_ongoing_requests,
        **{"num_replicas": num_replicas} if num_replicas is not None else {},
        **{"autoscaling_config": dict(autoscaling_config)} if autoscaling_config is not None else {},
        **options,
    ).bind(found, config)
    return made


def serve_forever(
    application: Application,
    *,
    address: str | None = None,
    host: str = "0.0.0.0",
    http_port: int = 8000,
    grpc_port: int | None = None,
) -> None:
    """Run an application until an interrupt, on a cluster that is there or one of this machine.

    Args:
        application: What `application` returned.
        address: Address of the cluster, as `ray.init` takes it; `None` starts one.
        host: Where Ray's proxies listen.
        http_port: Their port for HTTP.
        grpc_port: Their port for gRPC; without it there is none.
    """
    import ray
    from ray import serve

    ray.init(address=address)
    serve.start(
        proxy_location="EveryNode",
        http_options={"host": host, "port": http_port},
        grpc_options=None if grpc_port is None else {"port": grpc_port, "grpc_servicer_functions": [GRPC_SERVICER]},
    )
    serve.run(application, blocking=True)

"""Models as an application of Ray Serve, for the extra `pytriton-server[ray]`.

Every replica has a Triton of its own and hands requests on to it: callers of the cluster speak KServe v2 as they do to
one server, and requests that reach one replica at the same time are joined there. What Ray offers stays Ray's:
placement, autoscaling, health checks, rolling updates.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytriton.ray._application import GRPC_SERVICER, application, serve_forever

__all__ = ["GRPC_SERVICER", "application", "serve_forever"]


def __getattr__(name: str) -> Any:
    # The command line imports `command` even if the extra is not installed.
    if name in __all__:
        from pytriton.ray import _application

        return getattr(_application, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

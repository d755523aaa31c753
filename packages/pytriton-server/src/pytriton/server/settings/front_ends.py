"""The front ends that tritonserver has for clouds, Vertex AI and SageMaker: when they are on, what they need."""

import os

from pytriton.exceptions import PyTritonValidationError
from pytriton.server.settings.config import TritonConfig

__all__ = ["check_vertex_ai", "is_on_vertex_ai", "vertex_ai_is_on"]

_ROUTES = ("AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE")


def is_on_vertex_ai() -> bool:
    """Tell whether this program runs as a server on Vertex AI, going by the environment."""
    return os.environ.get("AIP_MODE") == "PREDICTION"


def vertex_ai_is_on(config: TritonConfig) -> bool:
    """Tell whether Vertex AI's endpoints are to be served."""
    return is_on_vertex_ai() if config.allow_vertex_ai is None else config.allow_vertex_ai


def check_vertex_ai(config: TritonConfig) -> None:
    """Check that Vertex AI's endpoints have their paths, if they are to be served.

    Raises:
        PyTritonValidationError: A variable of the environment is missing.
    """
    missing = [name for name in _ROUTES if not os.environ.get(name)]
    if missing and vertex_ai_is_on(config):
        raise PyTritonValidationError(
            f"Vertex AI's endpoints need the environment variables {' and '.join(_ROUTES)}, such as /predict and "
            f"/health; {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set. Set them, or "
            "TritonConfig.allow_vertex_ai=False.",
            expected=_ROUTES,
            received=missing,
        )

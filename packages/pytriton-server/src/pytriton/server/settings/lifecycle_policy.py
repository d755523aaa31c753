"""When the server is started and where its models come from: `TritonLifecyclePolicy`."""

import dataclasses

__all__ = ["DefaultTritonLifecyclePolicy", "TritonLifecyclePolicy", "VertextAILifecyclePolicy"]


@dataclasses.dataclass
class TritonLifecyclePolicy:
    """When the server is started."""

    launch_triton_on_startup: bool = True
    """Whether entering the context manager starts the server, so that `bind` loads each model at once."""
    local_model_store: bool = False
    """Kept for old scripts. Models bound before the start are always read from files."""


DefaultTritonLifecyclePolicy = TritonLifecyclePolicy()
"""Entering the context manager starts the server."""

VertextAILifecyclePolicy = TritonLifecyclePolicy(launch_triton_on_startup=False, local_model_store=True)
"""`run` or `serve` starts the server with all models in place, as Vertex AI wants it: its front end picks the model
then."""

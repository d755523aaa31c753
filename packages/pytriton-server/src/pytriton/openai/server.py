"""What the command needs of the endpoints: where a model is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytriton.openai._models import UnfitModelError, read_model

__all__ = ["UnfitModelError", "endpoints_of"]


def endpoints_of(config: Mapping[str, Any]) -> Sequence[str]:
    """Return the endpoints at which a model is asked."""
    served = read_model(config)
    served.chat_template.check()
    return served.endpoints

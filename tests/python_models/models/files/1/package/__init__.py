"""A package beside the model."""

from .inner import NAME

__all__ = ["NAME"]

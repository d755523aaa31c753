"""The keys of workers for a Python proxy, under the name by which programs import them."""

from .python_proxy.keys import CurveKeys, KeyFileError, KeysMissingError

__all__ = ["CurveKeys", "KeyFileError", "KeysMissingError"]

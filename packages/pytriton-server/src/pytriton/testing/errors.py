"""What a model has done wrong, as its caller would be told."""

from __future__ import annotations

from pytriton.exceptions import PyTritonError


class ModelError(PyTritonError):
    """A request failed, or the model cannot be loaded; the text is what a caller of a server would get.

    Attributes:
        code: The name of Triton's error code, such as `INTERNAL` or `INVALID_ARG`.
    """

    def __init__(self, message: str, code: str = "INTERNAL") -> None:
        """Make an error.

        Args:
            message: Its text.
            code: The name of its code.
        """
        super().__init__(message)
        self.code = code

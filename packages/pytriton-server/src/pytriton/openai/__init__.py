"""Endpoints of the OpenAI API before the models of a tritonserver, for the extra `pytriton-server[openai]`.

Models that take a text and give a text answer chats and completions, streamed where they are decoupled; those that give
a vector answer requests for embeddings. What a model is follows from its tensors, see `docs/openai.md`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytriton.openai._application import application

__all__ = ["application"]


def __getattr__(name: str) -> Any:
    # The command line imports `command` even if the extra is not installed.
    if name in __all__:
        from pytriton.openai import _application

        return getattr(_application, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

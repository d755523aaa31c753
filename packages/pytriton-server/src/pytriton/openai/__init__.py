"""Endpoints of the OpenAI API before the models of a tritonserver, for the extra `pytriton-server[openai]`.

Models that take a text and give a text answer chats and completions, streamed where they are decoupled; those that give
a vector answer requests for embeddings. What a model is follows from its tensors, see `docs/openai.md`.
"""

from pytriton.openai._application import application

__all__ = ["application"]

"""The models of a server as tools for agents, by the Model Context Protocol, for the extra `pytriton-server[mcp]`.

A tool has the name, the docstring and the tensors of its model, for one sample; a call is an inference.
"""

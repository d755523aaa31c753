"""The models of a server as workers of NVIDIA Dynamo, for the extra `pytriton-server[dynamo]`.

Dynamo's front ends find the models and route to them; each request goes on to the server, with its queues, limits,
metrics and cancellation.
"""

"""How a decorator wraps a callable, and what it knows of a call: context, requests, inputs, outputs."""

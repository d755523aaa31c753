"""Metrics and traces of a server."""

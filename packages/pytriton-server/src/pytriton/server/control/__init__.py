"""Calls to a running server: readiness, load, unload, statistics."""

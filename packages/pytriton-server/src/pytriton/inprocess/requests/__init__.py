"""Requests to a server in process, and their responses."""

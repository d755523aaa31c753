"""Bytes between worker and proxy backend: unix sockets, ZeroMQ, shared memory."""

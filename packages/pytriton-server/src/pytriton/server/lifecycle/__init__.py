"""A server from its start to its end: sessions, readiness, drain, restart."""

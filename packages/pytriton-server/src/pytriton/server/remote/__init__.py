"""Models on a server that somebody else started."""

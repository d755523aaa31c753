"""Models of a running server, the requests to them, and their responses."""

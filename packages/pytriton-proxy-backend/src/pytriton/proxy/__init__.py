"""What inference callables touch: the types of requests and responses."""

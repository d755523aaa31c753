"""Tensors in shared memory of this host, in place of the bytes of a request or a response."""

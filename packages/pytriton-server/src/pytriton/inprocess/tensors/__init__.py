"""Tensors and the memory that they lie in."""

"""Tokens: how many there are, and the tokenizers that models declare."""

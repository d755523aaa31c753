"""Replaced by what a test wants to be completed."""

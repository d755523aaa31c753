"""Bound models: their files, their configuration, their workers."""

"""Batches through an inference callable: execution, outputs, warm-up, statistics, traces."""

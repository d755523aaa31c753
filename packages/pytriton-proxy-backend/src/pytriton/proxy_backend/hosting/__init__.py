"""The supervisor of the processes that run models written for Triton's Python backend."""

"""Models written for Triton's Python backend, on workers of ours: what `model.py` finds around it, and its host."""

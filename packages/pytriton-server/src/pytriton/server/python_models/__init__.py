"""Models written for Triton's Python backend, served by processes of ours."""

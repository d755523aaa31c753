"""The Python proxy: a `TritonPythonModel` for servers where a native library cannot or may not be used.

It runs in the process that Triton's Python backend starts for the model, and hands batches to workers over ZeroMQ. A
model folder has it as one file (`bundle.py`), so that the server's Python needs numpy and pyzmq and nothing of ours.
"""

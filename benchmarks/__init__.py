"""The comparison with other ways to serve a Python function; ``python benchmarks/run.py --help`` tells its options."""

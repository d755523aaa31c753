"""Mixed traffic for a given time; `python benchmarks/soak/run.py --help` tells its options."""

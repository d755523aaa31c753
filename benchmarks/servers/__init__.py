"""The servers of the comparison: small scripts, each run by the interpreter of its own environment."""

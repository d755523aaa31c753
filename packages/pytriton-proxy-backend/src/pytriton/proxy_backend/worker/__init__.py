"""Workers: one inference callable, one thread, one connection to a proxy backend."""

"""tritonserver itself: the executable, its command line, process, ports and version."""

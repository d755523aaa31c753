"""Protocol 1 as bytes: the one home of every structure that crosses the border between the processes."""

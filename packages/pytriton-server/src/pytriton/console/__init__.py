"""The console: a page where people look at a running server, in a process of its own."""

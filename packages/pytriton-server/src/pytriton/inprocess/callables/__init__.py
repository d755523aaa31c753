"""Functions of this process as models of a server in process."""

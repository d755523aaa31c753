"""`python -m pytriton.server`: the `pytriton` command where its script is not on `PATH`."""

from pytriton.server.cli import main

if __name__ == "__main__":
    main()

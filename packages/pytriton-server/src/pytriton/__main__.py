"""`python -m pytriton`: the `pytriton` command where its script is not on `PATH`.

The one file of the namespace itself; unlike an `__init__.py`, it does not end it.
"""

from pytriton.cli import main

if __name__ == "__main__":
    main()

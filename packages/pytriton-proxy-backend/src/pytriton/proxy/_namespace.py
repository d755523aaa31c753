"""Refuses to work inside a `pytriton` package of somebody else.

`pytriton` is a namespace package: several distributions put their parts below it and none owns it, so it has no file.
Where a distribution brings a regular package of that name, as `nvidia-pytriton` does, Python runs that one's code first
and mixes its modules with ours. Every distribution holds the same copy of this file.
"""

import sys

__all__ = ["require_namespace_package"]


def require_namespace_package() -> None:
    """Check that the parent of the importing package is the namespace package.

    Raises:
        ImportError: If `pytriton` is a regular package. `path` is the file that makes it one.
    """
    file: str | None = getattr(sys.modules["pytriton"], "__file__", None)
    if file is not None:
        raise ImportError(
            f"Expected `pytriton` to be a namespace package, but {file} makes it a regular one, which hides or "
            "overwrites the modules of this installation. It most likely comes from nvidia-pytriton; pytriton-client, "
            "pytriton-decorators, pytriton-proxy-backend and pytriton-server take its place and cannot be installed "
            "beside it. Run `pip uninstall nvidia-pytriton`, then `pip install --force-reinstall` the pytriton-* "
            "distributions that you use, because the two have overwritten files of each other.",
            name="pytriton",
            path=file,
        )

"""Refuses to work inside a `pytriton` package of somebody else, and gives `pytriton` its version.

`pytriton` is a namespace package: several distributions put their parts below it and none owns it, so it has no file.
Where a distribution brings a regular package of that name, as `nvidia-pytriton` does, Python runs that one's code first
and mixes its modules with ours. Each distribution that can be installed alone holds the same copy of this file.
"""

import sys
from typing import Any


def require_namespace_package() -> None:
    """Check that the parent of the importing package is the namespace package."""
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
    vars(sys.modules["pytriton"])["__getattr__"] = _namespace_attribute


def _namespace_attribute(name: str) -> Any:
    """Find `pytriton.__version__` when it is read: a namespace package has no file that could hold it."""
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        # The versions are pinned to each other; any of the distributions may be installed alone.
        for distribution in ("pytriton-server", "pytriton-client", "pytriton-decorators", "pytriton-proxy-backend"):
            try:
                return version(distribution)
            except PackageNotFoundError:
                continue
    raise AttributeError(f"module 'pytriton' has no attribute {name!r}")

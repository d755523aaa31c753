"""The name `tritonserver` for this package, for programs that are written for NVIDIA's."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from pytriton.inprocess.capi.errors import AlreadyExistsError

_NAME = "tritonserver"
_ORIGIN = "pytriton.inprocess"


def as_tritonserver() -> ModuleType:
    """Have `import tritonserver` give the names of `pytriton.inprocess`, from now on in this process.

    Call it before what imports that name. `python -m pytriton.inprocess` does so for a program that is not to be
    changed.

    Returns:
        The module.

    Raises:
        AlreadyExistsError: If NVIDIA's package is installed, whose place this must not take.
    """
    from pytriton import inprocess  # which imports this module

    loaded = sys.modules.get(_NAME)
    spec = importlib.util.find_spec(_NAME) if loaded is None else loaded.__spec__
    if loaded is not None and spec is not None and spec.origin == _ORIGIN:
        return loaded
    if loaded is not None or spec is not None:
        raise AlreadyExistsError(
            f"Expected no package {_NAME!r} beside pytriton.inprocess, found {getattr(spec, 'origin', None)!r}. "
            "Uninstall it to run the program with pytriton.inprocess, or leave as_tritonserver() out.",
            expected="no package of this name",
            received=getattr(spec, "origin", None),
            where=_NAME,
        )
    # No package, so that none of its modules can be imported a second time under this name.
    module = ModuleType(_NAME, inprocess.__doc__)
    module.__spec__ = ModuleSpec(_NAME, None, origin=_ORIGIN)
    for name in (*inprocess.__all__, "__version__"):
        setattr(module, name, getattr(inprocess, name))
    sys.modules[_NAME] = module
    return module

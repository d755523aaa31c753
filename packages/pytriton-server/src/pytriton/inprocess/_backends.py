"""The folder that a server in process loads its backends from, and the other folders that Triton insists on.

```
<workspace>/
    models/                 a repository with a folder for each model that was loaded from memory
    backends/
        python/             the bundled Python backend: symlinks, a start script for its stub, and `_stub_utils.py`
        pytriton_inprocess/ the library that calls bound functions
        <other>/            symlinks to the other backends of the server and to those of the user
    repoagents/             empty
```

Triton takes one folder of backends only, and its default fits no installation by pip. The Python backend expects its
stub beside itself, and the stub finds neither libpython nor the interpreter of a virtual environment by itself. It is
started with fork and exec, so a start script can tell it, and the environment of this process stays as it is.
"""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig
from pathlib import Path

from pytriton import proxy_backend
from pytriton.inprocess._errors import InvalidArgumentError
from pytriton.server.binary import TritonServerBinary

__all__ = ["INPROCESS_BACKEND", "make_backends"]

INPROCESS_BACKEND = "pytriton_inprocess"
"""Name of the backend that calls functions of this process."""

_STUB = "triton_python_backend_stub"
_UTILS = "triton_python_backend_utils.py"


def make_backends(folder: Path, binary: TritonServerBinary, extra: Path | None) -> None:
    """Fill a folder with all backends.

    Args:
        folder: An existing, empty folder.
        binary: The server, whose backends are linked.
        extra: Folder of the user's with more backends. They take precedence over those of the server.

    Raises:
        InvalidArgumentError: If `extra` is not there.
        LibraryNotFoundError: If the installation has no library for bound functions.
    """
    sources = [binary.backends_dir]
    if extra is not None:
        if not extra.is_dir():
            raise InvalidArgumentError(
                f"Options.backend_directory: expected a folder with backends, found none at {str(extra)!r}.",
                expected="a folder",
                received=str(extra),
                where="Options.backend_directory",
            )
        sources.insert(0, extra)
    _make_inprocess_backend(folder / INPROCESS_BACKEND)
    for source in sources:
        for backend in sorted(source.iterdir()) if source.is_dir() else ():
            target = folder / backend.name
            if target.exists() or not backend.is_dir():
                continue
            if (backend / _STUB).is_file():
                _make_python_backend(target, backend.resolve(), binary)
            else:
                target.symlink_to(backend.resolve(), target_is_directory=True)


def _make_inprocess_backend(target: Path) -> None:
    find = getattr(proxy_backend, "inprocess_library_path", None)
    if find is None:
        return
    library = find()
    target.mkdir()
    # A link and no copy: the library is loaded from this side, too, and must be the same for the loader.
    (target / library.name).symlink_to(library)


def _make_python_backend(target: Path, source: Path, binary: TritonServerBinary) -> None:
    target.mkdir()
    for entry in source.iterdir():
        if entry.name == _UTILS:
            _link_utils(target, entry)
        elif entry.name != _STUB:
            (target / entry.name).symlink_to(entry)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    # The bundled server has one stub per version of Python, a plain one has the only one in its place.
    own = source / "stubs" / version / _STUB
    stub = own if own.is_file() else source / _STUB
    script = target / _STUB
    script.write_text(_start_script(stub, binary))
    script.chmod(0o700)


def _link_utils(target: Path, original: Path) -> None:
    """Link the module that every `model.py` imports, with what makes a stub for numpy 1 fit numpy 2."""
    (target / f"{original.stem}_original.py").symlink_to(original)
    (target / original.name).symlink_to(Path(__file__).with_name("_stub_utils.py"))
    (target / "_pytriton_dlpack.py").symlink_to(Path(proxy_backend.__file__).with_name("python_proxy") / "_dlpack.py")


def _start_script(stub: Path, binary: TritonServerBinary) -> str:
    libraries = [str(folder) for folder in binary.library_dirs]
    # Where libpython is, which many installations of Python keep off the loader's path.
    libraries += [str(sysconfig.get_config_var("LIBDIR") or ""), os.path.join(sys.base_prefix, "lib")]
    joined = os.pathsep.join(dict.fromkeys(folder for folder in libraries if folder))
    # The interpreter inside the stub takes its modules, also those of a virtual environment, from the python3 on PATH.
    interpreter = os.path.dirname(sys.executable) if sys.executable else ""
    path = f"PATH={shlex.quote(interpreter)}${{PATH:+:$PATH}}\nexport PATH\n" if interpreter else ""
    return (
        "#!/bin/sh\n"
        f"LD_LIBRARY_PATH={shlex.quote(joined)}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}\n"
        "export LD_LIBRARY_PATH\n"
        f"{path}"
        f'exec {shlex.quote(str(stub))} "$@"\n'
    )

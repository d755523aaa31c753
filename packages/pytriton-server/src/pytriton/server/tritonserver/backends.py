"""The folder that Triton loads its backends from, for a server that this program starts or has in its own process.

```
<workspace>/backends/
    python/     Triton's Python backend: links, a start script for its stub, and `stub_utils.py`; or the proxy backend,
                which asks for processes at the socket that a file names
    <ours>/     a link to a library of ours: the proxy backend, or the one that calls bound functions
    <other>/    links to the other backends of the server and to those of the user
```

Triton takes one folder of backends only, and its default fits no installation by pip. The Python backend runs each
`model.py` in a process of its own, the stub, which it expects beside itself. That was built for numpy 1, and finds
neither libpython nor the interpreter of a virtual environment by itself. It is started with fork and exec, so a start
script can tell it, and the environment of the server stays as it is.
"""

import os
import shlex
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from pytriton import proxy_backend
from pytriton.proxy_backend.settings import HOSTS_FILE_NAME, HOSTS_VARIABLE, hosts_text
from pytriton.proxy_backend.system.shortage import explain
from pytriton.server.errors import WorkspaceError
from pytriton.server.tritonserver.binary import TritonServerBinary
from pytriton.server.tritonserver.stubs import STUB

_PYTHON = "python"
_UTILS = "triton_python_backend_utils.py"
# The scripts of packed environments set this variable; Triton runs no other scripts.
_ACTIVE = "CONDA_PREFIX"


def make_backends(folder: Path, binary: TritonServerBinary, own: Mapping[str, Path], extra: Path | None = None) -> None:
    """Fill a folder with links to all backends; the user's own folder `extra` takes precedence over the server's."""
    try:
        for name, library in own.items():
            (folder / name).mkdir()
            # A link and not a copy, so that the loader sees one library if this process loads it, too.
            (folder / name / library.name).symlink_to(library)
        for source in (binary.backends_dir,) if extra is None else (extra, binary.backends_dir):
            for backend in sorted(source.iterdir()) if source.is_dir() else ():
                target = folder / backend.name
                if target.exists() or not backend.is_dir():
                    continue
                if (backend / STUB).is_file():
                    _make_python_backend(target, backend.resolve(), binary)
                else:
                    target.symlink_to(backend.resolve(), target_is_directory=True)
    except OSError as error:
        raise _unlinked(folder, error) from error


def make_python_backend(folder: Path, supervisor: Path) -> dict[str, str]:
    """Make the proxy backend that of `model.py` models, too, before `make_backends` fills the folder."""
    target = folder / _PYTHON
    try:
        target.mkdir()
        (target / f"libtriton_{_PYTHON}.so").symlink_to(proxy_backend.library_path())
        hosts = target / HOSTS_FILE_NAME
        hosts.write_text(hosts_text(supervisor), encoding="utf-8")
    except OSError as error:
        raise _unlinked(folder, error) from error
    return {HOSTS_VARIABLE: str(hosts)}


def _unlinked(folder: Path, error: OSError) -> WorkspaceError:
    return WorkspaceError(
        f"The backends cannot be linked into {folder}: "
        + explain(
            error, "Is it on a file system without symbolic links? Set PYTRITON_HOME to a folder on another one."
        ),
        path=str(folder),
    )


def _make_python_backend(target: Path, source: Path, binary: TritonServerBinary) -> None:
    target.mkdir()
    for entry in source.iterdir():
        if entry.name == _UTILS:
            _link_utils(target, entry)
        elif entry.name != STUB:
            (target / entry.name).symlink_to(entry)
    script = target / STUB
    script.write_text(_start_script(source, binary), encoding="utf-8")
    script.chmod(0o700)


def _link_utils(target: Path, original: Path) -> None:
    """Link the module that every `model.py` imports, with what makes a stub for numpy 1 fit numpy 2."""
    (target / f"{original.stem}_original.py").symlink_to(original)
    (target / original.name).symlink_to(Path(__file__).with_name("stub_utils.py"))
    (target / "_pytriton_dlpack.py").symlink_to(Path(proxy_backend.__file__).with_name("dlpack.py"))


def _start_script(source: Path, binary: TritonServerBinary) -> str:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    # The bundled server has one stub per version of Python, a plain server a single one.
    own = source / "stubs" / version / STUB
    libraries = [str(folder) for folder in binary.library_dirs]
    # The folder of libpython, which is often not on the loader's path.
    libraries += [str(sysconfig.get_config_var("LIBDIR") or ""), os.path.join(sys.base_prefix, "lib")]
    joined = os.pathsep.join(dict.fromkeys(folder for folder in libraries if folder))
    # The stub's interpreter takes its modules from the first python3 on PATH.
    interpreter = os.path.dirname(sys.executable) if sys.executable else ""
    path = f"PATH={shlex.quote(interpreter)}${{PATH:+:$PATH}}\nexport PATH\n" if interpreter else ""
    return (
        "#!/bin/sh\n"
        "# Where Triton has activated an environment that was packed for the model, that one's Python counts.\n"
        f'if [ "${_ACTIVE}" != {shlex.quote(os.environ.get(_ACTIVE, ""))} ]; then\n'
        f'    exec {shlex.quote(str(source / STUB))} "$@"\n'
        "fi\n"
        f"LD_LIBRARY_PATH={shlex.quote(joined)}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}\n"
        "export LD_LIBRARY_PATH\n"
        f"{path}"
        f'exec {shlex.quote(str(own if own.is_file() else source / STUB))} "$@"\n'
    )

"""Compiles the native libraries: into the wheel, or into a git-ignored folder of an editable install.

A wheel gets the Python proxy as one file, too, see `python_proxy/bundle.py`.

There are four: the native proxy; of mostly the same sources the backend that serves callables in the process that runs
Triton; the guard, which is loaded into tritonserver before its own libraries; and the accelerator, an extension module
of Python for workers.

The compiler is `$CXX`, else the first of `c++`, `g++`, `clang++` on PATH, else the one in the package `ziglang`, which
is asked for as a build requirement only then. Environment variables:

    PYTRITON_BUILD_WITH_ZIG=1   use ziglang even where there is a compiler: for wheels that run on every glibc from 2.17
    PYTRITON_BUILD_ARCH         `x86_64` or `aarch64`; another one than this machine's is built with ziglang
    PYTRITON_BUILD_OBJECTS      a folder where compiled files are kept, and found by the next build; `tools/dev.py` sets
                                it, without it everything is compiled

`python hatch_build.py` compiles for an editable install what changed; `--force` compiles everything.
Standard library only, since it runs in build environments of every supported Python.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ModuleNotFoundError:  # run as a script, in an environment that builds nothing
    BuildHookInterface = object  # type: ignore[assignment,misc]

ROOT = Path(__file__).resolve().parent
NATIVE = ROOT / "native"
LIBRARY_NAME = "libtriton_pytriton.so"
INPROCESS_LIBRARY_NAME = "libtriton_pytriton_inprocess.so"
GUARD_LIBRARY_NAME = "libpytriton_guard.so"
ACCELERATOR_NAME = "_accelerator.abi3.so"
PACKAGE_PATH = "pytriton/proxy_backend"
LIBRARY_PATH = f"{PACKAGE_PATH}/_lib"
EDITABLE_FOLDER = ROOT / "src" / LIBRARY_PATH
BUNDLE_PATH = f"{PACKAGE_PATH}/python_proxy"

ZIG_REQUIREMENT = "ziglang>=0.13,<0.16"
ZIG_GLIBC = "2.17"
ZIG_TARGET = "{arch}-linux-gnu." + ZIG_GLIBC
ARCHITECTURES = ("x86_64", "aarch64")
COMPILERS = ("c++", "g++", "clang++")
COMPILE_TIMEOUT_S = 600
OBJECTS_VARIABLE = "PYTRITON_BUILD_OBJECTS"
OBJECTS_KEPT_S = 30 * 24 * 3600.0
# No `-I` is among the flags, so an included file of ours lies where its name leads from the folder of the file that
# includes it. Files of the system are a part of the compiler, see `Objects`.
INCLUDE = re.compile(rb'^\s*#\s*include\s+"([^"\n]+)"', re.MULTILINE)

# The functions of Triton stay undefined: the server that loads the library has them, under a file name that differs
# from server to server. Everything else must be there at load time and not at the first call, hence `-z now`.
COMPILE_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread")
# What logs its place in the source names it from here on, so that a wheel is the same wherever it is built.
SAME_PLACES = (f"-ffile-prefix-map={NATIVE}=native",)
LINK_FLAGS = ("-shared", "-pthread", "-Wl,-z,now")
# The server brings a libstdc++ of its own version, so ours goes into the library. zig does that by itself.
STATIC_RUNTIME = ("-static-libstdc++", "-static-libgcc")
# Without this the library would export the C++ runtime that it contains, and the loader would tie half of our calls to
# it to the server's runtime instead.
VERSION_SCRIPT = "{{ global: {exports}; local: *; }};\n"


class NativeLibrary(NamedTuple):
    """What a library is made of."""

    name: str
    sources: tuple[str, ...]  # its source files in `native`; patterns of `Path.glob`
    compile_flags: tuple[str, ...]  # options for compiling that it needs beyond those common to all
    link_flags: tuple[str, ...]  # the same for linking
    exports: tuple[str, ...]  # the functions that others see; patterns of a linker's version script
    path: str = LIBRARY_PATH  # the folder of its file, below the one of the packages

    @property
    def editable_folder(self) -> Path:
        """The folder of its file in an editable install."""
        return ROOT / "src" / self.path


LIBRARIES = (
    # Never unmapped: a model that is loaded or called for a worker is waited for in threads that may be in this library
    # after the last model of it is gone.
    NativeLibrary(LIBRARY_NAME, ("proxy/**/*.cc",), SAME_PLACES, ("-Wl,-z,nodelete",), ("TRITONBACKEND_*",)),
    # In a process whose Triton keeps its symbols to itself nothing undefined could be found: it asks for them by name.
    NativeLibrary(
        INPROCESS_LIBRARY_NAME,
        (
            *("inprocess/*.cc", "python/*.cc", "accelerator/forms.cc", "accelerator/plain.cc"),
            *("proxy/batch/*.cc", "proxy/cache/cache_metrics.cc", "proxy/cache/response_cache.cc", "proxy/text/*.cc"),
            *("proxy/triton/devices.cc", "proxy/triton/late_ends.cc", "proxy/wire/record.cc"),
        ),
        # Weak: a tritonserver without an interpreter can load it all the same, to say what is missing.
        (
            *("-include", str(NATIVE / "inprocess" / "triton_table.h"), "-DPYTRITON_PYTHON=__attribute__((weak))"),
            *SAME_PLACES,
        ),
        ("-Wl,--no-undefined", "-ldl"),
        ("TRITONBACKEND_*", "pytriton_inprocess_*"),
    ),
    NativeLibrary(
        GUARD_LIBRARY_NAME,
        ("guard/**/*.cc", "grpc/*.cc", "proxy/text/*.cc"),
        (),
        ("-ldl",),
        (
            *("accept", "accept4", "bind", "close", "epoll_ctl", "epoll_wait", "inflate", "ioctl", "listen", "mmap"),
            *("munmap", "pthread_create", "readv", "recv", "recvmsg", "send", "sendmsg", "setpriority", "shm_open"),
            *("shutdown", "signal", "socketpair", "syscall", "writev"),
            *("TRITONSERVER_*", "TRITONBACKEND_OutputBuffer", "pytriton_guard_*"),
        ),
    ),
    # The functions of Python stay undefined: the interpreter that loads it has them, of whatever version it is.
    NativeLibrary(
        ACCELERATOR_NAME,
        ("accelerator/*.cc", "python/*.cc"),
        ("-fno-exceptions", "-fno-rtti"),
        (),
        ("PyInit__accelerator",),
        PACKAGE_PATH,
    ),
)


class CompileError(RuntimeError):
    """A native library cannot be compiled; the text says why and what to do."""


# --- what to compile with ------------------------------------------------------------------------------------------


class Compiler(NamedTuple):
    """A C++ compiler."""

    command: tuple[str, ...]  # how to start it
    link_flags: tuple[str, ...]  # options for linking that it needs beyond those common to all
    platform: str  # platform part of the tag of a wheel with what it compiles


def target_arch() -> str:
    """Return the architecture to compile for: that of `PYTRITON_BUILD_ARCH`, else that of this machine.

    Raises:
        CompileError: If the proxy was never tried on it.
    """
    arch = os.environ.get("PYTRITON_BUILD_ARCH") or platform.machine()
    if not sys.platform.startswith("linux") or arch not in ARCHITECTURES:
        raise CompileError(
            f"The native proxy is for Linux on {' and '.join(ARCHITECTURES)}, not for {sys.platform} on {arch}. "
            "Set PYTRITON_BUILD_ARCH to build for another machine than this one."
        )
    return arch


def machine_compiler() -> tuple[str, ...] | None:
    """Return the command of this machine's compiler, or `None` if there is none that may be used."""
    wanted = os.environ.get("PYTRITON_BUILD_WITH_ZIG", "").strip().lower()
    if wanted in ("1", "true", "yes", "on") or target_arch() != platform.machine():
        return None
    given = os.environ.get("CXX")
    if given:
        return tuple(shlex.split(given))
    return next(((path,) for name in COMPILERS if (path := shutil.which(name))), None)


def find_compiler() -> Compiler:
    """Choose the compiler.

    A wheel from this machine's compiler is tagged `linux`, since it needs a glibc about as new as this machine's:
    good for this machine, refused by package indexes. For others, build with zig.
    """
    arch = target_arch()
    command = machine_compiler()
    if command is not None:
        return Compiler(command, STATIC_RUNTIME, f"linux_{arch}")
    zig = (sys.executable, "-m", "ziglang", "c++", "-target", ZIG_TARGET.format(arch=arch))
    return Compiler(zig, ("-s",), f"manylinux_{ZIG_GLIBC.replace('.', '_')}_{arch}")


# --- compiling -----------------------------------------------------------------------------------------------------


def sources(library: NativeLibrary) -> list[Path]:
    """Return the source files of a library in a fixed order.

    Raises:
        CompileError: If any is missing.
    """
    found: list[Path] = []
    for pattern in library.sources:
        files = sorted(NATIVE.glob(pattern))
        if not files:
            raise CompileError(f"There is no C++ source {NATIVE / pattern}; is the source tree complete?")
        found += files
    return found


def compile_library(folder: Path, library: NativeLibrary = LIBRARIES[0], *, force: bool = False) -> Compiler:
    """Compile a library into a folder. An older one is replaced in one step: a server may have it loaded.

    Args:
        folder: Where the library is written.
        library: What it is made of.
        force: Whether files are compiled again that were compiled before.

    Returns:
        The compiler that did it.

    Raises:
        CompileError: If the compiler is missing, fails or does not end.
    """
    compiler = find_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".compile-", dir=folder) as made_here:
        scratch = Path(made_here)
        kept = os.environ.get(OBJECTS_VARIABLE)
        flags = [*COMPILE_FLAGS, *library.compile_flags]
        objects = Objects(Path(kept) if kept else scratch, compiler.command, flags, force=force)
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            compiled = list(pool.map(objects.compile, sources(library)))
        exports = scratch / "exports.map"
        exports.write_text(VERSION_SCRIPT.format(exports="; ".join(library.exports)))
        linked = scratch / library.name
        flags = [*LINK_FLAGS, *compiler.link_flags, f"-Wl,--version-script={exports}"]
        run_compiler([*compiler.command, *flags, *map(str, compiled), *library.link_flags, "-o", str(linked)])
        os.replace(linked, folder / library.name)
    return compiler


class Objects:
    """Compiled files in a folder, under names that say what they were compiled of, with which compiler and flags.

    Two builds may use one folder at the same time.
    """

    def __init__(self, folder: Path, command: Sequence[str], flags: Sequence[str], *, force: bool) -> None:
        """Ask the compiler for its version.

        Raises:
            CompileError: If the compiler is missing.
        """
        self._folder = folder
        self._command = [*command, *flags]
        self._force = force
        # Headers of the system and the C++ library change with the compiler's version.
        # zig prints its version and then refuses the targets that it compiles for.
        version = run_compiler([*command, "--version"], may_fail=True)
        self._key = digest_of([version, *command, *without_folders(flags)])

    def compile(self, source: Path) -> Path:
        """Return the compiled file of a source file; compile it unless that was done before."""
        made = self._folder / f"{source.stem}-{digest_of([self._key, *contents(source, self._command)])[:32]}.o"
        if self._force or not made.is_file():
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".compile-", dir=self._folder) as scratch:
                fresh = Path(scratch) / made.name
                run_compiler([*self._command, "-c", str(source), "-o", str(fresh)])
                os.replace(fresh, made)
        os.utime(made)
        return made


def contents(source: Path, flags: Sequence[str] = ()) -> list[str]:
    """Return the names and contents of a source file and of all files of ours that it includes.

    Args:
        source: The source file.
        flags: Options of the compiler; `-include` names a file more.
    """
    found: dict[Path, bytes] = {}
    waiting = [source, *(Path(value) for flag, value in pairwise(flags) if flag == "-include")]
    while waiting:
        path = waiting.pop()
        if path not in found:
            # A file that is missing is the compiler's to report.
            found[path] = path.read_bytes() if path.is_file() else b""
            names = [os.fsdecode(name) for name in INCLUDE.findall(found[path])]
            waiting += [Path(os.path.normpath(path.parent / name)) for name in names]
    return [text for path in sorted(found) for text in (*without_folders([str(path)]), found[path].decode())]


def without_folders(texts: Sequence[str]) -> list[str]:
    """Return texts with paths from the folder of this file on, wherever that lies."""
    return [text.replace(str(ROOT), "") for text in texts]


def digest_of(texts: Sequence[str]) -> str:
    """Return one digest of several texts."""
    return hashlib.sha256(b"".join(hashlib.sha256(text.encode()).digest() for text in texts)).hexdigest()


def forget_old_objects() -> None:
    """Remove the compiled files that no build has used for a month."""
    kept = os.environ.get(OBJECTS_VARIABLE)
    for path in Path(kept).glob("*.o") if kept else ():
        if path.stat().st_mtime < time.time() - OBJECTS_KEPT_S:
            path.unlink(missing_ok=True)


def run_compiler(command: list[str], *, may_fail: bool = False) -> str:
    """Run one step of the compilation, show its warnings and return what else the compiler printed.

    Raises:
        CompileError: If the compiler is missing, fails or does not end.
    """
    advice = "Set CXX to another C++17 compiler, or PYTRITON_BUILD_WITH_ZIG=1 to use the package ziglang."
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILE_TIMEOUT_S)
    except FileNotFoundError as error:
        raise CompileError(f"There is no C++ compiler {command[0]}. {advice}") from error
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{shlex.join(command)}\ntook over {COMPILE_TIMEOUT_S} s. {advice}") from error
    if may_fail:
        return done.stdout
    if done.returncode != 0:
        raise CompileError(f"{shlex.join(command)}\nfailed ({done.returncode}):\n{done.stderr.strip()}\n{advice}")
    if done.stderr.strip():
        print(done.stderr.strip(), file=sys.stderr)
    return done.stdout


def source_digest(library: NativeLibrary) -> str:
    """Return a digest of all that a library is made of, whatever compiles it."""
    made_of = [text for source in sources(library) for text in contents(source, library.compile_flags)]
    flags = [*COMPILE_FLAGS, *library.compile_flags, *LINK_FLAGS, *STATIC_RUNTIME, *library.link_flags]
    return digest_of([*made_of, *without_folders(flags), VERSION_SCRIPT, *library.exports])


def stamp_file(library: NativeLibrary) -> Path:
    """Return the file of an editable install that says what a library there was made of."""
    return EDITABLE_FOLDER / f".{library.name}.digest"


def is_stale(library: NativeLibrary) -> bool:
    """Tell whether the library of an editable install is missing, or was made of something else than is there now."""
    stamp = stamp_file(library)
    is_there = (library.editable_folder / library.name).is_file() and stamp.is_file()
    return not is_there or stamp.read_text() != source_digest(library)


def refresh_editable(*, force: bool = False) -> bool:
    """Compile the libraries of an editable install that are stale, or all with `force`; tell whether any was."""
    stale = [library for library in LIBRARIES if force or is_stale(library)]
    for library in stale:
        # Before the sources are read: what is saved meanwhile is compiled by the next build.
        digest = source_digest(library)
        compile_library(library.editable_folder, library, force=force)
        EDITABLE_FOLDER.mkdir(parents=True, exist_ok=True)
        stamp_file(library).write_text(digest)
    if stale:
        forget_old_objects()
    return bool(stale)


# --- the Python proxy ----------------------------------------------------------------------------------------------


def write_bundle(folder: Path) -> Path:
    """Write the Python proxy as one file into a folder; return the file."""
    made_by = ROOT / "src" / BUNDLE_PATH / "bundle.py"
    spec = importlib.util.spec_from_file_location("bundle", made_by)
    if spec is None or spec.loader is None:
        raise CompileError(f"There is no {made_by}; is the source tree complete?")
    bundle = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bundle)
    path: Path = folder / bundle.BUNDLE_NAME
    path.write_bytes(bundle.make_bundle(ROOT / "src" / PACKAGE_PATH))
    return path


# --- the hook ------------------------------------------------------------------------------------------------------


class NativeProxyBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the native libraries to a wheel, or to the source tree of an editable install."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Ask for a compiler from the package index where this machine has none."""
        try:
            return [] if machine_compiler() else [ZIG_REQUIREMENT]
        except CompileError:
            return []  # initialize() reports it, where an error is shown properly

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say for which platform the wheel is."""
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        try:
            if version == "editable":
                refresh_editable()
                return
            self._scratch = tempfile.TemporaryDirectory(prefix="pytriton-proxy-backend-")
            folder = Path(self._scratch.name)
            compilers = [compile_library(folder, library) for library in LIBRARIES]
            bundle = write_bundle(folder)
        except CompileError as error:
            self.app.abort(str(error))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{compilers[0].platform}"
        for library in LIBRARIES:
            build_data["force_include"][str(folder / library.name)] = f"{library.path}/{library.name}"
        build_data["force_include"][str(bundle)] = f"{BUNDLE_PATH}/{bundle.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was only needed while the wheel was written."""
        del version, build_data, artifact_path
        if self._scratch is not None:
            self._scratch.cleanup()


if __name__ == "__main__":
    try:
        if refresh_editable(force="--force" in sys.argv[1:]):
            print(f"compiled the native libraries in {EDITABLE_FOLDER}")
    except CompileError as error:
        sys.exit(str(error))

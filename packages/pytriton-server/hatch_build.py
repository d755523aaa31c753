"""Puts tritonserver next to the code: into the wheel, or into a git-ignored folder of an editable install.

The server comes from the folder named by `PYTRITON_TRITONSERVER_DIR` (laid out as `/opt/tritonserver`), or else from
the wheel that NVIDIA publishes, fetched with pip and held against a pinned hash. Only what the server needs is kept:

    bin/tritonserver
    lib/                     the libraries that the executable, the backend and the cache load, but no libpython
    backends/python/         Triton's Python backend; stubs/<version>/ holds one stub for each Python version
    caches/local/            the response cache
    licenses/                NVIDIA's licence texts

`python hatch_build.py` brings the folder of an editable install up to date without a new installation.
Standard library only, since it runs in build environments of every supported Python.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ModuleNotFoundError:  # run as a script, in an environment that builds nothing
    BuildHookInterface = object  # type: ignore[assignment,misc]

NVIDIA_REQUIREMENT = "nvidia-pytriton==0.7.0"
NVIDIA_WHEEL = "nvidia_pytriton-0.7.0-py3-none-manylinux_2_35_{arch}.whl"
NVIDIA_SHA256 = {
    "x86_64": "21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df",
    "aarch64": "f99e07ee56fe065337453956afba17d2673e02ec6a632c3de26ce6e7b32a0898",
}
# The platform that NVIDIA's own wheel names for these very files.
NVIDIA_PLATFORM = "manylinux_2_35_{arch}"
# A stub starts only with an interpreter of its own version, and ours starts at 3.10.
STUB_PYTHONS = ("3.10", "3.11", "3.12", "3.13")

# What a server consists of, with the licence of each: names of files begin with one of `files`, and what has none is in
# the binaries of Triton. `text` is the file of `licenses/` with the licence's text.
COMPONENTS = Path(__file__).resolve().parent / "components.json"
PACKAGE_PATH = "pytriton/server/_tritonserver"
EDITABLE_FOLDER = Path(__file__).resolve().parent / "src" / PACKAGE_PATH
SOURCE_FILE = "SOURCE"
DOWNLOAD_TIMEOUT_S = 900

# Triton starts the one executable of this name, whatever Python the user runs. A stub works with one version only and
# looks for its libraries where they were in NVIDIA's wheel, so this chooses the stub and says where the libraries are,
# libpython included. Only the stub is told: for the server itself, a folder like conda's lib/ holds too many others.
STUB_CHOOSER = """\
#!/bin/sh
here=$(cd "$(dirname "$0")" && pwd) || exit 1
ask='import sys, sysconfig; print("%d.%d" % sys.version_info[:2], sysconfig.get_config_var("LIBDIR"))'
answer=$(python3 -c "$ask") || exit 1
version=${answer%% *}
stub="$here/stubs/$version/triton_python_backend_stub"
if [ ! -x "$stub" ]; then
    echo "tritonserver's Python backend has no stub for Python $version (python3 on PATH is $(command -v python3));" \\
        "there are stubs for: $(ls "$here/stubs" | tr '\\n' ' ')" >&2
    exit 1
fi
LD_LIBRARY_PATH="$here/../../lib:${answer#* }${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export LD_LIBRARY_PATH
exec "$stub" "$@"
"""


class BundleError(RuntimeError):
    """tritonserver cannot be bundled; the text says why and what to do."""


# --- where the server comes from -----------------------------------------------------------------------------------


class Source(NamedTuple):
    """An unpacked tritonserver."""

    root: Path  # folder with `bin/`, `backends/` and `caches/`
    licenses: tuple[Path, ...]  # files with licence texts
    # One line that tells this source from others, and this hook's layout of it from that of other versions.
    identity: str
    platform: str  # platform part of the tag of a wheel that holds these files

    @property
    def library_folders(self) -> tuple[Path, ...]:
        """Folders with the server's own libraries: as in `/opt/tritonserver`, and as in NVIDIA's wheel."""
        return (self.root / "lib", self.root.parent.parent / "nvidia_pytriton.libs")


def target_arch() -> str:
    """Return the architecture to build for: that of `PYTRITON_BUILD_ARCH`, else that of this machine."""
    return os.environ.get("PYTRITON_BUILD_ARCH") or platform.machine()


def wanted_identity() -> str:
    """Return the identity of the source that the environment asks for, without fetching anything."""
    return f"{wanted_source()} arranged by {sha256(Path(__file__))[:12]}"


def wanted_source() -> str:
    """Name the source that the environment asks for.

    Raises:
        BundleError: If it names a folder without a server, or if there is none for this platform.
    """
    given = os.environ.get("PYTRITON_TRITONSERVER_DIR")
    if given:
        executable = Path(given).expanduser() / "bin" / "tritonserver"
        if not executable.is_file():
            raise BundleError(
                f"PYTRITON_TRITONSERVER_DIR is {given}, but there is no {executable}. It must name a folder laid out "
                "as /opt/tritonserver: bin/tritonserver, lib/, backends/, caches/."
            )
        found = executable.stat()
        return f"{executable.resolve()} {found.st_size} {found.st_mtime_ns}"
    arch = target_arch()
    if not sys.platform.startswith("linux") or arch not in NVIDIA_SHA256:
        raise BundleError(
            f"There is no tritonserver for {sys.platform} on {arch}; there is one for Linux on "
            f"{' and '.join(NVIDIA_SHA256)}. Set PYTRITON_TRITONSERVER_DIR to one of your own, or "
            "PYTRITON_BUNDLE_TRITONSERVER=0 to build without."
        )
    return f"{NVIDIA_REQUIREMENT} {arch} sha256:{NVIDIA_SHA256[arch]}"


def open_source(scratch: Path) -> Source:
    """Unpack or find the server that the environment asks for; what is unpacked goes below `scratch`."""
    identity = wanted_identity()
    arch = target_arch()
    given = os.environ.get("PYTRITON_TRITONSERVER_DIR")
    if given:
        root = Path(given).expanduser().resolve()
        texts = [*root.glob("LICENSE*"), *root.glob("NOTICE*"), *root.glob("licenses/*")]
        return Source(root, tuple(text for text in texts if text.is_file()), identity, f"linux_{arch}")
    unpacked = unpack(fetch_wheel(arch, scratch), scratch / "unpacked")
    licenses = tuple(unpacked.glob("*.dist-info/licenses/*"))
    return Source(unpacked / "pytriton" / "tritonserver", licenses, identity, NVIDIA_PLATFORM.format(arch=arch))


def fetch_wheel(arch: str, scratch: Path) -> Path:
    """Return the path of NVIDIA's wheel, from the user's cache or else fetched with pip.

    Raises:
        BundleError: If pip cannot fetch it or its hash is wrong.
    """
    name = NVIDIA_WHEEL.format(arch=arch)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pytriton-build"
    cached = cache / name
    if cached.is_file() and sha256(cached) == NVIDIA_SHA256[arch]:
        return cached
    downloads = scratch / "download"
    downloads.mkdir()
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{NVIDIA_REQUIREMENT} --hash=sha256:{NVIDIA_SHA256[arch]}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--platform", NVIDIA_PLATFORM.format(arch=arch)]
    command += ["--require-hashes", "--requirement", str(requirements), "--dest", str(downloads)]
    advice = "Set PYTRITON_TRITONSERVER_DIR to an unpacked server to build without fetching one."
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise BundleError(
            f"Fetching {NVIDIA_REQUIREMENT} with pip took over {DOWNLOAD_TIMEOUT_S} s. {advice}"
        ) from error
    fetched = downloads / name
    if done.returncode != 0 or not fetched.is_file():
        raise BundleError(
            f"pip could not fetch {NVIDIA_REQUIREMENT} for {arch} (exit code {done.returncode}):\n"
            f"{done.stderr.strip()}\n{advice}"
        )
    received = sha256(fetched)
    if received != NVIDIA_SHA256[arch]:
        raise BundleError(f"{name}: expected sha256 {NVIDIA_SHA256[arch]}, received {received}. {advice}")
    return keep(fetched, cached)


def keep(fetched: Path, cached: Path) -> Path:
    """Move a file into the cache in one step, or leave it where it is when the cache cannot be written."""
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
            copy = shutil.copy(fetched, folder)
            os.replace(copy, cached)
    except OSError as error:
        print(f"Not cached: {error}", file=sys.stderr)
        return fetched
    return cached


def unpack(wheel: Path, folder: Path) -> Path:
    """Unpack the server's part of NVIDIA's wheel, with the modes of its files, which zipfile would drop."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            wanted = ("pytriton/tritonserver/", "nvidia_pytriton.libs/") if not member.is_dir() else ()
            if member.filename.startswith(wanted) or ".dist-info/licenses/" in member.filename:
                path = archive.extract(member, folder)
                os.chmod(path, (member.external_attr >> 16) & 0o777 or 0o644)
    return folder


def sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# --- which files it takes ------------------------------------------------------------------------------------------


def needed_libraries(path: Path) -> list[str]:
    """Read the names of the libraries that a 64-bit little-endian ELF file loads (its DT_NEEDED entries)."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return []
    header_offset, header_size, header_count = (
        *struct.unpack_from("<Q", data, 32),
        *struct.unpack_from("<HH", data, 54),
    )
    load, dynamic = 1, 2
    segments = []
    entries: list[tuple[int, int]] = []
    for index in range(header_count):
        kind, _, offset, address, _, size = struct.unpack_from("<IIQQQQ", data, header_offset + index * header_size)
        if kind == load:
            segments.append((address, offset, size))
        elif kind == dynamic:
            entries = list(struct.iter_unpack("<qQ", data[offset : offset + size - size % 16]))
    needed_tag, string_table_tag = 1, 5
    table_address = next((value for tag, value in entries if tag == string_table_tag), None)
    if table_address is None:
        return []
    table = next(
        table_address - address + offset
        for address, offset, size in segments
        if address <= table_address < address + size
    )
    starts = [table + value for tag, value in entries if tag == needed_tag]
    return [data[start : data.index(b"\0", start)].decode() for start in starts]


def libraries_of(files: list[Path], folders: tuple[Path, ...]) -> dict[str, Path]:
    """Find the libraries that some ELF files load, directly or not, as far as they are in the given folders.

    What is elsewhere (libc, libstdc++, ...) belongs to the system. A libpython belongs to the user's interpreter.
    """
    found: dict[str, Path] = {}
    waiting = list(files)
    while waiting:
        for name in needed_libraries(waiting.pop()):
            if name in found or name.startswith("libpython"):
                continue
            path = next((folder / name for folder in folders if (folder / name).is_file()), None)
            if path is not None:
                found[name] = path
                waiting.append(path)
    return found


def stubs_of(root: Path) -> dict[str, Path]:
    """Find the stubs of the Python backend by Python version, in NVIDIA's wheel or in a folder made by this hook."""
    places = (root / "python_backend_stubs", root / "backends" / "python" / "stubs")
    return {
        version: path
        for place in places
        for version in STUB_PYTHONS
        if (path := place / version / "triton_python_backend_stub").is_file()
    }


def assemble(source: Source, folder: Path) -> None:
    """Copy what the server needs into a folder laid out as `/opt/tritonserver`.

    Raises:
        BundleError: If the executable is missing.
    """
    executable = source.root / "bin" / "tritonserver"
    if not executable.is_file():
        raise BundleError(f"There is no {executable} in what was fetched or given as tritonserver.")
    place(executable, folder / "bin" / "tritonserver", mode=0o755)
    plugins: list[Path] = []
    for part in ("backends/python", "caches"):
        for path in sorted((source.root / part).rglob("*")):
            relative = path.relative_to(source.root)
            if path.is_file() and "stubs" not in relative.parts and "__pycache__" not in relative.parts:
                place(path, folder / relative)
                plugins.append(path)
    stubs = stubs_of(source.root)
    for version, path in stubs.items():
        copied = folder / "backends" / "python" / "stubs" / version / path.name
        place(path, copied, mode=0o755)
        use_plain_libpython(copied, version)
    if stubs:
        chooser = folder / "backends" / "python" / "triton_python_backend_stub"
        chooser.write_text(STUB_CHOOSER)
        chooser.chmod(0o755)
    files = [executable, *plugins, *stubs.values()]
    for name, path in libraries_of(files, source.library_folders).items():
        place(path, folder / "lib" / name)
    for text in source.licenses:
        place(text, folder / "licenses" / text.name)
    (folder / SOURCE_FILE).write_text(source.identity + "\n")


def place(path: Path, target: Path, mode: int | None = None) -> None:
    """Copy a file, executable where it was so, with the given mode otherwise; nobody else may write to it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, target)
    target.chmod((mode or path.stat().st_mode) & 0o755)


def use_plain_libpython(stub: Path, version: str) -> None:
    """Let a stub load the user's libpython where NVIDIA's wheel made it load a renamed copy of its own.

    The plain name is shorter than the one it replaces, so it fits in its place in the table of strings.
    """
    plain = f"libpython{version}.so.1.0"
    for name in needed_libraries(stub):
        if name.startswith("libpython") and name != plain and len(name) >= len(plain):
            data = stub.read_bytes()
            stub.write_bytes(data.replace(name.encode() + b"\0", plain.encode().ljust(len(name), b"\0") + b"\0"))


# --- what it carries of others ---------------------------------------------------------------------------------------


def bill_of_materials(folder: Path, version: str) -> dict[str, Any]:
    """Describe what is in an assembled server, as CycloneDX does: components, their licences and files.

    Args:
        folder: The assembled server.
        version: Of this distribution.
    """
    described: list[dict[str, Any]] = json.loads(COMPONENTS.read_text(encoding="utf-8"))
    files = {path.relative_to(folder).as_posix(): path for path in files_below(folder)}
    components = [_component(each, files) for each in described]
    # Of a server that somebody brought there may be files that the table does not know; ours has none.
    components += [_file(name, path) for name, path in files.items() if not _is_no_component(name)]
    reference = f"pkg:pypi/pytriton-server@{version}"
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": reference,
                "name": "pytriton-server",
                "version": version,
                "purl": reference,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": components,
        "dependencies": [{"ref": reference, "dependsOn": [each["bom-ref"] for each in components]}],
    }


def _component(described: dict[str, Any], files: dict[str, Path]) -> dict[str, Any]:
    """Describe a component, and take its files out of those that nothing was found for."""
    own = [name for name in files if name.rpartition("/")[2].startswith(tuple(described["files"]))]
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": described["name"],
        "name": described["name"],
        "licenses": [{"expression": described["license"]}],
        "externalReferences": [{"type": "website", "url": described["url"]}],
    }
    if "version" in described:
        component["version"] = described["version"]
    if own:
        component["components"] = [_file(name, files.pop(name)) for name in own]
    return component


def _file(name: str, path: Path) -> dict[str, Any]:
    hashes = [{"alg": "SHA-256", "content": sha256(path)}]
    return {"type": "file", "bom-ref": f"{PACKAGE_PATH}/{name}", "name": f"{PACKAGE_PATH}/{name}", "hashes": hashes}


def _is_no_component(name: str) -> bool:
    return name == SOURCE_FILE or name.startswith("licenses/")


# --- the hook ------------------------------------------------------------------------------------------------------


def refresh_editable(folder: Path = EDITABLE_FOLDER) -> bool:
    """Fill the folder of an editable install unless it holds the wanted server already.

    Returns:
        Whether anything had to be done.
    """
    source_file = folder / SOURCE_FILE
    if source_file.is_file() and source_file.read_text().strip() == wanted_identity():
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tritonserver-", dir=folder.parent) as scratch:
        fresh = Path(scratch) / "fresh"
        assemble(open_source(Path(scratch)), fresh)
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        fresh.rename(folder)
    return True


def is_bundled() -> bool:
    """Tell whether the server is to be bundled; owners of one of their own may build without."""
    return os.environ.get("PYTRITON_BUNDLE_TRITONSERVER", "1").strip().lower() not in ("0", "false", "no", "off")


class TritonServerBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds tritonserver to a wheel, or to the source tree of an editable install."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Provide the server and say for which platform the wheel is."""
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        if not is_bundled():
            return
        try:
            if version == "editable":
                refresh_editable()
                return
            self._scratch = tempfile.TemporaryDirectory(prefix="pytriton-server-")
            source = open_source(Path(self._scratch.name))
            folder = Path(self._scratch.name) / "assembled"
            assemble(source, folder)
        except BundleError as error:
            self.app.abort(str(error))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{source.platform}"
        build_data["force_include"].update(force_included(folder))
        described = folder.parent / "tritonserver.cdx.json"
        described.write_text(json.dumps(bill_of_materials(folder, self.metadata.version), indent=1) + "\n")
        # In `sboms/` of the metadata (PEP 770).
        build_data["sbom_files"].append(str(described))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was only needed while the wheel was written."""
        del version, build_data, artifact_path
        if self._scratch is not None:
            self._scratch.cleanup()


def force_included(folder: Path) -> dict[str, str]:
    """Map every file below a folder to its place in the wheel."""
    return {str(path): f"{PACKAGE_PATH}/{path.relative_to(folder).as_posix()}" for path in files_below(folder)}


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder in a fixed order, for wheels that are the same each time."""
    # What Triton's Python backend leaves where it has run is not part of it.
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.parent.name != "__pycache__")


if __name__ == "__main__":
    try:
        if is_bundled() and refresh_editable():
            print(f"tritonserver is in {EDITABLE_FOLDER}")
    except BundleError as error:
        sys.exit(str(error))

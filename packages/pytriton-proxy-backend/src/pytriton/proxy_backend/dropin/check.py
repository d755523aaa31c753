"""Does a drop-in model fit this server, this version of the library and this machine?"""

from __future__ import annotations

import enum
import importlib.util
import ipaddress
import json
import os
import platform
import shutil
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import EndpointError, LibraryNotFoundError
from ..model import check_endpoint
from ..system.native import BACKEND_NAME, LIBRARY_NAME, PYTHON_LIBRARY_NAME, library_path
from ..system.peers import peer_credentials
from ..wire import layout
from .contents import machine_of
from .manifest import Manifest
from .repository import DropInModel, models_at

# The name of the backend's library for each flavour of model.
_LIBRARIES = {"native": LIBRARY_NAME, "hosts": PYTHON_LIBRARY_NAME}
# pytriton-server looks it up in the same way, but need not be installed here.
_SERVER_VARIABLE = "PYTRITON_TRITONSERVER_DIR"
_SERVER_PACKAGE = "pytriton.server"
_BUNDLED_FOLDER = "_tritonserver"
_SYSTEM_SERVER = Path("/opt/tritonserver")
# The folders of a server's libraries; the last one is where pip puts those of a wheel (`*.libs` beside the package).
_LIBRARY_FOLDERS = ("lib", "lib64", "../../*.libs")
_PROBE_TIMEOUT_S = 60.0
_HTTP_TIMEOUT_S = 10.0
# In another process, so that a library that fails to load harms nothing here.
_PROBE = """
import ctypes, sys
server = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
major, minor = ctypes.c_uint32(), ctypes.c_uint32()
server.TRITONBACKEND_ApiVersion(ctypes.byref(major), ctypes.byref(minor))
print(f"backend API {major.value}.{minor.value}")
backend = ctypes.CDLL(sys.argv[2], mode=2)  # RTLD_NOW: every symbol is looked up
backend.TRITONBACKEND_Initialize.restype = ctypes.c_void_p
error = backend.TRITONBACKEND_Initialize(None)
if error:
    server.TRITONSERVER_ErrorMessage.restype = ctypes.c_char_p
    server.TRITONSERVER_ErrorMessage.argtypes = [ctypes.c_void_p]
    sys.exit(server.TRITONSERVER_ErrorMessage(error).decode())
"""


class Level(enum.Enum):
    """The meaning of a finding."""

    OK = "ok"
    UNKNOWN = "not checked"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    level: Level  # what it means
    text: str  # what was found, and what to do about it


def check_model(model: DropInModel, *, server: Path | None = None, url: str | None = None) -> list[Finding]:
    """Check everything about a drop-in model that can be wrong.

    `server` is the folder of its tritonserver, and `url` its HTTP address if it runs.
    """
    if model.manifest is None:
        return [Finding(Level.PROBLEM, "; ".join(model.edits))]
    findings = [Finding(Level.PROBLEM, f"edited: {edit}") for edit in model.edits] or [
        Finding(Level.OK, "nothing was edited since it was written")
    ]
    findings += _check_versions(model.path, model.manifest)
    for version, endpoint in sorted(model.manifest.endpoints.items()):
        if model.manifest.flavour == "hosts":
            found = list(_check_supervisor(Path(endpoint)))
        else:
            found = [*_check_endpoint(endpoint, model.manifest.flavour), *_check_alone(model, endpoint)]
        if url is not None:
            found += _check_running(model.manifest, version, url)
        where = f"version {version}: " if len(model.manifest.endpoints) > 1 else ""
        findings += [Finding(finding.level, f"{where}{finding.text}") for finding in found]
    findings += _check_server(model.path, model.manifest, server)
    return findings


def find_server() -> Path | None:
    """Return the folder of this machine's tritonserver, if any.

    The search order is `PYTRITON_TRITONSERVER_DIR`, the server of pytriton-server, `/opt/tritonserver`, and
    `tritonserver` on `PATH`.
    """
    named = os.environ.get(_SERVER_VARIABLE)
    if named:
        return Path(named).expanduser()
    package = importlib.util.find_spec(_SERVER_PACKAGE)  # find_spec does not import it
    bundled = [Path(package.origin).parent / _BUNDLED_FOLDER] if package is not None and package.origin else []
    for folder in (*bundled, _SYSTEM_SERVER):
        if (folder / "bin" / "tritonserver").is_file():
            return folder
    found = shutil.which("tritonserver")
    return Path(found).resolve().parent.parent if found else None


# ---- the folder ----------------------------------------------------------------------------------------------------


def _check_versions(folder: Path, manifest: Manifest) -> Iterator[Finding]:
    major, minor = manifest.protocol
    ours = f"{layout.MAJOR}.{layout.MINOR}"
    verb = "convert" if manifest.flavour == "hosts" else "add"
    if major != layout.MAJOR:
        yield Finding(
            Level.PROBLEM,
            f"it speaks protocol {major}.{minor} (written by version {manifest.made_by}), workers of this installation "
            f"speak {ours} and would be refused: {verb} the model again with --replace",
        )
    else:
        yield Finding(Level.OK, f"it speaks protocol {major}.{minor}, as workers of this installation do ({ours})")
    if manifest.flavour not in _LIBRARIES:
        return
    if manifest.machine != platform.machine():
        yield Finding(
            Level.WARNING, f"its library is for {manifest.machine}, this machine is {platform.machine()}: so must the "
            f"server's be"
        )  # fmt: skip
    try:
        own = library_path().read_bytes()
        found = (folder / _LIBRARIES[manifest.flavour]).read_bytes()
    except (LibraryNotFoundError, OSError) as error:
        yield Finding(Level.UNKNOWN, f"its library was not compared with this installation's: {error}")
        return
    if machine_of(found) == manifest.machine and found != own:
        yield Finding(
            Level.WARNING,
            f"its library is of version {manifest.made_by}, not this installation's. It works as long as the protocol "
            f"is the same; --replace brings it up to date",
        )
    else:
        yield Finding(Level.OK, "its library is that of this installation")


# ---- the endpoint --------------------------------------------------------------------------------------------------


def _check_alone(model: DropInModel, endpoint: str) -> Iterator[Finding]:
    listening = models_at(model.path.parent, endpoint)
    if len(listening) > 1:
        yield Finding(
            Level.WARNING,
            f"{' and '.join(listening)} listen at {endpoint}: the one that is loaded last takes the place, and the "
            f"other one gets no worker. Add them again with endpoints of their own",
        )


def _check_endpoint(address: str, flavour: str) -> Iterator[Finding]:
    text = address.removeprefix("ipc://")
    if not text.startswith("/"):
        yield Finding(Level.UNKNOWN, f"workers reach {address} over the network")
        return
    endpoint = Path(text)
    try:
        check_endpoint(endpoint)
    except EndpointError as error:
        yield Finding(Level.PROBLEM, str(error))
        return
    folder = endpoint.parent
    try:
        status = folder.stat()
    except OSError as error:
        yield Finding(
            Level.PROBLEM,
            f"the folder of the endpoint, {folder}, cannot be used here: {error.strerror}. Make it before the server "
            f"loads the model, or mount the volume that server and workers share there",
        )
        return
    if not stat.S_ISDIR(status.st_mode):
        yield Finding(Level.PROBLEM, f"{folder}, where the endpoint is to be, is not a folder")
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        yield Finding(
            Level.PROBLEM,
            f"user {os.geteuid()} may not write to {folder}: server and workers run as one user, who owns the sockets",
        )
    elif status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        yield Finding(
            Level.WARNING, f"others may write to {folder}, and put a socket of theirs in the place: chmod 700"
        )
    else:
        yield Finding(Level.OK, f"the folder of the endpoint, {folder}, can be used by user {os.geteuid()}")
    yield from _check_socket(endpoint, flavour)


def _check_socket(endpoint: Path, flavour: str) -> Iterator[Finding]:
    try:
        status = endpoint.lstat()
    except OSError:
        yield Finding(Level.OK, "no server has loaded the model now")
        return
    if not stat.S_ISSOCK(status.st_mode):
        yield Finding(
            Level.PROBLEM,
            f"{endpoint} is there and not a socket, so no server can listen: remove it, if nobody needs it",
        )
    elif status.st_uid != os.geteuid():
        yield Finding(
            Level.PROBLEM,
            f"{endpoint} belongs to user {status.st_uid}, this is user {os.geteuid()}: workers must run as the "
            f"server's user",
        )
    elif flavour == "native":
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.settimeout(_HTTP_TIMEOUT_S)
            try:
                probe.connect(os.fspath(endpoint))
            except OSError:
                yield Finding(Level.OK, f"nobody listens at {endpoint}, which a server left behind and will replace")
            else:
                yield Finding(Level.OK, f"a server listens at {endpoint}")


def _check_supervisor(path: Path) -> Iterator[Finding]:
    command = f"pytriton-proxy-backend hosts --endpoint {path.parent}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_HTTP_TIMEOUT_S)
        try:
            probe.connect(os.fspath(path))
            uid = peer_credentials(probe).uid
        except OSError as error:
            yield Finding(
                Level.WARNING,
                f"nobody can be asked for processes at {path}: {error.strerror or error}. As the server's user, run "
                f"{command}",
            )
            return
    if uid == os.geteuid():
        yield Finding(Level.OK, f"processes of this user are started at {path}")
    else:
        yield Finding(
            Level.WARNING,
            f"processes of user {uid} are started at {path}, this is user {os.geteuid()}: the server must be that user",
        )


# ---- the server ----------------------------------------------------------------------------------------------------


def _check_server(folder: Path, manifest: Manifest, server: Path | None) -> Iterator[Finding]:
    if server is None:
        yield Finding(Level.UNKNOWN, "no tritonserver was found here; name its folder with --tritonserver")
        return
    if manifest.flavour == "python":
        backend = server / "backends" / "python" / "libtriton_python.so"
        if backend.is_file():
            yield Finding(Level.OK, f"{server} has Triton's Python backend")
        else:
            yield Finding(
                Level.PROBLEM,
                f"{server} has no Python backend (there is no {backend}), which the Python proxy runs in: use the "
                f"native flavour, or a server that has it",
            )
        return
    library = _LIBRARIES[manifest.flavour]
    libraries = [
        found
        for folder in _LIBRARY_FOLDERS
        for found in sorted(server.absolute().glob(f"{folder}/libtritonserver*.so*"))
    ]
    if not libraries:
        yield Finding(
            Level.PROBLEM,
            f"{server} is no tritonserver: there is no lib/libtritonserver.so, nor one where pip puts it. Name a "
            f"folder laid out as {_SYSTEM_SERVER}, or the one with bin/tritonserver in an installed wheel",
        )
        return
    command = [sys.executable, "-c", _PROBE, os.fspath(libraries[0]), os.fspath((folder / library).absolute())]
    # The executable tells the loader where its libraries are; a probe has to do that itself.
    paths = [os.fspath(libraries[0].parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        yield Finding(Level.PROBLEM, f"loading the libraries of {server} did not end within {_PROBE_TIMEOUT_S:g} s")
        return
    if done.returncode == 0:
        yield Finding(Level.OK, f"the library loads into the server of {server} ({done.stdout.strip()})")
    else:
        reason = (done.stderr.strip().splitlines() or [f"the probe ended with {done.returncode}"])[-1]
        yield Finding(Level.PROBLEM, f"the library does not load into the server of {server}: {reason}")


def _is_of_this_host(hostname: str) -> bool:
    try:
        address = ipaddress.ip_address(hostname)
    except ValueError:
        return hostname == "localhost"
    return address.is_loopback or address.is_unspecified


def _check_running(manifest: Manifest, version: int, url: str) -> Iterator[Finding]:
    base = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
    if not base.startswith(("http://", "https://")):
        yield Finding(
            Level.PROBLEM, f"expected the address of an HTTP service, such as http://localhost:8000, got {url!r}"
        )
        return
    # A proxy of the environment is for other hosts.
    is_local = _is_of_this_host(urllib.parse.urlsplit(base).hostname or "")
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_local else []))
    try:
        with opener.open(f"{base}/v2", timeout=_HTTP_TIMEOUT_S) as answer:
            server = json.load(answer)
        yield Finding(Level.OK, f"{base} is {server.get('name')} {server.get('version')}")
        config_url = f"{base}/v2/models/{manifest.name}/versions/{version}/config"
        with opener.open(config_url, timeout=_HTTP_TIMEOUT_S) as answer:
            config = json.load(answer)
    except urllib.error.HTTPError as error:
        reason = error.read(1000).decode(errors="replace").strip()
        error.close()
        yield Finding(Level.WARNING, f"{base} has not loaded model '{manifest.name}': {reason or error.reason}")
        return
    except (OSError, ValueError) as error:
        yield Finding(Level.PROBLEM, f"{base} does not answer as a tritonserver: {error}")
        return
    backend = BACKEND_NAME if manifest.flavour == "native" else "python"
    if config.get("backend") == backend:
        yield Finding(Level.OK, f"{base} has loaded model '{manifest.name}'")
    else:
        yield Finding(
            Level.PROBLEM,
            f"{base} serves a model '{manifest.name}' of backend {config.get('backend')!r}, which is another one",
        )

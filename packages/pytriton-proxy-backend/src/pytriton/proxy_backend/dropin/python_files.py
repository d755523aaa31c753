"""Files of a drop-in model that the Python proxy serves: its configuration, and all of our code that it needs."""

from __future__ import annotations

from pathlib import Path

from ..description import DESCRIPTION_NAME, render_description
from ..errors import DropInError
from ..model import ZMQ_SUFFIX, ModelSpec, check_endpoint
from ..settings import PYTHON_SIDE_FILE_NAME, PythonProxySettings
from ..zmq_keys import check_keys_given
from .config import CONFIG_NAME, Batching, config_text

# The copy has a name of its own: another version of this distribution may be installed in the server's Python.
_PACKAGE = "pytriton_python_proxy"
# All of our code that it needs: it has relative imports only.
_MODULES = ("description", "errors", "model", "settings", "zmq_keys")
_FOLDERS = ("protocol", "python_proxy", "system", "transport", "wire")
_MODEL = f'''\
"""Written by pytriton-proxy-backend: hands the requests of this model to workers in other processes."""

try:
    from {_PACKAGE}.python_proxy.model import TritonPythonModel
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the Python proxy needs the package {{error.name}} in the server's Python: pip install numpy "
        "'pyzmq>=26,<28'",
        name=error.name,
    ) from error

__all__ = ["TritonPythonModel"]
'''


def python_files(model: ModelSpec, settings: PythonProxySettings, batching: Batching) -> dict[str, bytes]:
    """Return the content of the folder of a model that the Python proxy serves, by path in the folder."""
    here = Path(__file__).parent.parent
    sources = [here / f"{name}.py" for name in _MODULES]
    sources += [path for folder in _FOLDERS for path in sorted((here / folder).glob("*.py"))]
    version = str(model.version)
    return {
        CONFIG_NAME: config_text(model, "python", batching).encode(),
        f"{version}/model.py": _MODEL.encode(),
        f"{version}/{PYTHON_SIDE_FILE_NAME}": settings.to_text().encode(),
        f"{version}/{DESCRIPTION_NAME}": render_description(model).encode(),
        f"{version}/{_PACKAGE}/__init__.py": b"",
        **{f"{version}/{_PACKAGE}/{path.relative_to(here)}": path.read_bytes() for path in sources},
    }


def proxy_address(endpoint: str, model: ModelSpec, *, has_keys: bool, insecure: bool) -> str:
    """Return where the Python proxy of a model listens.

    Args:
        endpoint: A folder, or an address of ZeroMQ.
        model: The model.
        has_keys: Whether workers prove who they are.
        insecure: Whether they need not, though others may reach the address.

    Raises:
        DropInError: If it is no such address.
        KeysMissingError: If others may reach it and need no keys.
        EndpointError: If the path of the socket is too long.
    """
    scheme, separator, rest = endpoint.partition("://")
    if not separator:
        path = Path(endpoint).absolute() / f"{model.name}.{model.version}{ZMQ_SUFFIX}"
        check_endpoint(path)
        return f"ipc://{path}"
    if scheme == "ipc":
        check_endpoint(Path(rest))
        return endpoint
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not colon or not host or not (port.isdecimal() and 0 < int(port) < 65536):
        raise DropInError(
            f"expected a folder, ipc:///path or tcp://host:port for the endpoint, got {endpoint!r}", path=endpoint
        )
    remedy = (
        "Give keys (--curve-secret-key and --curve-workers), a folder as --endpoint where the workers are on the same "
        "machine, or say --insecure where nobody else reaches the address"
    )
    check_keys_given(endpoint, has_keys=has_keys, insecure=insecure, remedy=remedy)
    return endpoint

"""What is in the folder of a drop-in model: the configuration that Triton reads, and what its proxy needs beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..description import DESCRIPTION_NAME, dtype_name, render_description
from ..errors import DropInError
from ..model import ZMQ_SUFFIX, ModelSpec, TensorSpec, check_endpoint
from ..python_proxy.bundle import BUNDLE_NAME, PACKAGE, read_bundle
from ..python_proxy.keys import check_keys_given
from ..settings import PYTHON_SIDE_FILE_NAME, SIDE_FILE_NAME, ProxySettings, PythonProxySettings
from ..system.native import BACKEND_NAME, LIBRARY_NAME

CONFIG_NAME = "config.pbtxt"
# The EM_* numbers of elf(5) for which the library is built.
_MACHINES = {62: "x86_64", 183: "aarch64"}

_MODEL = f'''\
"""Written by pytriton-proxy-backend: hands the requests of this model to workers in other processes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).with_name("{BUNDLE_NAME}")))
try:
    from {PACKAGE}.python_proxy.model import TritonPythonModel
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the Python proxy needs the package {{error.name}} in the server's Python: pip install numpy "
        "'pyzmq>=26,<28'",
        name=error.name,
    ) from error

__all__ = ["TritonPythonModel"]
'''


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How Triton batches for a model."""

    max_queue_delay_us: int = 0  # how long a request may wait for others to share its batch, in microseconds
    preferred_sizes: Sequence[int] = ()  # sizes of batches that are sent without waiting for more


def native_files(model: ModelSpec, settings: ProxySettings, batching: Batching, library: Path) -> dict[str, bytes]:
    """Return the content of the folder of a model that the native proxy serves, by path in the folder."""
    return {
        CONFIG_NAME: config_text(model, BACKEND_NAME, batching).encode(),
        # Triton looks here before it looks into its own folder of backends.
        LIBRARY_NAME: library.read_bytes(),
        f"{model.version}/{SIDE_FILE_NAME}": settings.to_text().encode(),
        f"{model.version}/{DESCRIPTION_NAME}": render_description(model).encode(),
    }


def python_files(model: ModelSpec, settings: PythonProxySettings, batching: Batching) -> dict[str, bytes]:
    """Return the content of the folder of a model that the Python proxy serves, by path in the folder."""
    version = str(model.version)
    return {
        CONFIG_NAME: config_text(model, "python", batching).encode(),
        f"{version}/model.py": _MODEL.encode(),
        f"{version}/{PYTHON_SIDE_FILE_NAME}": settings.to_text().encode(),
        f"{version}/{DESCRIPTION_NAME}": render_description(model).encode(),
        f"{version}/{BUNDLE_NAME}": read_bundle(),
    }


def proxy_address(endpoint: str, model: ModelSpec, *, has_keys: bool, insecure: bool) -> str:
    """Return where the Python proxy of a model listens; `endpoint` is a folder or an address of ZeroMQ.

    An address that others can reach needs keys, unless `insecure` is set.
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


def machine_of(library: bytes) -> str:
    """Return the architecture of a shared library; "unknown" if it is not an ELF file of a known one."""
    if library[:4] != b"\x7fELF" or len(library) < 20:
        return "unknown"
    return _MACHINES.get(int.from_bytes(library[18:20], "little"), "unknown")


def config_text(model: ModelSpec, backend: str, batching: Batching) -> str:
    """Return the text of `config.pbtxt`."""
    batches = model.batching and model.max_batch_size > 0
    lines = [
        "# Written by pytriton-proxy-backend. It does not touch this folder again once anything in it was edited.",
        f"name: {_text(model.name)}",
        f"backend: {_text(backend)}",
        f"max_batch_size: {model.max_batch_size if batches else 0}",
        "version_policy { all { } }",
        *(_tensor("input", tensor, is_ragged=model.cost is not None) for tensor in model.inputs),
        *(_tensor("output", tensor) for tensor in model.outputs),
        # A single instance gives batches to all workers.
        "instance_group [ { count: 1 kind: KIND_CPU } ]",
    ]
    if batches:
        sizes = "".join(f" preferred_batch_size: {size}" for size in batching.preferred_sizes)
        delay = f" max_queue_delay_microseconds: {batching.max_queue_delay_us}" if batching.max_queue_delay_us else ""
        lines.append(f"dynamic_batching {{{sizes}{delay} }}")
    if model.decoupled:
        lines.append("model_transaction_policy { decoupled: true }")
    return "\n".join([*lines, ""])


def check_model(model: ModelSpec, batching: Batching) -> None:
    """Check for everything that would make Triton refuse the model."""
    problems = []
    names = [tensor.name for tensor in model.inputs]
    if not model.inputs or not model.outputs:
        problems.append("expected at least one input and one output")
    for kind, tensors in (("input", model.inputs), ("output", model.outputs)):
        names = [tensor.name for tensor in tensors]
        problems += [f"{kind} '{name}' is given twice" for name in sorted(set(names)) if names.count(name) > 1]
        for tensor in tensors:
            if not tensor.name:
                problems.append(f"expected a name for every {kind}")
            if not tensor.shape or any(size == 0 or size < -1 for size in tensor.shape):
                problems.append(
                    f"{kind} '{tensor.name}': expected a shape of one or more sizes, each above 0, or -1 for a "
                    f"free one, got {tensor.shape}"
                )
            if tensor.optional and kind == "output":
                problems.append(f"output '{tensor.name}': an output cannot be optional")
    if not model.batching or not model.max_batch_size:
        if batching.preferred_sizes or batching.max_queue_delay_us:
            problems.append("preferred batch sizes and a queue delay are for batches: expected a --max-batch-size")
    elif any(not 0 < size <= model.max_batch_size for size in batching.preferred_sizes):
        problems.append(
            f"expected preferred batch sizes from 1 to {model.max_batch_size}, got {list(batching.preferred_sizes)}"
        )
    if problems:
        raise DropInError(f"model '{model.name}' cannot be added: {'; '.join(problems)}", path=model.name)


def _tensor(kind: str, tensor: TensorSpec, *, is_ragged: bool = False) -> str:
    dims = ", ".join(map(str, tensor.shape))
    name = dtype_name(tensor)
    fields: Mapping[str, str] = {
        "name": _text(tensor.name),
        "data_type": "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}",
        "dims": f"[ {dims} ]",
        **({"optional": "true"} if tensor.optional else {}),
        # Triton joins requests in which it differs.
        **({"allow_ragged_batch": "true"} if is_ragged and -1 in tensor.shape else {}),
    }
    return f"{kind} [ {{ {' '.join(f'{key}: {value}' for key, value in fields.items())} }} ]"


def _text(value: str) -> str:
    # Protobuf's text format accepts JSON's escapes of ASCII, and plain UTF-8.
    return json.dumps(value, ensure_ascii=False)

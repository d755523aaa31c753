"""The description of a model as a file: what a worker must know that no socket tells it.

It lies beside the socket of the model (`<socket>.json`), so that the name of a model and the folder of the endpoints
are enough to attach a worker from a shell. A drop-in model has a copy of it in its version folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import DescriptionError
from .model import ModelSpec, TensorSpec
from .wire.dtypes import dtype_of

DESCRIPTION_NAME = "pytriton.json"
"""Name of the copy in the version folder of a drop-in model."""

FORMAT = 1
_MAX_BYTES = 1 << 20
TRITON_CODES = {
    "BOOL": 1, "UINT8": 2, "UINT16": 3, "UINT32": 4, "UINT64": 5, "INT8": 6, "INT16": 7, "INT32": 8, "INT64": 9,
    "FP16": 10, "FP32": 11, "FP64": 12, "BYTES": 13, "BF16": 14,
}  # fmt: skip
_NAMES = {
    "bool": "BOOL", "float16": "FP16", "float32": "FP32", "float64": "FP64", "object": "BYTES", "bfloat16": "BF16",
    **{name.lower(): name for name in TRITON_CODES if "INT" in name},
}  # fmt: skip


def description_path(endpoint: Path) -> Path:
    """Return the file beside a socket that describes its model."""
    return endpoint.with_name(f"{endpoint.name}.json")


def render_description(model: ModelSpec) -> str:
    """Return the text of a model's description: JSON with a number for its format."""
    fields: dict[str, object] = {"format": FORMAT, "name": model.name, "version": model.version}
    fields["inputs"] = [_tensor_fields(tensor) for tensor in model.inputs]
    fields["outputs"] = [_tensor_fields(tensor) for tensor in model.outputs]
    for name in ("batching", "max_batch_size", "decoupled", "strict", "send_tracebacks"):
        fields[name] = getattr(model, name)
    if model.cost is not None:
        fields["cost"] = model.cost
    return json.dumps(fields, indent=1) + "\n"


def parse_description(text: str, where: str = "the description") -> ModelSpec:
    """Read a description that `render_description` wrote.

    Keys of later versions are ignored; `where` names the text in errors.
    """
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise DescriptionError(f"{where} is no description of a model: it is not JSON: {error}") from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        found = fields.get("format") if isinstance(fields, dict) else type(fields).__name__
        raise DescriptionError(
            f"{where} is no description of a model in a format that this version reads: expected format {FORMAT}, got "
            f"{found!r}. Write and read it with the same version of pytriton-proxy-backend"
        )
    reader = _Reader(fields, where)
    return ModelSpec(
        name=reader.get("name", str),
        version=reader.get("version", int),
        inputs=_tensors(reader, "inputs"),
        outputs=_tensors(reader, "outputs"),
        batching=reader.get("batching", bool),
        max_batch_size=reader.get("max_batch_size", int),
        decoupled=reader.get("decoupled", bool, False),
        strict=reader.get("strict", bool, False),
        send_tracebacks=reader.get("send_tracebacks", bool, False),
        cost=reader.get("cost", dict) if "cost" in fields else None,
    )


def write_description(path: Path, model: ModelSpec) -> None:
    """Write a description, readable by its owner alone, in place of what is there, in one step.

    Raises:
        DescriptionError: If a dtype has no counterpart among Triton's data types.
        OSError: If the file cannot be written.
    """
    text = render_description(model)
    # Imported late, because workers only read.
    import tempfile

    fd, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mkstemp makes it with mode 0600
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def read_description(path: Path) -> ModelSpec:
    """Read the description in a file.

    Raises:
        DescriptionError: If the file is not there, cannot be read or holds no description.
        TypeError: As `parse_description`.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise DescriptionError(
            f"there is no description of a model at {path}. It appears beside the socket of a model when the model is "
            f"bound or added: are the name, the version and the folder of the endpoints right?"
        ) from error
    except PermissionError as error:
        raise DescriptionError(
            f"the description at {path} cannot be read: it is for the user of the server alone. Run the worker as that "
            "user"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise DescriptionError(f"the description at {path} cannot be read: {error}") from error
    if len(text) > _MAX_BYTES:
        raise DescriptionError(f"{path} is no description of a model: it has more than {_MAX_BYTES} bytes")
    return parse_description(text, str(path))


def dtype_name(tensor: TensorSpec) -> str:
    """Return Triton's name of a tensor's data type, such as "FP32"."""
    name = "BYTES" if tensor.dtype.kind in "SUT" else _NAMES.get(tensor.dtype.name)
    if name is None:
        raise DescriptionError(
            f"tensor '{tensor.name}': Triton has no data type for numpy's {tensor.dtype}; it has "
            f"{', '.join(TRITON_CODES)}"
        )
    return name


class _Reader:
    """Reads fields of a JSON object, with errors that name the place."""

    def __init__(self, fields: Mapping[str, object], where: str) -> None:
        self.fields = fields
        self.where = where

    def get(self, name: str, kind: type, default: object = None) -> Any:
        value = self.fields.get(name, default)
        # True is an int in Python, but no version.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise DescriptionError(f"{self.where}: expected {name!r} to be a {kind.__name__}, got {value!r}")
        return value


def _tensor_fields(tensor: TensorSpec) -> dict[str, object]:
    fields: dict[str, object] = {"name": tensor.name, "dtype": dtype_name(tensor), "shape": list(tensor.shape)}
    return {**fields, "optional": True} if tensor.optional else fields


def _tensors(reader: _Reader, key: str) -> tuple[TensorSpec, ...]:
    made = []
    for index, fields in enumerate(reader.get(key, list)):
        where = f"{reader.where}: {key}[{index}]"
        if not isinstance(fields, dict):
            raise DescriptionError(f"{where}: expected an object with name, dtype and shape, got {fields!r}")
        tensor = _Reader(fields, where)
        name = tensor.get("dtype", str)
        if name not in TRITON_CODES:
            raise DescriptionError(f"{where}: expected a dtype among {', '.join(TRITON_CODES)}, got {name!r}")
        shape = tensor.get("shape", list)
        if not all(type(size) is int and size >= -1 for size in shape):
            raise DescriptionError(f"{where}: expected a shape of sizes, -1 for a free one, got {shape!r}")
        made.append(
            TensorSpec(
                name=tensor.get("name", str),
                dtype=dtype_of(TRITON_CODES[name]),
                shape=tuple(shape),
                optional=tensor.get("optional", bool, False),
            )
        )
    return tuple(made)

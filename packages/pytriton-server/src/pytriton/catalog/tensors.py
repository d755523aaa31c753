"""Signatures, inputs and outputs as people write and read them."""

import io
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from pytriton.client import ModelResult, ModelSpec, TensorSpec
from pytriton.client.exceptions import PyTritonClientValueError
from pytriton.decorators.serving import describe_tensors

# Larger arrays are abbreviated, as numpy does.
_MOST_SHOWN = 1000
_BOOLS = {"true": True, "1": True, "false": False, "0": False}


def describe_signature(spec: ModelSpec) -> str:
    """Return inputs, outputs and kind of a model in one line; `?` marks inputs that may be left out."""
    facts = [f"max_batch_size={spec.max_batch_size}"] if spec.batching else ["no batching"]
    facts += ["decoupled"] if spec.decoupled else []
    return f"{describe_inputs(spec)} -> {_listed(spec.outputs)}; {', '.join(facts)}"


def describe_inputs(spec: ModelSpec) -> str:
    """Return the inputs of a model in one line."""
    return _listed(spec.inputs)


def parse_inputs(
    spec: ModelSpec,
    texts: Mapping[str, str],
    values: Mapping[str, Any],
    *,
    is_batch: bool,
    files: Mapping[str, bytes] | None = None,
) -> dict[str, object]:
    """Return the inputs of a call by the signature of the model: texts as written behind `NAME=`, and values of JSON.

    `files` are those that `@` may name, by default all of this machine. The client checks types and shapes.
    """
    _check_names(spec, {*texts, *values})
    inputs: dict[str, object] = {}
    for tensor in spec.inputs:
        shape = (-1, *tensor.shape) if is_batch else tensor.shape
        if tensor.name in texts:
            inputs[tensor.name] = _fit(_parse(texts[tensor.name], tensor, shape, files), shape)
        elif tensor.name in values:
            inputs[tensor.name] = _fit(values[tensor.name], shape)
    return inputs


def result_as_json(result: ModelResult) -> str:
    """Return a result as one line of JSON. Bytes that are no text are `{"base64": ...}`; NaN and infinity are text."""
    outputs = {
        name: _plain(value.tolist() if isinstance(value, np.ndarray) else value) for name, value in result.items()
    }
    return json.dumps(
        {
            "model_name": result.model_name,
            "model_version": result.model_version,
            "outputs": outputs,
            "parameters": _plain(result.parameters),
        },
        ensure_ascii=False,
        allow_nan=False,
    )


def result_as_text(result: ModelResult, *, one_line: bool) -> str:
    """Return the outputs of a result, one a line, or all in one line."""
    parts = [_output_as_text(name, value, one_line=one_line) for name, value in result.items()]
    parts += [f"parameters: {json.dumps(_plain(result.parameters))}"] if result.parameters else []
    return ("  " if one_line else "\n").join(parts)


def _listed(tensors: Iterable[TensorSpec]) -> str:
    return describe_tensors(tuple(tensors)) or "nothing"


def _check_names(spec: ModelSpec, given: set[str]) -> None:
    unknown = sorted(given - {tensor.name for tensor in spec.inputs})
    missing = [tensor.name for tensor in spec.inputs if not tensor.optional and tensor.name not in given]
    if unknown or missing:
        problems = [f"has no input {', '.join(map(repr, unknown))}"] if unknown else []
        problems += [f"needs {', '.join(map(repr, missing))}"] if missing else []
        raise PyTritonClientValueError(
            f"Model {spec.model_name} {' and '.join(problems)}. Its inputs: {describe_inputs(spec)}.",
            model_name=spec.model_name,
        )


def _parse(text: str, tensor: TensorSpec, shape: tuple[int, ...], files: Mapping[str, bytes] | None) -> object:
    """Return the value of the text after `NAME=`."""
    is_text = tensor.datatype == "BYTES"
    if text.startswith("@"):
        return _read(text[1:], tensor, files, is_text=is_text)
    if text.startswith("["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            advice = " Text that begins with [ goes into --json." if is_text else ""
            _refuse(tensor, "JSON behind [", f"{_cut(text)} ({error})", advice)
    if is_text:
        return text
    numbers = [_parse_number(part.strip(), tensor) for part in text.split(",")]
    if len(numbers) == 1:
        return numbers[0]
    if len(shape) > 1 and shape.count(-1) <= 1:
        # Elements are in the order of rows. If they do not fit the shape, the client says so.
        try:
            return np.array(numbers, object).reshape(shape).tolist()
        except ValueError:
            return numbers
    return numbers


def _parse_number(text: str, tensor: TensorSpec) -> bool | int | float:
    kind = tensor.datatype
    try:
        if kind == "BOOL":
            return _BOOLS[text.lower()]
        return float(text) if kind.startswith(("FP", "BF")) else int(text)
    except (KeyError, ValueError):
        _refuse(tensor, f"{kind} ({'true or false' if kind == 'BOOL' else 'numbers with commas'})", _cut(text))


def _read(name: str, tensor: TensorSpec, files: Mapping[str, bytes] | None, *, is_text: bool) -> object:
    try:
        data = Path(name).read_bytes() if files is None else files[name]
        read_array: Any = np.lib.format.read_array  # numpy 1 has no type hints for it
        return data if is_text else read_array(io.BytesIO(data), allow_pickle=False)
    except OSError as error:
        _refuse(tensor, "a file", f"{name} ({error.strerror or error})")
    except KeyError:
        _refuse(tensor, "a file that was handed in", _cut(name))
    except (ValueError, EOFError) as error:
        _refuse(tensor, f"an array of {tensor.datatype} in a .npy file", f"{name} ({error})")


def _fit(value: Any, shape: tuple[int, ...]) -> object:
    """Give a single value the axes of its tensor if they may all have length one; the client checks other values."""
    if isinstance(value, list) or np.ndim(value) or any(length not in (1, -1) for length in shape):
        return value
    if isinstance(value, np.ndarray):
        return value.reshape((1,) * len(shape))
    for _ in shape:
        value = [value]
    return value


def _output_as_text(name: str, value: Any, *, one_line: bool) -> str:
    array = np.asarray(value, object) if isinstance(value, bytes) else np.asarray(value)
    if array.dtype.kind in "OST":
        shown = _texts(array, one_line=one_line)
    elif array.size == 1:
        shown = str(array.reshape(-1)[0])
    else:
        shown = np.array2string(array, separator=", ", threshold=_MOST_SHOWN, prefix=f"{name}: ")
        shown = " ".join(shown.split()) if one_line else shown
    # If an array is abbreviated, its size is shown.
    size = f" (shape [{', '.join(map(str, array.shape))}])" if array.size > _MOST_SHOWN else ""
    return f"{name}{size}: {shown}"


def _texts(array: np.ndarray[Any, Any], *, one_line: bool) -> str:
    texts = _plain(array.tolist())
    if array.size == 1:
        while isinstance(texts, list):
            (texts,) = texts
        line_by_line = texts if one_line or not isinstance(texts, str) else texts.replace("\n", "").replace("\t", "")
        # Characters that are not printable could control the terminal.
        if isinstance(line_by_line, str) and line_by_line.isprintable():
            return str(texts)
    plain = json.dumps(texts, ensure_ascii=False)
    return plain if plain.isprintable() else json.dumps(texts)


def _plain(value: Any) -> Any:
    """Return an element as JSON can show it."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            import base64

            return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _cut(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _refuse(tensor: TensorSpec, expected: str, received: str, advice: str = "") -> NoReturn:
    raise PyTritonClientValueError(
        f"Input {tensor.name!r}: expected {expected}, received {received}.{advice}",
        input_name=tensor.name,
        expected=expected,
        received=received,
    )

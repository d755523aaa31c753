"""A call of a model as somebody would write it for curl, Python and JavaScript."""

import json
import keyword
import math
import re
import shlex
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import quote

import numpy as np

from pytriton.catalog.openapi import generate_problem, infer_problem
from pytriton.client import ModelSpec, TensorSpec
from pytriton.decorators.serving import is_file, json_example

# Hardly anybody writes more values by hand.
_MOST_EXAMPLES = 64
# These arguments of the client's calls are not inputs.
_RESERVED = ("self", "inputs", "parameters", "headers")
_ENDS_WITH_ZERO = re.compile(r"""\\x00['"]""")  # a text, as Python writes it

# Inputs with such a word in their names, at the end or before an underscore, are files.
_FILES = re.compile(
    r"(^|_|\d)(audio|document|file|image|img|jpe?g|mp3|pdf|photo|picture|png|scan|sound|speech|video|wav|webp)s?(_|\d|$)",
    re.IGNORECASE,
)


def asks_for_file(tensor: TensorSpec) -> bool:
    """Return whether an input is rather a file than a text: one value that its author calls bytes.

    Where the author says neither bytes nor text, the name tells: `image` is a file.
    """
    if tensor.datatype != "BYTES" or any(size not in (1, -1) for size in tensor.shape):
        return False
    if tensor.hint:
        return is_file(tensor)
    return _FILES.search(tensor.name) is not None


def python_type(tensor: TensorSpec) -> str:
    """Return the Python type of a sample of an input: the hint of its author, `str`, `list[int]` or `array`."""
    if tensor.hint and not _is_of_batches(tensor):
        return tensor.hint
    kind = tensor.datatype
    if kind == "BYTES":
        element = "bytes" if asks_for_file(tensor) else "str"
    else:
        element = "bool" if kind == "BOOL" else "float" if kind.startswith(("FP", "BF")) else "int"
    if all(size == 1 for size in tensor.shape):
        return element
    return f"list[{element}]" if len(tensor.shape) == 1 else "array"


def describe_type(tensor: TensorSpec) -> str:
    """Return the types of an input in one line: Python's, or that of its author, and Triton's."""
    shape = ", ".join("any" if length < 0 else str(length) for length in tensor.shape)
    of_batches = f", in batches {tensor.hint}" if _is_of_batches(tensor) else ""
    return f"{python_type(tensor)}{of_batches}  {tensor.datatype}[{shape}]"


def _is_of_batches(tensor: TensorSpec) -> bool:
    """Return whether the hint of an input describes a whole batch, as hints of functions with `batched=True` do."""
    is_list = tensor.hint.startswith("list[") and tensor.shape != (-1,) and json_example(tensor) is None
    return is_list or "'batch'" in tensor.hint


def example_text(tensor: TensorSpec) -> str:
    """Return an example value as text for `parse_inputs`; empty if it would be long, or is a file."""
    if asks_for_file(tensor):
        return ""
    in_json = json_example(tensor)
    if in_json is not None:
        return in_json
    count = math.prod(1 if length < 0 else length for length in tensor.shape)
    kind = tensor.datatype
    if kind == "BYTES":
        return "hello" if count == 1 else json.dumps(["hello"] * count) if count <= _MOST_EXAMPLES else ""
    value = "true" if kind == "BOOL" else "1.0" if kind.startswith(("FP", "BF")) else "1"
    return ", ".join([value] * count) if count <= _MOST_EXAMPLES else ""


def describe_calls(
    server_url: str, spec: ModelSpec, inputs: Mapping[str, Any], *, is_batch: bool, files: Collection[str] = ()
) -> dict[str, str]:
    """Return a call as it is written for each tool: `curl`, `Python` and `JavaScript`.

    Inputs in `files` are read from a file.
    """
    if files:
        return _calls_with_files(server_url, spec, inputs, files, is_batch=is_batch)
    path, body, problem = _json_call(spec, inputs, is_batch=is_batch)
    calls = {"Python": _python(server_url, spec, inputs, files, is_batch=is_batch)}
    if problem:
        return {"curl": f"# {problem}", **calls, "JavaScript": f"// {problem}"}
    url = f"{server_url}/v2/models/{quote(spec.model_name, safe='')}/{path}"
    options = "-sN" if spec.decoupled else "-s"
    return {
        "curl": f"curl {options} {shlex.quote(url)} -H 'Content-Type: application/json' -d {shlex.quote(body)}",
        **calls,
        "JavaScript": _javascript(url, body, is_stream=spec.decoupled),
    }


def _calls_with_files(
    server_url: str, spec: ModelSpec, inputs: Mapping[str, Any], files: Collection[str], *, is_batch: bool
) -> dict[str, str]:
    """Return a call with files, whose JSON describes the bytes that follow it."""
    python = _python(server_url, spec, inputs, files, is_batch=is_batch)
    url = f"{server_url}/v2/models/{quote(spec.model_name, safe='')}/infer"
    tensors = [tensor for tensor in spec.inputs if tensor.name in inputs]
    problem = ""
    if spec.decoupled:
        problem = "A stream over HTTP is JSON, which holds no files: see Python"
    elif len(files) > 1 or any(tensor.datatype != "BYTES" for tensor in tensors if tensor.name in files):
        problem = "Several files, and files of numbers, are written by Python"
    if problem:
        return {"curl": f"# {problem}", "Python": python, "JavaScript": f"// {problem}"}
    [name] = files
    size = len(_objects(inputs[name]).ravel()[0])
    if len(spec.inputs) == 1 and not is_batch:
        curl = f"curl -s {shlex.quote(url)} --data-binary @FILE -H 'Inference-Header-Content-Length: 0' --output -"
    elif not size:
        curl = "# Choose a file: its size is a part of the request"
    else:
        head = json.dumps({"inputs": [_described(spec, tensor, inputs, size, name, is_batch) for tensor in tensors]})
        length = "".join(f"\\{byte:03o}" for byte in size.to_bytes(4, "little"))
        curl = (
            f"{{ printf %s {shlex.quote(head)}; printf '{length}'; cat FILE; }} |\n"
            f"curl -s {shlex.quote(url)} -H 'Inference-Header-Content-Length: {len(head)}' --data-binary @-"
        )
    described = [_described(spec, tensor, inputs, "SIZE", name, is_batch) for tensor in tensors]
    head = json.dumps({"inputs": described}).replace('"SIZE"', "file.size + 4")
    javascript = "\n".join(
        [
            'const file = document.querySelector("input[type=file]").files[0]; // in Node: await fs.openAsBlob("FILE")',
            f"const head = JSON.stringify({head});",
            f"const response = await fetch({json.dumps(url)}, {{",
            '  method: "POST",',
            '  headers: { "Inference-Header-Content-Length": String(head.length) },',
            "  body: new Blob([head, new Uint32Array([file.size]), file]),",
            "});",
            "console.log(await response.text());",
        ]
    )
    return {"curl": curl, "Python": python, "JavaScript": javascript}


def _described(
    spec: ModelSpec, tensor: TensorSpec, inputs: Mapping[str, Any], size: object, file: str, is_batch: bool
) -> dict[str, Any]:
    """Return an input as the JSON of a request describes it; `size` is the size of the `file`."""
    values = _objects(inputs[tensor.name])
    shape = [1] * (spec.batching and not is_batch) + list(values.shape)
    described: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": shape}
    if tensor.name == file:
        # Four bytes with the length precede the element.
        return {**described, "parameters": {"binary_data_size": size + 4 if isinstance(size, int) else size}}
    return {**described, "data": values.ravel().tolist()}


def _json_call(spec: ModelSpec, inputs: Mapping[str, Any], *, is_batch: bool) -> tuple[str, str, str]:
    """Return path and body of a call in JSON, or why there is none."""
    tensors = [tensor for tensor in spec.inputs if tensor.name in inputs]
    shapes = {name: np.shape(_objects(value)) for name, value in inputs.items()}
    flat = {name: _objects(value).ravel().tolist() for name, value in inputs.items()}
    body: dict[str, Any]
    # The server derives shapes from the model, so values by name are enough if only one shape fits.
    is_plain = not is_batch and all(len(tensor.shape) <= 1 for tensor in tensors)
    if spec.decoupled or (is_plain and not generate_problem(spec)):
        problem = generate_problem(spec)
        path = "generate_stream" if spec.decoupled else "generate"
        body = {name: values[0] if len(values) == 1 else values for name, values in flat.items()}
    else:
        problem = infer_problem(spec)
        path = "infer"
        body = {
            "inputs": [
                {
                    "name": tensor.name,
                    "datatype": tensor.datatype,
                    "shape": [1] * (spec.batching and not is_batch) + list(shapes[tensor.name]),
                    "data": flat[tensor.name],
                }
                for tensor in tensors
            ]
        }
    try:
        return path, json.dumps(body, allow_nan=False), problem
    except ValueError:
        return "", "", "JSON has finite numbers only: see Python"


def _objects(value: Any) -> np.ndarray[Any, Any]:
    """Return nested lists as an array of objects, as deep as they are rectangular."""
    return np.array(value.tolist() if isinstance(value, np.ndarray) else value, object)


def _python(
    server_url: str, spec: ModelSpec, inputs: Mapping[str, Any], files: Collection[str], *, is_batch: bool
) -> str:
    tensors = [tensor for tensor in spec.inputs if tensor.name in inputs]
    values = {tensor.name: _python_value(tensor, inputs[tensor.name], tensor.name in files) for tensor in tensors}
    if all(name.isidentifier() and not keyword.iskeyword(name) and name not in _RESERVED for name in values):
        arguments = [f"{name}={value}" for name, value in values.items()]
    elif len(values) == len(spec.inputs):
        arguments = list(values.values())
    else:
        arguments = [f"**{{{', '.join(f'{name!a}: {value}' for name, value in values.items())}}}"]
    client, method = (
        "DecoupledModelClient" if spec.decoupled else "ModelClient",
        "infer_batch" if is_batch else "infer_sample",
    )
    imports = ["from pathlib import Path", ""] * any("Path(" in value for value in values.values())
    imports += ["import ml_dtypes"] * any("ml_dtypes." in value for value in values.values())
    imports += ["import numpy as np", ""] * any("np." in value for value in values.values())
    call = f"client.{method}({', '.join(arguments)})"
    body = [f"    for result in {call}:", "        print(dict(result))"]
    if not spec.decoupled:
        body = [f"    result = {call}", "print(dict(result))"]
    return "\n".join(
        [
            *imports,
            f"from pytriton.client import {client}",
            "",
            f"with {client}({server_url!a}, {spec.model_name!a}) as client:",
            *body,
        ]
    )


def _python_value(tensor: TensorSpec, value: Any, is_file: bool) -> str:
    if tensor.datatype == "BYTES":
        if is_file:
            read = 'Path("FILE").read_bytes()'
            for _ in np.shape(_objects(value)):
                read = f"[{read}]"
            return f"np.array({read}, dtype=object)"
        texts = ascii(value.tolist() if isinstance(value, np.ndarray) else value)
        # By themselves numpy's strings lose zeros at their ends.
        return f"np.array({texts}{', dtype=object' if _ENDS_WITH_ZERO.search(texts) else ''})"
    if is_file:
        return 'np.load("FILE.npy")'
    numbers = repr(value.tolist() if isinstance(value, np.ndarray) else value)
    numbers = numbers.replace("nan", "np.nan").replace("inf", "np.inf")
    name = "ml_dtypes.bfloat16" if tensor.datatype == "BF16" else f"np.{np.dtype(tensor.dtype).name}"
    return f"np.array({numbers}, dtype={'np.bool_' if name == 'np.bool' else name})"


def _javascript(url: str, body: str, *, is_stream: bool) -> str:
    lines = [
        f"const response = await fetch({json.dumps(url)}, {{",
        '  method: "POST",',
        '  headers: { "Content-Type": "application/json" },',
        f"  body: JSON.stringify({body}),",
        "});",
    ]
    if is_stream:
        lines += [
            "const decoder = new TextDecoder();",
            "for await (const piece of response.body) {",
            "  console.log(decoder.decode(piece, { stream: true }));",
            "}",
        ]
    else:
        lines += ["console.log(await response.json());"]
    return "\n".join(lines)

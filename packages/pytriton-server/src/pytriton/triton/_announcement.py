"""What somebody wants to know of a server that has just been started."""

import html
import json
import logging
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytriton.decorators.serving import is_file, json_example
from pytriton.model_config.dtypes import wire_name
from pytriton.model_config.triton_model_config import TensorSpec, TritonModelConfig
from pytriton.proxy_backend.system.escapes import is_terminal
from pytriton.proxy_backend.system.log_gate import is_log_set_up, set_gate
from pytriton.triton._description import ModelDescription, TritonDescription

logger = logging.getLogger(__name__)

# A longer line would hardly be copied.
_MAX_BODY = 300


def present(description: TritonDescription) -> None:
    """Print what is served, and how to stop it.

    On a terminal the text is printed; otherwise it is logged, or one line goes to standard error if no log is set up.
    """
    lines = list(_lines(description))
    if not is_terminal(sys.stdout):
        for line in lines:
            logger.info("%s", line)
        say_ready(description)
        return
    try:
        print(*lines, sep="\n", flush=True)
    except OSError as error:
        # A server may outlive the terminal that it was started in.
        logger.debug("The terminal is gone: %s", error)


def say_ready(description: TritonDescription) -> None:
    """Print one line on standard error that models are served, if the program has set up no logging."""
    if is_log_set_up(__name__):
        return
    names = ", ".join(dict.fromkeys([*(model.name for model in description.models), *description.folders]))
    urls = " and ".join(description.urls[name] for name in ("http", "grpc") if name in description.urls)
    line = f"pytriton: {names or 'no model yet'} served{urls and f' at {urls}'}; Ctrl+C or SIGTERM stops it."
    if sys.stderr is not None:
        handler = logging.StreamHandler()
        # The stream may be a pipe that nobody reads.
        set_gate(handler, for_all=True)
        handler.handle(logging.LogRecord(__name__, logging.INFO, __file__, 0, "%s", (line,), None))


def _lines(description: TritonDescription) -> Iterator[str]:
    yield from str(description).splitlines()
    for name in ("HTTP", "gRPC", "metrics"):
        if name.lower() in description.urls:
            yield f"{name:8}{description.urls[name.lower()]}"
    yield f"Ready after {description.start_s:.1f} s."
    if description.models and "http" in description.urls:
        model = description.models[0]
        yield f"Try: {_file_call(model, description.urls) or _curl_call(model, description.urls['http'])}"
    yield "Serving. Press Ctrl+C or send SIGTERM to stop."


def describe_as_html(description: TritonDescription, title: str) -> str:
    """Return the models and addresses of a server as a table, for a notebook."""
    urls = ", ".join(description.urls[name] for name in ("http", "grpc") if name in description.urls)
    states = {None: "", True: "attached", False: "not attached"}
    rows = [
        (model.name, model.inputs, model.outputs, model.facts, states[model.is_ready]) for model in description.models
    ]
    header = "".join(f"<th>{name}</th>" for name in ("model", "inputs", "outputs", "served", "state"))
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    caption = html.escape(f"{title}, {f'served at {urls}' if description.is_running else 'not running'}")
    return f"<table><caption>{caption}</caption><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"


def _curl_call(model: ModelDescription, url: str) -> str:
    return f"curl -s {url}/v2/models/{model.name}{_call(model.config)}"


def _file_call(model: ModelDescription, urls: Mapping[str, str]) -> str:
    """Return a line for a model of files, of which curl sends no several; empty for any other."""
    inputs = [spec for spec in model.config.inputs or () if not spec.optional]
    if not any(map(is_file, inputs)) or not all(is_file(spec) or len(spec.shape) == 1 for spec in inputs):
        return ""
    values = {spec.name: "@FILE" if is_file(spec) else _typed(spec) for spec in inputs}
    # A stream over HTTP is JSON, which has no files.
    url = urls.get("grpc", urls["http"]) if model.config.decoupled else urls["http"]
    return f"pytriton infer {url} {model.name} {shlex.join(f'{name}={value}' for name, value in values.items())}"


def _typed(spec: TensorSpec) -> str:
    """Return an example of an input as `pytriton infer` takes it."""
    values = _values(spec)
    if wire_name(spec.dtype) == "BYTES":
        return str(values[0]) if len(values) == 1 else json.dumps(values)
    return ",".join(json.dumps(value) for value in values)


def _call(config: TritonModelConfig) -> str:
    """Return the end of a curl line for a model: what follows its name, and the body of the request."""
    declared = list(config.inputs or ())
    # If all inputs are optional, the first one is shown, because requests without inputs are rare.
    inputs = [spec for spec in declared if not spec.optional] or declared[:1]
    is_plain = all(len(spec.shape) == 1 for spec in inputs)
    values = {spec.name: _values(spec) for spec in inputs}
    body: Any
    if is_plain:
        path = "/generate_stream" if config.decoupled else "/generate"
        body = {name: value[0] if len(value) == 1 else value for name, value in values.items()}
    else:
        path = "/infer"
        body = {"inputs": [_wire_input(spec, values[spec.name], batching=config.batching) for spec in inputs]}
    text = json.dumps(body)
    has_json = not any(wire_name(spec.dtype) in ("FP16", "BF16") for spec in [*inputs, *(config.outputs or ())])
    # The other models are only described.
    is_possible = has_json and (is_plain or not config.decoupled) and len(text) <= _MAX_BODY
    return f"{path} -d {shlex.quote(text)}" if is_possible else ""


def _wire_input(spec: TensorSpec, values: Sequence[Any], *, batching: bool) -> dict[str, Any]:
    shape = [1, *_sizes(spec)] if batching else _sizes(spec)
    return {"name": spec.name, "datatype": wire_name(spec.dtype), "shape": shape, "data": values}


def _values(spec: TensorSpec) -> list[Any]:
    in_json = json_example(spec)
    if in_json is not None:
        return [in_json]
    kind = wire_name(spec.dtype)
    count = min(_MAX_BODY, math.prod(_sizes(spec)))
    if kind in ("BYTES", "BOOL"):
        pair = ("hello", "world") if kind == "BYTES" else (True, False)
        return [pair[index % 2] for index in range(count)]
    return [float(index) if kind.startswith("FP") else index for index in range(1, count + 1)]


def _sizes(spec: TensorSpec) -> list[int]:
    """Return the sizes of an example; a variable size is several, to show that it is a list."""
    last = len(spec.shape) - 1
    return [size if size >= 0 else 2 if axis == last else 1 for axis, size in enumerate(spec.shape)]

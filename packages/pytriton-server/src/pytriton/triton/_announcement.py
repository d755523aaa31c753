"""What somebody wants to know of a server that has just been started."""

import html
import json
import logging
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pytriton.decorators.serving import describe_tensors
from pytriton.model_config.dtypes import wire_name
from pytriton.model_config.triton_model_config import TensorSpec, TritonModelConfig
from pytriton.server.models.bound_model import BoundModel
from pytriton.server.models.process_workers import ProcessWorker

if TYPE_CHECKING:
    from pytriton.triton._base import TritonBase
    from pytriton.triton._triton import Triton

__all__ = ["describe_as_html", "describe_models", "is_terminal", "present"]

logger = logging.getLogger(__name__)

# A line that is longer is not one to be copied.
_MAX_BODY = 300


def present(triton: "Triton") -> None:
    """Say what is served, and how to stop it: to a terminal as it is, else to the log.

    Args:
        triton: The server, which runs.
    """
    if not is_terminal():
        for line in _describe(triton):
            logger.info("%s", line)
        return
    try:
        print(*_describe(triton), sep="\n", flush=True)
    except OSError as error:
        # Servers outlive the terminals that they were started in.
        logger.debug("The terminal is gone: %s", error)


def is_terminal() -> bool:
    """Return whether somebody looks at what this program prints."""
    return sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()


def describe_models(triton: "Triton") -> Iterator[str]:
    """Yield a line for each model, on a server that runs or not."""
    for model in triton._models.values():
        config = model.triton_config
        tensors = f"({describe_tensors(config.inputs or ())}) -> {describe_tensors(config.outputs or ())}"
        state = ["ready" if model.is_attached else "not attached"] if triton.is_connected() else []
        yield f"{model.name}{tensors}; {', '.join([*state, _facts(model)])}"
    for name, folder in triton._folders.items():
        yield f"{name}; of {folder}"


def _describe(triton: "Triton") -> Iterator[str]:
    yield from describe_models(triton)
    models = list(triton._models.values())
    for name, url in (("HTTP", triton.http_url), ("gRPC", triton.grpc_url), ("metrics", triton.metrics_url)):
        if url is not None:
            yield f"{name:8}{url}"
    yield f"Ready after {triton._start_s:.1f} s."
    if models and triton.http_url is not None:
        yield f"Try: curl -s {triton.http_url}/v2/models/{models[0].name}{_call(models[0].triton_config)}"
    yield "Serving. Press Ctrl+C or send SIGTERM to stop."


def describe_as_html(triton: "TritonBase") -> str:
    """Return the models and addresses of a server as a table, for a notebook.

    Args:
        triton: The server, whether it runs or not.
    """
    runs = triton.is_connected()
    urls = f"served at {', '.join(triton._urls())}" if runs else "not running"
    rows = [
        (
            model.name,
            describe_tensors(model.triton_config.inputs or ()),
            describe_tensors(model.triton_config.outputs or ()),
            _facts(model),
            ("attached" if model.is_attached else "not attached") if runs else "",
        )
        for model in triton._models.values()
    ]
    header = "".join(f"<th>{name}</th>" for name in ("model", "inputs", "outputs", "served", "state"))
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    caption = html.escape(f"{type(triton).__name__}, {urls}")
    return f"<table><caption>{caption}</caption><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"


def _facts(model: BoundModel) -> str:
    processes = sum(each.copies for each in model.callables if isinstance(each, ProcessWorker))
    threads = sum(not isinstance(each, ProcessWorker) for each in model.callables)
    config = model.triton_config
    facts = [f"version {model.version}"] if model.version != 1 else []
    facts += [f"max_batch_size={config.max_batch_size}"] if config.batching else []
    facts += ["decoupled"] if config.decoupled else []
    facts += [_counted(threads, "thread")] if threads else []
    facts += [_counted(processes, "process", "es")] if processes else []
    return ", ".join(facts)


def _counted(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"


def _call(config: TritonModelConfig) -> str:
    """Return the rest of a curl line for a model: what is behind its name, and the body of the request."""
    declared = list(config.inputs or ())
    # One that needs none is called with one all the same: requests without inputs are rare.
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
    # Of the others, what they are like.
    is_possible = has_json and (is_plain or not config.decoupled) and len(text) <= _MAX_BODY
    return f"{path} -d {shlex.quote(text)}" if is_possible else ""


def _wire_input(spec: TensorSpec, values: Sequence[Any], *, batching: bool) -> dict[str, Any]:
    shape = [1, *_sizes(spec)] if batching else _sizes(spec)
    return {"name": spec.name, "datatype": wire_name(spec.dtype), "shape": shape, "data": values}


def _values(spec: TensorSpec) -> list[Any]:
    kind = wire_name(spec.dtype)
    value: Any = "hello" if kind == "BYTES" else True if kind == "BOOL" else 1.0 if kind.startswith("FP") else 1
    return [value] * min(_MAX_BODY, math.prod(_sizes(spec)))


def _sizes(spec: TensorSpec) -> list[int]:
    return [1 if size < 0 else size for size in spec.shape]

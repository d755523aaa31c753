"""The commands `models`, `infer` and `bench`: what a server has, a call of one of its models, many of them."""

import collections
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from pytriton.guests.options import Token

if TYPE_CHECKING:
    from pytriton.client import ModelClient, ModelSpec, TlsSettings
    from pytriton.client.management import TritonUrl
    from pytriton.server.control.http import Control

_TOKEN_ADVICE = "The server asks for its access token: --access-token, or the variable PYTRITON_ACCESS_TOKEN"
_DEFAULT_URL = "localhost:8000"
# Answers of other servers begin like this: pages, or JSON in another form. Triton's texts are already taken out of its
# JSON.
_NOT_OF_TRITON = ("<", "{", "[")
# Triton says this if a model or a version does not exist or is not loaded.
_UNKNOWN_TEXT = "unknown model"
_TRITONS_METRICS_PORT = 8002

Url = Annotated[
    str,
    typer.Argument(metavar="URL", help="[SCHEME://]HOST[:PORT] of any tritonserver; http, https, grpc or grpcs."),
]
CaFile = Annotated[
    Path | None, typer.Option(help="Certificates of the authorities to trust, for https:// and grpcs://.")
]


def models(
    url: Url,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="The models that are wanted; all if none is named.")
    ] = None,
    access_token: Token = None,
    ca_file: CaFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="The port of its page of metrics, which says which models sleep. By default the port of a server of "
            "yours on this host, else 8002.",
        ),
    ] = None,
    openapi: Annotated[
        bool, typer.Option("--openapi", help="Print an OpenAPI document: what JSON the models take and give.")
    ] = False,
) -> None:
    """List the models of a server: state, versions, requests, signature."""
    from pytriton.catalog.listing import list_models, models_as_json, models_as_text, read_sleep, with_sleep
    from pytriton.catalog.openapi import describe_openapi
    from pytriton.client.management import TritonUrl

    if as_json and openapi:
        raise typer.BadParameter("--json and --openapi exclude each other")
    # A protected server describes single models to everybody.
    advice = _TOKEN_ADVICE if names else f"{_TOKEN_ADVICE}. Or name a model, whose signature needs none"
    with _told(url, advice), contextlib.closing(_connect(url, access_token, ca_file)) as control:
        parsed = TritonUrl.from_url(url)
        if openapi and parsed.protocol != "http":
            _fail("OpenAPI describes HTTP: give the server's http:// address.")
        found = list_models(control, names or ())
        if openapi:
            typer.echo(json.dumps(describe_openapi(found, parsed.with_scheme), indent=2))
        else:
            asleep, uses = read_sleep(_metrics_url(parsed, metrics_port))
            found = [replace(with_sleep(each, asleep), use=uses.get(each.name)) for each in found]
            typer.echo(models_as_json(found) if as_json else models_as_text(found))


def infer(
    url: Url,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model.")],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUE]... [-]",
            help="The inputs: text, numbers with commas, JSON that begins with [, or @FILE: bytes, for numbers a .npy "
            "file. A - reads a JSON object of inputs from standard input.",
        ),
    ] = None,
    json_inputs: Annotated[
        str | None, typer.Option("--json", metavar="OBJECT", help="Inputs by name, as a JSON object.")
    ] = None,
    batch: Annotated[
        bool, typer.Option("--batch", help="The values have the axis of the batch. Without this they are one sample.")
    ] = False,
    model_version: Annotated[str | None, typer.Option(help="The version; by default the latest.")] = None,
    output: Annotated[str, typer.Option(help="text, or json: one object, of a stream one a line.")] = "text",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer, and for each one of a stream.")] = 60.0,
    access_token: Token = None,
    ca_file: CaFile = None,
) -> None:
    """Call a model, and print what it answers. Streams are printed as they come."""
    from pytriton.catalog.tensors import parse_inputs, result_as_json, result_as_text
    from pytriton.client import DecoupledModelClient

    if output not in ("text", "json"):
        raise typer.BadParameter(f"--output must be text or json, got {output!r}")
    url, model, written = _with_url(url, model, inputs or ())
    texts, values = _read_inputs(written, json_inputs)
    with contextlib.ExitStack() as opened:
        client, spec = opened.enter_context(_called(url, model, model_version, timeout, access_token, ca_file))
        if batch and not spec.batching:
            _fail(f"Model {model} takes one sample at a time: leave --batch out.")
        ordered, named = _arguments(spec, parse_inputs(spec, texts, values, is_batch=batch))
        show = result_as_json if output == "json" else partial(result_as_text, one_line=spec.decoupled)
        if spec.decoupled:
            streaming = opened.enter_context(DecoupledModelClient.from_existing_client(client))
            stream = streaming.with_options(casting="same_kind", timeout_s=timeout)
            responses = stream.infer_batch(*ordered, **named) if batch else stream.infer_sample(*ordered, **named)
            for response in opened.enter_context(contextlib.closing(responses)):
                typer.echo(show(response))
        else:
            # Numbers on a command line have no type, so they may be cast.
            call = client.with_options(casting="same_kind")
            result = call.infer_batch(*ordered, **named) if batch else call.infer_sample(*ordered, **named)
            typer.echo(show(result))


def bench(
    url: Url,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model.")],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUE]...",
            help="The inputs, as for infer, with --batch-size those of a batch; by default random ones, where any "
            "length is possible of length 1.",
        ),
    ] = None,
    concurrency: Annotated[
        str, typer.Option(metavar="N,N,...", help="How many call at once, one number after the other.")
    ] = "1,2,4,8,16,32",
    duration: Annotated[float, typer.Option(min=0.01, help="Seconds for each of these numbers.")] = 3.0,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rows of each request; without this it is one sample.")
    ] = None,
    model_version: Annotated[str | None, typer.Option(help="The version; by default the latest.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    access_token: Token = None,
    ca_file: CaFile = None,
) -> None:
    """Measure a model: throughput against latency, with more and more callers. Ctrl+C shows what there is by then."""
    from pytriton.catalog.tensors import parse_inputs
    from pytriton.cli import bench as benchmark

    numbers = _read_numbers(concurrency)
    texts, values = _read_inputs(inputs or (), None)
    with _called(url, model, model_version, timeout, access_token, ca_file) as (client, spec):
        if batch_size is not None and not spec.batching:
            _fail(f"Model {model} takes one sample at a time: leave --batch-size out.")
        if texts or values:
            values = parse_inputs(spec, texts, values, is_batch=batch_size is not None)
        else:
            values = benchmark.make_inputs(spec, batch_size)
        connect = partial(_connected, client, spec, values, timeout, is_batch=batch_size is not None)
        levels: list[benchmark.Level] = []
        code = 0
        try:
            if not as_json:
                typer.echo(benchmark.table_row(None))
            for number in numbers:
                levels.append(benchmark.Level(number))
                benchmark.measure(connect, number, duration, levels[-1])
                if not as_json:
                    typer.echo(benchmark.table_row(levels[-1]))
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
            if not as_json:
                typer.echo(f"{benchmark.table_row(levels[-1])}  interrupted" if levels else "interrupted")
        typer.echo(
            benchmark.as_json(levels, url=url, model=model, batch_size=batch_size)
            if as_json
            else "\n".join(benchmark.as_table(levels))
        )
        if code == 0 and not any(level.latencies_ms for level in levels):
            code = 1
    raise typer.Exit(code)


@contextlib.contextmanager
def _called(
    url: str, model: str, version: str | None, timeout_s: float, access_token: str | None, ca_file: Path | None
) -> Iterator[tuple["ModelClient", "ModelSpec"]]:
    """Open a client of a model and read its specification; errors in the block are printed."""
    from pytriton.client import ModelClient

    with _told(url):
        # It does not wait for the model: a user who calls by hand wants to know at once that it is missing.
        client = ModelClient(
            url,
            model,
            version,
            init_timeout_s=timeout_s,
            inference_timeout_s=timeout_s,
            ensure_model_is_ready=False,
            access_token=access_token,
            tls=_tls(ca_file),
        )
        with client:
            yield client, _find_spec(client, lambda: _connect(url, access_token, ca_file), model, version)


@contextlib.contextmanager
def _connected(
    client: "ModelClient", spec: "ModelSpec", values: Mapping[str, Any], timeout_s: float, *, is_batch: bool
) -> Iterator[Callable[[], object]]:
    """Open a connection like that of a client; return a function that makes one request with it."""
    from pytriton.client import DecoupledModelClient, ModelClient

    with contextlib.ExitStack() as opened:
        ordered, named = _arguments(spec, values)
        if spec.decoupled:
            stream = opened.enter_context(DecoupledModelClient.from_existing_client(client))
            stream = stream.with_options(casting="same_kind", timeout_s=timeout_s)
            start = stream.infer_batch if is_batch else stream.infer_sample
            yield lambda: collections.deque(start(*ordered, **named), maxlen=0)
        else:
            own = opened.enter_context(ModelClient.from_existing_client(client)).with_options(casting="same_kind")
            call = own.infer_batch if is_batch else own.infer_sample
            yield lambda: call(*ordered, **named)


def _arguments(spec: "ModelSpec", values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs by position if possible, because an input may have the name of another argument."""
    return (tuple(values.values()), {}) if len(values) == len(spec.inputs) else ((), dict(values))


def _read_numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise typer.BadParameter(f"--concurrency must be numbers of at least 1 with commas, got {text!r}")
    return numbers


def _connect(url: str, access_token: str | None, ca_file: Path | None) -> "Control":
    from pytriton.client.management import TritonUrl, check_tls
    from pytriton.server.control.connect import connect
    from pytriton.server.control.local_token import use_token

    parsed, access_token = use_token(TritonUrl.from_url(url), access_token)
    return connect(parsed, access_token, check_tls(_tls(ca_file), parsed))


def _metrics_url(url: "TritonUrl", port: int | None) -> "TritonUrl":
    """Return where a server has its metrics, as far as that is known."""
    from pytriton.client.management import TritonUrl
    from pytriton.server.control.local_token import find_token

    found = find_token(url)
    port = port or (found.metrics_port if found else None) or _TRITONS_METRICS_PORT
    return TritonUrl("http", url.hostname, port, trust_env=found is None)


def _tls(ca_file: Path | None) -> "TlsSettings | None":
    from pytriton.client import TlsSettings

    return None if ca_file is None else TlsSettings(ca_file=ca_file)


def _with_url(url: str, model: str, inputs: Sequence[str]) -> tuple[str, str, Sequence[str]]:
    """Return the arguments; if the URL was left out, add that of a server on this machine."""
    if "=" not in model and model != "-":
        return url, model, inputs
    typer.echo(f"The server comes first: taken as `pytriton infer {_DEFAULT_URL} {url} {model} ...`", err=True)
    return _DEFAULT_URL, url, [model, *inputs]


def _read_inputs(written: Iterable[str], json_inputs: str | None) -> tuple[dict[str, str], dict[str, Any]]:
    """Return inputs as text behind their names, and inputs as values of JSON."""
    texts: dict[str, str] = {}
    values = {} if json_inputs is None else _parse_object(json_inputs, "--json")
    for each in written:
        name, separator, text = each.partition("=")
        if each == "-":
            more = _parse_object(sys.stdin.read(), "standard input")
        elif separator and name:
            more = {name: text}
        else:
            _fail(f"Expected NAME=VALUE or - for an input, received {each!r}.")
        for twice in more.keys() & (texts.keys() | values.keys()):
            _fail(f"The input {twice!r} is given twice.")
        (values if each == "-" else texts).update(more)
    return texts, values


def _parse_object(text: str, source: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        _fail(f"Expected a JSON object of inputs by name as {source}: {error}.")
    if not isinstance(parsed, dict):
        _fail(f"Expected a JSON object of inputs by name as {source}, received {text[:80]!r}.")
    return parsed


def _find_spec(client: "ModelClient", connect: Callable[[], "Control"], name: str, version: str | None) -> "ModelSpec":
    from pytriton.client.exceptions import PyTritonClientInferenceServerError

    try:
        return client.model_config
    except PyTritonClientInferenceServerError as error:
        if _UNKNOWN_TEXT not in (error.server_message or ""):
            raise
        with contextlib.closing(connect()) as control:
            _fail(_say_what_there_is(control, name, version))


def _say_what_there_is(control: "Control", name: str, version: str | None) -> str:
    from pytriton.catalog.listing import known_models
    from pytriton.server.control.http import ControlError

    try:
        known = known_models(control)
    except ControlError:
        return f"The server has no model {name!r} that is ready. With --access-token this names those that it has."
    if name in known:
        states = [f"{each.version or 'no version'} {each.state} {each.reason}".rstrip() for each in known[name]]
        missing = "" if version is None else f" in version {version}"
        return f"The model {name!r} is not ready{missing}. Its versions: {', '.join(states)}."
    return f"The server has no model {name!r}. Its models: {', '.join(sorted(known)) or 'none'}."


@contextlib.contextmanager
def _told(url: str, token_advice: str = _TOKEN_ADVICE) -> Iterator[None]:
    """End the program with one line for an error that is no fault of its own."""
    from pytriton.client.exceptions import (
        PyTritonClientError,
        PyTritonClientInferenceServerError,
        PyTritonClientValueError,
    )
    from pytriton.client.management import is_denial
    from pytriton.server.control.http import ControlError

    try:
        yield
    except PyTritonClientValueError as error:
        # Inputs that the server was not asked about are an error of the server's kind, too.
        _fail(str(error))
    except (PyTritonClientInferenceServerError, ControlError) as error:
        said = error.reason if isinstance(error, ControlError) else error.server_message
        if said is None:
            _fail(f"{url}: {error}")
        if said.lstrip().startswith(_NOT_OF_TRITON):
            _fail(
                f"{url} is a web server, and no Triton: expected an error in Triton's form, received {said[:60]!r}. Is "
                "the port right? Triton's are 8000 for HTTP and 8001 for gRPC, unless somebody has chosen others."
            )
        _fail(f"{token_advice} ({said})" if is_denial(error.status or "", said) else said)
    except PyTritonClientError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


def _fail(text: str) -> NoReturn:
    # One line of printable characters, because most of the text comes from the server.
    line = " ".join(text.split())
    typer.echo(f"Error: {line if line.isprintable() else ascii(line)}", err=True)
    raise typer.Exit(1)

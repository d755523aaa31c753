"""The commands `models` and `infer`: what a running server has, and a call of one of its models."""

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from pytriton.client import ModelClient, ModelSpec, TlsSettings
    from pytriton.server.control.http import Control

__all__ = ["infer", "models"]

_TOKEN_ADVICE = "The server asks for its access token: --access-token, or the variable PYTRITON_ACCESS_TOKEN"
# How Triton begins where a model, or a version of it, is not there or not loaded.
_UNKNOWN_TEXT = "unknown model"

Url = Annotated[
    str,
    typer.Argument(metavar="URL", help="[SCHEME://]HOST[:PORT] of any tritonserver; http, https, grpc or grpcs."),
]
Token = Annotated[
    str | None,
    typer.Option(envvar="PYTRITON_ACCESS_TOKEN", help="The server's token. Others can see a command line."),
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
    openapi: Annotated[
        bool, typer.Option("--openapi", help="Print an OpenAPI document: what JSON the models take and give.")
    ] = False,
) -> None:
    """List the models of a server: state, versions, requests, signature."""
    from pytriton.client.management import TritonUrl
    from pytriton.server.catalog.listing import list_models, models_as_json, models_as_text
    from pytriton.server.catalog.openapi import describe_openapi

    if as_json and openapi:
        raise typer.BadParameter("--json and --openapi exclude each other")
    with _told(url), contextlib.closing(_connect(url, access_token, ca_file)) as control:
        parsed = TritonUrl.from_url(url)
        if openapi and parsed.protocol != "http":
            _fail("OpenAPI describes HTTP: give the server's http:// address.")
        found = list_models(control, names or ())
        if openapi:
            typer.echo(json.dumps(describe_openapi(found, parsed.with_scheme), indent=2))
        else:
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
    from pytriton.client import DecoupledModelClient, ModelClient
    from pytriton.server.catalog.tensors import parse_inputs, result_as_json, result_as_text

    if output not in ("text", "json"):
        raise typer.BadParameter(f"--output must be text or json, got {output!r}")
    with _told(url), contextlib.ExitStack() as opened:
        texts, values = _read_inputs(inputs or (), json_inputs)
        # Without a wait for the model: whoever calls it by hand wants to know at once that it is not there.
        client = ModelClient(
            url,
            model,
            model_version,
            init_timeout_s=timeout,
            inference_timeout_s=timeout,
            ensure_model_is_ready=False,
            access_token=access_token,
            tls=_tls(ca_file),
        )
        opened.enter_context(client)
        spec = _find_spec(client, lambda: _connect(url, access_token, ca_file), model, model_version)
        if batch and not spec.batching:
            _fail(f"Model {model} takes one sample at a time: leave --batch out.")
        named: dict[str, Any] = parse_inputs(spec, texts, values, is_batch=batch)
        # By position where that can be: an input may have the name of another argument.
        ordered, named = (tuple(named.values()), {}) if len(named) == len(spec.inputs) else ((), named)
        show = result_as_json if output == "json" else partial(result_as_text, one_line=spec.decoupled)
        if spec.decoupled:
            streaming = opened.enter_context(DecoupledModelClient.from_existing_client(client))
            stream = streaming.with_options(casting="same_kind", timeout_s=timeout)
            responses = stream.infer_batch(*ordered, **named) if batch else stream.infer_sample(*ordered, **named)
            for response in opened.enter_context(contextlib.closing(responses)):
                typer.echo(show(response))
        else:
            # Nobody chose the type of a number on a command line.
            call = client.with_options(casting="same_kind")
            result = call.infer_batch(*ordered, **named) if batch else call.infer_sample(*ordered, **named)
            typer.echo(show(result))


def _connect(url: str, access_token: str | None, ca_file: Path | None) -> "Control":
    from pytriton.client.management import TritonUrl, check_tls
    from pytriton.server.control.connect import connect

    parsed = TritonUrl.from_url(url)
    return connect(parsed, access_token, check_tls(_tls(ca_file), parsed))


def _tls(ca_file: Path | None) -> "TlsSettings | None":
    from pytriton.client import TlsSettings

    return None if ca_file is None else TlsSettings(ca_file=ca_file)


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
    from pytriton.server.catalog.listing import known_models
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
def _told(url: str) -> Iterator[None]:
    """End the program with one line for an error that is no fault of its own."""
    from pytriton.client.exceptions import PyTritonClientError, PyTritonClientInferenceServerError
    from pytriton.client.management import is_denial
    from pytriton.server.control.http import ControlError

    try:
        yield
    except (PyTritonClientInferenceServerError, ControlError) as error:
        said = error.reason if isinstance(error, ControlError) else error.server_message
        if said is None:
            _fail(f"{url}: {error}")
        _fail(f"{_TOKEN_ADVICE} ({said})" if is_denial(error.status or "", said) else said)
    except PyTritonClientError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


def _fail(text: str) -> NoReturn:
    # In one line, and without what could do things to the terminal: much of it is the server's.
    line = " ".join(text.split())
    typer.echo(f"Error: {line if line.isprintable() else ascii(line)}", err=True)
    raise typer.Exit(1)

"""The command `openai`, and the options of `serve`: endpoints of the OpenAI API before a server."""

import contextlib
import importlib.util
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn

import typer

from pytriton.exceptions import PyTritonError
from pytriton.guests import Guest
from pytriton.guests.endpoints import (
    EndpointError,
    bind_endpoint,
    check_port,
    read_key,
    run_application,
    run_endpoint_beside,
)
from pytriton.guests.options import AuthoritiesFile, Token

if TYPE_CHECKING:
    from pytriton.triton import Triton

API_KEY_VARIABLE = "PYTRITON_OPENAI_API_KEY"
"""The environment variable with the API key."""

_NEEDED = ("fastapi", "hpack", "jinja2", "jsonschema", "python_multipart", "uvicorn")
_INSTALL = 'pip install "pytriton-server[openai]"'
_NAME = "the OpenAI endpoints"


def openai_command(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="[SCHEME://]HOST[:PORT] of any tritonserver. Over gRPC a model learns at once that a caller has left.",
        ),
    ] = "grpc://localhost:8001",
    model: Annotated[list[str] | None, typer.Option(help="A model that may be asked, in place of all; repeatable.")] = (
        None
    ),
    address: Annotated[str, typer.Option(help="Where the endpoints listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Their port; 0 takes a free one.")] = 9000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help=f"Holds the key that callers have to send, in place of the variable {API_KEY_VARIABLE}."),
    ] = None,
    access_token: Token = None,
    ca_file: AuthoritiesFile = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=MODEL", help="A further name that a model may be asked by; repeatable."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse fields that are not known, in place of naming them in the log.")
    ] = False,
    cors_origins: Annotated[
        list[str] | None,
        typer.Option(
            "--cors",
            metavar="ORIGIN",
            help="A place, such as https://app.example, whose pages browsers let read answers; repeatable. * is any.",
        ),
    ] = None,
    descriptor: Annotated[int | None, typer.Option(hidden=True, help="A socket that is bound, from serve.")] = None,
) -> None:
    """Answer callers of the OpenAI API with the models of a running server, until Ctrl+C or SIGTERM.

    Models that take a text and give a text answer chats and completions; those that give a vector, embeddings; those
    that compare two texts, ranks; those that take audio, transcriptions. Needs the extra openai.
    """
    _check_installed("The command openai")
    from pytriton.client.exceptions import PyTritonClientError
    from pytriton.client.management import TlsSettings
    from pytriton.openai import application

    try:
        key = read_key(api_key_file, API_KEY_VARIABLE)
        app = application(
            url,
            models=model,
            api_key=key,
            access_token=access_token,
            tls=None if ca_file is None else TlsSettings(ca_file=ca_file),
            aliases=_read_aliases(alias or ()),
            strict=strict,
            cors_origins=cors_origins or (),
        )
        listener = bind_endpoint(address, port, name=_NAME, option="--openai", descriptor=descriptor)
    except (PyTritonClientError, PyTritonError) as error:
        _fail(str(error))
    try:
        run_application(app, listener, title="OpenAI", path="/v1", has_key=key is not None)
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None


@dataclass
class OpenAiGuest(Guest):
    """Endpoints of the OpenAI API beside a server."""

    openai: Annotated[
        int | None,
        typer.Option(
            "--openai",
            metavar="PORT",
            min=0,
            max=65535,
            help="Answer callers of the OpenAI API there with the models that take text, at the address of the server; "
            "0 takes a free port.",
        ),
    ] = None
    openai_key_file: Annotated[
        Path | None,
        typer.Option(
            help=f"With --openai: holds the API key that callers have to send, in place of {API_KEY_VARIABLE}."
        ),
    ] = None
    openai_alias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MODEL", help="With --openai: a further name that a model may be asked by; repeatable."
        ),
    ] = None
    openai_strict: Annotated[
        bool,
        typer.Option(
            "--openai-strict",
            help="With --openai: refuse fields that are not known, not only name them in the log.",
        ),
    ] = False

    commands: ClassVar = {"openai": openai_command}
    in_file: ClassVar = {
        "openai": range(65536), "openai_key_file": str, "openai_alias": list, "openai_strict": bool
    }  # fmt: skip

    def __post_init__(self) -> None:
        if self.openai_key_file is not None:
            # A file of settings gives a string.
            self.openai_key_file = Path(self.openai_key_file)

    def check(self, given: Collection[str]) -> None:
        """Check that the endpoints can be started if they are asked for."""
        if self.openai is not None:
            _check_installed("--openai")
            _read_aliases(self.openai_alias or ())
            return
        for option, value in (
            ("key-file", self.openai_key_file), ("alias", self.openai_alias), ("strict", self.openai_strict)
        ):  # fmt: skip
            if value:
                raise typer.BadParameter(f"--openai-{option} is for --openai")

    def describe(self, triton: "Triton") -> Iterator[str]:
        """Yield a line for each model: its endpoint, or why it has none."""
        if self.openai is None:
            return
        check_port(triton, self.openai, name=_NAME, option="--openai")
        yield from _describe_endpoints(triton, _read_aliases(self.openai_alias or ()))
        read_key(self.openai_key_file, API_KEY_VARIABLE)

    def beside(
        self, triton: "Triton", opened: contextlib.ExitStack, *, address: str
    ) -> contextlib.AbstractContextManager[object]:
        """Bind the port, and return the context manager that runs the endpoints."""
        if self.openai is None:
            return contextlib.nullcontext()
        listener = opened.enter_context(bind_endpoint(address, self.openai, name=_NAME, option="--openai"))
        options = ["--strict"] if self.openai_strict else []
        options += ["--api-key-file", str(self.openai_key_file)] if self.openai_key_file is not None else []
        options += [f"--alias={alias}" for alias in self.openai_alias or ()]
        options += [f"--cors={origin}" for origin in triton.describe().cors_origins]
        return run_endpoint_beside(triton, listener, "openai", options, name=_NAME)


def _read_aliases(given: Iterable[Any]) -> dict[str, str]:
    """Return further names of models, with the models."""
    aliases = {}
    for text in given:
        alias, _, name = text.partition("=") if isinstance(text, str) else ("", "", "")
        if not alias or not name:
            raise EndpointError(f"expected an alias as NAME=MODEL, such as gpt-4o=writer; got {text!r}")
        aliases[alias] = name
    return aliases


def _check_installed(who: str) -> None:
    """Check that the endpoints can be started."""
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            raise typer.BadParameter(f"{who} needs {name}: {_INSTALL}")


def _describe_endpoints(triton: "Triton", aliases: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each model of a server, running or not: its endpoint, or why it has none."""
    from pytriton.openai.server import UnfitModelError, endpoints_of

    for model in triton.describe().models:
        try:
            endpoints = endpoints_of(model.triton_config)
        except UnfitModelError as error:
            yield f"OpenAI: {model.name} is not served: {error}"
            continue
        except ValueError as error:
            raise EndpointError(f"model {model.name!r}: {error}") from None
        also = ", ".join(alias for alias, name in aliases.items() if name == model.name)
        yield f"OpenAI: {model.name}{also and f' (also {also})'} at {', '.join(endpoints)}"
    names = [model.name for model in triton.describe().models]
    for alias, name in aliases.items():
        if name not in names:
            raise EndpointError(f"the alias {alias!r} is to be of a model {name!r}; there are {', '.join(names)}")


def _fail(text: str) -> NoReturn:
    typer.echo(f"Error: {text}", err=True)
    raise typer.Exit(1)

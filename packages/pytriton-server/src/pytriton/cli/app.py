"""The commands."""

import importlib.metadata
import inspect
import shlex
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
import typer.core

from pytriton.cli import calls
from pytriton.cli.checks.report import Report, ReportError
from pytriton.cli.checks.steps import Steps
from pytriton.guests import find_guests
from pytriton.guests.options import given_options

_INTERRUPTED = 128 + signal.SIGINT
_BANNER = (
    "The report names files, hosts, users and settings of this machine, and variables of the environment. What looks "
    "like a secret is left out, which no program gets right every time: read it before you hand it on."
)

Workspace = Annotated[
    Path | None,
    typer.Option(
        "--workspace",
        "-w",
        help="Folder to make for logs and files, which must not exist yet. Without it they are removed in the end.",
    ),
]
Zip = Annotated[bool, typer.Option("--zip/--no-zip", help="Put logs and files into a ZIP in the current folder.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Name each published vulnerability of the tritonserver.")
]
# None where nothing is typed, so that the environment counts, see `TritonConfig`.
Address = Annotated[str | None, typer.Option(help="Where HTTP, gRPC and metrics listen; 0.0.0.0 by default.")]
HttpPort = Annotated[int | None, typer.Option(help="Port of HTTP, 8000 by default; 0 takes a free one.")]
GrpcPort = Annotated[int | None, typer.Option(help="Port of gRPC, 8001 by default; 0 takes a free one.")]
MetricsPort = Annotated[int | None, typer.Option(help="Port of the metrics, 8002 by default; 0 takes a free one.")]
AccessToken = Annotated[
    str | None,
    typer.Option(
        envvar="PYTRITON_ACCESS_TOKEN",
        help="What callers have to send as triton-access-token to load and unload models, and to use shared memory, "
        "statistics, traces and log settings; without one, nobody can. Others can see a command line.",
    ),
]
Unprotected = Annotated[bool, typer.Option("--unprotected", help="Let everybody who reaches the server do all that.")]
CorsOrigins = Annotated[
    list[str] | None,
    typer.Option(
        "--cors",
        metavar="ORIGIN",
        help="A place, such as https://app.example, whose pages browsers let read answers over HTTP; repeatable. "
        "* is any.",
    ),
]
LogLevel = Annotated[
    str | None,
    typer.Option(
        help="The least level of the whole log: DEBUG, INFO, WARNING or ERROR. Without it INFO for pytriton, and "
        "WARNING for all else."
    ),
]
LogFormat = Annotated[str, typer.Option(help="text, or json: an object for each record of the log, a line each.")]

_NEVER_CUT = 1000


class _Commands(typer.core.TyperGroup):
    """The commands in the order of their definition below, which is that of their use."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands and what they do, wrapped and not cut."""
        found = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, each.get_short_help_str(limit=_NEVER_CUT)) for name, each in found if each and not each.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


app = typer.Typer(
    name="pytriton",
    cls=_Commands,
    help="Serves models and calls them, checks an installation of pytriton, and attaches workers.",
    # Plain text is readable in a narrow terminal, too.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def run() -> None:
    """Run the command line, and end the interpreter."""
    signal.signal(signal.SIGTERM, _end)
    # With `python -m`, help would show the name of the file.
    app(prog_name="pytriton")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Serve models and call them. Begin with `pytriton init`."""
    if version:
        typer.echo(f"pytriton {importlib.metadata.version('pytriton-server')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to; it is made if it is not there.")] = Path(),
) -> None:
    """Write a project: a model, its test, a Dockerfile. Nothing that is there is overwritten."""
    from pytriton.cli.project import ProjectError, make_project

    try:
        files = make_project(folder)
    except ProjectError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{', '.join(files)}\n\nNext:")
    for line in ([] if folder.resolve() == Path.cwd() else [f"cd {shlex.quote(str(folder))}"]) + [
        "pytriton serve app.py",
        "pytriton infer localhost:8000 shout text=hello  # in another terminal",
    ]:
        typer.echo(f"  {line}")


_guests = find_guests()


def _with_options_of_guests(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of the guests to a command: typer reads them from a signature, and passes keyword arguments."""
    signature = inspect.signature(command)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    others = [each for guest in _guests for each in inspect.signature(guest).parameters.values()]
    command.__signature__ = signature.replace(parameters=[*own, *others])  # type: ignore[attr-defined]
    return command


@app.command(no_args_is_help=True)
@_with_options_of_guests
def serve(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE|MODULE[:NAME]",
            help="Such as app.py or package.module: every model that it defines with @model. With a name, such as "
            "app.py:softmax: that model, or that Triton, or the Triton that a function of that name returns.",
        ),
    ],
    workers: Annotated[
        int,
        typer.Option(
            min=0,
            help="How many processes serve each model, each with its own copy; by default a thread of this one does.",
        ),
    ] = 0,
    min_workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Begin with so many of --workers, add one while requests wait in the queue, and end those again that "
            "are not needed.",
        ),
    ] = None,
    idle: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="After so long without a request, such as 90s, 5m or 1h, the processes of --workers end, and the next "
            "request for their model starts them again.",
        ),
    ] = None,
    sleep: Annotated[
        str | None,
        typer.Option(
            metavar="process|parent",
            help="What stays of a model that sleeps: nothing, or a process with its imports and weights "
            "from which the others are forked, many times faster.",
        ),
    ] = None,
    memory_budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            envvar="PYTRITON_MEMORY_BUDGET",
            help="How much memory the processes of --workers may take together, such as 2GiB. Where a model needs "
            "more, those that were used least recently end until their next request.",
        ),
    ] = None,
    min_awake: Annotated[
        int, typer.Option(min=0, help="How many models stay awake however long nobody calls them, in spite of --idle.")
    ] = 0,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML or YAML with options, the tables [server] with fields of TritonConfig and [models.NAME] with "
            "workers, min_workers, idle, sleep, starts_asleep, pinned, golden and fields of ModelConfig. What is "
            "typed here counts more.",
        ),
    ] = None,
    reload: Annotated[
        bool, typer.Option("--reload", help="Serve what the file defines anew whenever it, or one beside it, is saved.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Say what would be served, or what is wrong, and start nothing.")
    ] = False,
    address: Address = None,
    http_port: HttpPort = None,
    grpc_port: GrpcPort = None,
    metrics_port: MetricsPort = None,
    access_token: AccessToken = None,
    unprotected: Unprotected = False,
    cors_origins: CorsOrigins = None,
    log_level: LogLevel = None,
    log_format: LogFormat = "text",
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Log each request: model, id, rows, duration, outcome. It costs speed.")
    ] = False,
    **of_guests: Any,
) -> None:
    """Serve the models of a file, until Ctrl+C (SIGINT) or SIGTERM.

    SIGHUP replaces the server, without a lost request, by one with the settings that the file of --config has then.

    Further settings come from environment variables, such as PYTRITON_TRITON_CONFIG_CACHE_CONFIG.
    """
    options = {**locals(), **of_guests}
    for name in ("context", "target", "of_guests"):
        del options[name]
    from pytriton.cli.serve import serve as serve_target

    given = given_options(context)
    serve_target(target, options, guests=_guests, given=[name for name in options if name in given])


app.command(no_args_is_help=True)(calls.infer)
app.command(no_args_is_help=True)(calls.models)
app.command(no_args_is_help=True)(calls.bench)
for _guest in _guests:
    for _name, _command in _guest.commands.items():
        app.command(_name)(_command)


@app.command()
def check(workspace: Workspace = None, zip_report: Zip = False, verbose: Verbose = False) -> None:
    """Describe the environment, try what the system allows, serve a model and call it. Exit code 0 when all works."""
    _report("check", workspace, zip_report, partial(_environment, verbose), _system, _add_sub, _add_sub_script)


@app.command()
def env(workspace: Workspace = None, zip_report: Zip = False, verbose: Verbose = False) -> None:
    """Describe the environment: versions, machine, tritonserver, ports, variables."""
    _report("env", workspace, zip_report, partial(_environment, verbose))


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def worker(context: typer.Context) -> None:
    """Serve a model of a running server with a callable, until SIGINT or SIGTERM."""
    # Both programs share one command line, which `pytriton worker --help` shows.
    from pytriton.proxy_backend.cli.app import run as run_command

    run_command(["worker", *(context.args or ["--help"])], program="pytriton")


@app.command("serve-repository", no_args_is_help=True)
def serve_repository(
    repository: Annotated[
        str,
        typer.Argument(
            metavar="DIR",
            help="A model repository, as tritonserver takes it: a folder, or s3://, gs:// or as://. "
            "Nothing in it changes.",
        ),
    ],
    python_models: Annotated[
        str,
        typer.Option(
            help="Who runs the model.py of models for Triton's Python backend: workers, processes of this Python or of "
            "the model's environment; or stub, that backend itself."
        ),
    ] = "workers",
    idle: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="After so long without a request, such as 90s, 5m or 1h, the process of an instance of such a model "
            "ends, and the next request starts it again.",
        ),
    ] = None,
    memory_budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            envvar="PYTRITON_MEMORY_BUDGET",
            help="How much memory the processes of such models may take together, such as 2GiB. Where one needs more, "
            "those that were used least recently end until their next request.",
        ),
    ] = None,
    model_control_mode: Annotated[
        str,
        typer.Option(
            help="How models come and go: explicit, loaded at the start and then when asked; poll, when their files "
            "change; none, loaded at the start."
        ),
    ] = "explicit",
    load_model: Annotated[
        list[str] | None, typer.Option(help="With explicit: a model to load at the start, in place of all; repeatable.")
    ] = None,
    repository_poll_secs: Annotated[
        int | None, typer.Option(help="With poll: how often files are looked at, in seconds; 15 by default.")
    ] = None,
    exit_on_error: Annotated[
        bool,
        typer.Option("--exit-on-error/--no-exit-on-error", help="End where a model cannot be loaded at the start."),
    ] = True,
    address: Address = None,
    http_port: HttpPort = None,
    grpc_port: GrpcPort = None,
    metrics_port: MetricsPort = None,
    access_token: AccessToken = None,
    unprotected: Unprotected = False,
    cors_origins: CorsOrigins = None,
    log_level: LogLevel = None,
    log_format: LogFormat = "text",
) -> None:
    """Serve a model repository, models for Triton's Python backend included, until SIGINT or SIGTERM.

    Further settings come from environment variables, such as PYTRITON_TRITON_CONFIG_CACHE_CONFIG.
    """
    from pytriton.cli.repository import serve_repository as serve_models
    from pytriton.cli.server_options import ServerOptions

    serve_models(
        ServerOptions(
            address=address,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            access_token=access_token,
            unprotected=unprotected,
            cors_origins=cors_origins,
            log_level=log_level,
            log_format=log_format,
            memory_budget=memory_budget,
        ),
        model_repository=repository,
        python_models=python_models,
        python_models_idle=idle,
        model_control_mode=model_control_mode,
        load_model=load_model or None,
        repository_poll_secs=repository_poll_secs,
        # Otherwise Triton would end without naming the model that failed.
        exit_on_error=None if exit_on_error else False,
    )


@app.command()
def examples(workspace: Workspace = None, zip_report: Zip = False) -> None:
    """Run all examples."""
    _report("examples", workspace, zip_report, _add_sub, _add_sub_script)


@app.command("example-add-sub", hidden=True)
def add_sub(workspace: Workspace = None, zip_report: Zip = False) -> None:
    """Serve a model in this process, and call it over HTTP and gRPC."""
    _report("example-add-sub", workspace, zip_report, _add_sub)


@app.command("example-add-sub-script", hidden=True)
def add_sub_script(workspace: Workspace = None, zip_report: Zip = False) -> None:
    """Serve a model with a script in a process of its own, call it, and end it with SIGTERM."""
    _report("example-add-sub-script", workspace, zip_report, _add_sub_script)


def _environment(verbose: bool, _steps: Steps, folder: Path) -> None:
    # The imports take a second, which is too long for `--help`.
    from pytriton.cli.checks.environment import describe_environment

    details = describe_environment(verbose=True)
    (folder / "environment.txt").write_text(details, encoding="utf-8")
    typer.echo(details if verbose else describe_environment(verbose=False))


def _system(steps: Steps, folder: Path) -> None:
    from pytriton.cli.checks.system import check_system

    check_system(steps, folder)


def _add_sub(steps: Steps, folder: Path) -> None:
    from pytriton.cli.checks.examples import example_add_sub

    example_add_sub(steps, folder)


def _add_sub_script(steps: Steps, folder: Path) -> None:
    from pytriton.cli.checks.examples import example_add_sub_script

    example_add_sub_script(steps, folder)


def _report(command: str, workspace: Path | None, zip_report: bool, *parts: Callable[[Steps, Path], None]) -> None:
    """Run the parts one after the other; a failed part does not stop the next one."""
    typer.echo(f"{_BANNER}\n")
    steps = Steps(typer.echo)
    try:
        with Report(command, workspace, zip_report=zip_report) as report:
            for part in parts:
                part(steps, report.folder)
            (report.folder / "steps.txt").write_text(steps.text, encoding="utf-8")
            if not zip_report and workspace is None and steps.failed:
                typer.echo("\nRun it again with --workspace or --zip to see the logs.")
        for path in report.kept:
            typer.echo(f"\nLogs and files are in {path}.")
    except ReportError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("\nInterrupted.", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    if report.kept:
        typer.echo(_BANNER)
    if steps.failed:
        raise typer.Exit(1)


def _end(number: int, _frame: FrameType | None) -> None:
    # An exception lets servers stop and removes folders on the way out.
    raise SystemExit(128 + number)

"""`add`: puts a model into a model repository."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..dropin.contents import Batching, check_model, machine_of, native_files, proxy_address, python_files
from ..dropin.manifest import Manifest
from ..dropin.repository import add_model, check_name, models_at
from ..errors import DropInError
from ..model import ModelSpec, endpoint_path
from ..settings import ProxySettings, PythonProxySettings, cost_settings
from ..system.native import LIBRARY_NAME, library_path
from ..wire import layout
from ..wire.settings import ServingSettings, SettingField, setting_fields
from .app import add_repository, own_version
from .tensors import load_signature, model_of, parse_tensor

_DEFAULT_BATCH = 4
_SERVING = {field.name for field in setting_fields(ServingSettings)}
_NATIVE = {field.name for field in setting_fields(ProxySettings)}
# The options of both proxies, and those of one alone.
_OPTIONS = {
    field.name: field
    for field in (*setting_fields(ProxySettings), *setting_fields(PythonProxySettings))
    if field.about.option
}
# The largest number in Triton's configuration.
_MOST = (1 << 63) - 1
_MOST_ROWS = (1 << 31) - 1
_MOST_DIGITS = 20
_EPILOG = """\
A tensor is NAME:DTYPE:DIMS, such as x:float32:-1,4 or text:str:1, without the batch axis; ':optional' behind it marks
an input that callers may leave out. Dtypes have numpy's names or Triton's.

A model that is there already as it would be written is left alone. One that is not ours or was edited is never touched.
"""


def register(commands: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "add",
        help="put a model into a model repository",
        description="Puts the folder of a model into a model repository, in one step. Any tritonserver that loads the "
        "repository serves the model, as soon as workers attach to its endpoint.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_repository(parser)
    parser.add_argument("--name", required=True, help="name of the model")
    parser.add_argument(
        "--version", type=_whole(1), default=1, metavar="N", help="version of the model (1); others of the model stay"
    )
    parser.add_argument(
        "--input", action="append", type=_argument(parse_tensor), metavar="TENSOR", dest="inputs", help="an input"
    )
    parser.add_argument(
        "--output", action="append", type=_argument(parse_tensor), metavar="TENSOR", dest="outputs", help="an output"
    )
    parser.add_argument(
        "--from",
        dest="signature",
        metavar="MODULE:SIGNATURE",
        help="take inputs and outputs from an attribute of a module; the other options go before what it says",
    )
    parser.add_argument("--flavour", choices=("native", "python"), default="native", help="which proxy (native)")
    parser.add_argument(
        "--endpoint",
        required=True,
        metavar="DIR",
        help="folder for the socket, where server and workers see it; it may be made later. For the Python proxy also "
        "an address such as tcp://*:5555",
    )
    parser.add_argument(
        "--max-batch-size",
        type=_whole(0, _MOST_ROWS),
        metavar="N",
        help=f"rows of the largest batch, 0: no batching ({_DEFAULT_BATCH})",
    )
    parser.add_argument("--max-queue-delay-us", type=_whole(0), default=0, metavar="US", help="wait for fuller batches")
    parser.add_argument("--preferred-batch-size", action="append", type=_whole(1), default=[], metavar="N")
    parser.add_argument(
        "--decoupled", action="store_const", const=True, help="a request may get any number of responses"
    )
    parser.add_argument("--strict", action="store_const", const=True, help="outputs must be exactly as declared")
    for name, field in _OPTIONS.items():
        only = "" if name in _SERVING else "native proxy: " if name in _NATIVE else "Python proxy: "
        _add_setting(parser, field, only)
    parser.add_argument("--replace", action="store_true", help="replace a version that differs and is unedited")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Add the model."""
    check_name(arguments.name)
    model = _model(arguments)
    batching = Batching(max_queue_delay_us=arguments.max_queue_delay_us, preferred_sizes=arguments.preferred_batch_size)
    check_model(model, batching)
    endpoint, files = (_native if arguments.flavour == "native" else _python)(arguments, model, batching)
    manifest = Manifest(
        name=model.name,
        flavour=arguments.flavour,
        endpoints={model.version: endpoint},
        made_by=own_version(),
        protocol=(layout.MAJOR, layout.MINOR),
        machine=machine_of(files[LIBRARY_NAME]) if LIBRARY_NAME in files else "",
    )
    repository: Path = arguments.model_repository
    outcome = add_model(repository, model, manifest, files, may_replace=arguments.replace)
    print(f"{outcome}: {repository / model.name}")
    print(f"workers attach at {endpoint}")
    listening = models_at(repository, endpoint)
    if len(listening) > 1:
        print(
            f"warning: {' and '.join(listening)} listen at {endpoint}: the one that is loaded last takes the place, "
            "and the other one gets no worker. Give each an endpoint of its own",
            file=sys.stderr,
        )
    return 0


def _model(arguments: argparse.Namespace) -> ModelSpec:
    given: dict[str, Any] = {"max_batch_size": _DEFAULT_BATCH}
    if arguments.signature is not None:
        given.update(load_signature(arguments.signature))
    for name in ("inputs", "outputs", "max_batch_size", "decoupled", "strict"):
        value = getattr(arguments, name)
        if value is not None:
            given[name] = tuple(value) if isinstance(value, list) else value
    if arguments.max_batch_size is not None:
        given["batching"] = arguments.max_batch_size > 0
    missing = [name for name in ("inputs", "outputs") if not given.get(name)]
    if missing:
        raise DropInError(
            f"model '{arguments.name}' needs {' and '.join(missing)}: give --input and --output, or --from",
            path=arguments.name,
        )
    return model_of(arguments.name, arguments.version, given)


def _native(arguments: argparse.Namespace, model: ModelSpec, batching: Batching) -> tuple[str, dict[str, bytes]]:
    given = _given(arguments)
    if "://" in arguments.endpoint or not given.keys() <= _NATIVE:
        raise DropInError(
            f"the native proxy listens on a socket in a folder of this machine, got --endpoint {arguments.endpoint}: "
            f"addresses, keys and --link-timeout are for --flavour python",
            path=model.name,
        )
    endpoint = endpoint_path(Path(arguments.endpoint).absolute(), model.name, model.version)
    if model.decoupled and given.get("cache_bytes"):
        raise DropInError(
            "the answers of a decoupled model cannot be kept: leave --response-cache out", path=model.name
        )
    settings = ProxySettings(
        endpoint=endpoint,
        batching=model.batching,
        decoupled=model.decoupled,
        tensors_digest=model.tensors_digest,
        **cost_settings(model),
        **given,
    )
    return str(endpoint), native_files(model, settings, batching, library_path())


def _python(arguments: argparse.Namespace, model: ModelSpec, batching: Batching) -> tuple[str, dict[str, bytes]]:
    refused = [tensor.name for tensor in (*model.inputs, *model.outputs) if tensor.dtype.name == "bfloat16"]
    if refused:
        raise DropInError(
            f"{', '.join(refused)}: Triton's Python backend gives no BF16 tensors to Python; use the native flavour",
            path=model.name,
        )
    if model.cost is not None:
        raise DropInError(
            "the Python proxy does not count what batches cost: leave the cost out of the signature, or use the native "
            "flavour",
            path=model.name,
        )
    if arguments.cache_bytes:
        raise DropInError(
            "the Python proxy keeps no answers: leave --response-cache out, or use the native flavour", path=model.name
        )
    if arguments.stream_backlog_bytes is not None or arguments.stream_stall_timeout_s is not None:
        raise DropInError(
            "the Python proxy does not see how fast the callers of streams read: leave --stream-backlog and "
            "--stream-stall-timeout out, or use the native flavour",
            path=model.name,
        )
    has_keys = arguments.secret_key_file is not None
    if has_keys != (arguments.workers_keys_dir is not None):
        raise DropInError(
            "--curve-secret-key and --curve-workers go together: the proxy's own keys, and those of whom it lets in",
            path=model.name,
        )
    address = proxy_address(arguments.endpoint, model, has_keys=has_keys, insecure=bool(arguments.insecure))
    return address, python_files(model, PythonProxySettings(address=address, **_given(arguments)), batching)


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given."""
    values = {name: getattr(arguments, name) for name in _OPTIONS}
    return {
        name: value.absolute() if isinstance(value, Path) else value
        for name, value in values.items()
        if value is not None
    }


def _add_setting(parser: argparse.ArgumentParser, field: SettingField, prefix: str) -> None:
    """Add the option of a setting; one that is not given is `None`."""
    about = field.about
    default = about.unset if field.optional else f"{field.default:g}" if field.type is float else str(field.default)
    if field.type is bool:
        parser.add_argument(
            about.option, dest=field.name, action="store_const", const=True, help=f"{prefix}{about.meaning}"
        )
        return
    parse, metavar = {
        int: (_whole(int(about.minimum), int(about.maximum)), "BYTES" if field.name.endswith("_bytes") else "N"),
        float: (_argument(lambda text: _seconds(text, about.minimum, about.maximum)), "S"),
        Path: (Path, "DIR" if field.name.endswith("_dir") else "FILE"),
    }[field.type]
    help_text = f"{prefix}{about.meaning} ({default})"
    parser.add_argument(about.option, dest=field.name, type=parse, metavar=metavar, help=help_text)


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a type for argparse whose errors are shown as they are."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _whole(least: int, most: int = _MOST) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not text.isdecimal() or not least <= int(text[:_MOST_DIGITS]) <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got {text!r}")
        return int(text)

    return convert


def _seconds(text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise ValueError(f"expected a number of seconds from {least:g} to {most:g}, got {text!r}")
    return value

"""`check`: do the models of ours in a repository fit?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..dropin.check import Level, check_model, find_server
from ..dropin.repository import check_name, find_models, inspect_folder
from ..errors import DropInError
from .app import add_repository


def register(commands: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "check",
        help="check models of ours in a model repository",
        description="Checks whether models fit this installation, a tritonserver and this machine, whether they were "
        "edited, and whether their endpoints can be used. Exit code 1 if anything is a problem.",
    )
    add_repository(parser)
    parser.add_argument("--name", help="name of the model; without it, every model of ours")
    parser.add_argument(
        "--tritonserver", type=Path, metavar="DIR", help="the server's folder, laid out as /opt/tritonserver"
    )
    parser.add_argument("--server-url", metavar="URL", help="HTTP address of a running server to ask")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check the models."""
    repository: Path = arguments.model_repository
    models = find_models(repository)
    if arguments.name is not None:
        check_name(arguments.name)
        model = inspect_folder(repository / arguments.name)
        if model is None:
            raise DropInError(f"there is no model '{arguments.name}' of ours in {repository}", path=str(repository))
        models = [model]
    server = arguments.tritonserver or find_server()
    found = {model.path.name: check_model(model, server=server, url=arguments.server_url) for model in models}
    if arguments.json:
        print(
            json.dumps(
                {
                    name: [{"level": finding.level.value, "text": finding.text} for finding in findings]
                    for name, findings in found.items()
                },
                indent=1,
            )
        )
    else:
        if not found:
            print(f"no models of pytriton-proxy-backend in {repository}")
        for name, findings in found.items():
            print(f"{name}:")
            for finding in findings:
                print(f"  {finding.level.value}: {finding.text}")
    return int(any(finding.level is Level.PROBLEM for findings in found.values() for finding in findings))

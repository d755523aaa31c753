"""`list`: the models of ours in a model repository."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..dropin.repository import DropInModel, find_models
from .app import add_repository


def register(commands: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "list",
        help="list the models of ours in a model repository",
        description="Lists the models in a model repository that this command has put there.",
    )
    add_repository(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """List the models."""
    models = find_models(arguments.model_repository)
    if arguments.json:
        print(json.dumps([fields for model in models for fields in _fields(model)], indent=1))
        return 0
    if not models:
        print(f"no models of pytriton-proxy-backend in {arguments.model_repository}")
    for model in models:
        state = "edited: " + "; ".join(model.edits) if model.edits else "unedited"
        for fields in _fields(model):
            print(f"{fields['name']}  version {fields['version']}  {fields['flavour']}  {fields['endpoint']}  {state}")
    return 0


def _fields(model: DropInModel) -> list[dict[str, object]]:
    """Return the fields of each version; a single row without any if the manifest cannot be read."""
    manifest = model.manifest
    endpoints = {None: None} if manifest is None else manifest.endpoints
    return [
        {
            "name": model.path.name,
            "version": version,
            "flavour": manifest.flavour if manifest else None,
            "endpoint": endpoint,
            "made_by": manifest.made_by if manifest else None,
            "edits": list(model.edits),
        }
        for version, endpoint in sorted(endpoints.items())
    ]

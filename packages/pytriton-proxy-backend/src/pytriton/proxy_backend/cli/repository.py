"""Options that the commands about a model repository share."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_repository(parser: argparse.ArgumentParser) -> None:
    """Add `--model-repository`."""
    parser.add_argument(
        "--model-repository", required=True, type=Path, metavar="REPO", help="the model repository of tritonserver"
    )

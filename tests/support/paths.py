"""Where things lie in this checkout, so that a test module can move without a change."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent


def load_program(path: Path) -> ModuleType:
    """Import a program that is not installed, such as `tools/dev.py`; once more with each call."""
    spec = importlib.util.spec_from_file_location(f"program_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module

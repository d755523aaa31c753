"""Where things lie in this checkout, so that a test module can move without a change."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent

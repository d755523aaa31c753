"""What holds for all tests, those of the distributions included."""

import gc

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exclude what pytest has made of thousands of tests from garbage collections, which took 0.3 s each with it."""
    gc.collect()
    gc.freeze()

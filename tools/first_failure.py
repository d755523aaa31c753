"""`conftest.py` of the tests that `mutants.py` runs: a mutant is noticed as soon as a test fails.

The process ends there and then. What the test would still have let go, such as a callable that waits for it, keeps
fixtures waiting for minutes.
"""

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """End the process. mutmut names a mutant here, and none while it tries the tests without one."""
    if report.failed and "__mutmut_" in os.environ.get("MUTANT_UNDER_TEST", ""):
        os._exit(pytest.ExitCode.TESTS_FAILED)

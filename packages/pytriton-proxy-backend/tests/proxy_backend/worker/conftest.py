import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_record_kept() -> Iterator[None]:
    """pytest keeps log records with their tracebacks, and these keep the inputs, which would not go back then."""
    logger = logging.getLogger("pytriton.proxy_backend")
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(logging.NOTSET)

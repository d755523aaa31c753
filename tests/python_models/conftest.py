"""The two servers whose answers are compared, which are started once for each module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.python_models.pair import Pair, serving_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both servers, without models."""
    with serving_pair(tmp_path_factory.mktemp) as pair:
        yield pair

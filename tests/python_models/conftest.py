"""The two servers whose answers are compared, which are started once for each module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.python_backend import why_no_python_backend
from support.python_models.pair import Pair, Side
from support.serving import running, short_home


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both servers, without models."""
    if why := why_no_python_backend():
        pytest.skip(why)
    sides = [Side(who, tmp_path_factory.mktemp(who)) for who in ("stub", "workers")]
    with short_home(), running(*(side.triton for side in sides)), sides[0].clients(), sides[1].clients():
        yield Pair(*sides)

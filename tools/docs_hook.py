"""What mkdocs does to a page before it becomes HTML."""

from __future__ import annotations

import re
from typing import Any

# Why a block is not run is for tests/project/test_docs.py; the extension that draws blocks takes no option that it
# does not know.
_NO_RUN = re.compile(r'^(\s*```.*?) norun="[^"]*"', re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Leave out of the fences of blocks what is not for readers."""
    return _NO_RUN.sub(r"\1", markdown)

"""What mkdocs does to pages: what is not for readers goes, and what draws diagrams comes from the site itself."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

# Why a block is not run is for tests/project/test_docs.py; the extension that draws blocks takes no option that it
# does not know.
_NO_RUN = re.compile(r'^(\s*```.*?) norun="[^"]*"', re.MULTILINE)

_MERMAID = "assets/mermaid"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Leave out of the fences of blocks what is not for readers."""
    return _NO_RUN.sub(r"\1", markdown)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add Mermaid as NiceGUI has it: the theme would fetch it from elsewhere, where nobody has loaded it."""
    found = importlib.util.find_spec("nicegui")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError("Diagrams are drawn by the Mermaid of NiceGUI, which is not installed: pip install nicegui")
    folder = Path(found.submodule_search_locations[0], "elements", "mermaid", "dist")
    for path in sorted(folder.glob("*.js")):
        files.append(File.generated(config, f"{_MERMAID}/{path.name}", abs_src_path=str(path)))
    return files


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Load Mermaid on pages with diagrams, before the theme looks for it."""
    if 'class="mermaid"' not in output:
        return output
    url = get_relative_url(f"{_MERMAID}/index.js", page.url)
    script = f'<script type="module">import {{ mermaid }} from "./{url}"; window.mermaid = mermaid;</script>'
    return output.replace("</head>", f"{script}</head>", 1)

"""What mkdocs does to pages: what is not for readers goes, and what draws diagrams comes from the site itself.

It adds the reference, `reference/*.md`, which tools/reference.py makes from the docstrings.
Beside the pages it writes `llms.txt`, which says what there is, each page as Markdown, and all of them in one file, for
assistants and other programs that read.
"""

from __future__ import annotations

import importlib.util
import re
import runpy
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


# What the theme wants and plain Markdown has not: attributes of images, buttons and paragraphs, and its own HTML.
_FOR_THE_THEME = re.compile(r"^---\n.*?\n---\n|\{ [.:#][^}\n]*\}|^</?div[^>\n]*>\n", re.DOTALL | re.MULTILINE)
_LIST = "llms.txt"
_ALL = "llms-full.txt"
_written: dict[str, tuple[str, str]] = {}


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Leave out of the fences of blocks what is not for readers."""
    text = _NO_RUN.sub(r"\1", markdown)
    _written[page.file.src_uri] = str(page.title), _FOR_THE_THEME.sub("", text).strip() + "\n"
    return text


def on_post_build(config: MkDocsConfig) -> None:
    """Write the pages as Markdown."""
    site = Path(config.site_dir)
    pages = [page for page in _in_order(config.nav) if page in _written]
    for page in pages:
        (site / page).parent.mkdir(parents=True, exist_ok=True)
        (site / page).write_text(_written[page][1], encoding="utf-8")
    lines = [
        f"# {config.site_name}",
        "",
        f"> {config.site_description}",
        "",
        f"All pages in one file: [{_ALL}]({_ALL})",
        "",
    ]
    lines += [f"* [{_written[page][0]}]({page})" for page in pages]
    (site / _LIST).write_text("\n".join(lines) + "\n", encoding="utf-8")
    texts = [f"<!-- {page} -->\n\n{_written[page][1]}" for page in pages]
    (site / _ALL).write_text("\n".join(texts), encoding="utf-8")


def _in_order(menu: Any) -> list[str]:
    """Return the pages of a menu as they come in it."""
    if isinstance(menu, str):
        return [menu]
    entries = menu.values() if isinstance(menu, dict) else menu
    return [page for entry in entries for page in _in_order(entry)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference, and the Mermaid that NiceGUI ships: the theme alone would load Mermaid from the network."""
    reference = runpy.run_path(str(Path(__file__).with_name("reference.py")))
    for name, text in reference["pages"]().items():
        files.append(File.generated(config, f"reference/{name}", content=text))
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

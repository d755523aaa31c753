"""The site that mkdocs builds of docs/, looked at with a real Chromium that reaches no other host."""

from __future__ import annotations

import functools
import json
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from support.chromium import browsing, hosts
from support.paths import ROOT
from support.waiting import PATIENCE_S, eventually

for needed in ("mkdocs", "material", "nicegui"):
    pytest.importorskip(needed)

# What a page loads by itself; links are followed by people.
LOADED = re.compile(
    r"<(?:script|link|img|source|iframe|object)\b[^>]*\b(?:src|href|data)=[\"']?((?:https?:)?//[^\"'\s>]+)"
)


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.slow(seconds=30)
def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    found = {page.relative_to(site).as_posix(): LOADED.findall(page.read_text(encoding="utf-8")) for page in pages}
    assert {page: urls for page, urls in found.items() if urls} == {}
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?(https?:)?//|@import", style.read_text(encoding="utf-8")), style
    for drawing in site.rglob("*.svg"):
        assert not re.search(r"(href|src)=[\"'](https?:)?//|url\(\s*[\"']?(https?:)?//", drawing.read_text()), drawing


@pytest.mark.slow(seconds=30)
def test_assistants_find_the_pages_as_markdown(site: Path) -> None:
    listed = re.findall(r"\]\(([\w/.-]+\.md)\)", (site / "llms.txt").read_text(encoding="utf-8"))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    generated = runpy.run_path(str(ROOT / "tools" / "reference.py"))["pages"]()
    assert sorted(listed) == sorted(pages | {f"reference/{name}" for name in generated})
    whole = (site / "llms-full.txt").read_text(encoding="utf-8")
    for page in listed:
        text = (site / page).read_text(encoding="utf-8")
        assert re.match(r"(<!--.*?-->\s*)?# ", text, re.DOTALL), page
        assert text in whole
        assert "norun=" not in text
        assert "{ ." not in text
    quickstart = (site / "quickstart.md").read_text(encoding="utf-8")
    assert quickstart == re.sub(r' norun="[^"]*"', "", (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8"))


WORDS = {
    "conda": "environments/",
    "curl": "languages/",
    "docker": "environments/",
    "embedding": "recipes/sentence_embeddings/",
    "gpu": "environments/",
    "javascript": "languages/",
    "llm": "recipes/token_streaming/",
    "node": "languages/",
    "whisper": "recipes/speech/",
}


@pytest.mark.slow(seconds=30)
def test_the_search_knows_the_words_that_people_look_for(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    for word, page in WORDS.items():
        found = {entry["location"].partition("#")[0] for entry in index if word in f"{entry}".lower()}
        assert page in found, word


@pytest.mark.slow(seconds=30)
def test_diagrams_are_drawn_without_a_network(served: str) -> None:
    drawn = "return [...document.querySelectorAll('div.mermaid')].filter(each => each.clientHeight > 50).length"
    wanted = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").count("```mermaid")
    with browsing() as browser:
        browser.open(f"http://{served}/architecture/")
        eventually(lambda: browser.driver.execute_script(drawn) == wanted)
        assert browser.errors() == []
        assert hosts(browser.requests()) == {served}

"""The AI SDK and OpenAI's client, both for Node, against the endpoints and a model that answers by rule."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("jinja2")
pytest.importorskip("openai")

from pytriton.triton import Triton
from support.language.clerk import clerk
from support.language.endpoints import Served
from support.serving import local_config, running
from support.waiting import PATIENCE_S

PROGRAM = Path(__file__).with_name("node_clients.mjs")
PACKAGES = ("ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", "openai@6.49.0", "zod@4.6.7")
OSLO = {"city": "Oslo", "degrees": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed here")
    made = tmp_path_factory.mktemp("node")
    # Nothing is tried again, so that a machine without a registry is told at once.
    options = ["--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=0", "--fetch-timeout=60000"]
    command = [npm, "install", *options, *PACKAGES]
    try:
        done = subprocess.run(command, cwd=made, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("no registry of npm answers here")
    if done.returncode:
        assert re.search("network|FetchError|ECONN|ENOTFOUND|EAI_AGAIN|ETIMEDOUT", done.stderr), done.stderr
        pytest.skip("no registry of npm answers here")
    shutil.copy(PROGRAM, made)
    return made


@pytest.fixture(scope="module")
def found(folder: Path) -> Any:
    triton = Triton(config=local_config())
    triton.bind(clerk)
    with running(triton), Served(triton) as served:
        command = ["node", PROGRAM.name, f"{served.url}/v1"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_ai_sdk(found: Any) -> None:
    assert found["generateText"] == ["It says How is Oslo?.", "stop", 5]
    assert found["tools"] == ["It says 4 degrees in Oslo.", {"city": "Oslo"}, 2]
    assert found["generateObject"] == OSLO
    assert found["error"][0] == 404
    assert "nobody" in found["error"][1]


def test_ai_sdk_streams(found: Any) -> None:
    assert found["streamText"] == ["It says How is Oslo?.", True, 5]
    assert found["streamTools"] == ["It says 4 degrees in Oslo.", {"city": "Oslo"}]
    assert found["streamObject"] == [OSLO, True]


def test_openai(found: Any) -> None:
    assert found["openai"] == [["weather", '{"city": "Oslo"}']]
    assert found["openaiStream"] == found["openaiResponses"] == "It says How is Oslo?."

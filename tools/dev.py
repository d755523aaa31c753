"""The one command of this repository: `python3 tools/dev.py test`, `demo`, `bench`, `lint`, `build`, ...

It needs Python 3.10 or newer and pip, nothing else. It puts hatch into `.tools/` and hands over to hatch, which makes
the environments that `pyproject.toml` describes, with the releases that `tools/locks/` names. Each Python has its own,
and they are made anew when the locks or the metadata of a distribution change. Delete `.tools/` to start afresh;
nothing else is written outside the checkout but the download caches of pip, uv and the build hook of pytriton-server.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import lowest as lowest_releases  # noqa: E402
from tools import newer_pythons  # noqa: E402 - found by the line above, also where a test loads this file

TOOLS = ROOT / ".tools"
LOCKS = ROOT / "tools" / "locks"
REPORTS = TOOLS / "reports"
OVERRIDES = LOCKS / "overrides.txt"
HATCH_REQUIREMENT = "hatch>=1.18,<2"
MINIMUM_PYTHON = (3, 10)
# What each lock is made of: a group of pyproject.toml with what our distributions need, or without; a requirement more.
LOCKED_GROUPS = {
    "checks": ("checks", True, ""),
    "numpy1": ("checks", True, "numpy<2"),
    "deploy": ("deploy", False, ""),
    "hatch": ("", False, HATCH_REQUIREMENT),
}
MATRIX_PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.15")
MATRIX_NUMPYS = ("1", "2")
# What `test --quick` runs, and `test --ci` on the oldest and the newest Python, too: in a minute or two, with some real
# servers among it.
QUICK_TESTS = (
    "-m",
    "not slow and not ci and not soak",
    "packages/pytriton-decorators/tests",
    "packages/pytriton-proxy-backend/tests",
    "packages/pytriton-server/tests/server/models",
    "packages/pytriton-server/tests/server/settings",
    "packages/pytriton-client/tests/client/core",
    "packages/pytriton-client/tests/client/http",
    "tests/inprocess/test_tensor.py",
    "tests/serving/test_inference.py",
)
# Besides, in `test --quick`: each way to serve is held against the reference of the protocol, with few batches.
REFERENCE_TESTS = "tests/serving/test_reference.py"
FEW_BATCHES = {"PYTRITON_REFERENCE_BATCHES": "6"}
# What `test` leaves to `test --ci` of the tests with a server.
NO_SLOW_TESTS = ("-m", "not slow and not ci and not soak")
# Percent of lines and branches that the quick tests reach, rounded down; it may only rise.
COVERAGE_FLOOR = 73
# Besides, with the older numpy: what Triton's own Python backend was built for, which ours is compared with.
OLDER_NUMPY_TESTS = (
    "tests/serving/test_isolation.py::test_a_caller_that_reaches_for_the_texts_of_others[python-proxy]",
    "tests/serving/test_reference.py::test_random_batches[python-proxy]",
    "tests/python_models/test_conformance.py",
    "tests/python_models/test_conformance_kinds.py",
    "tests/python_models/test_conformance_life.py",
    "tests/python_models/test_conformance_utils.py",
)
# CI tries so many failed tests of a step once more, one after the other. A machine that others share can delay a test
# in ways that nobody has foreseen; who fails twice, or with many others, does not fail for that.
MOST_TRIED_AGAIN = 3
REPORT = "--junitxml="
TRY_AGAIN = ("--last-failed", "--last-failed-no-failures=none", "-n", "0")
# A process of pytest takes seconds to start, with two processors for four of them half a minute. So many tests in the
# files that are asked for are worth one: those of tests/ start a server, those of a distribution take milliseconds.
TESTS_PER_PROCESS = {"tests": 8, "packages": 100}
MOST_PROCESSES = 4
# Where Pythons are that this machine lacks.
NEWER_PYTHONS = TOOLS / newer_pythons.SUITE
LONE_DISTS = ("client", "decorators", "proxy-backend")
# Folders laid out as /opt/tritonserver, as in PATH: the tests that start a server run once more for each.
TEST_SERVERS_VARIABLE = "PYTRITON_TEST_TRITONSERVERS"
SERVER_VARIABLE = "PYTRITON_TRITONSERVER_DIR"

# Options of pip that decide where packages come from, and what uv calls them. hatch installs with uv, which reads no
# pip configuration, so a machine that reaches its packages through a mirror would otherwise be left without them.
PIP_TO_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}

# Runs hatch from its folder without putting that folder on PYTHONPATH, where every environment would inherit it.
RUN_HATCH = "import sys; sys.path.insert(0, sys.argv.pop(1)); sys.argv[0] = 'hatch'; from hatch.cli import main; main()"


class DevError(Exception):
    """Something that the person at the terminal has to put right; its text says what."""


# --- hatch ---------------------------------------------------------------------------------------------------------


def home_of_python(*, locked: bool) -> Path:
    """Return the folder of this Python in `.tools/`, with hatch in it, where its environments will be.

    Args:
        locked: Whether the environments are to have what the locks name. Those that are not are made anew each time.

    Raises:
        DevError: If pip is missing or the installation of hatch fails.
    """
    # Some dependencies of hatch are compiled, and hatch would go on with an environment of any other Python.
    version = f"py{sys.version_info.major}.{sys.version_info.minor}{sys.abiflags}"
    home = TOOLS / (version if locked else f"newest-{version}")
    # An editable installation has the commands and requirements of the day on which it was made.
    metadata = sorted(ROOT.glob("packages/*/pyproject.toml"))
    locks = "".join(path.read_text() for path in [*sorted(LOCKS.iterdir()), *metadata])
    if locked and home.is_dir() and (home / "locks").read_text() == locks:
        return home
    say(f"Installing hatch into {home.relative_to(ROOT)} (once)")
    TOOLS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TOOLS) as scratch:
        fresh = Path(scratch) / "home"
        command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        command += ["--target", str(fresh / "hatch")]
        command += ["--no-deps", "-r", str(LOCKS / "hatch.txt")] if locked else [HATCH_REQUIREMENT]
        done = subprocess.run(command, check=False)
        if done.returncode != 0:
            raise DevError(
                f"Could not install {HATCH_REQUIREMENT} with {sys.executable} -m pip (exit code {done.returncode}). "
                "Check that this interpreter has pip and that pip reaches a package index."
            )
        (fresh / "locks").write_text(locks)
        try:
            if home.is_dir():
                home.rename(Path(scratch) / "old")
            fresh.rename(home)
        except OSError:
            # Somebody else's run finished first; theirs is as good as ours.
            if not home.is_dir():
                raise
    return home


def pip_settings() -> dict[str, str]:
    """Translate the places that pip takes packages from into uv's variables; explicit uv settings win."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    found: dict[str, str] = {}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        option = key.rpartition(".")[2].replace("_", "-").lower()
        if option in PIP_TO_UV:
            # pip prints values as Python literals, and reads several of them apart at white space.
            found[PIP_TO_UV[option]] = value.strip("'\"").replace("\\n", " ").strip()
    if "UV_FIND_LINKS" in found:
        found["UV_FIND_LINKS"] = ",".join(found["UV_FIND_LINKS"].split())
    if "UV_INDEX" in found:
        # pip takes the best version of all indexes, and passes over a file:// index that lacks a package.
        urls = [url for url in found["UV_INDEX"].split() if not url.startswith("file:")]
        found["UV_INDEX"] = " ".join(urls)
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {name: value for name, value in found.items() if value and name not in os.environ}


def lock_settings(arguments: Sequence[str]) -> dict[str, str]:
    """Have uv and pip install what a lock names; which one depends on the environment that hatch is to run in."""
    if any(argument.startswith("dynamo:") for argument in arguments):
        return {}  # Dynamo wants other releases than all else
    name = "deploy" if "deploy:check" in arguments else "numpy1" if "+numpy=1" in arguments else "checks"
    lock = LOCKS / f"{name}.txt"
    # Both take several files, parted by spaces, and run in other folders, too: a URI has no spaces.
    locked = {f"{tool}_{kind}": lock.as_uri() for tool in ("UV", "PIP") for kind in ("CONSTRAINT", "BUILD_CONSTRAINT")}
    return {**locked, "UV_OVERRIDE": OVERRIDES.as_uri()}


def hatch_environment(home: Path) -> dict[str, str]:
    """Make the environment variables for hatch: everything it keeps lies under `.tools/`."""
    config = TOOLS / "hatch.toml"
    if not config.exists():
        config.touch()
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        **pip_settings(),
        "PYTHONPYCACHEPREFIX": str(byte_code_folder()),
        # Of the native libraries, wheels that tests build included: only what changed is compiled.
        "PYTRITON_BUILD_OBJECTS": str(TOOLS / "objects"),
        "HATCH_CONFIG": str(config),
        "HATCH_DATA_DIR": str(home / "data"),
        "HATCH_CACHE_DIR": str(TOOLS / "cache"),
        "HATCH_PYTHON": sys.executable,
        # Under --target the executables of packages are in bin/, where hatch does not look for uv.
        "HATCH_ENV_TYPE_VIRTUAL_UV_PATH": str(home / "hatch" / "bin" / "uv"),
    }


def byte_code_folder() -> Path:
    """Make the folder for byte code, which hundreds of short programs of the tests would have to compile otherwise."""
    folder = TOOLS / "pycache"
    # None of temporary files: a module that is written twice within a second would be taken for the first one. A file
    # where Python wants a folder has it pass over them.
    temporary = folder / Path(tempfile.gettempdir()).relative_to("/")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    temporary.touch()
    return folder


class Runner:
    """Runs commands in hatch environments and keeps a record of each step for the closing summary."""

    def __init__(self, *, locked: bool = True) -> None:
        """Install hatch if need be and settle its environment variables."""
        self.locked = locked
        self.home = home_of_python(locked=locked)
        self.environment = hatch_environment(self.home)
        self.steps: list[tuple[str, int, float]] = []
        self.unstable: list[str] = []

    def hatch(self, *arguments: str, extra: Mapping[str, str] | None = None, output: IO[str] | None = None) -> int:
        """Run hatch and return its exit code; what it prints goes into `output`, if there is one."""
        command = [sys.executable, "-c", RUN_HATCH, str(self.home / "hatch"), *arguments]
        locks = lock_settings(arguments) if self.locked else {}
        environment = {**self.environment, **locks, **(extra or {})}
        error = None if output is None else subprocess.STDOUT
        return subprocess.run(command, cwd=ROOT, env=environment, check=False, stdout=output, stderr=error).returncode

    def step(self, title: str, *arguments: str, extra: Mapping[str, str] | None = None) -> int:
        """Run hatch as one named step, with a heading and its time in the summary."""
        say(title)
        began = time.monotonic()
        code = self.hatch(*arguments, extra=extra)
        written = next((Path(each.removeprefix(REPORT)) for each in arguments if each.startswith(REPORT)), None)
        if code == 1 and written is not None:
            code = self.try_again(title, written, arguments, extra)
        self.steps.append((title, code, time.monotonic() - began))
        return code

    def program(self, title: str, command: Sequence[str], extra: Mapping[str, str]) -> None:
        """Run another program as one named step."""
        say(title)
        began = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, **extra}, check=False).returncode
        self.steps.append((title, code, time.monotonic() - began))

    @contextlib.contextmanager
    def beside(self, title: str, *arguments: str) -> Iterator[None]:
        """Run hatch as one named step while those within this block run, and print then what it has said."""
        began = time.monotonic()
        ended = began

        def run(output: IO[str]) -> int:
            nonlocal ended
            code = self.hatch(*arguments, output=output)
            ended = time.monotonic()
            return code

        with tempfile.TemporaryFile("w+", dir=TOOLS) as said, ThreadPoolExecutor(1) as pool:
            running = pool.submit(run, said)
            yield
            code = running.result()
            say(title)
            said.seek(0)
            print(said.read(), end="", flush=True)
        self.steps.append((title, code, ended - began))

    def try_again(self, title: str, written: Path, arguments: Sequence[str], extra: Mapping[str, str] | None) -> int:
        """Run the failed tests of a step once more, if they are few; those that pass then are told in the summary.

        Args:
            title: Name of the step.
            written: Report of its first run.
            arguments: What hatch ran.
            extra: Environment variables of the step.

        Returns:
            The exit code of the step.
        """
        failed = failures_of(written)
        if not 1 <= len(failed) <= MOST_TRIED_AGAIN:
            return 1
        say(f"{title}: what failed, once more")
        others = [each for each in arguments if not each.startswith(REPORT)]
        code = self.hatch(*others, f"{REPORT}{written.with_suffix('')}-again.xml", *TRY_AGAIN, extra=extra)
        if code == 0:
            self.unstable += [f"{title}: {test}" for test in failed]
        return code

    def run(self, *command: str) -> int:
        """Run a command in the default environment."""
        return self.hatch("run", "--", *command)

    def finish(self) -> int:
        """Print the summary and return the exit code of the whole."""
        say("Summary")
        for title, code, seconds in self.steps:
            print(f"{'ok' if code == 0 else f'FAILED ({code})':>12}  {seconds:6.1f} s  {title}")
        for test in self.unstable:
            print(f"{'unstable':>12}            {test} failed at first and then passed: find out why")
        return 1 if any(code != 0 for _, code, _ in self.steps) else 0


# --- commands ------------------------------------------------------------------------------------------------------


def prepare(runner: Runner) -> int:
    """Bring what the build hooks put into the source tree up to date; nothing to do is nearly free."""
    for dist in ("proxy-backend", "server"):
        code = runner.run("python", f"packages/pytriton-{dist}/hatch_build.py")
        if code != 0:
            return code
    return 0


def test(runner: Runner, arguments: Sequence[str]) -> int:
    """Run the checks; with --quick those of a minute, with --ci also long ones; with others, only pytest with these."""
    servers = test_servers()
    code = prepare(runner)
    if code != 0:
        return code
    if arguments and arguments[0] == "--quick":
        check_sources(runner, types=False)
        with runner.beside("Types", "run", "types"):
            # Each process takes 11 s to collect them, and one processor has the types to check.
            count = str(min(os.cpu_count() or 1, MOST_PROCESSES))
            tests = ("-n", count, *QUICK_TESTS, REFERENCE_TESTS, *arguments[1:])
            runner.step("Quick tests", "run", "test", *tests, extra=FEW_BATCHES)
        code = runner.finish()
        say_skipped(
            [
                "most tests with a server, of the clients, of processes and of the project",
                "the distributions without each other, other Pythons, other servers",
            ]
        )
        return code
    long = list(arguments) == ["--ci"]
    if arguments and not long:
        arguments = [*processes(arguments), *arguments]
        codes = [runner.run("pytest", *arguments)]
        for server in servers:
            say(f"The same with {server}")
            codes.append(runner.hatch("run", "--", "pytest", *arguments, extra={SERVER_VARIABLE: str(server)}))
        return next((code for code in codes if code != 0), 0)
    return test_in_ci(runner, servers) if long else test_here(runner, servers)


def test_here(runner: Runner, servers: Sequence[Path]) -> int:
    """Run what tells most in some minutes: all but the slow tests with a server, with one Python."""
    check_sources(runner, types=False)
    with runner.beside("Types", "run", "types"):
        run_tests(runner, servers, (), NO_SLOW_TESTS, reports=False)
    code = runner.finish()
    say_skipped(
        [
            "other Pythons and numpy 1: `test --ci`, as CI does, or `matrix`",
            "tests with a server that take 10 s and more (wheels, Ray Serve, the console, mixed traffic): `test --ci`",
            "C++ on aarch64, images and manifests: `test --ci`",
        ]
    )
    return code


def test_in_ci(runner: Runner, servers: Sequence[Path]) -> int:
    """Run everything but what takes minutes for one test."""
    there, newer, skipped = matrix_pythons()
    if newer or not there:  # otherwise they are checked on the oldest and the newest Python, and not on a third
        check_sources(runner)
    check_deploy(runner)
    shutil.rmtree(REPORTS, ignore_errors=True)
    selection = ("-m", "not soak")
    run_tests(runner, servers, selection, selection, reports=True)
    skipped += quick_matrix(runner, there, newer, reports=True)
    runner.step("Skipped tests", "run", "--", "python", "tools/skips.py", str(REPORTS))
    code = runner.finish()
    say_skipped(skipped)
    return code


def run_tests(
    runner: Runner, servers: Sequence[Path], alone: Sequence[str], others: Sequence[str], *, reports: bool
) -> None:
    """Run the tests of each light distribution by itself, and all others with each server.

    Args:
        runner: What runs them.
        servers: Further servers.
        alone: Options for the light distributions.
        others: Options for all others.
        reports: Whether pytest writes what it ran.
    """
    for dist in LONE_DISTS:
        more = (*alone, *report(f"alone-{dist}", wanted=reports))
        runner.step(f"pytriton-{dist} with no sibling", "run", f"+dist={dist}", "alone:test", *more)
    # Those of the lone distributions have run by now; the matrix of CI runs them with their siblings.
    tests = (*others, "packages/pytriton-server/tests", "tests")
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    runner.step("All other tests", "run", "test", *report(name, wanted=reports), *tests)
    for server in servers:
        more = (*report(f"server-{server.name}", wanted=reports), *tests)
        runner.step(f"Tests with {server}", "run", "test", *more, extra={SERVER_VARIABLE: str(server)})


def processes(arguments: Sequence[str]) -> tuple[str, ...]:
    """Choose the number of processes for the files that are named; everything else is left to pyproject.toml."""
    named = [ROOT / name.partition("::")[0] for name in arguments if not name.startswith("-")]
    files = [path for path in named if path.suffix == ".py" and path.is_file()]
    if any(path.is_dir() for path in named) or not files or "--pdb" in arguments:
        return ()
    few = "-k" in arguments or any("::" in name for name in arguments)
    wanted = 0.0
    for path in () if few else files:
        count = len(re.findall(r"^\s*(?:async )?def test_", path.read_text(encoding="utf-8"), re.MULTILINE))
        wanted += count / TESTS_PER_PROCESS["packages" if path.is_relative_to(ROOT / "packages") else "tests"]
    # One process beside the one that hands out the tests is slower than that alone.
    return ("-n", str(min(round(wanted), MOST_PROCESSES) if wanted >= 1.5 else 0))


def report(name: str, *, wanted: bool) -> tuple[str, ...]:
    """Have pytest write what it ran, for tools/skips.py."""
    return (f"{REPORT}{REPORTS / name}.xml",) if wanted else ()


def failures_of(written: Path) -> list[str]:
    """Return the tests that failed, by a report that pytest has written."""
    cases = ET.parse(written).iter("testcase")
    return [
        f"{case.get('classname')}.{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]


def quick_matrix(runner: Runner, there: Mapping[str, Path], newer: Sequence[str], *, reports: bool) -> list[str]:
    """Run style, types and the quick tests on the oldest and the newest Python; return what is skipped.

    Args:
        runner: What runs them.
        there: Interpreters of this machine, by version.
        newer: Versions of which a root has interpreters.
        reports: Whether pytest writes what it ran.
    """
    skipped: list[str] = []
    if there:
        # The oldest with the older numpy: each generation once.
        oldest, *_, newest = [*there, *there]
        pairs = [(oldest, "1", OLDER_NUMPY_TESTS)] + ([] if newer else [(newest, "2", ())])
        for version, numpy, more in pairs:
            tests = (*report(f"python{version}-numpy{numpy}", wanted=reports), *QUICK_TESTS, *more)
            skipped += run_on(runner, version, there[version], numpy, tests, title=", quick tests", sources=True)
    if newer:
        # Types are not checked there, where packages are missing.
        matrix_in_root(runner, newer, ["--quick"])
    return skipped


def matrix(runner: Runner, arguments: Sequence[str]) -> int:
    """Run the tests on every Python that can be had, or on those named by --python, with each generation of numpy."""
    parser = argparse.ArgumentParser(prog="python3 tools/dev.py matrix", allow_abbrev=False)
    parser.add_argument("--python", action="append", choices=MATRIX_PYTHONS, help="only this version; can be repeated")
    parser.add_argument("--quick", action="store_true", help="the quick tests, with numpy 2")
    options, tests = parser.parse_known_args(arguments)
    there, newer, skipped = matrix_pythons(options.python)
    for version, interpreter in there.items():
        if options.quick:
            chosen = (*report(f"python{version}-numpy2", wanted=True), *QUICK_TESTS, *tests)
            skipped += run_on(runner, version, interpreter, "2", chosen, title=", quick tests")
            continue
        for numpy in MATRIX_NUMPYS:
            skipped += run_on(runner, version, interpreter, numpy, tests)
    if newer:
        # The root's compiler makes libraries that this machine cannot load: it has to find them made.
        code = prepare(runner)
        if code != 0:
            return code
        matrix_in_root(runner, newer, [*(["--quick"] if options.quick else []), *tests])
    code = runner.finish()
    say_skipped(skipped)
    return code


def matrix_pythons(versions: Sequence[str] | None = None) -> tuple[dict[str, Path], list[str], list[str]]:
    """Find the interpreters of the matrix.

    Returns:
        Those of this machine, by version; the versions that a root of a newer Debian suite has; and a line for each
        one that is missing.
    """
    versions = MATRIX_PYTHONS if versions is None else versions
    found = {version: find_python(version) for version in versions}
    there = {version: interpreter for version, interpreter in found.items() if interpreter is not None}
    missing = [version for version in versions if version not in there]
    newer = [version for version in missing if version in newer_pythons.VERSIONS]
    reason = newer_pythons.reason_against() if newer else None
    if newer and reason is None:
        say(f"Python {' and '.join(newer)}: a root of Debian {newer_pythons.SUITE} (once)")
        try:
            newer_pythons.make(NEWER_PYTHONS)
        except newer_pythons.RootError as error:
            reason = str(error)
    if reason is not None:
        newer = []
    lines = []
    for version in missing:
        if version not in newer:
            why = f"; {reason}" if reason and version in newer_pythons.VERSIONS else ""
            lines.append(f"Python {version}: no interpreter found on PATH or in ~/.pyenv/versions{why}")
    return there, newer, lines


def matrix_in_root(
    runner: Runner, versions: Sequence[str], arguments: Sequence[str], command_name: str = "matrix"
) -> None:
    """Run the matrix of some versions with the interpreters of the root; it prints what it skips itself."""
    first = newer_pythons.interpreter(versions[-1])
    command = [str(first), str(Path(__file__).resolve()), command_name, *(f"--python={each}" for each in versions)]
    folders = [str(newer_pythons.interpreter(version).parent) for version in versions]
    path = os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)])
    runner.program(
        f"Python {' and '.join(versions)} in a root of Debian {newer_pythons.SUITE}",
        newer_pythons.inside(NEWER_PYTHONS, *command, *arguments, folder=ROOT),
        {"PATH": path},
    )


def run_on(
    runner: Runner,
    version: str,
    interpreter: Path,
    numpy: str,
    arguments: Sequence[str],
    *,
    title: str = "",
    sources: bool = False,
) -> list[str]:
    """Run tests on one interpreter with one generation of numpy; return a line where there is no such pair."""
    name = f"Python {version} with numpy {numpy}"
    reason = numpy_missing(interpreter, numpy)
    if reason:
        return [f"{name}: {reason}"]
    extra = {"PATH": os.pathsep.join([str(interpreter.parent), os.environ.get("PATH", os.defpath)])}
    selection = ("run", f"+py={version}", f"+numpy={numpy}")
    if sources:
        check_sources(runner, *selection[1:], environment="matrix:", title=f", {name}", extra=extra)
    runner.step(name + title, *selection, "matrix:test", *arguments, extra=extra)
    return []


def lowest(runner: Runner, arguments: Sequence[str]) -> int:
    """Run some tests with the lowest releases that our distributions take, on the oldest and the newest Python."""
    parser = argparse.ArgumentParser(prog="python3 tools/dev.py lowest", allow_abbrev=False)
    parser.add_argument("--python", action="append", choices=MATRIX_PYTHONS, help="this version; can be repeated")
    parser.add_argument("--case", action="append", choices=lowest_releases.CASES, help="this one; can be repeated")
    options, tests = parser.parse_known_args(arguments)
    cases = options.case or list(lowest_releases.CASES)
    there, newer, skipped = matrix_pythons(options.python or (MATRIX_PYTHONS[0], MATRIX_PYTHONS[-1]))
    code = prepare(runner)
    if code != 0:
        return code
    for version, interpreter in there.items():
        maker = lowest_releases.Maker(
            runner.home / "hatch" / "bin" / "uv", ROOT, interpreter, TOOLS / "lowest" / version, OVERRIDES,
            runner.environment,
        )  # fmt: skip
        for case in cases:
            skipped += lowest_of(runner, maker, f"Python {version}, lowest releases, {case}", case, tests)
    if newer:
        matrix_in_root(runner, newer, [*(f"--case={case}" for case in cases), *tests], "lowest")
    code = runner.finish()
    say_skipped(skipped)
    return code


def lowest_of(
    runner: Runner, maker: lowest_releases.Maker, title: str, case: str, arguments: Sequence[str]
) -> list[str]:
    """Run the tests of one case with the lowest releases; return a line where there are no wheels for it."""
    try:
        python = maker.make(case)
    except lowest_releases.LowestError as error:
        if "no usable wheels" in str(error):
            return [f"{title}: {error}"]
        raise DevError(f"{title}: {error}") from error
    # Releases of such an age use what today's others call deprecated.
    tests = ["-W", "default", *NO_SLOW_TESTS, *lowest_releases.CASES[case].tests, *arguments]
    runner.program(title, [str(python), "-m", "pytest", "-n", "0", *tests], runner.environment)
    return []


def build(runner: Runner, arguments: Sequence[str]) -> int:
    """Build the sdist of every distribution, and of that the wheel, into `dist/` or the folder that is given."""
    if any(argument.startswith("-") for argument in arguments):
        raise DevError(f"build takes a folder, got {' '.join(arguments)}.")
    target = ROOT.joinpath(*arguments or ["dist"])
    with tempfile.TemporaryDirectory(dir=TOOLS) as sources, tempfile.TemporaryDirectory(dir=TOOLS) as made_here:
        code = runner.hatch("build", "--all", "--target", "sdist", made_here)
        if code == 0:
            for sdist in Path(made_here).glob("*.tar.gz"):
                shutil.unpack_archive(sdist, sources)
            # What is missing from an sdist is missing here, too. Of folders pip keeps nothing in its cache.
            wheel = ("python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", made_here)
            code = runner.run(*wheel, *map(str, Path(sources).iterdir()))
        if code == 0:
            target.mkdir(parents=True, exist_ok=True)
            for path in Path(made_here).iterdir():
                shutil.move(path, target / path.name)
    return code


def newest(runner: Runner, arguments: Sequence[str]) -> int:
    """Run what `test` runs with the newest releases, not the locked ones, and list what is newer than the locks."""
    code = test(runner, arguments)
    say("Newer than the locks")
    with tempfile.TemporaryDirectory(dir=TOOLS) as folder:
        for name in LOCKED_GROUPS:
            fresh = Path(folder) / f"{name}.txt"
            write_lock(runner, name, fresh)
            old, new = (path.read_text().splitlines(keepends=True) for path in (LOCKS / fresh.name, fresh))
            print(*difflib.unified_diff(old, new, f"tools/locks/{fresh.name}", "newest", n=0), sep="", end="")
    return code


def lock(runner: Runner, arguments: Sequence[str]) -> int:
    """Write tools/locks/ anew: add what is missing from them, with --upgrade take the newest of everything."""
    for name in LOCKED_GROUPS:
        write_lock(runner, name, LOCKS / f"{name}.txt", *arguments)
    return 0


def write_lock(runner: Runner, name: str, target: Path, *options: str) -> None:
    """Resolve one lock, for all Pythons and systems at once; releases that the file names already are kept.

    Raises:
        DevError: If there are no releases that fit together, or no package index.
    """
    group, ours, requirement = LOCKED_GROUPS[name]
    requirements = [requirement]
    if ours:
        requirements += [f"-e {path.relative_to(ROOT)}" for path in sorted(ROOT.glob("packages/*"))]
    command = [str(runner.home / "hatch" / "bin" / "uv"), "pip", "compile", "--quiet", "--universal", "--no-annotate"]
    command += ["--python-version", ".".join(map(str, MINIMUM_PYTHON)), "--output-file", str(target), *options]
    command += ["--override", str(OVERRIDES)]
    command += ["--custom-compile-command", "python3 tools/dev.py lock"]
    for path in ROOT.glob("packages/*"):
        command += ["--no-emit-package", path.name]
    command += ["--group", group] if group else []
    done = subprocess.run(
        [*command, "-"], input="\n".join(requirements), text=True, cwd=ROOT, env=runner.environment, check=False
    )
    if done.returncode != 0:
        raise DevError(f"Could not resolve {target.name}: `uv pip compile` ended with exit code {done.returncode}.")


def demo(runner: Runner, arguments: Sequence[str]) -> int:
    """Serve a real classifier and question it from many threads."""
    return prepare(runner) or runner.run("python", "tools/demo.py", *arguments)


def bench(runner: Runner, arguments: Sequence[str]) -> int:
    """Compare with others; `tokens`, `many_models`, `variable`, `sleeping`, `dynamo` measure parts of ours."""
    if arguments[:1] == ["dynamo"]:
        return prepare(runner) or runner.hatch("run", "dynamo:bench", *arguments[1:])
    program = "run"
    if arguments[:1] in (["tokens"], ["many_models"], ["variable"], ["sleeping"]):
        program, *arguments = arguments
    return prepare(runner) or runner.run("python", f"benchmarks/{program}.py", *arguments)


def soak(runner: Runner, arguments: Sequence[str]) -> int:
    """Run the tests that take minutes."""
    return prepare(runner) or runner.run("pytest", "-m", "soak", *arguments)


def coverage(runner: Runner, arguments: Sequence[str]) -> int:
    """Run the quick tests with the branches of all processes counted, and hold them against the floor; or others."""
    folder = TOOLS / "coverage"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    code = prepare(runner)
    if code != 0:
        return code
    runner.step(
        "Tests", "run", "--", "coverage", "run", "-m", "pytest", *(arguments or (*QUICK_TESTS, REFERENCE_TESTS))
    )
    runner.run("coverage", "combine", "--quiet")
    floor = () if arguments else (f"--fail-under={COVERAGE_FLOOR}",)
    runner.step("Branches", "run", "--", "coverage", "report", *floor)
    return runner.finish()


def mutants(runner: Runner, arguments: Sequence[str]) -> int:
    """Change a module of sources in small ways, one at a time, and list the changes that its tests do not notice."""
    return prepare(runner) or runner.hatch("run", "mutants:python", "tools/mutants.py", *arguments)


def lint(runner: Runner, _arguments: Sequence[str]) -> int:
    """Check style, imports, types and the files of deploy/."""
    check_sources(runner)
    check_deploy(runner)
    return runner.finish()


def check_sources(
    runner: Runner,
    *selection: str,
    environment: str = "",
    title: str = "",
    extra: Mapping[str, str] | None = None,
    types: bool = True,
) -> None:
    """Run ruff, import-linter and mypy, unless told not to; each runs even where another has found something."""
    # Numpy 1 types less. What is shipped has to pass with it all the same, since type checkers of its users read it.
    checked = "types-shipped" if "+numpy=1" in selection else "types"
    scripts = [("Style", "style"), ("Imports", "imports"), *([("Types", checked)] if types else [])]
    for name, script in scripts:
        runner.step(name + title, "run", *selection, environment + script, extra=extra)


def check_deploy(runner: Runner) -> None:
    """Hold the files of deploy/ against the schemas of those who read them."""
    runner.step("Images and manifests", "run", "deploy:check")


def format_sources(runner: Runner, _arguments: Sequence[str]) -> int:
    """Mend what ruff can mend by itself."""
    return runner.hatch("run", "format")


def reference(runner: Runner, arguments: Sequence[str]) -> int:
    """Write docs/signatures.md from the sources, and what is generated from the table of settings."""
    return runner.run("python", "tools/reference.py", *arguments) or runner.run(
        "python", "tools/settings.py", *arguments
    )


def pictures(runner: Runner, _arguments: Sequence[str]) -> int:
    """Take the pictures of docs/ anew: of the console and of terminals, with Chromium. Wants the ports 8000 to 8003."""
    extra = {"PYTRITON_TEST_SCREENSHOTS": str(ROOT / "docs")}
    tests = (
        "tests/server/test_console.py",
        "tests/command_line/test_first_hour.py",
        "tests/command_line/test_recipes.py",
    )
    return prepare(runner) or runner.hatch("run", "--", "pytest", "-rP", *tests, extra=extra)


def docs(runner: Runner, arguments: Sequence[str]) -> int:
    """Build the pages of docs/ into .tools/site."""
    return runner.run("mkdocs", "build", "--strict", *arguments)


def native(runner: Runner, _arguments: Sequence[str]) -> int:
    """Compile the native proxy if its sources changed, and fetch tritonserver if it is not there."""
    return prepare(runner)


def run(runner: Runner, arguments: Sequence[str]) -> int:
    """Run any command in the default environment."""
    if not arguments:
        raise DevError("Say what to run: python3 tools/dev.py run python -c 'import pytriton.client'")
    return runner.run(*arguments)


COMMANDS: dict[str, Callable[[Runner, Sequence[str]], int]] = {
    "test": test,
    "demo": demo,
    "bench": bench,
    "lint": lint,
    "format": format_sources,
    "lock": lock,
    "newest": newest,
    "native": native,
    "reference": reference,
    "pictures": pictures,
    "docs": docs,
    "build": build,
    "matrix": matrix,
    "lowest": lowest,
    "soak": soak,
    "coverage": coverage,
    "mutants": mutants,
    "run": run,
}


# --- interpreters --------------------------------------------------------------------------------------------------


def test_servers() -> list[Path]:
    """Return the further servers to run the tests with.

    Raises:
        DevError: If a folder that the variable names holds none.
    """
    servers = [Path(name).absolute() for name in os.environ.get(TEST_SERVERS_VARIABLE, "").split(os.pathsep) if name]
    for server in servers:
        if not os.access(server / "bin" / "tritonserver", os.X_OK):
            raise DevError(
                f"Expected folders laid out as /opt/tritonserver in {TEST_SERVERS_VARIABLE}, parted by {os.pathsep!r}; "
                f"{server} holds no bin/tritonserver that can be run."
            )
    return servers


def find_python(version: str) -> Path | None:
    """Find an interpreter of one version, for example `"3.12"`, that starts."""
    candidates = [Path(found) for found in [shutil.which(f"python{version}")] if found]
    candidates += sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"), reverse=True)
    for candidate in candidates:
        # A pyenv shim is on PATH for versions that are not selected, too, and then only prints an error.
        asked = subprocess.run([str(candidate), "-c", "import sys, venv"], capture_output=True, check=False)
        if asked.returncode == 0:
            return candidate
    return None


def numpy_missing(interpreter: Path, generation: str) -> str | None:
    """Ask pip whether there is a numpy wheel of this generation; return the reason if there is none."""
    version = f"{interpreter.name.removeprefix('python')}"
    requirement = {"1": "numpy>=1.26,<2", "2": "numpy>=2,<3"}[generation]
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--target", scratch]
        command += ["--only-binary", ":all:", "--python-version", version, requirement]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if asked.returncode == 0 else f"there is no wheel of {requirement} for it"


def say_skipped(lines: Sequence[str]) -> None:
    """Print what was not run, under the summary."""
    for line in lines:
        print(f"{'skipped':>12}            {line}")


# --- command line --------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print a heading, in step with what the commands print themselves."""
    print(f"\n--- {text}", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Parse the command line and run one command.

    Returns:
        The exit code: zero if everything asked for succeeded.
    """
    if sys.version_info < MINIMUM_PYTHON:
        print(f"Python 3.10 or newer is needed, this is {sys.version.split()[0]}.", file=sys.stderr)
        return 2
    summary = "\n".join(f"  {name:<10} {function.__doc__}" for name, function in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python3 tools/dev.py",
        epilog=f"commands:\n{summary}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="handed on to what the command runs")
    parsed = parser.parse_args(arguments)
    try:
        command = COMMANDS[parsed.command]
        return command(Runner(locked=command is not newest), parsed.arguments)
    except DevError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

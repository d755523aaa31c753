"""Changes the sources of a module in small ways, one at a time, and says which changes no test notices: mutmut.

`python3 tools/dev.py mutants PATH [TESTS ...]` runs it in an environment of its own, and `mutants show NAME` prints a
change of the last run. A mutant is a function with one change, such as `or` for `and`. mutmut wants sources in `src/`
of the folder that it runs in, and copies all that is there, so `.tools/mutants` gets the sources of one distribution,
its tests, and what they use of `tests/support`. What `UNCHANGED` names is left as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import tomli

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".tools" / "mutants"
MUTMUT = [sys.executable, "-m", "mutmut"]
NO_CACHES = shutil.ignore_patterns("__pycache__", "*.pyc")
# How long one test may take with a mutant, in seconds, five times as long as the slowest does without one: a test waits
# ten minutes for what must happen, and where a mutant keeps it from happening nothing else would end it sooner.
PATIENCE_S = 15
# How long all tests of a mutant may take, for what is slow without end: so many times the seconds that they took before
# and the constant, so 20 s at least.
PATIENCE = {"timeout_multiplier": 5.0, "timeout_constant": 4.0}
# The first lines of statements in which nothing is changed, because no test should hold them: the words of errors and
# of the log, and what people see of an object in a debugger. Whether an error is raised is tested: its `if` is
# changed like any other. Type hints and decorators need no rule, as mutmut leaves them alone by itself.
UNCHANGED = (
    r"^\s*raise\b",
    r"^\s*(self\.)?_?(logger|log)\.\w+\(",
    r"^\s*warnings\.warn\(",
    r"^\s*def __(repr|str)__\(",
)
# The rooms whose tests have to notice so many of a hundred mutants, every night. Some of the tests are those of rooms
# that use them.
FLOOR = 90.0
PROXY_BACKEND = Path("packages/pytriton-proxy-backend")
HELD = {
    PROXY_BACKEND / "src/pytriton/proxy_backend" / room: [
        PROXY_BACKEND / "tests/proxy_backend" / each for each in tests
    ]
    for room, tests in (
        ("wire", ("wire",)),
        ("protocol", ("protocol",)),
        ("runtime", ("runtime", "worker")),
    )
}
# The exit codes that mutmut keeps of a mutant: its tests passed, there are none, or it was not tried.
LIVES, UNTESTED, UNTRIED = (0,), (5, 33), (None, 2, 34)


class MutantsError(Exception):
    """There is nothing to change, or nothing to notice it; the text says what is missing."""


def mirrored(path: Path) -> Path:
    """Return the tests of a module or folder of sources: those of the nearest folder that has a twin below `tests/`.

    Args:
        path: Below `packages/<distribution>/src`, relative to the checkout.

    Raises:
        MutantsError: It is not there, or has no tests.
    """
    if path.parts[:1] != ("packages",) or path.parts[2:3] != ("src",) or not (ROOT / path).exists():
        raise MutantsError(f"Expected a module or folder below packages/<distribution>/src, got {path}.")
    tests = ROOT.joinpath(*path.parts[:2], "tests")
    # Rooms of one distribution have no underscore in the names of their tests.
    names = [part.lstrip("_") for part in path.with_suffix("").parts[4:]]
    while names and not tests.joinpath(*names).is_dir():
        names.pop()
    if not names:
        raise MutantsError(f"No folder below {tests.relative_to(ROOT)} mirrors {path}; name its tests.")
    return tests.joinpath(*names).relative_to(ROOT)


def lay_out(path: Path, tests: Sequence[Path]) -> None:
    """Make the folder that mutmut runs in."""
    package = Path(*path.parts[:2])
    shutil.rmtree(FOLDER, ignore_errors=True)
    shutil.copytree(ROOT / package / "src", FOLDER / "src", ignore=NO_CACHES)
    for name in (package / "tests", package / "native", Path("tests", "support"), Path("docs", "protocol.md")):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, FOLDER / name, ignore=NO_CACHES)
        elif (ROOT / name).exists():
            (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, FOLDER / name)
    shutil.copy(ROOT / "tools" / "first_failure.py", FOLDER / "conftest.py")
    (FOLDER / "pyproject.toml").write_text(configuration(path, tests), encoding="utf-8")


def configuration(path: Path, tests: Sequence[Path]) -> str:
    """Return the settings of pytest and mutmut."""
    chosen = Path(*path.parts[2:])
    ours = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    pytest = {
        "addopts": [
            "--import-mode=importlib",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow and not ci and not soak",
        ],
        "timeout": PATIENCE_S,
        # It ends the process, whatever its threads and its event loop do.
        "timeout_method": "thread",
        **{name: ours[name] for name in ("pythonpath", "markers", "filterwarnings")},
    }
    mutmut = {
        "source_paths": ["src"],
        "only_mutate": [str(chosen if chosen.suffix else chosen / "*.py")],
        "also_copy": ["conftest.py", "packages", "tests", "docs"],
        "do_not_mutate_patterns": list(UNCHANGED),
        "pytest_add_cli_args_test_selection": list(map(str, tests)),
        **PATIENCE,
    }
    tables = {"tool.pytest.ini_options": pytest, "tool.mutmut": mutmut}
    # JSON of texts, numbers and lists is TOML, too.
    return "\n".join(
        f"[{table}]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
        for table, values in tables.items()
    )


def results() -> Iterator[tuple[str, str, int | None]]:
    """Yield each mutant: its file below `src/`, its name, and what mutmut keeps of it."""
    made = FOLDER / "mutants" / "src"
    for path in sorted(made.rglob("*.meta")):
        codes = json.loads(path.read_text(encoding="utf-8"))["exit_code_by_key"]
        yield from ((str(path.relative_to(made).with_suffix("")), name, code) for name, code in codes.items())


def sampled(count: int, seed: int) -> list[str]:
    """Make the mutants and return the names of some, the same ones for a seed.

    mutmut has no command that makes them and tries none: it makes them, measures the tests, and fails for a name that
    no mutant has.

    Raises:
        MutantsError: If it made none.
    """
    subprocess.run([*MUTMUT, "run", "none"], cwd=FOLDER, check=False, capture_output=True)
    names = sorted(name for _, name, _ in results())
    if not names:
        raise MutantsError("mutmut has made no mutants; run it without --sample to see why.")
    return random.Random(seed).sample(names, min(count, len(names)))


def report(path: Path, floor: float) -> int:
    """Print the mutants that live, and how many were noticed in each file; return 1 where that is below the floor."""
    tried: dict[str, list[int]] = {}
    for file, name, code in results():
        if code in UNTRIED:
            continue
        counts = tried.setdefault(file, [0, 0])
        counts[0] += 1
        if code in LIVES or code in UNTESTED:
            print(f"    {name}: {'lives' if code in LIVES else 'these tests do not call it'}")
        else:
            counts[1] += 1
    for file, (count, noticed) in tried.items():
        print(f"{file}: {100 * noticed / count:.1f} % of {count}")
    total, noticed = (sum(column) for column in zip(*tried.values(), strict=True)) if tried else (0, 0)
    score = 100 * noticed / max(1, total)
    print(f"{path}: {score:.1f} % of {total} mutants were noticed. `dev.py mutants show NAME` prints one.")
    return int(score < floor)


def try_out(path: Path, tests: Sequence[Path], asked: argparse.Namespace, floor: float) -> int:
    """Run mutmut on a module or folder and report; return the exit code.

    Raises:
        MutantsError: If there is nothing to change, or nothing to notice it.
    """
    lay_out(path, tests or [mirrored(path)])
    names = sampled(asked.sample, asked.seed) if asked.sample else []
    command = [*MUTMUT, "run", "--max-children", str(asked.children), *names]
    code = subprocess.run(command, cwd=FOLDER, check=False).returncode
    if code != 0:
        print("mutmut has failed: it runs the tests with the sources as they are at first, and these have to pass.")
        return code
    return report(path, floor)


def main(arguments: Sequence[str]) -> int:
    """Run mutmut, print the score and the mutants that live, and return 1 where the score is below the floor."""
    if arguments[:1] == ["show"]:
        return subprocess.run([*MUTMUT, *arguments], cwd=FOLDER, check=False).returncode
    parser = argparse.ArgumentParser(prog="python3 tools/dev.py mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path, nargs="?", help="module or folder below packages/<distribution>/src")
    parser.add_argument("tests", type=Path, nargs="*", help="tests of that distribution; those that mirror the sources")
    parser.add_argument("--nightly", action="store_true", help=f"the rooms that have a floor, {FLOOR:.0f} percent")
    parser.add_argument("--floor", type=float, default=0.0, help="percent of the mutants that have to be noticed")
    parser.add_argument("--children", type=int, default=os.cpu_count(), help="mutants that are tried at a time")
    parser.add_argument("--sample", type=int, metavar="COUNT", help="try so many mutants, chosen by chance")
    parser.add_argument("--seed", type=int, default=1, help="which ones these are; 1")
    asked = parser.parse_args(arguments)
    if asked.nightly == (asked.path is not None):
        parser.error("Name a module or folder, or say --nightly.")
    try:
        if asked.nightly:
            return max([try_out(path, tests, asked, FLOOR) for path, tests in HELD.items()])
        return try_out(asked.path, asked.tests, asked, asked.floor)
    except MutantsError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

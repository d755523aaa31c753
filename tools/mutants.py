"""Changes the sources of a module in small ways, one at a time, and says which changes no test notices: mutmut.

`python3 tools/dev.py mutants PATH [TESTS ...]` runs it in an environment of its own, and `mutants show NAME` prints a
change of the last run. A mutant is a function with one change, such as `or` for `and`. mutmut wants sources in `src/`
of the folder that it runs in, and copies all that is there, so `.tools/mutants` gets the sources of one distribution,
its tests, and what they use of `tests/support`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import tomli

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".tools" / "mutants"
NO_CACHES = shutil.ignore_patterns("__pycache__", "*.pyc")
# How long a mutant may take: so many times what its tests took before, and some seconds.
PATIENCE = {"timeout_multiplier": 30.0, "timeout_constant": 10.0}


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
        **{name: ours[name] for name in ("pythonpath", "markers", "filterwarnings")},
    }
    mutmut = {
        "source_paths": ["src"],
        "only_mutate": [str(chosen if chosen.suffix else chosen / "*.py")],
        "also_copy": ["packages", "tests", "docs"],
        "pytest_add_cli_args_test_selection": list(map(str, tests)),
        **PATIENCE,
    }
    tables = {"tool.pytest.ini_options": pytest, "tool.mutmut": mutmut}
    # JSON of texts, numbers and lists is TOML, too.
    return "\n".join(
        f"[{table}]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
        for table, values in tables.items()
    )


def main(arguments: Sequence[str]) -> int:
    """Run mutmut, print the score and the mutants that live, and return 1 where the score is below the floor."""
    mutmut = [sys.executable, "-m", "mutmut"]
    if arguments[:1] == ["show"]:
        return subprocess.run([*mutmut, *arguments], cwd=FOLDER, check=False).returncode
    parser = argparse.ArgumentParser(prog="python3 tools/dev.py mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path, help="a module or folder of sources, below packages/<distribution>/src")
    parser.add_argument("tests", type=Path, nargs="*", help="tests of that distribution; those that mirror the sources")
    parser.add_argument("--floor", type=float, default=0.0, help="percent of the mutants that have to be noticed")
    parser.add_argument("--children", type=int, default=os.cpu_count(), help="mutants that are tried at a time")
    asked = parser.parse_args(arguments)
    try:
        lay_out(asked.path, asked.tests or [mirrored(asked.path)])
    except MutantsError as error:
        parser.error(str(error))
    code = subprocess.run([*mutmut, "run", "--max-children", str(asked.children)], cwd=FOLDER, check=False).returncode
    if code == 0:
        code = subprocess.run([*mutmut, "export-cicd-stats"], cwd=FOLDER, check=False).returncode
    if code != 0:
        print("mutmut has failed: it runs the tests with the sources as they are at first, and these have to pass.")
        return code
    listed = subprocess.run([*mutmut, "results"], cwd=FOLDER, check=True, capture_output=True, text=True).stdout
    counts = json.loads((FOLDER / "mutants" / "mutmut-cicd-stats.json").read_text(encoding="utf-8"))
    noticed = sum(counts[name] for name in ("killed", "timeout", "segfault", "suspicious"))
    score = 100 * noticed / max(1, counts["total"] - counts["skipped"])
    print(listed)
    print(
        f"{asked.path}: {score:.1f} % of {counts['total']} mutants were noticed; {counts['survived']} live, and "
        f"{counts['no_tests']} are in functions that these tests do not call. `dev.py mutants show NAME` prints one."
    )
    return int(score < asked.floor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

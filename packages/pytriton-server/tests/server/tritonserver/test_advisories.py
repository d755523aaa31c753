import re
from pathlib import Path

import pytest

from pytriton.cli.checks.vulnerabilities import describe_vulnerabilities
from pytriton.server.tritonserver.advisories import (
    ADVISORIES,
    KNOWN_AS_OF,
    NEWEST_KNOWN_VERSION,
    RELEASES,
    Advisory,
    Coverage,
    advisories_of,
    is_newer_than_known,
)
from pytriton.server.tritonserver.binary import find_tritonserver
from pytriton.server.tritonserver.version import parse_server_version


def ids(found: list[Advisory]) -> set[str]:
    return {advisory.id for advisory in found}


def describe(folder: Path, version: str) -> list[str]:
    """What is said of a server that calls its version so."""
    executable = folder / "bin" / "tritonserver"
    executable.parent.mkdir(parents=True)
    executable.write_text(f"#!/bin/sh\necho '| server_version | {version} |'\n")
    executable.chmod(0o755)
    return list(describe_vulnerabilities(find_tritonserver(folder), verbose=True))


def test_each_is_complete_and_there_once() -> None:
    assert len(ids(list(ADVISORIES))) == len(ADVISORIES)
    for advisory in ADVISORIES:
        assert re.fullmatch(r"CVE-20\d\d-\d{4,6}", advisory.id), advisory
        assert 0 < advisory.severity <= 10, advisory
        assert re.fullmatch(r"\d\d\.\d\d", advisory.release), advisory
        assert advisory.component, advisory
        assert re.fullmatch(r"[A-Z][^|\n]+\.", advisory.summary), advisory
        assert re.fullmatch(r"([A-Z][^|\n]+\.)?", advisory.also), advisory
        assert re.fullmatch(r"((server|core|common|python_backend)#\d+)?", advisory.change), advisory
        # What is covered is covered because it is known what it is.
        assert advisory.guard is not Coverage.COVERED or advisory.change, advisory


def test_versions_and_releases_go_together() -> None:
    versions = [parse_server_version(version) for version in RELEASES]
    assert versions == sorted(versions, key=lambda version: version or (0, 0, 0))
    assert list(RELEASES.values()) == sorted(RELEASES.values())
    assert max(RELEASES, key=lambda version: parse_server_version(version) or (0, 0, 0)) == NEWEST_KNOWN_VERSION
    order = [list(RELEASES).index(advisory.fixed_in) for advisory in ADVISORIES]
    assert order == sorted(order)


def test_a_version_has_what_later_ones_fixed() -> None:
    bundled = ids(advisories_of("2.51.0"))
    assert {"CVE-2025-23310", "CVE-2024-53880", "CVE-2026-16497"} <= bundled
    assert "CVE-2024-0116" not in bundled
    # 25.07 is 2.59.1, and 2.59.0 was 25.06.
    assert "CVE-2025-23310" in ids(advisories_of("2.59.0"))
    assert "CVE-2025-23310" not in ids(advisories_of("2.59.1"))
    assert "CVE-2025-23322" not in ids(advisories_of("2.59.0"))
    assert advisories_of(NEWEST_KNOWN_VERSION) == []
    severities = [advisory.severity for advisory in advisories_of("2.51.0")]
    assert severities == sorted(severities, reverse=True)


def test_what_is_no_version_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a version of tritonserver, such as '2\.51\.0', got 'main'"):
        advisories_of("main")
    with pytest.raises(ValueError, match="expected a version"):
        is_newer_than_known("")


def test_the_bundled_version_is_described(tmp_path: Path) -> None:
    lines = describe(tmp_path / "server", "2.51.0")
    text = "\n".join(lines)
    known = advisories_of("2.51.0")
    assert lines[0] == f"{len(known)} are published for tritonserver 2.51.0, known as of {KNOWN_AS_OF}."
    assert lines[1] == "The guard is loaded into this server when Triton starts it."
    # Each once, under the heading for what the guard does.
    for advisory in known:
        assert text.count(advisory.id + " (") == 1
        assert f"{advisory.component}: {advisory.summary}" in text
        assert advisory.also in text
    covered = text[text.index("The guard covers:") :]
    assert "CVE-2025-23310 (9.8, fixed in 25.07), HTTP front end:" in covered
    assert "CVE-2025-23316" not in covered


def test_a_server_without_the_guard_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTRITON_GUARD", "off")
    text = "What the guard covers is NOT covered: it is not loaded into this server, because {}."
    assert describe(tmp_path / "off", "2.51.0")[1] == text.format("PYTRITON_GUARD switches it off")
    monkeypatch.delenv("PYTRITON_GUARD")
    server = tmp_path / "setgid"
    describe(server, "2.51.0")
    executable = server / "bin" / "tritonserver"
    executable.chmod(0o2755)
    (line,) = (
        line for line in describe_vulnerabilities(find_tritonserver(server), verbose=True) if "NOT covered" in line
    )
    assert str(executable) in line
    assert "LD_PRELOAD" in line


def test_a_version_newer_than_the_list_says_so(tmp_path: Path) -> None:
    assert describe(tmp_path / "newer", "2.99.0") == [
        f"0 are published for tritonserver 2.99.0, known as of {KNOWN_AS_OF}.",
        f"It came out after {NEWEST_KNOWN_VERSION}, the newest that is known here: see NVIDIA's bulletins, too.",
    ]
    assert len(describe(tmp_path / "newest", NEWEST_KNOWN_VERSION)) == 1


def test_a_version_that_cannot_be_told_says_so(tmp_path: Path) -> None:
    (line,) = describe(tmp_path / "own", "main-build")
    assert line == "This server calls its version 'main-build', which cannot be compared with those that have a fix."
    lines = describe(tmp_path / "silent", "' ; exit 4 ; echo '")
    assert lines[0] == "The version of this server cannot be told, so neither can what concerns it."
    assert "ended with 4" in lines[1]

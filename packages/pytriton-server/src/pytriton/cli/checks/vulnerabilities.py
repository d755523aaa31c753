"""Which published vulnerabilities the server in use has, and what is done about them."""

from collections.abc import Iterator

from pytriton.server.tritonserver.advisories import (
    KNOWN_AS_OF,
    NEWEST_KNOWN_VERSION,
    Advisory,
    Coverage,
    advisories_of,
    is_newer_than_known,
)
from pytriton.server.tritonserver.binary import TritonServerBinary
from pytriton.server.tritonserver.guard import Part, find_guard
from pytriton.server.tritonserver.version import ServerVersionUnknownError, parse_server_version, read_server_version

_HEADINGS = {
    Coverage.NOT_COVERED: "The guard does nothing about",
    Coverage.UNKNOWN: "NVIDIA does not tell which requests do it, so the guard may or may not do something about",
    Coverage.PARTLY: "The guard covers a part of",
    Coverage.COVERED: "The guard covers",
}
_COUNTED = {
    Coverage.COVERED: "are covered by the guard",
    Coverage.PARTLY: "in part",
    Coverage.UNKNOWN: "may be, as NVIDIA does not tell how they are used",
    Coverage.NOT_COVERED: "are not",
}


def describe_vulnerabilities(binary: TritonServerBinary, *, verbose: bool) -> Iterator[str]:
    """Yield what is known of the version of a server, what is worst first; each is named if `verbose`."""
    try:
        version = read_server_version(binary)
    except ServerVersionUnknownError as error:
        yield "The version of this server cannot be told, so neither can what concerns it."
        yield from str(error).splitlines()
        return
    if parse_server_version(version) is None:
        yield f"This server calls its version {version!r}, which cannot be compared with those that have a fix."
        return
    found = advisories_of(version)
    yield f"{len(found)} are published for tritonserver {version}, known as of {KNOWN_AS_OF}."
    if is_newer_than_known(version):
        yield f"It came out after {NEWEST_KNOWN_VERSION}, the newest that is known here: see NVIDIA's bulletins, too."
    if not found:
        return
    yield _state_of_guard(binary)
    if not verbose:
        counts = {guard: sum(advisory.guard is guard for advisory in found) for guard in _HEADINGS}
        told = [f"{counts[guard]} {what}" for guard, what in _COUNTED.items() if counts[guard]]
        yield f"{', '.join(told)}. `pytriton check --verbose` names them."
        return
    for guard, heading in _HEADINGS.items():
        concerned = [advisory for advisory in found if advisory.guard is guard]
        if concerned:
            yield f"{heading}:"
            yield from (f"  {_line(advisory)}" for advisory in concerned)


def _state_of_guard(binary: TritonServerBinary) -> str:
    guard = find_guard(None, binary.executable)
    if guard.library is not None:
        off = ", ".join(part.value for part in Part if part in guard.parts_off)
        but = f" PYTRITON_GUARD switches parts of it off, and what these cover is NOT covered: {off}." if off else ""
        return f"The guard is loaded into this server when Triton starts it.{but}"
    reason = guard.obstacle or "PYTRITON_GUARD switches it off"
    return f"What the guard covers is NOT covered: it is not loaded into this server, because {reason}."


def _line(advisory: Advisory) -> str:
    also = f" {advisory.also}" if advisory.also else ""
    return (
        f"{advisory.id} ({advisory.severity}, fixed in {advisory.release}), {advisory.component}: "
        f"{advisory.summary}{also}"
    )

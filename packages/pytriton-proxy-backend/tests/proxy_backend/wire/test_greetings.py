"""Greetings of any two versions: the same major goes on with what both know, another one is refused by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytriton.proxy_backend.errors import VersionMismatchError
from pytriton.proxy_backend.wire import layout
from pytriton.proxy_backend.wire.greetings import GreetingError, Hello, Welcome, parse_answer, parse_hello
from pytriton.proxy_backend.wire.layout import CAPABILITIES, GREETING_VERSION, MAGIC, Capability

OURS = f"{layout.MAJOR}.{layout.MINOR}"
versions = st.tuples(
    st.one_of(st.just(layout.MAJOR), st.integers(0, 2**16 - 1)),
    st.one_of(st.just(layout.MINOR), st.integers(0, 2**16 - 1)),
)
capabilities = st.integers(0, 2**32 - 1)


def of_version(packet: bytes, version: tuple[int, int], more: bytes) -> bytes:
    """Return a greeting as another version would send it, with fields that ours does not know."""
    changed = bytearray(packet + more)
    GREETING_VERSION.pack_into(changed, layout.MESSAGE.size, MAGIC, *version)
    kind, flags, _, *rest = layout.MESSAGE.unpack_from(changed)
    layout.MESSAGE.pack_into(changed, 0, kind, flags, len(changed), *rest)
    return bytes(changed)


@given(versions, capabilities, st.binary(max_size=40))
def test_a_worker_of_any_version(version: tuple[int, int], able: int, more: bytes) -> None:
    packet = of_version(Hello(name="n", model_name="m", capabilities=able).pack(), version, more)
    if version[0] != layout.MAJOR:
        with pytest.raises(GreetingError) as caught:
            parse_hello(packet, decoupled=False)
        assert f"protocol {version[0]}.{version[1]}, this proxy {OURS}" in str(caught.value)
        return
    hello = parse_hello(packet, decoupled=False)
    assert (hello.version, hello.name, hello.model_name) == (version, "n", "m")
    assert hello.capabilities == able & (CAPABILITIES | Capability.STANDS_IN)


@given(versions, capabilities, st.binary(max_size=40))
def test_a_proxy_backend_of_any_version(version: tuple[int, int], able: int, more: bytes) -> None:
    welcome = Welcome(
        model_name="m",
        model_version=1,
        batching=True,
        decoupled=False,
        capabilities=Capability(able & sum(Capability)),
        arena_budget=1,
        arena_idle_s=1.0,
    )
    packet = of_version(welcome.pack(), version, more)
    if version[0] == layout.MAJOR:
        assert parse_answer(packet) == welcome
        return
    with pytest.raises(VersionMismatchError) as caught:
        parse_answer(packet)
    assert (caught.value.ours, caught.value.theirs) == ((layout.MAJOR, layout.MINOR), version)

"""Greetings of any two versions: the same major goes on with what both know, another one is refused by name."""

import dataclasses
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytriton.proxy_backend.errors import AttachError, VersionMismatchError
from pytriton.proxy_backend.wire import layout
from pytriton.proxy_backend.wire.greetings import (
    GreetingError,
    Hello,
    Welcome,
    pack_refuse,
    parse_answer,
    parse_hello,
)
from pytriton.proxy_backend.wire.layout import CAPABILITIES, GREETING_VERSION, MAGIC, Capability
from pytriton.proxy_backend.wire.limits import MAX_IN_FLIGHT

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


names = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=20)


@given(
    st.text(max_size=20).filter(lambda text: not any("\ud800" <= each <= "\udfff" for each in text)),
    names,
    names,
    st.binary(max_size=8),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
)
def test_a_worker_is_read_as_it_greets(
    name: str, model: str, digest: str, token: bytes, most: int, version: int
) -> None:
    hello = Hello(
        name=name, model_name=model, tensors_digest=digest, memory_token=token, max_in_flight=most,
        model_version=version, capabilities=CAPABILITIES,
    )  # fmt: skip
    packet = hello.pack()
    read = parse_hello(packet, decoupled=True)
    assert read == dataclasses.replace(
        hello, name=name.replace("\n", " "), pid=os.getpid(), max_in_flight=min(max(most, 1), MAX_IN_FLIGHT)
    )
    fields = layout.GREETING.unpack_from(packet, layout.MESSAGE.size)
    assert fields[:6] == (MAGIC, layout.MAJOR, layout.MINOR, os.getpid(), os.geteuid(), most)
    # What only a proxy backend says.
    assert (fields[7], *fields[10:]) == (0, 0, 0, 0)


@given(st.data())
def test_greetings_that_are_cut_off(data: st.DataObject) -> None:
    packet = Hello(name="name", model_name="model").pack()
    cut = data.draw(st.integers(0, len(packet) - 1))
    # The size in the header is that of what came, so that only the greeting is too short.
    part = bytearray(packet[:cut])
    if cut >= layout.MESSAGE.size:
        kind, flags, _, *rest = layout.MESSAGE.unpack_from(part)
        layout.MESSAGE.pack_into(part, 0, kind, flags, cut, *rest)
    least = layout.MESSAGE.size + GREETING_VERSION.size
    expected = f"a packet of {cut} bytes" if cut < least else f"cut off after {cut} bytes"
    with pytest.raises(GreetingError, match=expected):
        parse_hello(bytes(part), decoupled=False)


def test_greetings_of_others() -> None:
    packet = Hello(name="name").pack()
    for wrong in (
        packet.replace(MAGIC, b"PYTRIT0N"),
        packet + b"more",
        Hello(name="name").pack(layout.MessageType.CALLER),
    ):
        with pytest.raises(GreetingError, match="expected the greeting of a pytriton worker, got something else"):
            parse_hello(wrong, decoupled=False)


def test_a_greeting_without_a_name_is_whole() -> None:
    packet = Hello(name="").pack()
    assert len(packet) == layout.MESSAGE.size + layout.GREETING.size
    assert parse_hello(packet, decoupled=False).name == ""


def test_who_may_answer_a_request_more_than_once() -> None:
    for able, is_fit in ((CAPABILITIES, True), (CAPABILITIES & ~Capability.DECOUPLED, False), (0, False)):
        packet = Hello(name="n", capabilities=able).pack()
        parse_hello(packet, decoupled=False)
        if is_fit:
            parse_hello(packet, decoupled=True)
        else:
            with pytest.raises(GreetingError, match="the worker cannot answer a request more than once"):
                parse_hello(packet, decoupled=True)


def with_text(text: bytes) -> bytes:
    """Return a HELLO with such a text."""
    blank = bytearray(Hello(name="x" * len(text)).pack())
    blank[-len(text) :] = text
    return bytes(blank)


def test_texts_of_a_greeting_that_are_wrong() -> None:
    assert parse_hello(with_text(b"a\xff\nm"), decoupled=False).name == "a\ufffd"
    # A token that is none, and lines of a later version.
    assert parse_hello(with_text(b"n\nm\nd\nno hex"), decoupled=False).memory_token == b""
    read = parse_hello(with_text(b"n\nm\nd\n0102\nmore"), decoupled=False)
    assert (read.model_name, read.tensors_digest, read.memory_token) == ("m", "d", b"\x01\x02")


@given(names, st.booleans(), st.booleans(), st.integers(0, 2**40), st.integers(0, 10**7), st.integers(0, 9))
def test_an_answer_is_read_as_it_was_given(
    model: str, batching: bool, decoupled: bool, budget: int, milliseconds: int, most: int
) -> None:
    welcome = Welcome(
        model_name=model, model_version=budget, batching=batching, decoupled=decoupled,
        capabilities=Capability.CANCEL, arena_budget=budget, arena_idle_s=milliseconds / 1000,
        execution_timeout_s=milliseconds / 1000 or None, max_in_flight=most,
    )  # fmt: skip
    packet = welcome.pack()
    assert parse_answer(packet) == welcome
    with pytest.raises(AttachError, match="is not a pytriton proxy backend"):
        parse_answer(packet + b"more")
    if model:
        short = bytearray(packet[:-1])
        kind, flags, _, *rest = layout.MESSAGE.unpack_from(short)
        layout.MESSAGE.pack_into(short, 0, kind, flags, len(short), *rest)
        with pytest.raises(AttachError, match=f"is cut off after {len(short)} bytes"):
            parse_answer(bytes(short))


def test_answers_that_are_none() -> None:
    with pytest.raises(AttachError, match="an answer of 3 bytes came to the greeting, which is too short"):
        parse_answer(b"abc")
    with pytest.raises(AttachError, match="message 1 came instead of an answer"):
        parse_answer(Hello(name="n").pack())
    with pytest.raises(AttachError, match=r"the proxy backend refused this worker: why\?$"):
        parse_answer(pack_refuse("why\udcff"))
    assert len(pack_refuse("x" * layout.MAX_PACKET)) == layout.MAX_PACKET

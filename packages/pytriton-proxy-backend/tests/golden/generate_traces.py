"""Makes the traces of protocol 1.0: `python generate_traces.py` writes `traces/*.trace`.

A trace is a conversation between a worker and a proxy backend. Every implementation of one side replays it: it is fed
with what the other side sends, and must send, and see, what the trace says. Like `generate.py`, this was written from
`docs/protocol.md` and imports nothing of the distribution. See `test_traces.py` and `native/tests/traces.cc`.

A trace is text, a step on each line:

    sides SIDE ...                       who can replay it: the packets of the other side may be those of a broken one
    link unix|zmq                        what the packets pass through
    settings decoupled=0 budget=BYTES max_in_flight=N
    send SIDE NAME DESCRIPTORS PARTS HEX SIDE sends this packet, with so many descriptors, and with a part of so many
                                         bytes (`-` is none); the sender of a greeting and the text of REFUSE are free
    write worker SEGMENT OFFSET HEX      the worker writes into its memory
    do worker respond BATCH SEGMENT OFFSET LENGTH done|more
    do worker fail BATCH CODE TEXT
    do worker unused SEGMENT OFFSET      nobody uses this block of the proxy backend any more
    do worker tick
    do worker detach
    do SIDE segment NUMBER LENGTH        a segment is added to its arena
    do proxy batch BATCH OFFSET LENGTH   a batch, in segment 1 of its arena (over ZeroMQ without one: at -)
    do proxy cancel BATCH REQUEST        the caller of a request is gone
    do proxy tick
    see worker batch BATCH | cancelled BATCH REQUEST | paused [REQUEST, ...]
    see worker freed SEGMENT OFFSET | full IN_USE LENGTH | free IN_USE LENGTH
    see proxy answered BATCH | done BATCH | freed SEGMENT OFFSET
    end SIDE violation|refused|version|detached
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from typing import Any

from generate import (
    BATCH,
    BATCH_DONE,
    CANCEL,
    DETACH,
    DIGEST,
    FAIL,
    FOLDER,
    FP32,
    HELLO,
    INPUT_RELEASED,
    PAUSE,
    REFUSE,
    RELEASE,
    RESPONSE,
    RESUME,
    SEGMENT,
    SEGMENT_CLOSE,
    WELCOME,
    Answer,
    Request,
    Tensor,
    batch_record,
    greeting,
    message,
    response_record,
)

NAMES = {
    HELLO: "HELLO", WELCOME: "WELCOME", REFUSE: "REFUSE", SEGMENT: "SEGMENT", SEGMENT_CLOSE: "SEGMENT_CLOSE",
    BATCH: "BATCH", RESPONSE: "RESPONSE", FAIL: "FAIL", RELEASE: "RELEASE", CANCEL: "CANCEL", DETACH: "DETACH",
}  # fmt: skip
MIB = 1 << 20
BUDGET = 256 * MIB
RECORD = len(batch_record(7, [Request(outputs=["y"])], [Tensor("x", FP32, [1, 2], struct.pack("<2f", 1, 2))]))
OVER_LINK = 320


def answer(batch: int) -> bytes:
    """The one response to a batch of one request."""
    return response_record(batch, [Answer(0, rows=1)], [Tensor("y", FP32, [1, 2], struct.pack("<2f", 3, 4))])


class Trace:
    """A conversation, step by step."""

    def __init__(
        self, about: str, *sides: str, link: str = "unix", decoupled: bool = False, max_in_flight: int = 1
    ) -> None:
        self.decoupled = decoupled
        self.max_in_flight = max_in_flight
        self.link = link
        self.lines = [
            f"# {about}",
            f"sides {' '.join(sides or ('worker', 'proxy'))}",
            f"link {link}",
            f"settings decoupled={int(decoupled)} budget={BUDGET} max_in_flight={max_in_flight}",
        ]

    def step(self, text: str) -> Trace:
        """Adds a step as it is."""
        self.lines.append(text)
        return self

    def send(self, side: str, packet: bytes, descriptors: int = 0, part: int | None = None) -> Trace:
        """Adds a packet."""
        name = NAMES.get(struct.unpack_from("<H", packet)[0], "unknown")
        return self.step(f"send {side} {name} {descriptors} {'-' if part is None else part} {packet.hex()}")

    def worker(self, kind: int, descriptors: int = 0, part: int | None = None, **fields: Any) -> Trace:
        """Adds a packet of the worker."""
        return self.send("worker", message(kind, **fields), descriptors, part)

    def proxy(self, kind: int, descriptors: int = 0, part: int | None = None, **fields: Any) -> Trace:
        """Adds a packet of the proxy backend."""
        return self.send("proxy", message(kind, **fields), descriptors, part)

    def hello(self, model: str = "model", major: int = 1) -> Trace:
        """Adds the greeting of a worker."""
        text = f"worker\n{model}\n{DIGEST}"
        packet = greeting(HELLO, text, max_in_flight=self.max_in_flight, model_version=1, major=major, pid=0, uid=0)
        return self.send("worker", packet)

    def greet(self, segment: bool = True) -> Trace:
        """Adds the whole greeting, and the first segment of the proxy backend."""
        self.hello()
        packet = greeting(
            WELCOME, "model", max_in_flight=self.max_in_flight, model_flags=1 + 2 * self.decoupled, model_version=1,
            arena_budget=BUDGET, arena_idle_ms=10_000, pid=0, uid=0,
        )  # fmt: skip
        self.send("proxy", packet)
        return self.segment("proxy", 1, MIB) if segment else self

    def segment(self, side: str, number: int, size: int) -> Trace:
        """Adds a segment to an arena."""
        if self.link == "zmq" or side == "worker":
            self.step(f"do {side} segment {number} {size}")
        return self.send(side, message(SEGMENT, segment=number, length=size), 1)

    def batch(self, number: int, offset: int = 0, *, consumed: int = 0, freed: str = "") -> Trace:
        """Adds a batch; with what it acknowledges, a block of the worker may be free."""
        self.step(f"do proxy batch {number} {offset} {RECORD}")
        self.proxy(BATCH, batch=number, consumed=consumed, segment=1, offset=offset, length=RECORD)
        if freed:
            self.step(f"see worker freed {freed}")
        return self.step(f"see worker batch {number}")

    def respond(
        self, number: int, offset: int = 0, *, length: int = OVER_LINK, flags: int, record: bytes | None = None
    ) -> Trace:
        """Adds a response in segment 1 of the worker."""
        self.step(f"write worker 1 {offset} {(answer(number) if record is None else record).hex()}")
        how = "done" if flags & BATCH_DONE else "more"
        self.step(f"do worker respond {number} 1 {offset} {length} {how}")
        self.worker(RESPONSE, flags=flags, batch=number, segment=1, offset=offset, length=length)
        self.step(f"see proxy answered {number}")
        return self.step(f"see proxy done {number}") if flags & BATCH_DONE else self


def attached(about: str, *sides: str, **settings: int) -> Trace:
    """A worker that has greeted, and has a segment where the trace is about its packets."""
    return Trace(about, *sides, **settings).greet()  # type: ignore[arg-type]


def broken_worker(about: str) -> Trace:
    """A worker that has a batch and a segment, for a trace that it ends by a violation."""
    return attached(about, "proxy").batch(7).segment("worker", 1, MIB)


def traces() -> dict[str, str]:
    """Every trace by the name of its file."""
    done = INPUT_RELEASED | BATCH_DONE
    made = {
        "greeting": attached("A worker attaches."),
        "refused_version": Trace("A worker of another major version.", "proxy").hello(major=2)
        .send("proxy", greeting(REFUSE, "the reason", pid=0, uid=0)).step("end proxy refused"),
        "refused_by_version": Trace("A proxy backend of another major version.", "worker").hello()
        .send("proxy", greeting(REFUSE, "speak 2.0", major=2)).step("end worker version"),
        "refused_model": Trace("A worker for another model.", "proxy").hello(model="other")
        .send("proxy", greeting(REFUSE, "the reason", pid=0, uid=0)).step("end proxy refused"),
        "refused": Trace("A worker that is refused.", "worker").hello()
        .send("proxy", greeting(REFUSE, "another model")).step("end worker refused"),
        "batch": attached("A batch is answered; the next one acknowledges the response.")
        .batch(7).segment("worker", 1, MIB)
        .step("do worker unused 1 0").respond(7, flags=done).step("see proxy freed 1 0")
        .batch(8, consumed=1, freed="1 0")
        .step("do worker unused 1 0").respond(8, flags=done).step("see proxy freed 1 0")
        .step("do proxy tick").proxy(RELEASE, consumed=2).step("see worker freed 1 0"),
        "fail": attached("A batch that the worker cannot serve.").batch(7).step("do worker unused 1 0")
        .step("do worker fail 7 3 why").worker(FAIL, flags=done, batch=7, index=3, body=b"why")
        .step("see proxy done 7").step("see proxy freed 1 0"),
        "stream": attached("A stream fills its window, and goes on when it was read.", decoupled=1)
        .batch(7).segment("worker", 1, 128 * MIB)
        .step(f"see worker free 0 {40 * MIB}")
        .respond(7, length=40 * MIB, flags=0, record=response_record(7, [Answer(0, flags=0)]))
        .step(f"see worker full {40 * MIB} {40 * MIB}")
        .proxy(RELEASE, consumed=1).step("see worker freed 1 0").step(f"see worker free 0 {40 * MIB}")
        .respond(7, 64, flags=0, record=response_record(7, [Answer(0, flags=0)]))
        .proxy(RELEASE, consumed=2).step("see worker freed 1 64")
        .step("do worker unused 1 0")
        .respond(7, 128, flags=done, record=response_record(7, [Answer(0, flags=1 | 4)])).step("see proxy freed 1 0")
        .proxy(RELEASE, consumed=3).step("see worker freed 1 128"),
        "cancel": attached("The caller of a request is gone.").batch(7).segment("worker", 1, MIB)
        .step("do proxy cancel 7 0").proxy(CANCEL, batch=7, index=0).step("see worker cancelled 7 0")
        .step("do worker unused 1 0").respond(7, flags=done).step("see proxy freed 1 0"),
        "pause": attached("Two callers are slow, and the batch ends while one still is.", "worker", decoupled=1)
        .batch(7).segment("worker", 1, MIB)
        .proxy(PAUSE, batch=7, index=0).step("see worker paused [0]")
        .proxy(PAUSE, batch=7, index=1).step("see worker paused [0, 1]")
        .proxy(RESUME, batch=7, index=0).step("see worker paused [1]")
        .step("do worker unused 1 0").respond(7, flags=done, record=response_record(7, [Answer(0, flags=1 | 4)]))
        .proxy(RESUME, batch=7, index=1).step("see worker paused []")
        .proxy(PAUSE, batch=7, index=1).step("see worker paused []"),
        "release": attached("The callable keeps its inputs for a while.").batch(7).segment("worker", 1, MIB)
        .respond(7, flags=BATCH_DONE)
        .step("do worker unused 1 0").step("do worker tick").worker(RELEASE, segment=1, offset=0)
        .step("see proxy freed 1 0"),
        "release_early": attached("A stream lets its inputs go before its end.", decoupled=1, max_in_flight=2)
        .batch(7).segment("worker", 1, MIB).step("do worker unused 1 0")
        .respond(7, flags=INPUT_RELEASED, record=response_record(7, [Answer(0, flags=0)])).step("see proxy freed 1 0")
        .proxy(RELEASE, consumed=1).step("see worker freed 1 0")
        # The same block again, for another batch: an answer to the first one must not claim it.
        .batch(8, consumed=1).step("do worker unused 1 0")
        .step(f"write worker 1 0 {response_record(7, [Answer(0, flags=1 | 4)]).hex()}")
        .step(f"do worker respond 7 1 0 {OVER_LINK} done")
        .worker(RELEASE, segment=1, offset=0).step("see proxy freed 1 0")
        .worker(RESPONSE, flags=BATCH_DONE, batch=7, segment=1, offset=0, length=OVER_LINK)
        .step("see proxy answered 7").step("see proxy done 7")
        .proxy(RELEASE, consumed=2).step("see worker freed 1 0")
        .respond(8, flags=BATCH_DONE, record=response_record(8, [Answer(0, flags=1 | 4)]))
        .proxy(RELEASE, consumed=3).step("see worker freed 1 0"),
        "detach": attached("A worker leaves with a batch in flight.").batch(7).segment("worker", 1, MIB)
        .step("do worker detach").worker(DETACH)
        .step("do worker unused 1 0").respond(7, flags=done).step("see proxy freed 1 0").step("end proxy detached"),
        "segment_closed": attached("A worker gives memory up.").batch(7).segment("worker", 1, MIB)
        .step("do worker close 1").worker(SEGMENT_CLOSE, segment=1).segment("worker", 2, MIB)
        .step("do worker unused 1 0").step(f"write worker 2 0 {answer(7).hex()}")
        .step(f"do worker respond 7 2 0 {OVER_LINK} done")
        .worker(RESPONSE, flags=done, batch=7, segment=2, offset=0, length=OVER_LINK)
        .step("see proxy answered 7").step("see proxy done 7").step("see proxy freed 1 0"),
        # ---- violations of a worker ----
        "bad_size": broken_worker("A worker's message says another size.")
        .send("worker", struct.pack("<HHI", RELEASE, 0, 49) + bytes(40)).step("end proxy violation"),
        "bad_short": broken_worker("Less than a header.").send("worker", b"short").step("end proxy violation"),
        "bad_kind": broken_worker("A worker sends what nobody knows.").worker(99).step("end proxy violation"),
        "bad_direction": broken_worker("A worker sends a batch.").worker(BATCH, batch=1).step("end proxy violation"),
        "bad_batch": broken_worker("An answer to a batch that is not there.")
        .worker(RESPONSE, flags=done, batch=9, segment=1, length=OVER_LINK).step("end proxy violation"),
        "bad_segment": broken_worker("An answer in a segment that is not there.")
        .worker(RESPONSE, flags=done, batch=7, segment=9, length=OVER_LINK).step("end proxy violation"),
        "bad_place": broken_worker("An answer beyond the end of its segment.")
        .worker(RESPONSE, flags=done, batch=7, segment=1, offset=MIB - 64, length=OVER_LINK)
        .step("end proxy violation"),
        "bad_alignment": broken_worker("An answer that is not aligned.")
        .worker(RESPONSE, flags=done, batch=7, segment=1, offset=8, length=OVER_LINK).step("end proxy violation"),
        "bad_release": broken_worker("A release of what is not in use.")
        .worker(RELEASE, segment=1, offset=64).step("end proxy violation"),
        "bad_descriptor": broken_worker("A descriptor with a message that carries none.")
        .worker(DETACH, 1).step("end proxy violation"),
        "bad_segment_twice": broken_worker("A segment that is announced twice.")
        .worker(SEGMENT, 1, segment=1, length=MIB).step("end proxy violation"),
        "bad_segment_alone": broken_worker("A segment without its descriptor.")
        .worker(SEGMENT, segment=2, length=MIB).step("end proxy violation"),
        "bad_segment_budget": broken_worker("A segment beyond the budget.")
        .worker(SEGMENT, 1, segment=2, length=BUDGET).step("end proxy violation"),
        # ---- violations of a proxy backend ----
        "bad_proxy_size": attached("A proxy backend's message says another size.", "worker")
        .send("proxy", struct.pack("<HHI", RELEASE, 0, 49) + bytes(40)).step("end worker violation"),
        "bad_proxy_kind": attached("A proxy backend sends what nobody knows.", "worker")
        .proxy(99).step("end worker violation"),
        "bad_proxy_direction": attached("A proxy backend sends a response.", "worker")
        .proxy(RESPONSE, batch=1).step("end worker violation"),
        "bad_proxy_acknowledgement": attached("More responses are acknowledged than were sent.", "worker")
        .batch(7).segment("worker", 1, MIB).step("do worker unused 1 0").respond(7, flags=done)
        .proxy(RELEASE, consumed=2).step("see worker freed 1 0").step("end worker violation"),
        "bad_proxy_segment": attached("A batch in a segment that is not there.", "worker")
        .proxy(BATCH, batch=7, segment=2, length=RECORD).step("end worker violation"),
        "bad_proxy_place": attached("A batch beyond the end of its segment.", "worker")
        .proxy(BATCH, batch=7, segment=1, offset=MIB, length=RECORD).step("end worker violation"),
        "bad_proxy_alignment": attached("A batch that is not aligned.", "worker")
        .proxy(BATCH, batch=7, segment=1, offset=8, length=RECORD).step("end worker violation"),
        "bad_proxy_descriptor": attached("A descriptor with a message that carries none.", "worker")
        .proxy(BATCH, 1, batch=7, segment=1, length=RECORD).step("end worker violation"),
        "bad_proxy_segment_twice": attached("A segment that is announced twice.", "worker")
        .proxy(SEGMENT, 1, segment=1, length=MIB).step("end worker violation"),
        "bad_proxy_segment_alone": attached("A segment without its descriptor.", "worker")
        .proxy(SEGMENT, segment=2, length=MIB).step("end worker violation"),
        "bad_proxy_segment_budget": attached("A segment beyond the budget.", "worker")
        .proxy(SEGMENT, 1, segment=2, length=BUDGET).step("end worker violation"),
        # ---- over ZeroMQ ----
        "zmq_parts": Trace("Records that come with their messages.", link="zmq").greet(segment=False)
        .step(f"do proxy batch 7 - {RECORD}").proxy(BATCH, part=RECORD, batch=7, length=RECORD)
        .step("see worker batch 7").step(f"do worker respond 7 0 0 {OVER_LINK} done")
        .worker(RESPONSE, part=OVER_LINK, flags=BATCH_DONE, batch=7, length=OVER_LINK)
        .step("see proxy answered 7").step("see proxy done 7").step("do worker detach").worker(DETACH),
        "zmq_memory": Trace("Records in shared memory; blocks go back by name.", link="zmq").greet()
        .batch(7).segment("worker", 1, MIB)
        .step("do worker unused 1 0").respond(7, flags=done).step("see proxy freed 1 0")
        .step("do proxy unused 1 0").step("do proxy tick")
        .proxy(RELEASE, segment=1, offset=0).step("see worker freed 1 0"),
        "zmq_dismissed": Trace("A proxy lets its worker go.", "worker", link="zmq").greet()
        .proxy(DETACH).step("end worker detached"),
        "zmq_refused": Trace("A proxy ends the connection of a worker that broke the protocol.", "worker", link="zmq")
        .greet().send("proxy", greeting(REFUSE, "it sent garbage")).step("end worker refused"),
        "zmq_bad_part": Trace("A batch whose record has another length.", "worker", link="zmq").greet()
        .proxy(BATCH, part=RECORD - 1, batch=7, length=RECORD).step("end worker violation"),
        "zmq_bad_release": Trace("A block that is given back twice.", "worker", link="zmq").greet()
        .proxy(RELEASE, segment=1, offset=0).step("end worker violation"),
        "zmq_bad_answer": Trace("An answer without its record.", "proxy", link="zmq").greet()
        .batch(7).worker(RESPONSE, flags=BATCH_DONE, batch=7, length=OVER_LINK).step("end proxy violation"),
    }  # fmt: skip
    return {f"{name}.trace": "\n".join(trace.lines) + "\n" for name, trace in made.items()}


def stale_traces() -> Iterator[str]:
    """The names of files that are not what this script makes."""
    for name, text in traces().items():
        path = FOLDER / "traces" / name
        if not path.is_file() or path.read_text() != text:
            yield name


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(f"not as generated: {', '.join(names)}" if (names := list(stale_traces())) else 0)
    for file_name, content in traces().items():
        (FOLDER / "traces" / file_name).write_text(content)

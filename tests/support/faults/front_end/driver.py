"""Sends cases to a server, and knows which ones it had when it died."""

from __future__ import annotations

import re
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from support.faults.front_end.grpc_messages import Message
from support.faults.front_end.requests import Case
from support.faults.front_end.served import Recent, Served

# How long a server may be silent before that counts as an answer that never comes, in seconds.
PATIENCE_S = 120.0
THREADS = 8
# Any of these may be what killed it: each thread had one under way, and what a request breaks may show later.
MOST_RECENT = 24
TOKEN_KEY = "triton-grpc-protocol-triton-access-token"


@dataclass
class Report:
    """What became of the cases."""

    # How many ended how: the status, or what came in the place of an answer.
    outcomes: Counter[str] = field(default_factory=Counter)
    last: list[int] | None = None  # the numbers of the last ones sent, where the server died
    silent: list[int] = field(default_factory=list)  # the numbers of those that were never answered

    @property
    def sent(self) -> int:
        return sum(self.outcomes.values())


def exchange(address: tuple[str, int], case: Case, timeout_s: float = PATIENCE_S) -> str:
    """Send one case on a connection of its own.

    Returns:
        The status of the answer, or what came in its place: `cut` where none was waited for, `closed` and `reset` where
        the server ended the connection, `silent` where nothing came.

    Raises:
        ConnectionRefusedError: Nobody listens.
    """
    with socket.create_connection(address, timeout=timeout_s) as connection:
        try:
            connection.sendall(case.content)
            if case.cut:
                return "cut"
            # Half a request has no answer otherwise: the server waits for the rest.
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            # The server has ended the connection before it had all; it may have said why.
            pass
        received = b""
        try:
            while b"\r\n" not in received:
                data = connection.recv(65536)
                if not data:
                    return "closed"
                received += data
            # The rest of the answer: until it is whole, or the server closes or pauses.
            connection.settimeout(0.05)
            while not _is_whole(received) and (data := connection.recv(65536)):
                received += data
        except TimeoutError:
            if not received:
                return "silent"
        except OSError:
            if not received:
                return "reset"
        return received.split(b"\r\n", 1)[0].decode("latin-1")[9:12]


def _is_whole(received: bytes) -> bool:
    head, end, body = received.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return bool(end and length) and len(body) >= int(length[1] if length else 0)


def attack(server: Served, make: Callable[[int], Case], numbers: range) -> Report:
    """Send the cases of some numbers over HTTP; ends early where the server is dead."""

    def send(number: int) -> str:
        try:
            return exchange(server.address, make(number))
        except ConnectionRefusedError:
            return "refused"

    return _attack(server, send, numbers)


def attack_grpc(server: Served, make: Callable[[int], Message], numbers: range) -> Report:
    """Send the messages of some numbers over gRPC; ends early where the server is dead."""
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(server.grpc_address, options) as channel:
        return _attack(server, lambda number: send_message(channel, make(number), server.token), numbers)


def send_message(channel: grpc.Channel, message: Message, token: str) -> str:
    """Make one call and give its status."""
    metadata = [(TOKEN_KEY, token)]
    try:
        if message.is_stream:
            for _ in channel.stream_stream(message.method)(
                iter([message.content]), metadata=metadata, timeout=PATIENCE_S
            ):
                pass
        else:
            channel.unary_unary(message.method)(message.content, metadata=metadata, timeout=PATIENCE_S)
    except grpc.RpcError as error:
        return "silent" if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else str(error.code().name)
    return "OK"


def _attack(server: Served, send: Callable[[int], str], numbers: range) -> Report:
    report = Report()
    lock = threading.Lock()
    left = iter(numbers)
    recent = Recent(MOST_RECENT)
    dead = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        while not dead.is_set():
            with lock:
                number = next(left, None)
            if number is None:
                return
            recent.add(number)
            outcome = send(number)
            with lock:
                report.outcomes[outcome] += 1
                if outcome == "silent":
                    report.silent.append(number)
            if outcome in ("closed", "reset", "refused", "UNAVAILABLE") and not server.is_alive():
                dead.set()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)
            dead.set()

    workers = [threading.Thread(target=run) for _ in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    if not server.is_alive():
        report.last = recent.list()
    return report

"""tritonserver's front ends under requests that nobody should send: it answers, or ends the connection, and lives.

Every request is made from the seed and its number alone. `PYTRITON_TEST_FUZZ_REQUESTS` and `PYTRITON_TEST_FUZZ_SEED`
say how many the long form sends, and which.
"""

from __future__ import annotations

import functools
import os

import pytest

from support.faults.front_end import grpc_messages, requests
from support.faults.front_end.driver import Report, attack, attack_grpc, exchange
from support.faults.front_end.poisons import POISONS
from support.faults.front_end.requests import Case
from support.faults.front_end.served import Served, served

SEED = int(os.environ.get("PYTRITON_TEST_FUZZ_SEED", "1"))
MANY = int(os.environ.get("PYTRITON_TEST_FUZZ_REQUESTS", "100000"))
SOME = 2000


def check(server: Served, report: Report, describe: str) -> None:
    print(f"{describe}: seed {SEED}, {report.sent} sent, {dict(report.outcomes.most_common())}, {server.rss_mib()} MiB")
    assert report.last is None, f"{describe}: the server died with seed {SEED}; the last requests: {report.last}"
    assert not report.silent, f"{describe}: never answered, with seed {SEED}: {report.silent}"
    server.answers()


def attack_http(server: Served, count: int) -> None:
    make = functools.partial(requests.make, SEED, token=server.token)
    report = attack(server, make, range(count))
    if report.last is not None:
        kinds = {number: make(number).kind for number in report.last}
        pytest.fail(f"the server died after {report.sent} requests with seed {SEED}; the last ones: {kinds}")
    check(server, report, "HTTP")
    # Else the requests went somewhere else.
    assert {"200", "400"} <= report.outcomes.keys()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_poisons() -> None:
    left = list(POISONS)
    problems = []
    while left:
        # A server that one of them ended is followed by another, so that all are tried.
        with served() as server:
            while left and server.is_alive():
                name = left.pop(0)
                try:
                    outcome = exchange(server.address, Case(name, POISONS[name]()))
                except OSError as error:
                    # One that was tried before ended it, late.
                    problems.append(f"before {name}: {error}")
                    left.insert(0, name)
                    break
                if outcome == "silent" or not server.goes_on():
                    problems.append(f"{name}: {outcome}, and the server {'lives' if server.is_alive() else 'is dead'}")
    assert not problems, "\n".join(problems)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_some_requests() -> None:
    with served() as server:
        attack_http(server, SOME)
        check(server, attack_grpc(server, functools.partial(grpc_messages.make, SEED), range(SOME // 4)), "gRPC")


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_requests_over_http() -> None:
    with served() as server:
        attack_http(server, MANY)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_messages_over_grpc() -> None:
    with served() as server:
        check(server, attack_grpc(server, functools.partial(grpc_messages.make, SEED), range(MANY)), "gRPC")


def test_requests_are_made_again_from_their_number() -> None:
    for number in range(50):
        assert requests.make(SEED, number) == requests.make(SEED, number)
        assert grpc_messages.make(SEED, number) == grpc_messages.make(SEED, number)
    assert len({requests.make(SEED, number).content for number in range(50)}) > 40

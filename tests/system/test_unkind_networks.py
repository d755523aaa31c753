"""A machine that does not reach itself as others do: in a network of its own, where the system allows one."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from support.paths import TESTS
from support.waiting import PATIENCE_S

SERVE = """
import os, sys
from pytriton.exceptions import PyTritonValidationError
from pytriton.triton import Triton, TritonConfig
from support.callables import X, Y, identity
from support.http import infer

addresses = dict(item.split("=") for item in sys.argv[1:])
try:
    with Triton(config=TritonConfig(http_port=0, grpc_port=0, metrics_port=0, **addresses)) as triton:
        triton.bind("m", identity, X, Y)
        print("answers", infer(triton.http_url, "m", 3.0), triton.http_url, triton.metrics_url)
except PyTritonValidationError as error:
    print(error)
"""
ANYWHERE = ["http_address=::", "grpc_address=::"]


LOCALHOST = """
from support.clients import address_of, ask_all, serving_all

addresses = dict.fromkeys(("http_address", "grpc_address"), "localhost")
with serving_all(**addresses) as triton:
    for protocol in ("http", "grpc"):
        url = address_of(triton, protocol)
        assert "[::1]" in url, url
        ask_all(url.replace("[::1]", "localhost"), init_timeout_s=600)
print("all have been answered")
"""


def serve(network: str, *addresses: str, program: str = SERVE) -> str:
    """Start a server in a network that a shell script makes; return what came of it."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("unshare and ip of util-linux and iproute2 are missing")
    if subprocess.run(["unshare", "-n", "sh", "-ec", network], capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not make such a network, or this machine has no IPv6")
    command = ["unshare", "-n", "sh", "-ec", f'{network}; exec "$@"', "sh", sys.executable, "-c", program, *addresses]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=TESTS)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_loopback_is_down() -> None:
    said = serve("true")
    assert "TritonConfig.http_address cannot be asked anything by this machine, which does not reach 127.0.0.1" in said
    assert said.endswith("Network is unreachable. Is the loopback interface up (`ip link set lo up`)?")


WITHOUT_IPV4 = "ip link set lo up; ip addr del 127.0.0.1/8 dev lo"


def test_there_is_ipv6_alone() -> None:
    assert serve(WITHOUT_IPV4).endswith("It reaches itself at ::1 alone: set TritonConfig.http_address='::', or '::1'.")
    # Nobody has said where the page of metrics, and Triton's own, are to be.
    assert serve(WITHOUT_IPV4, *ANYWHERE).startswith("answers [3.0] http://[::1]:")


def test_localhost_is_an_address_of_ipv6() -> None:
    """Whatever /etc/hosts says of it."""
    assert serve(WITHOUT_IPV4, program=LOCALHOST) == "all have been answered"


def test_there_is_ipv4_alone() -> None:
    said = serve("ip link set lo up; ip addr del ::1/128 dev lo", *ANYWHERE)
    assert said.endswith(
        "It reaches itself at 127.0.0.1 alone: set TritonConfig.http_address='0.0.0.0', or '127.0.0.1'."
    )

"""What every way to serve makes of random batches, honest and hostile, is what the reference of the protocol says."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.isolation.random_batches import Requests, differences
from support.isolation.raw_requests import together
from support.isolation.ways import WAYS, Batching

BATCHES = int(os.environ.get("PYTRITON_REFERENCE_BATCHES", "60"))
SOAK_BATCHES = int(os.environ.get("PYTRITON_FUZZ_BATCHES", "100000"))
LARGEST = 8


@pytest.mark.parametrize("way", WAYS)
def test_random_batches(way: str, tmp_path: Path) -> None:
    check(way, tmp_path, BATCHES)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("way", WAYS)
def test_random_batches_for_long(way: str, tmp_path: Path) -> None:
    check(way, tmp_path, SOAK_BATCHES // len(WAYS))


def check(way: str, folder: Path, batches: int) -> None:
    """Hold a way to serve against the reference, with so many batches over all that asks it."""
    seed = int(os.environ.get("PYTRITON_FUZZ_SEED", random.randrange(1 << 32)))
    print(f"PYTRITON_FUZZ_SEED={seed}")
    by_stub = way == "python-proxy"
    with WAYS[way](folder, Batching(LARGEST, 2000)) as senders, ThreadPoolExecutor(LARGEST) as pool:
        for name, send in senders.items():
            made = Requests(seed, reaching=not by_stub, rowless=not by_stub and not name.startswith("ensemble"))
            joined = refused = 0
            for number in range(batches // len(senders) + 1):
                requests = made.batch()
                answers = together(send, requests, pool)
                wrong = list(differences(requests, answers, by_rows=name.startswith("batch")))
                assert not wrong, f"{name}, seed {seed}, batch {number}:\n" + "\n".join(wrong)
                refused += sum(bool(answer.error) for answer in answers)
                joined += sum(b"," in answer.outputs["ids"].payload for answer in answers if not answer.error)
            print(f"{name}: {number + 1} batches, {refused} requests refused, {joined} served together with others")

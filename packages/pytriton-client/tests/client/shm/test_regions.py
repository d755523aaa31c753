"""Regions of shared memory, and who has them. No server."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.client._core.requests import InferCall, InferRequest, InferResponse
from pytriton.client._core.spec import ModelSpec, TensorSpec
from pytriton.client._shm import placing, pool, regions
from pytriton.client._shm.pool import RegionPool, stale_regions_of
from pytriton.client._shm.regions import Region, is_left_behind, remove_left_files
from support.waiting import eventually

pytestmark = pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs the shared memory of Linux")

KIB = 1 << 10
URL = "http://localhost:1"


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = set(os.listdir("/dev/shm"))
    stale_regions_of(URL).names.clear()
    yield
    gc.collect()
    eventually(lambda: "pytriton-client-watchdog" not in {thread.name for thread in threading.enumerate()})
    assert not [name for name in set(os.listdir("/dev/shm")) - before if f".{os.getpid()}." in name]


def made(regions_: RegionPool, size: int) -> Region:
    region = regions_.make(size)
    region.unlink()
    return region


def left() -> list[str]:
    return list(stale_regions_of(URL).names)


def test_region_has_its_memory_and_nobody_else_sees_it() -> None:
    region = Region(1 << 20)
    path = Path("/dev/shm", region.name)
    try:
        status = path.stat()
        assert status.st_mode & 0o777 == 0o600
        assert status.st_blocks * 512 >= region.size
        region.memory[:] = 7
        assert path.read_bytes() == b"\x07" * region.size
        assert not is_left_behind(region.name)
    finally:
        region.unlink()
    region.unlink()
    assert not path.exists()


def test_idle_memory_goes_back_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does although a server has it mapped, and nobody calls the client."""
    idle = RegionPool(URL)
    region = idle.make(1 << 20)
    with Path("/dev/shm", region.name).open("rb") as mapped_by_the_server:
        region.unlink()
        region.memory[:] = 7
        monkeypatch.setattr(pool, "_LONGEST_FREE_S", 0.2)
        idle.give_back(region)
        if idle.take(1 << 20) is region:  # else the test was slow
            assert region.memory[0] == 7
            assert left() == []
            idle.give_back(region)
        eventually(lambda: left() == [region.name])
        eventually(lambda: os.fstat(mapped_by_the_server.fileno()).st_blocks == 0)
        assert idle.take(1 << 20) is None
        monkeypatch.setattr(pool, "_LONGEST_FREE_S", 1e9)
        other = made(idle, 1 << 20)
        idle.give_back(other)
        idle.close()


def test_memory_that_an_array_lay_in_goes_back_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller may drop the result of its last call long after it."""
    idle = RegionPool(URL)
    region = made(idle, 1 << 20)
    owner = region.memory[:]
    assert idle.may_lend(region)
    idle.lend(region, owner)
    monkeypatch.setattr(pool, "_LONGEST_FREE_S", 0.2)
    del owner
    eventually(lambda: left() == [region.name])
    idle.close()


def test_the_wait_for_idle_memory_does_not_keep_a_client() -> None:
    dropped = RegionPool(URL)
    region = made(dropped, 1 << 20)
    dropped.give_back(region)
    gone = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert gone() is None
    assert left() == [region.name]


def test_more_than_there_is() -> None:
    with pytest.raises(OSError, match=r"bytes are needed") as caught:
        Region(regions.room()[0] + (1 << 30))
    assert caught.value.errno == errno.ENOSPC


def test_names_of_processes_that_are_gone() -> None:
    source = (
        "from pytriton.client._shm.regions import Region; "
        "region = Region(4096); print(region.name, flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        name = process.stdout.readline().decode().strip()
        assert not is_left_behind(name)
        remove_left_files()
        assert Path("/dev/shm", name).exists()
        process.kill()
        # Also before its parent has asked how it ended.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_left_behind(name)
        process.wait()
        assert is_left_behind(name)
        remove_left_files()
        assert not Path("/dev/shm", name).exists()
    prefix, place, pid, start, rest = name.rsplit(".", 4)
    assert is_left_behind(f"{prefix}.{place}.{os.getpid()}.1.{rest}")  # of an older process with this number
    for other in (f"{prefix}.00.{pid}.{start}.{rest}", f"{prefix}.{place}.{pid}.{start}", "triton", f"{name}/.."):
        assert not is_left_behind(other)


def test_region_is_used_again_by_what_fits() -> None:
    pool_ = RegionPool(URL)
    assert pool_.take(100 * KIB) is None
    region = made(pool_, 100 * KIB)
    assert region.size == 128 * KIB
    assert pool_.take(KIB) is None
    pool_.give_back(region)
    assert pool_.take(60 * KIB) is region
    assert pool_.take(60 * KIB) is None
    pool_.give_back(region)
    assert left() == []
    # One that grows takes the place of the smaller one.
    assert pool_.take(300 * KIB) is None
    assert left() == [region.name]


def test_region_is_lent_until_the_last_array_is_gone() -> None:
    pool_ = RegionPool(URL)
    region = made(pool_, 64 * KIB)
    assert pool_.may_lend(region)
    owner = region.memory[:]
    view = np.frombuffer(owner.data[: 8 * KIB], np.float32).reshape(2, -1)[1, ::2]
    pool_.lend(region, owner)
    del owner
    gc.collect()
    assert pool_.take(64 * KIB) is None
    del view
    assert pool_.take(64 * KIB) is region


def test_no_more_is_lent_than_a_part_of_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "room", lambda: (1 << 20, 1 << 20))
    pool_ = RegionPool(URL)
    lent = [made(pool_, 64 * KIB) for _ in range(5)]
    assert [pool_.may_lend(region) for region in lent] == [True] * 4 + [False]
    pool_.give_back(lent[0])
    assert pool_.may_lend(lent[4])
    for region in lent:
        pool_.give_back(region)
    assert left() == [lent[0].name]  # so much may be free


def test_what_is_free_for_long_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    pool_ = RegionPool(URL)
    old, new = made(pool_, 64 * KIB), made(pool_, 64 * KIB)
    pool_.give_back(old)
    monkeypatch.setattr(pool, "_LONGEST_FREE_S", 0.0)
    monkeypatch.setattr(pool, "_wait_idle", lambda _idleness: None)  # it would drop the new one as well
    pool_.give_back(new)
    assert left() == [old.name]


def test_memory_goes_back_without_the_lock_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Giving back a large region takes long, and other threads take and give back regions meanwhile."""
    regions_ = RegionPool(URL)
    dropped, free = made(regions_, 1 << 20), made(regions_, 64 * KIB)
    regions_.give_back(dropped)
    during = []

    def release(region: Region) -> None:
        regions_.give_back(free)
        during.append((region, regions_.take(64 * KIB)))

    monkeypatch.setattr(Region, "release", release)
    caller = threading.Thread(target=regions_.drop_free, daemon=True)
    caller.start()
    caller.join(60)
    assert during == [(dropped, free)]
    monkeypatch.undo()
    regions_.leave(free)


def test_what_is_given_back_late_is_dropped() -> None:
    pool_ = RegionPool(URL)
    region, other, lent, gone = (made(pool_, 64 * KIB) for _ in range(4))
    owner = lent.memory[:]
    assert pool_.may_lend(lent)
    pool_.lend(lent, owner)
    pool_.give_back(region)
    pool_.forget(gone)
    assert left() == [gone.name, region.name]
    del owner
    pool_.give_back(other)
    assert sorted(left()[2:]) == sorted([lent.name, other.name])
    assert pool_.take(64 * KIB) is None
    again = made(pool_, 64 * KIB)
    pool_.close()
    pool_.give_back(again)
    assert left()[4:] == [again.name]


def test_what_a_dropped_pool_had_is_left() -> None:
    pool_ = RegionPool(URL)
    region = made(pool_, 64 * KIB)
    del pool_
    gc.collect()
    assert left() == [region.name]


def request_of(*shape: int, **options: Any) -> InferRequest:
    tensor = TensorSpec("x", (-1,), np.float32)
    array = np.zeros(shape, np.float32)
    return InferRequest("m", None, "0", ((tensor, array),), InferCall(inputs=(array,), options=options))


@pytest.mark.parametrize(
    ("shape", "dtype", "batching", "expected"),
    [
        ((4, 5), np.float32, True, 240),
        ((4, 5), np.float64, False, 160),
        ((-1,), np.float32, True, None),
        ((4,), np.bytes_, True, None),
    ],
)
def test_sizes_that_follow_from_the_specification(shape: Any, dtype: Any, batching: bool, expected: int | None) -> None:
    spec = ModelSpec("m", batching=batching, outputs=(TensorSpec("y", shape, dtype),))
    sizes = placing.Expectations(1000).sizes(spec, request_of(3, 7), 1)
    assert sizes == ({} if expected is None else {"y": expected})
    assert placing.Expectations(100).sizes(spec, request_of(3, 7), 1) == {}
    assert placing.Expectations(1000).sizes(spec, request_of(3, 7), 241) == {}


def test_sizes_that_were_seen() -> None:
    spec = ModelSpec("m", batching=True, outputs=(TensorSpec("y", (-1,), np.float32),))
    expectations = placing.Expectations(1 << 30)

    def learn(size: int, *shape: int) -> None:
        expectations.learn(spec, request_of(*shape), InferResponse({"y": np.zeros((1, size), np.float32)}), 20)

    learn(4, 1, 7)
    learn(10, 1, 7)
    assert expectations.sizes(spec, request_of(1, 7), 1) == {}
    learn(10, 1, 7)
    assert expectations.sizes(spec, request_of(1, 7), 1) == {"y": 40}
    assert expectations.sizes(spec, request_of(1, 8), 1) == {}
    assert expectations.sizes(spec, request_of(1, 7, sequence_id=1), 1) == {}
    for length in range(8, 8 + 2 * placing._MOST_SHAPES):
        learn(10, 1, length)
    assert len(expectations._seen) == placing._MOST_SHAPES
    learn(10, 1, 7)
    learn(11, 1, 7)
    learn(11, 1, 7)
    assert expectations.sizes(spec, request_of(1, 7), 1) == {}

"""The arena that a worker owns, and the one that it only reads."""

import fcntl
import gc
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytriton.proxy_backend.errors import ArenaFullError, ProtocolError
from pytriton.proxy_backend.protocol.segments import PeerSegments
from pytriton.proxy_backend.transport.arena import NewSegment, OwnArena, OwnedBlock, PeerArena, ViewedBlock

MIB = 1 << 20
GIB = 1 << 30


def grow(arena: OwnArena, length: int) -> NewSegment:
    segment = arena.add_segment(length)
    assert os.fstat(segment.fd).st_size == segment.size
    os.close(segment.fd)
    return segment


def take(arena: OwnArena, length: int) -> OwnedBlock:
    block = arena.allocate(length)
    if block is None:
        grow(arena, length)
        block = arena.allocate(length)
    assert block is not None
    assert block.offset % 64 == 0
    return block


# ---- our own -------------------------------------------------------------------------------------------------------


def test_blocks_are_aligned_and_apart() -> None:
    arena = OwnArena(8 * MIB)
    blocks = [take(arena, length) for length in (0, 1, 64, 65)]
    assert [block.offset for block in blocks] == [0, 64, 128, 192]
    assert arena.in_use == 320
    blocks[3].memory[192:257] = b"x" * 65


def test_freed_neighbours_become_one_piece() -> None:
    for order in ([0, 1, 2], [2, 1, 0], [0, 2, 1], [1, 0, 2]):
        arena = OwnArena(MIB)
        third = MIB // 4
        blocks = [take(arena, third) for _ in range(3)]
        for index in order:
            arena.release(blocks[index])
        assert arena.in_use == 0
        assert take(arena, MIB).offset == 0


def test_a_hole_is_used_again() -> None:
    arena = OwnArena(MIB)
    first, second, third = (take(arena, 100) for _ in range(3))
    arena.release(second)
    assert take(arena, 128).offset == second.offset
    assert arena.in_use == 3 * 128
    del first, third


def test_grows_up_to_its_budget() -> None:
    arena = OwnArena(4 * MIB)
    take(arena, MIB)
    assert arena.size == MIB
    take(arena, MIB)
    take(arena, 2 * MIB)
    assert arena.size == 4 * MIB
    assert arena.allocate(1) is None
    assert not arena.can_grow(1)
    with pytest.raises(ArenaFullError, match=r"1 bytes .* 4194304 bytes .* Raise arena_budget_bytes") as caught:
        arena.add_segment(1)
    assert (caught.value.needed, caught.value.budget, caught.value.in_use) == (1, 4 * MIB, 4 * MIB)


def test_a_budget_below_the_usual_first_segment() -> None:
    arena = OwnArena(1024)
    assert take(arena, 1000).offset == 0
    with pytest.raises(ArenaFullError):
        arena.add_segment(64)


def test_segments_are_sealed() -> None:
    segment = OwnArena(MIB).add_segment(1)
    try:
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(segment.fd, 0)
        assert not os.get_inheritable(segment.fd)
    finally:
        os.close(segment.fd)


def test_memory_that_nobody_uses_goes_back() -> None:
    arena = OwnArena(64 * MIB)
    small = take(arena, 100)
    large = take(arena, 8 * MIB)
    assert arena.has_idle() is False
    assert arena.trim(0) == []
    arena.release(large)
    assert arena.has_idle()
    assert arena.trim(0) == []  # idle from now on
    assert arena.trim(0) == [large.segment]
    assert arena.size == MIB
    assert arena.in_use == 128
    arena.release(small)
    assert arena.trim(0) == arena.trim(0) == []  # the first MiB stays
    assert not arena.has_idle()


def test_unused_segments_make_way() -> None:
    arena = OwnArena(8 * MIB)
    small = take(arena, 100)
    large = take(arena, 4 * MIB)
    arena.release(large)
    assert arena.allocate(6 * MIB) is None
    assert not arena.can_grow(6 * MIB)
    assert arena.drop_unused() == [large.segment]
    assert arena.size == MIB
    assert take(arena, 6 * MIB).offset == 0
    arena.release(small)
    assert arena.drop_unused() == [small.segment]


def test_use_in_between_restarts_the_clock() -> None:
    arena = OwnArena(64 * MIB)
    take(arena, 1)
    for _ in range(2):
        block = take(arena, 8 * MIB)
        arena.release(block)
        assert arena.trim(0) == []
    assert arena.trim(3600) == []
    assert len(arena.trim(0)) == 1


# ---- the peer's ----------------------------------------------------------------------------------------------------


def memfd(size: int, seals: int | None = None) -> int:
    fd = os.memfd_create("pytriton-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK if seals is None else seals)
    return fd


def test_only_sealed_memory_of_the_right_size_is_taken(tmp_path: Path) -> None:
    arena = PeerArena()
    arena.attach(1, memfd(4096), 4096)
    for number, fd, size, reason in (
        (2, memfd(4096), 4097, "hold 4097 bytes"),
        (2, memfd(4096), 0, "sealed against shrinking"),
        (2, memfd(4096, 0), 4096, "sealed against shrinking"),
        (2, memfd(4096, fcntl.F_SEAL_GROW), 4096, "sealed against shrinking"),
        (2, os.open(tmp_path, os.O_RDONLY), 4096, "not a memfd"),
        (2, os.open(os.devnull, os.O_RDONLY), 4096, "not a memfd"),
    ):
        with pytest.raises(ProtocolError, match=reason):
            arena.attach(number, fd, size)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


@pytest.mark.parametrize(
    ("segment", "offset", "length"),
    [(2, 0, 64), (1, 32, 64), (1, 0, 4097), (1, 4096, 1), (1, 1 << 63, 64), (1, 64, 4096)],
)
def test_blocks_outside_are_refused(segment: int, offset: int, length: int) -> None:
    segments = PeerSegments(4096)
    segments.announce(1, 4096, 1)
    with pytest.raises(ProtocolError, match="does not lie inside"):
        segments.check(segment, offset, length)


def views(block: ViewedBlock) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = np.ndarray((4, 8), np.float32, block, 0)
    return array


@pytest.mark.parametrize(
    "derive",
    [
        lambda a: a,
        lambda a: a[1],
        lambda a: a[1:3, ::2],
        lambda a: a.T,
        lambda a: a.reshape(2, 2, 8),
        lambda a: a.view(np.int32),
        lambda a: a.ravel()[5:],
        lambda a: np.broadcast_to(a, (3, 4, 8)),
        lambda a: a[None].swapaxes(0, 2).squeeze(),
        lambda a: np.asarray(a),
        lambda a: np.frombuffer(memoryview(a), np.uint8),
        lambda a: a.flat,
        lambda a: memoryview(a),
    ],
)
def test_a_block_lives_as_long_as_any_view_of_it(derive: Any) -> None:
    arena = PeerArena()
    arena.attach(1, memfd(4096), 4096)
    block, _ = arena.block(1, 64, 256)
    array = views(block)
    kept = derive(array)
    del block, array
    gc.collect()
    assert not arena.released
    del kept
    gc.collect()
    assert list(arena.released) == [(1, 64)]


def test_a_copy_does_not_keep_the_block() -> None:
    arena = PeerArena()
    arena.attach(1, memfd(4096), 4096)
    block, _ = arena.block(1, 0, 256)
    copy = views(block) + 1
    del block
    assert list(arena.released) == [(1, 0)]
    assert copy.sum() == 32


def test_views_outlive_their_segment() -> None:
    arena = PeerArena()
    fd = memfd(4096)
    with mmap.mmap(fd, 4096) as memory:
        memory[:4] = b"\1\2\3\4"
    arena.attach(1, fd, 4096)
    block, _ = arena.block(1, 0, 256)
    kept = views(block).view(np.uint8)
    del block
    arena.detach(1)
    arena.detach(1)
    assert kept[0, :4].tolist() == [1, 2, 3, 4]


def test_places_beyond_4_gib() -> None:
    """Lengths and offsets of more than 32 bits, in memory that has no pages but the few that are written."""
    size = 12 * GIB
    fd = memfd(size)
    with mmap.mmap(fd, size) as memory:
        memory[10 * GIB : 10 * GIB + 4] = b"tail"
    arena = PeerArena()
    arena.attach(1, fd, size)
    block, _ = arena.block(1, 5 * GIB, 6 * GIB)
    assert block.shape == (6 * GIB,)
    assert bytes(block[5 * GIB : 5 * GIB + 4]) == b"tail"
    segments = PeerSegments(16 * GIB)
    segments.announce(1, size, 1)
    segments.check(1, 5 * GIB, 6 * GIB)
    with pytest.raises(ProtocolError):
        segments.check(1, 5 * GIB, 8 * GIB)

    own = OwnArena(16 * GIB)
    take(own, 5 * GIB)
    later = take(own, 64)
    assert later.offset >= 5 * GIB
    later.memory[later.offset : later.offset + 4] = b"late"

"""Memory that two processes share: pieces come out as they went in, in their order, whatever a broken peer writes."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from types import ModuleType

import pytest
from compiled import variants
from hypothesis import given, settings
from hypothesis import strategies as st
from memories import memories

from dps.engine.core.requests import ring as core
from dps.engine.core.requests.ring import RING_BYTES, SLOT_BYTES, SLOTS, Ring
from dps.engine.wire import shared_memory

if not hasattr(os, "memfd_create"):
    pytest.skip("the system has no such memory", allow_module_level=True)

SECOND = 10**9
ACTIONS = st.lists(st.sampled_from(["make", "make", "take", "take", "lie"]), max_size=60)
RETURNED = struct.Struct("<I")


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("test")
    os.ftruncate(fd, RING_BYTES)
    yield fd
    os.close(fd)


def check(ring: ModuleType, fd: int, actions: list[str], lies: list[int]) -> None:
    """Pieces of two ends beside a queue. A lie is a wrong count of the pieces that were given back."""
    os.pwrite(fd, bytes(64), 0)
    maker, taker = ring.Ring(fd), ring.Ring(fd)
    low = maker.slot().ctypes.data
    on_the_way: deque[int] = deque()
    honest, made, told = True, 0, list(lies)
    for action in actions:
        if action == "make":
            free = maker.wait(0) >= 0
            if honest:
                assert free == (len(on_the_way) < SLOTS)
            slot = maker.slot()
            assert 0 <= slot.ctypes.data - low < SLOTS * SLOT_BYTES
            if free:
                slot[:] = made % 251
                maker.made()
                on_the_way.append(made % 251)
                made += 1
        elif action == "take" and on_the_way:
            expected = on_the_way.popleft()
            if honest:
                assert (taker.slot() == expected).all()
            taker.taken()
            assert not honest or RETURNED.unpack(os.pread(fd, 4, 0))[0] == taker.pieces
        elif action == "lie" and told:
            os.pwrite(fd, RETURNED.pack(told.pop()), 0)
            honest = False
    assert maker.pieces == made


@settings(max_examples=150, deadline=None)
@given(actions=ACTIONS, lies=st.lists(st.integers(0, 2**32 - 1), max_size=3))
def test_pieces_come_as_they_went(actions: list[str], lies: list[int]) -> None:
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, RING_BYTES)
        check(core, fd, actions, lies)
    finally:
        os.close(fd)


WRONG = [
    ("ring.h", "__ATOMIC_SEQ_CST)) < DPS_SLOTS;", "__ATOMIC_SEQ_CST)) <= DPS_SLOTS;"),
    ("ring.h", "__ATOMIC_SEQ_CST)) < DPS_SLOTS;", "__ATOMIC_SEQ_CST)) < DPS_SLOTS - 1;"),
    ("ring.pyx", "(self.pieces % DPS_SLOTS)", "(self.pieces % (DPS_SLOTS - 1))"),
    ("ring.pyx", "        self.pieces += 1\n        dps_give_back", "        dps_give_back"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("source", "old", "new"), WRONG)
def test_a_wrong_variant_is_caught(source: str, old: str, new: str, file: int) -> None:
    (variant,) = variants(["ring"], source, old, new)

    @settings(max_examples=300, deadline=None, database=None)
    @given(actions=ACTIONS)
    def check_all(actions: list[str]) -> None:
        check(variant, file, ["make"] * 10 + actions, [])

    with pytest.raises(AssertionError):
        check_all()


def test_a_maker_waits_until_a_piece_is_given_back(file: int) -> None:
    maker, taker = Ring(file), Ring(file)
    for _ in range(SLOTS):
        maker.made()
    assert maker.wait(0) == -1
    assert maker.wait(SECOND // 1000) == -1
    timer = threading.Timer(0.05, taker.taken)  # by then the maker sleeps
    timer.start()
    assert maker.wait(60 * SECOND) > 0
    timer.join()
    assert maker.wait(-5) == 0, "a slot is free, however little time there is"


def test_two_threads_pass_many_pieces(file: int) -> None:
    """The maker is told by nothing but the counter; the taker by a socket."""
    ours, theirs = socket.socketpair()
    found: list[int] = []

    def take() -> None:
        ring = Ring(file)
        while theirs.recv(1):
            slot = ring.slot()
            found.append(int(slot[0]) if (slot == slot[0]).all() else -1)
            ring.taken()

    thread = threading.Thread(target=take)
    thread.start()
    maker = Ring(file)
    for number in range(200):
        assert maker.wait(60 * SECOND) >= 0
        maker.slot()[:] = number
        maker.made()
        ours.send(b".")
    ours.close()
    thread.join()
    theirs.close()
    assert found == list(range(200))


@pytest.fixture
def ends() -> Iterator[socket.socket]:
    one, other = socket.socketpair()
    with one, other:
        yield one


def test_the_offered_memory_is_opened_and_goes_with_its_ends(ends: socket.socket) -> None:
    before = memories()
    offer = shared_memory.offered()
    assert offer is not None
    ours, number = offer
    theirs = shared_memory.opened(ends, number, ours.mark)
    assert theirs is not None
    theirs.slot()[:] = 7
    theirs.made()
    assert (ours.slot() == 7).all()
    ours.taken()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)  # nobody needs the file any more
    slot = theirs.slot()
    del ours, theirs, offer
    assert sum((memories() - before).values()) == 1
    slot[:] = 8  # an array keeps the memory
    del slot
    assert not memories() - before


def memory(size: int, seals: int | None, there: bool = True) -> int:
    """A file of that size, of which the system has provided all pages, unless they are not `there`."""
    fd = os.memfd_create("dps-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if there:
        os.posix_fallocate(fd, 0, size)
    else:
        os.ftruncate(fd, size)
    if seals is not None:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize(
    ("size", "seals"),
    [
        (RING_BYTES, None),
        (RING_BYTES, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL),
        (RING_BYTES - 1, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL),
        (2 * RING_BYTES, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL),
        (RING_BYTES, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | fcntl.F_SEAL_WRITE),
    ],
)
def test_a_file_that_would_be_a_danger_is_not_opened(size: int, seals: int | None, ends: socket.socket) -> None:
    before, fd = memories(), memory(size, seals)
    try:
        assert shared_memory.opened(ends, fd, 0) is None
    finally:
        os.close(fd)
    assert not memories() - before


def test_other_files_are_not_opened(ends: socket.socket) -> None:
    pipe = os.pipe()
    with open(__file__) as text:
        for number in (text.fileno(), pipe[0], pipe[1], ends.fileno(), 0, 1 << 30, -1):
            assert shared_memory.opened(ends, number, 0) is None
    os.close(pipe[0])
    os.close(pipe[1])
    fd = memory(RING_BYTES, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    mapped = mmap.mmap(fd, RING_BYTES)
    assert shared_memory.opened(ends, fd, 5) is None, "it has another mark"
    mapped[128:136] = (5).to_bytes(8, "little")
    assert shared_memory.opened(ends, fd, 5) is not None
    mapped.close()
    os.close(fd)


def test_memory_whose_pages_are_not_there_is_refused(ends: socket.socket) -> None:
    """A page that the system cannot provide would end the process that writes it."""
    fd = memory(RING_BYTES, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, there=False)
    assert shared_memory.opened(ends, fd, 0) is None
    os.close(fd)


def test_without_such_memory_none_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped, before = memories(), set(os.listdir("/proc/self/fd"))

    def fails(*_: object) -> int:
        raise PermissionError

    with monkeypatch.context() as patched:
        patched.setattr(shared_memory.fcntl, "fcntl", fails)
        assert shared_memory.offered() is None
    with monkeypatch.context() as patched:
        patched.setattr(os, "memfd_create", fails)
        assert shared_memory.offered() is None
        patched.delattr(os, "memfd_create")
        assert shared_memory.offered() is None
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1  # the folder itself
    assert not memories() - mapped
    assert SLOTS & (SLOTS - 1) == 0, "else a counter that begins anew would name another slot"

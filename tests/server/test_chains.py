"""Chains of servers that pass pushes on: the compiled steps against the general way, on the primary and all backups."""

from __future__ import annotations

import collections
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from compiled import put_variant
from hypothesis import given, settings
from hypothesis import strategies as st
from lone_server import LoneServer
from test_service import SPECS, Talk, differences

from dps.engine.state.transfer import first_difference
from dps.engine.wire import frames
from dps.engine.wire.frames import HEADER_SIZE, Header, decode_header
from dps.engine.wire.messages import Placement, ShardPlace
from dps.errors import DPSError


class ChainedServer(LoneServer):
    """The `number`-th server of a chain that holds all shards."""

    def __init__(self, number: int, copies: int, plain: bool):
        super().__init__(SPECS, plain, backup=number > 0)
        self.role.number = number
        self.role.endpoint.connect = self.role.relay.endpoint.connect = self._connect  # type: ignore[method-assign]
        self.link: Any = None
        self.sent: list[bytes] = []  # to the next server
        place = ShardPlace([*range(copies)], None, [1] * copies, False)
        places = {spec.id: [place] * spec.shards for spec in SPECS}
        self.role.adopt(Placement(2, {n: ("here", n + 1) for n in range(copies)}, places))

    def _connect(self, address: Any, session: str, secret: str, on_up: Any, on_frame: Any, on_end: Any) -> Any:
        self.link = SimpleNamespace(open=False, plain=None, party=None, on_frame=on_frame, close=lambda: None)
        self.link.write = lambda buffers: self.sent.append(b"".join(bytes(buffer) for buffer in buffers))
        self._on_up = on_up
        return self.link

    def open_link(self) -> None:
        if self.link is not None and not self.link.open:
            self.link.open = True
            self._on_up(self.link)

    def take_answers(self, answers: bytes) -> None:
        """What the next server has answered."""
        if self.plain and answers:
            inbox = np.frombuffer(bytearray(answers), np.uint8)
            answers = answers[self.link.plain(inbox, 0, len(inbox)) :]
        while answers:
            header = decode_header(answers, 0, 1 << 40)
            end = HEADER_SIZE + header.body
            self.link.on_frame(self.link, header, memoryview(answers[HEADER_SIZE:end]))
            answers = answers[end:]


class Chain:
    """Servers in a chain. Those after the first one, and all answers, wait until `pump`."""

    def __init__(self, copies: int, plain: bool):
        self.plain = plain
        self.servers = [ChainedServer(n, copies, plain) for n in range(copies)]

    def take(self, requests: list[bytes]) -> dict[int, bytes]:
        """Answer frames: the general way one by one, the compiled one together. From a request to its answer."""
        answers = b""
        for arrived in [b"".join(requests)] if self.plain else requests:
            first = self.servers[0]
            first.take(arrived)
            self.pump()
            answers += bytes(first.peer.received)
        found = {}
        while answers:
            header: Header = decode_header(answers, 0, 1 << 40)
            end = HEADER_SIZE + header.body
            assert header.request not in found
            found[header.request], answers = answers[:end], answers[end:]
        return found

    def pump(self) -> None:
        """Let all that is on its way arrive, first down the chain and then up."""
        for one, other in zip(self.servers, self.servers[1:], strict=False):
            one.open_link()
            other.take(b"".join(one.sent))
            one.sent.clear()
        for one, other in reversed([*zip(self.servers, self.servers[1:], strict=False)]):
            one.take_answers(bytes(other.peer.received))
            other.peer.received.clear()

    def check(self) -> None:
        """All replicas are equal, and nothing is on its way."""
        first, *others = self.servers
        assert first.role.relay.unconfirmed()[:2] == (0, 0)
        for spec in SPECS:
            for other in others:
                for number, replica in first.role.tables[spec.id].replicas.items():
                    same = other.role.tables[spec.id].replicas[number].shard
                    assert first_difference(replica.shard, same) is None


def play(seed: int, turns: int = 12) -> Chain:
    """Let two chains answer the same frames; the one with compiled steps."""
    talk, copies = Talk(seed), 2 + seed % 2
    one, other = Chain(copies, plain=True), Chain(copies, plain=False)
    for _ in range(turns):
        arrived = [talk.frame() for _ in range(talk.rng.integers(1, 8))]
        arrived = [
            frame for frame in arrived if decode_header(frame, 0, 1 << 40).kind != frames.STATUS
        ]  # it says what waits
        assert one.take(arrived) == other.take(arrived)
        if talk.chance(0.2):
            keep, over = bool(talk.chance(0.5)), talk.chance(0.5)
            for chain in (one, other):
                chain.servers[0].role.settle(keep, [[1, 1]] if over and talk.numbers[0] > 70 else [])
                chain.pump()
        for server, same in zip(one.servers, other.servers, strict=True):
            assert not differences(server, same)
        one.check()
        other.check()
    return one


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_same_as_the_general_way_on_all_replicas(seed: int) -> None:
    play(seed)


@pytest.mark.thorough
def test_many_of_these_frames_are_plain_on_all_servers() -> None:
    chain = play(1, turns=150)
    assert len(chain.servers) == 3
    assert all(server.answered > 50 for server in chain.servers), "steps, of several frames each"


WRONG = [
    ('outgoing = [b"".join(outgoing)]', 'outgoing = [b"".join(outgoing[::-1])]'),
    ("spans[n].start, spans[n].a, spans[n].b = part[n].start, part[n].a, part[n].b", "spans[n].a = spans[n].b = 0"),
    ("self._spans[n].version\n", "1\n"),
    ("head.count, head.body = self._spans[0].start,", "head.count, head.body = 0,"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new"), [WRONG[0], *(pytest.param(*wrong, marks=pytest.mark.slow) for wrong in WRONG[1:])]
)
def test_a_broken_variant_is_caught(monkeypatch, old: str, new: str) -> None:
    put_variant(monkeypatch, ("service", "forwards", "answers"), old, new)
    with pytest.raises((AssertionError, DPSError)):  # by few of all seeds, 69, 110 and 176 among them
        collections.deque(map(play, range(60, 180)), maxlen=0)

"""PartitionPeer: trainers lend each other partitions, over real connections of the loopback."""

from __future__ import annotations

import contextlib
import inspect
import threading
import time
from collections.abc import Iterator

import dask
import numpy as np
import pytest
from oracles import mutant
from servers import wait_until

from dps.engine.client.environment import ProcessEnvironment
from dps.engine.client.ticket import Ticket
from dps.engine.training import partition_peer, trainer_port
from dps.engine.training.partition_peer import MAX_PICKLES, PartitionPeer
from dps.engine.training.trainer_port import FETCHED_BYTES, TrainerPort
from dps.engine.wire import frames, rights
from dps.engine.wire.handshake import new_secret
from dps.engine.wire.headers import PartitionRequest, PieceAnswer
from dps.errors import (
    DPSError,
    InputError,
    InputTypeError,
    ProtocolError,
    RequestTimeoutError,
    ServerGoneError,
    StoppedError,
)

SECRET = new_secret()
TICKET = Ticket("dps", ("127.0.0.1", 1), new_secret())
LARGE = np.random.default_rng(0).integers(0, 256, 3 * FETCHED_BYTES + 12_345, np.uint8)  # four pieces


def go_on() -> None:
    """Stops nothing."""


@contextlib.contextmanager
def peer(partitions=None, run=1, secret=SECRET) -> Iterator[PartitionPeer]:
    made = PartitionPeer(TICKET, secret, ProcessEnvironment(), run, partitions or {})
    try:
        yield made
    finally:
        made.close()


def check_lending() -> None:
    """What comes is what lies there, whatever its size, also where others fetch, and the owner changes it meanwhile."""
    partitions = {7: LARGE, 2: [1, "two", None], 5: np.zeros(0), 0: {"id": np.arange(5), "names": list("abcde")}}
    with peer(partitions) as owner, peer() as other:
        assert (other.fetch(7, owner.address, go_on) == LARGE).all()
        assert other.fetch(2, owner.address, go_on) == [1, "two", None]
        assert other.fetch(5, owner.address, go_on).shape == (0,)
        assert other.fetch(0, owner.address, go_on)["names"] == list("abcde")
        assert len(owner._pickles) <= MAX_PICKLES
    check_changed_meanwhile()
    check_refused()


def check_changed_meanwhile() -> None:
    """The owner makes another pickle after the first piece: what arrives is one of the two, and no mixture."""
    partition = {"rows": LARGE.copy()}
    with peer({0: partition}) as owner, peer() as other:
        asked = []

        def change() -> None:
            owner._pickles.clear()
            partition["rows"] = LARGE[::-1].copy()

        ask = PartitionRequest.header

        def header(self):
            asked.append(self.start)
            if len(asked) == 2:
                owner._port.submit(change).result(10)
            return ask(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PartitionRequest, "header", header)
            assert (other.fetch(0, owner.address, go_on)["rows"] == LARGE[::-1]).all()
        assert asked.count(0) == 2, "it has begun again"


def check_refused() -> None:
    """Nothing of another run, and of no other partition, is answered; nor to one that knows the session's secret."""
    with peer({3: [1]}) as owner, peer({3: [1]}, run=2) as stranger, peer(secret=TICKET.secret) as client:
        with pytest.raises(InputError, match="a trainer of run 1 was asked for a partition of run 2"):
            stranger.fetch(3, owner.address, go_on)
        with pytest.raises(InputError, match=r"partition 4 was asked for of a trainer of run 1 that has partitions 3"):
            owner.fetch(4, owner.address, go_on)
        with pytest.raises(ServerGoneError, match=r"partition 3 cannot be fetched, .*no proof of the secret"):
            client.fetch(3, owner.address, go_on)
        with pytest.raises(ServerGoneError, match="no trainer lends it at present"):
            owner.fetch(3, None, go_on)


def test_partitions_of_all_sizes_come_as_they_are():
    check_lending()


NOTICED = AssertionError, DPSError, pytest.fail.Exception
VARIANTS = [
    (TrainerPort, "fetch", "content and piece.edition != edition", "False"),
    (TrainerPort, "fetch", "ask(len(content))", "ask(0)"),
    (trainer_port, "answer_piece", "max(0, start) : max(0, start) + FETCHED_BYTES", "0:FETCHED_BYTES"),
    (PartitionPeer, "_tell", "request.run != self._run", "False"),
    (PartitionPeer, "_tell", "request.partition not in self._partitions", "False"),
    (PartitionPeer, "__init__", "secret=secret", "secret=ticket.secret"),
    (PartitionPeer, "_pickled", "len(self._pickles) >= MAX_PICKLES", "False"),
]


@pytest.mark.parametrize(("owner", "name", "old", "new"), VARIANTS)
def test_a_wrong_variant_is_noticed(monkeypatch, caplog, owner, name, old, new):
    assert inspect.getsource(getattr(owner, name)).count(old) == 1
    wrong = mutant(getattr(owner, name), old, new)
    monkeypatch.setattr(owner, name, wrong)
    if owner is trainer_port:
        monkeypatch.setattr(partition_peer, name, wrong)
    with dask.config.set({"dps.timeouts.fetch": "2 s"}), pytest.raises(NOTICED):
        check_lending()


def test_no_more_pickles_than_two_are_kept_and_all_get_theirs(monkeypatch):
    """Six trainers fetch six partitions at once: none is made anew for each piece, and none is left out."""
    made, found, most = [], {}, []
    make = PartitionPeer._made

    def note(self, partition):
        made.append(partition)
        most.append(len(self._pickles) + 1)
        return make(self, partition)

    monkeypatch.setattr(PartitionPeer, "_made", note)
    with peer({n: LARGE + np.uint8(n) for n in range(6)}) as owner, peer() as other:
        threads = [
            threading.Thread(target=lambda n=n: found.update({n: other.fetch(n, owner.address, go_on)}))
            for n in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert all((found[n] == LARGE + np.uint8(n)).all() for n in range(6))
    assert max(most) <= MAX_PICKLES
    assert len(made) < 12


def test_one_that_gave_up_does_not_keep_the_others_waiting():
    with peer(dict.fromkeys(range(3), LARGE)) as owner, peer() as other:
        for n in range(2):  # the first piece, and no more
            channel = other._port.connect(owner._port.address, go_on)
            channel.ask(PartitionRequest(1, n, 0).header()).result(time.monotonic() + 10)
            channel.close()
        began = time.monotonic()
        assert (other.fetch(2, owner.address, go_on) == LARGE).all()
        assert time.monotonic() - began > 0.5, "it may go on"


class Locked:
    def __reduce_ex__(self, protocol):
        raise TypeError("stays here")


def test_what_cannot_be_pickled_is_refused_with_the_remedy():
    with peer({3: Locked()}) as owner, peer() as other, pytest.raises(InputTypeError, match=r"stays here.*read_with"):
        other.fetch(3, owner.address, go_on)


@contextlib.contextmanager
def stuck(pieces):
    """A trainer that sends so many pieces and then no more; what it was asked."""
    asked = []

    def tell(connection, header, body):
        asked.append(PartitionRequest.of(header))
        if len(asked) <= pieces:
            answer = PieceAnswer(10 * FETCHED_BYTES, 1).header(header.request)
            connection.reply(answer, bytes(FETCHED_BYTES))

    ticket = Ticket("dps", TICKET.controller, SECRET)
    port = TrainerPort(ticket, ProcessEnvironment(), rights.TO_LENDER, {frames.FETCH_PARTITION: tell})
    try:
        yield port, asked
    finally:
        port.close()


def test_a_fetch_ends_in_time():
    why = r"partition 3 was not here within 0.5 s \(dps.timeouts.fetch\): the trainer at 127.* make partitions smaller"
    with stuck(2) as (port, asked), peer() as other, dask.config.set({"dps.timeouts.fetch": "0.5 s"}):
        with pytest.raises(RequestTimeoutError, match=why):
            other.fetch(3, "{}:{}".format(*port.address), go_on)
        assert [request.start for request in asked] == [0, FETCHED_BYTES, 2 * FETCHED_BYTES]


def test_a_trainer_that_dies_in_the_middle_is_told_from_one_that_is_slow():
    with stuck(2) as (port, asked), peer() as other:
        killer = threading.Thread(target=lambda: (wait_until(lambda: len(asked) == 3), port.close()))
        killer.start()
        with pytest.raises(
            ServerGoneError, match=r"partition 3 cannot be fetched, because the trainer at 127.* is gone"
        ):
            other.fetch(3, "{}:{}".format(*port.address), go_on)
        killer.join(10)
        with pytest.raises(ServerGoneError, match="partition 3 cannot be fetched"):
            other.fetch(3, "{}:{}".format(*port.address), go_on)


def test_a_trainer_that_is_told_to_stop_does_not_wait():
    def stop() -> None:
        raise StoppedError("told to stop")

    with stuck(0) as (port, _), peer() as other, pytest.raises(StoppedError, match="told to stop"):
        other.fetch(3, "{}:{}".format(*port.address), stop)


def test_pieces_of_another_size_than_announced_are_no_partition():
    def tell(connection, header, body):
        connection.reply(PieceAnswer(8, 1).header(header.request), bytes(64))

    ticket = Ticket("dps", TICKET.controller, SECRET)
    port = TrainerPort(ticket, ProcessEnvironment(), rights.TO_LENDER, {frames.FETCH_PARTITION: tell})
    with peer() as other, pytest.raises(ProtocolError, match="64 bytes where 8 were missing"):
        other.fetch(3, "{}:{}".format(*port.address), go_on)
    port.close()

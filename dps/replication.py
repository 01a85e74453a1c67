"""Relay: passes a server's ops on to the next server of each shard's chain, and knows what is confirmed there.

Theory of operation
-------------------
A shard's copies form a chain: primary, backup, backup, ... Each applies an op, passes it on, and confirms it to the
one before when the one behind has confirmed it (van Renesse & Schneider, "Chain Replication", OSDI 2004). Ops of one
shard are numbered (`version`) by the primary and travel over one connection in that order, so every copy is a prefix
of the one before.

One request of a client may touch many shards. Those that lie side by side and have the same successor travel on as one
frame (a `Forward`), as views of the request's own body: nothing is copied or encoded anew. A `Waiter` stands for the
answer that is owed for the request; it ends when all its forwards are confirmed.

What can happen between any two lines, and what then:

* the connection to the successor breaks: it is made again, and what is not confirmed is sent again, in order. The
  successor knows repeats by their version;
* the successor is replaced (PLACE): what is not confirmed goes to the new one, which has everything that ever was
  confirmed; where there is none left, it is confirmed;
* the successor says that *we* were replaced (FencedError): we are deposed, and fail what we owe. Clients ask elsewhere.
  Of a frame for several shards that may be true of one: each goes again by itself, and so does what came after;
* it says anything else, or nothing for too long: the controller is told (SUSPECT), and decides.

A *feed* brings a joiner up to date: the dump's pieces travel on the same connection as the ops, so their order is that
in which they happened here. Ops count as confirmed only when the joiner has them too: it is the chain's end, except
that nobody would make it the primary yet.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from dps import config
from dps.copies import Copy, Forward, Part, Waiter
from dps.errors import FencedError, MovedError
from dps.state.transfer import Dump
from dps.wire import frames
from dps.wire.frames import Header, pack_arrays

__all__ = ["Relay"]

logger = logging.getLogger(__name__)

RETRY = 0.05  # seconds until a broken connection to a successor is made again
DUMP_PIECE = 1 << 20  # bytes of rows in one frame of a dump
BEGIN, ROWS, END = 0, 1, 2  # what a DUMP frame holds, in its `number`


class Feed:
    """Brings a joiner up to date: a dump of the shard, between the ops."""

    def __init__(self, relay: Relay, copy: Copy, to: int, fence: int):
        self.relay, self.copy, self.to, self.fence = relay, copy, to, fence
        self.done = False
        self.given = 0
        self.dump: Any = None

    def begin(self) -> None:
        """From here on, every op of the shard goes to the joiner as well."""
        self.done, self.given = False, 0
        self.dump = Dump(self.copy.shard)
        self._send(BEGIN, *self.dump.head())

    def confirmed(self, number: int, nbytes: int) -> None:
        """The joiner has a piece: the next one, not faster than `dps.limits.move` allows."""
        if self.copy.feed is not self:
            return
        if number == END:
            self.done = True
            self.tell()
        else:
            self.relay.endpoint.later(nbytes / self.relay.rate, self._next, self.dump)

    def tell(self) -> None:
        """The joiner is in step: the controller may put it into the chain."""
        about = {"server": self.to, "table": self.copy.spec.name, "shard": self.copy.number}
        self.relay.report(frames.CAUGHT_UP, about)

    def _next(self, dump: Any) -> None:
        if self.copy.feed is self and self.dump is dump:
            piece = dump.piece(self.relay.piece)
            if piece is None:
                self._send(END, {}, [])
            else:
                self._send(ROWS, *piece)

    def _send(self, number: int, meta: dict[str, Any], arrays: list[np.ndarray]) -> None:
        count, pieces = pack_arrays(meta, [array.copy() for array in arrays])  # the rows go on changing
        nbytes = sum(memoryview(piece).nbytes for piece in pieces)
        self.given += nbytes
        header = Header(frames.DUMP, table=self.copy.spec.id, epoch=self.relay.epoch, number=number, count=count)
        forward = Forward(header._replace(shard=self.copy.number, body=nbytes), [], None, None, [])
        forward.feed, forward.pieces, forward.nbytes = self, pieces, nbytes
        self.relay.send(self.to, forward)


class Wire:
    """The connection to one successor, and what it has not confirmed."""

    def __init__(self, number: int):
        self.number = number
        self.link: Any = None
        self.unconfirmed: dict[int, Forward] = {}
        self.last = 0
        self.progress = math.inf  # when it last confirmed something, or began to have something to confirm


class Relay:
    """All forwarding of one server: see the module's docstring.

    Parameters
    ----------
    endpoint
        Offers `now`, `later`, `connect`.
    session, secret : str
        Of the parameter server.
    report : callable
        Given a frame kind and a dict, tells the controller.
    """

    def __init__(self, endpoint: Any, session: str, secret: str, report: Callable[[int, dict[str, Any]], None]):
        self.endpoint, self._report = endpoint, report
        self.epoch = 0
        self.addresses: dict[int, tuple[str, int]] = {}
        self.busy = False  # some copy has a successor
        self.backlog = 0  # bytes not confirmed
        self.rate: float = config.nbytes("move")
        self.piece = DUMP_PIECE
        self._limit, self._patience = config.nbytes("unconfirmed"), config.seconds("silence")
        self._session, self._secret = session, secret
        self._wires: dict[int, Wire] = {}
        self._copies: dict[Copy, None] = {}  # those with a successor, in the order they got it
        self._stepping: list[Copy] = []
        self._pressed: list[Any] = []
        self._closed = False

    def report(self, kind: int, about: dict[str, Any]) -> None:
        """Tell the controller, and at which placement."""
        self._report(kind, {**about, "epoch": self.epoch})

    # -- ops

    def forward(
        self, header: Header, fresh: list[tuple[Part, int]], keys: Any, values: np.ndarray, waiter: Waiter
    ) -> None:
        """Pass on what was applied: for each part its shard's new version. `waiter` waits for all of it."""
        i = 0
        while i < len(fresh):
            part = fresh[i][0]
            j, end = i + 1, part.b
            while j < len(fresh) and fresh[j][0].copy.successor == part.copy.successor and fresh[j][0].a == end:
                if header.rows > 0 and fresh[j][0].copy.number != fresh[j - 1][0].copy.number + 1:
                    break  # the frame is for all shards from its first to its last
                end = fresh[j][0].b
                j += 1
            if part.copy.successor is not None:
                waiter.left += 1
                self.send(part.copy.successor, Forward(header, fresh[i:j], keys, values, [waiter]))
            i = j

    def follow(self, copy: Copy, waiter: Waiter) -> None:
        """A repeat: it may be answered when all that was passed on before is confirmed."""
        if not copy.drained:
            assert copy.tail is not None
            waiter.left += 1
            copy.tail.waiters.append(waiter)

    def press(self, connection: Any) -> None:
        """Read no more of this connection while too much is unconfirmed."""
        if self.backlog > self._limit:
            connection.suspend()
            self._pressed.append(connection)

    def send(self, to: int, forward: Forward) -> None:
        """To the successor `to`, now or as soon as there is a connection."""
        wire = self._wires.get(to)
        if wire is None:
            wire = self._wires[to] = Wire(to)
        for part, _ in forward.parts:
            part.copy.tail = forward
        now = self.endpoint.now()
        if not wire.unconfirmed:
            wire.progress = now
        forward.since = min(forward.since, now)
        self.backlog += forward.nbytes
        wire.last = wire.last % 0xFFFFFFFF + 1
        wire.unconfirmed[wire.last] = forward
        self._write(wire, wire.last)
        if wire.link is None:
            self._connect(wire)

    def _write(self, wire: Wire, number: int) -> None:
        if wire.link is not None and wire.link.open:
            wire.link.send(*wire.unconfirmed[number].frame(number, self.epoch))

    # -- placement

    def rechain(self, copy: Copy, successor: int | None, feed: int | None) -> None:
        """The server behind `copy` is now `successor`; with `feed`, its fence, it is a joiner that needs everything."""
        old, copy.successor = copy.successor, successor
        if successor is None:
            self._copies.pop(copy, None)
        else:
            self._copies[copy] = None
        self.busy = bool(self._copies)
        begin = feed is not None and (copy.feed is None or (copy.feed.to, copy.feed.fence) != (successor, feed))
        moved = self._take(copy, old) if old is not None and (old != successor or begin) else []
        if feed is None:
            copy.feed = None
        elif begin:
            assert successor is not None
            copy.feed = Feed(self, copy, successor, feed)
            copy.feed.begin()
        for forward in moved:
            if successor is None:
                self._confirm(forward)
            else:
                self.send(successor, forward)
        if copy.stepping_down and copy not in self._stepping:
            self._stepping.append(copy)

    def settle(self) -> None:
        """After a new placement: forget connections to nobody, report who has stepped down, read on."""
        for number in [n for n in self._wires if n not in self.addresses]:
            link = self._wires.pop(number).link
            if link is not None:
                link.close()
        self._stepping = [copy for copy in self._stepping if copy.stepping_down]
        self._tell_stepped_down()
        self._ease()

    def drop(self, copy: Copy) -> None:
        """The copy is given up: nobody is to wait for what it passed on."""
        old, copy.successor, copy.feed, copy.deposed = copy.successor, None, None, True
        copy.stepping_down = False
        self._copies.pop(copy, None)
        self.busy = bool(self._copies)
        for forward in self._take(copy, old):
            self._refuse(forward)

    def _take(self, copy: Copy, server: int | None) -> list[Forward]:
        """What is not confirmed of one copy, off its wire. Its neighbours in the same frames are sent again, alone."""
        wire = self._wires.get(-1 if server is None else server)
        if wire is None:
            return []
        kept: dict[int, Forward] = {}
        taken, again = [], []
        for number, forward in wire.unconfirmed.items():
            dump = forward.feed is not None and forward.feed.copy is copy
            if not dump and all(part.copy is not copy for part, _ in forward.parts):
                kept[number] = forward
                continue
            self.backlog -= forward.nbytes
            for single in self._split(forward):
                if single.parts[0][0].copy is copy:
                    taken.append(single)
                else:
                    wire.last = wire.last % 0xFFFFFFFF + 1
                    kept[wire.last] = single
                    self.backlog += single.nbytes
                    again.append(wire.last)
        wire.unconfirmed = kept
        for number in again:
            self._write(wire, number)
        return taken

    @staticmethod
    def _split(forward: Forward) -> list[Forward]:
        """One for each shard; who waits for the whole now waits for all of them."""
        singles = []
        for item in forward.parts:
            single = Forward(forward.header, [item], forward.keys, forward.values, list(forward.waiters))
            single.since = forward.since
            if item[0].copy.tail is forward:
                item[0].copy.tail = single
            singles.append(single)
        for waiter in forward.waiters:
            waiter.left += len(singles) - 1
        return singles

    # -- wires

    def _connect(self, wire: Wire) -> None:
        """Make the connection, if somebody is to be found there."""
        if self._closed or wire.link is not None or self._wires.get(wire.number) is not wire:
            return
        address = self.addresses.get(wire.number)
        if address is not None:
            wire.link = self.endpoint.connect(
                tuple(address), self._session, self._secret, self._up, self._answered, self._ended
            )
            wire.link.party = wire

    def _up(self, link: Any) -> None:
        """Connected (again): dumps begin anew, then what is not confirmed, in order."""
        wire = link.party
        waiting = [forward for forward in wire.unconfirmed.values() if forward.feed is None]
        feeds = [c.feed for c in self._copies if c.feed is not None and c.feed.to == wire.number and not c.feed.done]
        self.backlog -= sum(forward.nbytes for forward in wire.unconfirmed.values())
        wire.unconfirmed = {}
        for feed in feeds:
            feed.begin()
        for forward in waiting:
            self.send(wire.number, forward)

    def _ended(self, link: Any) -> None:
        wire = link.party
        if wire is not None and wire.link is link:
            wire.link = None
            self.endpoint.later(RETRY, self._connect, wire)

    def _answered(self, link: Any, header: Header, body: memoryview) -> None:
        """The successor confirms, or refuses."""
        wire = link.party
        forward = wire.unconfirmed.get(header.request) if wire.link is link else None
        if forward is None:  # rerouted meanwhile
            return
        wire.progress = self.endpoint.now()
        if header.kind == frames.ERROR:
            error = frames.decode_error(body)
            logger.warning("server %d does not take an op: %s", wire.number, error)
            if not isinstance(error, FencedError):
                refused = [part.copy for part, _ in forward.parts] if forward.feed is None else [forward.feed.copy]
                self._suspect(wire, str(error), refused)
                return
            if len(forward.parts) > 1:
                self._retry_singly(wire, header.request)
                return
            for part, _ in forward.parts:
                part.copy.deposed = True
        del wire.unconfirmed[header.request]
        self.backlog -= forward.nbytes
        if header.kind == frames.ERROR:
            self._refuse(forward)
        elif forward.feed is not None:
            forward.feed.confirmed(forward.header.number, forward.nbytes)
        else:
            self._confirm(forward)
        if self._stepping:
            self._tell_stepped_down()
        self._ease()

    def _retry_singly(self, wire: Wire, number: int) -> None:
        """Refused, but not for all its shards, perhaps: each by itself, and what came after them once more."""
        unconfirmed, wire.unconfirmed = wire.unconfirmed, {}
        for n, forward in unconfirmed.items():
            for one in self._split(forward) if n == number else [forward]:
                wire.last = wire.last % 0xFFFFFFFF + 1
                wire.unconfirmed[wire.last] = one
        self.backlog += sum(one.nbytes for one in wire.unconfirmed.values())
        self.backlog -= sum(one.nbytes for one in unconfirmed.values())
        link, wire.link = wire.link, None
        link.close()
        self._connect(wire)

    def _ease(self) -> None:
        """Read on, where too much was unconfirmed."""
        if self._pressed and self.backlog < self._limit // 2:
            pressed, self._pressed = self._pressed, []
            for connection in pressed:
                connection.resume()

    def _confirm(self, forward: Forward) -> None:
        forward.done = True
        for waiter in forward.waiters:
            waiter.confirm()

    def _refuse(self, forward: Forward) -> None:
        forward.done = True
        shards = ", ".join(str(part.copy.number) for part, _ in forward.parts)
        for waiter in forward.waiters:
            waiter.fail(MovedError(f"another server has become the primary of shards {shards}"))

    def _tell_stepped_down(self) -> None:
        """Those that take no more requests and have nothing unconfirmed: all their copies are equal."""
        for copy in self._stepping:
            if copy.drained:
                self.report(frames.STEPPED_DOWN, {"table": copy.spec.name, "shard": copy.number})

    def _suspect(self, wire: Wire, why: str, copies: Iterable[Copy]) -> None:
        shards = [[c.spec.name, c.number] for c in copies if c.successor == wire.number]
        self.report(frames.SUSPECT, {"server": wire.number, "shards": shards, "why": why[:200]})

    def look(self) -> None:
        """Now and then: tell the controller (again) who is silent, who has caught up, who has stepped down."""
        now = self.endpoint.now()
        for wire in self._wires.values():
            if wire.unconfirmed and now - wire.progress > self._patience:
                self._suspect(wire, f"has confirmed nothing for {now - wire.progress:.1f} s", self._copies)
        for copy in self._copies:
            if copy.feed is not None and copy.feed.done:
                copy.feed.tell()
        self._tell_stepped_down()

    def describe(self) -> dict[str, Any]:
        """What is on its way: ops not confirmed, dumps."""
        moves = [
            {"table": c.spec.name, "shard": c.number, "to": c.feed.to, "bytes": c.feed.given, "of": c.shard.nbytes}
            for c in self._copies
            if c.feed is not None and not c.feed.done
        ]
        return {"unconfirmed": self.unconfirmed()[0], "moves": moves}

    def unconfirmed(self) -> tuple[int, int, float]:
        """Frames on their way, their bytes, and for how many seconds the oldest has been."""
        waiting = [wire.unconfirmed for wire in self._wires.values() if wire.unconfirmed]
        since = [next(iter(ops.values())).since for ops in waiting]
        age = self.endpoint.now() - min(since) if since else 0.0
        return sum(map(len, waiting)), self.backlog, age

    def close(self) -> None:
        self._closed = True
        for wire in self._wires.values():
            if wire.link is not None:
                wire.link.close()

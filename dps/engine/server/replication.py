"""Relay: passes a server's ops on to the next server of each shard's chain, and knows which ops that one has confirmed.

Theory of operation
-------------------
A shard's replicas form a chain: primary, backup, backup, ... Each replica applies an op, passes it on to its successor,
and confirms it to its predecessor once the successor has confirmed it (van Renesse & Schneider, "Chain Replication",
OSDI 2004). The primary numbers the ops of a shard (`version`), and they travel over one connection in that order, so
the ops that a replica has applied are always a prefix of its predecessor's.

One request of a client may touch many shards. Its parts for neighbouring shards with the same successor travel on as
one frame (a `Forward` of `forwards.pyx`). An `OwedAnswer` stands for the answer to the client; it is due when all
forwards of the request are confirmed. A large body stays until each of them is confirmed or refused, because a forward
that is left may be sent again after another one was refused.

What can happen between any two lines, and what then:

* the connection to the successor breaks: the relay makes it again, and sends all unconfirmed ops again, in order. The
  successor recognizes repeats by their version;
* the controller replaces the successor (PLACE): the unconfirmed ops go to the new one, which has every op that was
  ever confirmed; where no successor is left, they count as confirmed;
* the successor answers that this server was replaced (FencedError): the replica is deposed, and the relay fails the
  answers that it owes. Clients ask elsewhere. Of a frame for several shards the answer may hold for one of them only:
  the relay sends each shard's op again in a frame of its own, and also every op that came after;
* the controller takes one shard of a frame away, or gives it another successor: the ops of the other shards are sent
  again, but only when the placement is adopted for all shards (`settle`). A frame bears the epoch of the placement, and
  a fence trusts it. So no op of a shard may leave under an epoch before the server knows its place there: the shard may
  be lost by the same placement, and the successor may be its primary now, which would take the op as a new one;
* the successor answers with another error, or with nothing for too long: the relay tells the controller (SUSPECT),
  which decides.

A *feed* (`replicas.py`) brings a joiner up to date: the dump's pieces travel on the same connection as the ops, so both
arrive in the order in which they happened here. No answer waits for a joiner that is learning: the chain has the op
without it. From the end of the dump on an op counts as confirmed only when the joiner has it too. The joiner is then
the end of the chain in all respects but one, which is that the controller would not make it the primary yet.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from dps import config
from dps.engine.core.requests.forwards import Forward, Forwards, Successor
from dps.engine.server.beside_thread import Carrier
from dps.engine.server.pace import PIECE_BYTES, DumpPace
from dps.engine.server.replicas import FeedsOfJoiner, JoinerFeed, PieceMemory, Replica
from dps.engine.telemetry.snapshot import ShardMove
from dps.engine.wire import frames
from dps.engine.wire.bandwidth import LinkBudget
from dps.engine.wire.frames import Header
from dps.engine.wire.messages import SteppedDown, Suspect
from dps.engine.wire.protocols import RoleConnection, RoleEndpoint, RoleLink
from dps.errors import FencedError, MovedError

__all__ = ["Relay"]

logger = logging.getLogger(__name__)

RECONNECT_SECONDS = 0.05  # from a broken connection to the next attempt


class Relay:
    """All forwarding of one server: see the module's docstring.

    Parameters
    ----------
    endpoint
        The server's; the relay uses its `now`, `later` and `connect`.
    session, secret : str
        Name and secret under which the servers connect to each other.
    report : callable
        Sends a frame of the given kind, with a message of `wire/messages.py`, to the controller.
    carrier : Carrier
        Lists the keys of large shards beside the endpoint's loop.
    pace : DumpPace
        The share of the server's time that feeds may have.
    """

    def __init__(
        self,
        endpoint: RoleEndpoint,
        session: str,
        secret: str,
        report: Callable[[int, msgspec.Struct], None],
        carrier: Carrier,
        pace: DumpPace,
    ):
        self.endpoint, self.report, self.carrier = endpoint, report, carrier
        self.ops = Forwards(endpoint.now, FeedsOfJoiner, self._connect, config.nbytes("unconfirmed"))
        self.addresses: dict[int, tuple[str, int]] = {}
        self.has_successors = False  # a replica has a successor
        self.rate: float = config.nbytes("move")
        self.budget = LinkBudget(config.bandwidth())
        self.piece = PIECE_BYTES
        self.memory, self.pace = PieceMemory(), pace
        self._silence_seconds = config.seconds("silence")
        self._session, self._secret = session, secret
        self._replicas: dict[Replica, None] = {}  # those with a successor, in the order in which they got it
        self._stepping_down: list[Replica] = []
        self._throttled: list[RoleConnection] = []  # connections that are not read while the backlog is too large
        self._rewritten: list[tuple[Successor, int]] = []  # requests that leave when the placement is adopted
        self._closed = False

    def throttle(self, connection: RoleConnection) -> bool:
        """Read no more from this connection while the backlog is larger than its limit; whether it is."""
        if not self.ops.full:
            return False
        connection.suspend()
        self._throttled.append(connection)
        return True

    # -- placement

    def rechain(self, replica: Replica, successor: int | None, feed: int | None) -> None:
        """Make `successor` the next server in the chain of `replica`; None: it is the last.

        With `feed`, the joiner's fence, the successor is a joiner, which needs a dump of the shard.
        """
        old, replica.successor = replica.successor, successor
        if successor is None:
            self._replicas.pop(replica, None)
        else:
            self._replicas[replica] = None
        self.has_successors = bool(self._replicas)
        fed = None if replica.feed is None else (replica.feed.to, replica.feed.fence)
        begin = feed is not None and fed != (successor, feed)
        moved = self._withdraw(replica, old) if old is not None and (old != successor or begin) else []
        if feed is None or begin:
            self._end_feed(replica)
        if begin:
            assert successor is not None
            assert feed is not None
            self._begin_feed(JoinerFeed(self, replica, successor, feed))
        for forward in moved:
            if successor is None:
                forward.confirm()
            else:
                self.ops.send(successor, forward)
        if replica.stepping_down and replica not in self._stepping_down:
            self._stepping_down.append(replica)

    def _begin_feed(self, feed: JoinerFeed) -> None:
        feed.replica.feed = feed
        self.ops.successor(feed.to).feeds.add(feed)
        feed.begin()

    def _end_feed(self, replica: Replica) -> None:
        feed, replica.feed = replica.feed, None
        replica.learning = False
        if feed is not None:
            feed.close()
        if feed is not None and feed.to in self.ops.successors:
            self.ops.successors[feed.to].feeds.remove(feed, self)

    def settle(self) -> None:
        """A placement is adopted for all shards: send again the neighbours of withdrawn ops, close connections to
        servers that are out of it, report step-downs, read on."""
        for number in [n for n in self.ops.successors if n not in self.addresses]:
            link = self.ops.successors.pop(number).link
            if link is not None:
                link.close()
        rewritten, self._rewritten = self._rewritten, []
        for successor, number in rewritten:
            if number in successor.unconfirmed:  # else it was withdrawn too, because its shard has another place now
                self.ops.write(successor, number)
        self._stepping_down = [replica for replica in self._stepping_down if replica.stepping_down]
        self._report_stepped_down()
        self._resume_throttled()

    def drop(self, replica: Replica) -> None:
        """Give up a replica: the answers that wait for what it passed on fail."""
        self._end_feed(replica)
        old, replica.successor, replica.deposed = replica.successor, None, True
        replica.stepping_down = False
        self._replicas.pop(replica, None)
        self.has_successors = bool(self._replicas)
        for forward in self._withdraw(replica, old):
            self._refuse(forward)

    def _withdraw(self, replica: Replica, server: int | None) -> list[Forward]:
        """Take the unconfirmed ops of one replica off its successor's list, and return them, one forward for each op.

        Its neighbours in the same frames are sent again, each in a frame of its own, by the next :meth:`settle`.
        """
        successor = self.ops.successors.get(-1 if server is None else server)
        if successor is None:
            return []
        kept: dict[int, Forward] = {}
        taken = []
        for number, forward in successor.unconfirmed.items():
            dump = forward.feed is not None and forward.feed.replica is replica
            if not dump and all(other is not replica for other in forward.replicas):
                kept[number] = forward
                continue
            self.ops.backlog -= forward.nbytes
            for single in forward.split():
                if single.replicas[0] is replica:
                    taken.append(single)
                else:
                    again = successor.next_request()
                    kept[again] = single
                    self.ops.backlog += single.nbytes
                    self._rewritten.append((successor, again))
        successor.replace(kept)
        return taken

    # -- connections to successors

    def _connect(self, successor: Successor) -> None:
        """Make the connection, if the placement has an address for the successor."""
        if self._closed or successor.link is not None or self.ops.successors.get(successor.number) is not successor:
            return
        address = self.addresses.get(successor.number)
        if address is not None:
            successor.link = self.endpoint.connect(
                address, self._session, self._secret, self._on_up, self._on_answer, self._on_end
            )
            successor.link.party = successor
            successor.link.plain = functools.partial(self._on_confirmations, successor.link)

    def _on_up(self, link: RoleLink) -> None:
        """The connection is there (again): begin dumps anew, then send the unconfirmed ops, in order."""
        successor = link.party
        waiting = [forward for forward in successor.unconfirmed.values() if forward.feed is None]
        self.ops.backlog -= sum(forward.nbytes for forward in successor.unconfirmed.values())
        successor.replace({})
        successor.feeds.begin_anew()
        for forward in waiting:
            self.ops.send(successor.number, forward)

    def _on_end(self, link: RoleLink) -> None:
        successor = link.party
        if successor is not None and successor.link is link:
            successor.link = None
            self.endpoint.later(RECONNECT_SECONDS, self._connect, successor)

    def _on_confirmations(self, link: RoleLink, inbox: np.ndarray, start: int, end: int) -> int:
        """Take the confirmations of ops at the beginning of what a successor has sent; how many bytes they have."""
        successor = link.party
        if successor.link is not link:
            return 0
        taken = self.ops.confirm(successor, inbox, start, end)
        if taken and successor.feeds.queue:
            successor.feeds.op_confirmed(self)
        if taken and (self._stepping_down or self._throttled):
            self._less_unconfirmed()
        return taken

    def _on_answer(self, link: RoleLink, header: Header, body: memoryview) -> None:
        successor = link.party
        forward = successor.unconfirmed.get(header.request) if successor.link is link else None
        if forward is None:  # it was sent to another successor meanwhile
            return
        successor.progressed_at = self.endpoint.now()
        if header.kind == frames.ERROR:
            error = frames.decode_error(body)
            logger.warning("server %d does not take an op: %s", successor.number, error)
            if forward.feed is not None:
                forward.feed.refused()
                successor.feeds.go_on(self)
            if not isinstance(error, FencedError):
                refused = forward.replicas if forward.feed is None else [forward.feed.replica]
                self._suspect(successor, str(error), refused)
                return
            if len(forward.replicas) > 1:
                self._retry_singly(successor, header.request)
                return
            for replica in forward.replicas:
                replica.deposed = True
        successor.take(header.request)
        self.ops.backlog -= forward.nbytes
        if header.kind == frames.ERROR:
            self._refuse(forward)
        elif forward.feed is not None:
            successor.feeds.piece_confirmed(forward, self)
        else:
            forward.confirm()
            if successor.feeds.queue:
                successor.feeds.op_confirmed(self)
        self._less_unconfirmed()

    def _less_unconfirmed(self) -> None:
        if self._stepping_down:
            self._report_stepped_down()
        self._resume_throttled()

    def _retry_singly(self, successor: Successor, number: int) -> None:
        """A successor has refused a frame, perhaps because of one of its shards only: send each shard's op again in a
        frame of its own, and everything that came after it, too."""
        before, again = successor.unconfirmed, {}
        for n, forward in before.items():
            for single in forward.split() if n == number else [forward]:
                again[successor.next_request()] = single
        successor.replace(again)
        self.ops.backlog += sum(single.nbytes for single in again.values())
        self.ops.backlog -= sum(single.nbytes for single in before.values())
        link, successor.link = successor.link, None
        assert link is not None  # it has brought the answer
        link.close()
        self._connect(successor)

    def _resume_throttled(self) -> None:
        """Read from the throttled connections again, once the backlog is half of its limit."""
        if self._throttled and self.ops.backlog < self.ops.limit // 2:
            throttled, self._throttled = self._throttled, []
            for connection in throttled:
                connection.resume()

    @staticmethod
    def _refuse(forward: Forward) -> None:
        shards = ", ".join(str(replica.number) for replica in forward.replicas)
        forward.refuse(MovedError(f"another server has become the primary of shards {shards}"))

    def _report_stepped_down(self) -> None:
        """Report each replica that steps down and has nothing unconfirmed: then all replicas of its shard are equal."""
        for replica in self._stepping_down:
            if replica.drained:
                self.report(frames.STEPPED_DOWN, SteppedDown(replica.spec.name, replica.number, self.ops.epoch))

    def _suspect(self, successor: Successor, why: str, replicas: Iterable[Replica]) -> None:
        shards = [(c.spec.name, c.number) for c in replicas if c.successor == successor.number]
        self.report(frames.SUSPECT, Suspect(successor.number, shards, why[:200], self.ops.epoch))

    def tick(self) -> None:
        """With each heartbeat, tell the controller (again) which successors are silent, which joiners have caught up,
        which replicas have stepped down."""
        now = self.endpoint.now()
        for successor in self.ops.successors.values():
            if successor.unconfirmed and now - successor.progressed_at > self._silence_seconds:
                why = f"has confirmed nothing for {now - successor.progressed_at:.1f} s"
                self._suspect(successor, why, self._replicas)
        for replica in self._replicas:
            if replica.feed is not None and replica.feed.done:
                replica.feed.report_caught_up()
        self._report_stepped_down()

    def moves(self) -> list[ShardMove]:
        """How far the dumps to joiners are."""
        return [
            ShardMove(c.spec.name, c.number, c.feed.to, c.feed.sent_bytes, c.shard.nbytes)
            for c in self._replicas
            if c.feed is not None and not c.feed.done
        ]

    def unconfirmed(self) -> tuple[int, int, float]:
        """How many forwards are unconfirmed, their bytes, and the age of the oldest in seconds."""
        waiting = [successor.unconfirmed for successor in self.ops.successors.values() if successor.unconfirmed]
        since = [next(iter(ops.values())).first_sent for ops in waiting]
        age = self.endpoint.now() - min(since) if since else 0.0
        return sum(map(len, waiting)), self.ops.backlog, age

    def close(self) -> None:
        self._closed = True
        for successor in self.ops.successors.values():
            if successor.link is not None:
                successor.link.close()

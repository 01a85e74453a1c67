"""MachineMeeting: where the processes of a machine put together what their trainers have pushed in a clock.

Each process first sums the pushes of its own trainers (`merged_pushes.py`). One process of the machine is the
*aggregator*: the others send it their sums, it sends the sum of all to the servers, with all stamps, and tells each
what has become of it. The aggregator is the process that first listens at a Unix socket whose name is made of the run
and the servers' secret. The name ends with that process, and then another one takes it. The connections prove the
secret to each other, as all do.

What may go wrong costs bytes and no more, because servers tell repeats by the stamps, and take a sum whole or not at
all (docs/design/training.md, "One message for a process"):

* The aggregator comes to its clock too late, or has sent for that clock before: it says that it has sent nothing, and
  the other process sends its own sum.
* The aggregator dies or does not answer: what has become of its sum is not known, so each trainer sends its own pushes.
* The other process dies after it has sent its sum: the sum of all may still be sent, as if it had left before.

Processes of one network namespace find each other, and none does with TLS, or where ``dps.unix-sockets`` is off.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import NamedTuple

from dps import config
from dps.engine.client.environment import Environment, LocalEndpoint
from dps.engine.client.push_meetings import PushMeeting, Round
from dps.engine.client.row_cache import PushOutcome
from dps.engine.client.ticket import Ticket
from dps.engine.wire import frames
from dps.engine.wire.channel import Channel
from dps.engine.wire.frames import Header, decode_json
from dps.engine.wire.protocols import RoleConnection
from dps.engine.wire.rights import TO_AGGREGATOR, guarded
from dps.engine.wire.table_sums import Sums, joined_sums, pack_sums, unpack_sums
from dps.errors import AccessDeniedError, ProtocolError, RequestTimeoutError, ServerGoneError

__all__ = ["MachineMeeting"]

# The aggregator waits so long for the other processes at the end of a clock, as trainers of a process do.
STRAGGLER_SECONDS = 0.25
# A sum that waits so long for the aggregator's own trainers goes back. It is longer than these wait for each other.
EXPIRY_SECONDS = 4 * STRAGGLER_SECONDS
# The others wait so long for an answer: until their sum expires, or servers have answered the aggregator, which gives
# up after 5 s.
ANSWER_SECONDS = EXPIRY_SECONDS + 6.0
# A process that had no answer sends its own sums for so long, because one that hangs would cost each clock a wait.
REST_SECONDS = 60.0
CHECK_SECONDS = 0.25  # between two looks at whether a trainer that waits was told to stop
SendSums = Callable[[Sums], dict[str, PushOutcome]]
FAILURES = (ServerGoneError, RequestTimeoutError, ProtocolError, AccessDeniedError)


class Owed(NamedTuple):
    """A request of another process, and the round to which its sums belong."""

    header: Header
    joined: Round[Sums]


class MachineMeeting:
    """What one process knows of the others of its machine, for one run. Any trainer of the process may use it.

    Parameters
    ----------
    run : int
        The number of the run.
    """

    def __init__(self, ticket: Ticket, run: int):
        self._ticket, self._nbytes = ticket, config.nbytes("frame")
        text, key = repr((ticket.controller, ticket.session, run)), ticket.secret.encode()[:64]
        self._name = "sums/" + hashlib.blake2b(text.encode(), key=key, digest_size=16).hexdigest()
        self._users: set[object] = set()
        self._busy = threading.Lock()  # a trainer brings the sums of the process; closing waits for no trainer
        self._meeting: PushMeeting[Sums] = PushMeeting()  # of processes, at the aggregator
        self._channel: Channel | None = None  # to the aggregator
        self._endpoint: LocalEndpoint | None = None  # this process is the aggregator
        self._owed: dict[RoleConnection, Owed] = {}  # only the endpoint's thread uses it
        self._again = 0.0  # when the next attempt to find the others may be made
        self._check: Callable[[], None] = lambda: None  # of the trainer that brings the sums

    def enter(self, trainer: object) -> None:
        """A trainer of the process uses it from now on."""
        self._users.add(trainer)

    def leave(self, trainer: object) -> None:
        """A trainer goes; with the last one the process is no aggregator any more."""
        self._users.discard(trainer)
        if not self._users and self._busy.acquire(blocking=False):
            try:
                self._close()
            finally:
                self._busy.release()

    def bring(
        self,
        clock: int,
        sums: Sums,
        begin: Callable[[], None],
        send: SendSums,
        check: Callable[[], None],
        environment: Environment,
    ) -> dict[str, PushOutcome] | None:
        """Put the sums of the process together with those of the others; what has become of them, by table.

        None: nothing was sent, and nothing will be. `begin` is called before the sums leave the process; `send` sends
        those of all, where this process is the aggregator. `check` is called now and then in a wait, and may raise. The
        `environment` is that of the trainer.
        """
        if not self._busy.acquire(blocking=False):  # an earlier clock's sums are still on their way
            return None
        try:
            self._check = check
            self._find(environment)
            if self._endpoint is not None:
                return self._aggregate(self._endpoint, clock, sums, begin, send, environment)
            return None if self._channel is None else self._ask(self._channel, clock, sums, begin, environment)
        finally:
            self._busy.release()
            if not self._users:
                self.leave(None)

    # -- inside

    def _find(self, environment: Environment) -> None:
        """Be the aggregator, or have a connection to it, if that can be now."""
        if self._channel is not None and self._channel.closed:  # by an error of an earlier trainer
            self._channel = None
        if self._endpoint is not None or self._channel is not None or environment.now() < self._again:
            return
        ticket = self._ticket
        for _ in range(2):  # because another process may take the name in between
            self._channel = environment.connect_locally(ticket, self._name, "the aggregator", self._look)
            if self._channel is not None:
                return
            handlers = guarded(TO_AGGREGATOR, {frames.SUM: self._take})
            self._endpoint = environment.listen_locally(ticket, self._name, handlers, self._forget)
            if self._endpoint is not None:
                return
        self._again = environment.now() + REST_SECONDS

    def _look(self) -> None:
        self._check()

    def _close(self) -> None:
        channel, self._channel = self._channel, None
        endpoint, self._endpoint = self._endpoint, None
        if channel is not None:
            channel.close()
        if endpoint is not None:
            endpoint.stop()

    # -- a process that sends its sums to the aggregator

    def _ask(
        self, channel: Channel, clock: int, sums: Sums, begin: Callable[[], None], environment: Environment
    ) -> dict[str, PushOutcome] | None:
        text_bytes, pieces = pack_sums(sums)
        nbytes = sum(memoryview(piece).nbytes for piece in pieces)
        if nbytes > self._nbytes:
            return None
        begin()
        try:
            request = channel.send(Header(frames.SUM, clock=clock, count=text_bytes, body=nbytes), pieces)
            request.result(environment.now() + ANSWER_SECONDS)
            taken = decode_json(request.body)
        except FAILURES as error:
            channel.close()
            self._channel = None
            if not isinstance(error, ServerGoneError):
                self._again = environment.now() + REST_SECONDS
            return dict.fromkeys(sums, PushOutcome.DOUBTFUL)
        except BaseException:
            channel.close()
            self._channel = None
            raise
        if taken is None:
            return None
        return {t: PushOutcome.ACKNOWLEDGED if t in taken else PushOutcome.DOUBTFUL for t in sums}

    # -- the aggregator: the trainer that brings the sums of its process

    def _aggregate(
        self,
        endpoint: LocalEndpoint,
        clock: int,
        sums: Sums,
        begin: Callable[[], None],
        send: SendSums,
        environment: Environment,
    ) -> dict[str, PushOutcome] | None:
        meeting = self._meeting
        joined, began = meeting.bring(self, clock, sums), environment.now()
        try:
            with meeting.changed:
                while not meeting.leads(joined, late=(waited := environment.now() - began) >= STRAGGLER_SECONDS):
                    self._check()
                    environment.await_change(meeting.changed, min(STRAGGLER_SECONDS - waited, CHECK_SECONDS))
        except BaseException:
            meeting.withdraw(self, joined)
            raise
        outcomes = None
        try:
            if len(joined.brought) > 1:
                begin()
                outcomes = send(joined_sums(joined.brought.values()))
        finally:
            taken = None if outcomes is None else [t for t, o in outcomes.items() if o is PushOutcome.ACKNOWLEDGED]
            endpoint.submit(self._answer, joined, taken)
        return outcomes

    # -- the aggregator: its endpoint, in the endpoint's thread

    def _take(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        """Another process brings its sums."""
        endpoint, sums = self._endpoint, unpack_sums(header.count, memoryview(bytes(body)))
        if endpoint is None:  # it has only begun to listen, or ends
            connection.reply_json(Header(frames.OK, request=header.request), None)
            return
        with self._meeting.changed:
            joined = self._meeting.bring(connection, header.clock, sums)
            self._meeting.changed.notify_all()
        if joined.late:
            connection.reply_json(Header(frames.OK, request=header.request), None)
            return
        self._owed[connection] = owed = Owed(header, joined)
        endpoint.later(EXPIRY_SECONDS, self._expire, connection, owed)

    def _expire(self, connection: RoleConnection, owed: Owed) -> None:
        """Sums have waited for long enough: they go back, unless they are on their way."""
        if self._owed.get(connection) is owed and self._meeting.withdraw(connection, owed.joined):
            del self._owed[connection]
            connection.reply_json(Header(frames.OK, request=owed.header.request), None)

    def _answer(self, joined: Round[Sums], taken: list[str] | None) -> None:
        """Tell the other processes of a round which of their sums servers have taken; None: nothing was sent."""
        for connection, owed in list(self._owed.items()):
            if owed.joined is joined:
                del self._owed[connection]
                connection.reply_json(Header(frames.OK, request=owed.header.request), taken)

    def _forget(self, connection: RoleConnection) -> None:
        """A connection has ended."""
        self._owed.pop(connection, None)
        self._meeting.leave(connection)

"""Recorder: commits the controller's decisions to the journal before they take effect.

`coordination/journal.py` has the rules. Everything here happens in the thread of the controller's endpoint. A decision
changes what the controller knows at once, and has an *effect* on others: servers get a placement, clients a route,
drivers an answer. The effect waits until a record with the decision is committed. Decisions that come while a record is
on its way share the next one, so there is one record at a time, however many decisions there are.

Where the setting ``dps.scheduler.grace`` is 0, servers end with their scheduler, so there is nothing to record for:
then there is no recorder, and effects take place at once.

A record is sent again to holders that have not answered, once a second, because connections break. Holders change as
servers come and go: see `choose_holders`. Each change is two records, the second of which names the new holders only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from dps.engine.coordination.journal import Ballot, Journal, Record, choose_holders, may_write
from dps.engine.wire.journal_messages import Recorded

__all__ = ["Recorder"]

logger = logging.getLogger(__name__)

# Time until a record is sent again to holders that have not answered.
AGAIN_SECONDS = 1.0

Effect = Callable[[], object]


class Recorder:
    """Commits the decisions of one parameter server's controller.

    Parameters
    ----------
    session : str
        Name of the parameter server, for messages.
    content : callable
        Returns everything that is decided, encoded.
    send : callable
        Sends a record to a server, if it is connected.
    hosts : callable
        Returns the machines of the servers that are up, by the servers' numbers.
    now : callable
        Seconds.
    ballot : Ballot
        The controller's standing.
    committed : callable
        Called with the content of each committed record, before effects take place.
    recovering : bool
        Whether a journal is to be taken over: until then, all effects wait. Otherwise they take place at once before
        the first record.
    """

    def __init__(
        self,
        session: str,
        content: Callable[[], bytes],
        send: Callable[[int, Record], None],
        hosts: Callable[[], Mapping[int, str]],
        now: Callable[[], float],
        ballot: Ballot,
        committed: Callable[[bytes], None],
        recovering: bool = False,
    ):
        self.session, self.ballot = session, ballot
        self._content, self._send, self._hosts, self._now = content, send, hosts, now
        self._on_commit, self._recovering = committed, recovering
        self.journal: Journal | None = None  # None: nothing has been recorded yet, and no driver knows of anything
        self._due: list[Effect] = []  # effects of the decisions in the record that is on its way
        self._waiting: list[Effect] = []  # effects of later decisions
        self._changed = False  # since the last record was proposed, without an effect
        self._written: set[int] = set()  # holders that keep the record that is on its way
        self._sent_at = 0.0

    def begin(self, effect: Effect) -> None:
        """Write the first record, to the servers that are up; then the effect takes place."""
        holders = choose_holders(self._hosts(), ())
        record = Record(self.ballot, 0, holders, holders, self._content())
        self.take(Journal(self.ballot, record), effect)

    def take(self, journal: Journal, effect: Effect) -> None:
        """Go on with a journal whose record is to be written; then the effect takes place."""
        self.journal = journal
        self._due.append(effect)
        self._send_all()

    @property
    def fenced(self) -> bool:
        """Whether the servers follow another controller, so that this one decides nothing any more."""
        return self.journal is not None and self.journal.fenced

    @property
    def unwritten(self) -> set[int]:
        """Servers that have not confirmed the record that is on its way, and whose deaths would count."""
        record = None if self.journal is None or self.journal.fenced else self.journal.proposed
        return set() if record is None else set(record.before) - self._written

    @property
    def keepers(self) -> frozenset[int]:
        """The servers that another controller may need: those that keep the last record, and the one on its way."""
        journal = self.journal
        records = [] if journal is None else [r for r in (journal.committed, journal.proposed) if r is not None]
        return frozenset().union(*(record.holders | record.before for record in records))

    def decide(self, effect: Effect) -> None:
        """Have the effect of a decision take place once the decision is committed; at once before the first record."""
        if self.journal is None and not self._recovering:
            effect()
        elif not self.fenced:
            self._waiting.append(effect)
            self._go_on()

    def refresh(self) -> None:
        """Something has changed that a record names, and no effect waits for it."""
        self._changed = True
        self._go_on()

    def recorded(self, answer: Recorded) -> None:
        """A server has answered a record."""
        journal = self.journal
        if journal is None or Ballot(*answer.ballot) != self.ballot or journal.fenced:
            return
        if not answer.kept:
            journal.refused()
            self._due.clear()
            self._waiting.clear()
            logger.error(
                "parameter server %r: server %d follows another controller, so this one decides nothing any more; "
                "drivers attach by the scheduler of the other one",
                *(self.session, answer.server),
            )
        elif journal.proposed is not None and answer.number == journal.proposed.number:
            self._written.add(answer.server)
            if journal.written(answer.server, journal.proposed):
                self._committed()

    def died(self, server: int) -> None:
        """The process of a server has ended, so it never follows another controller."""
        if self.journal is not None and self.journal.died(server):
            self._committed()

    def force(self) -> bool:
        """If a record waits for servers that are gone for good: have those that are up keep the journal alone.

        Returns whether a record is on its way.
        """
        journal = self.journal
        if journal is None or journal.proposed is None or journal.fenced:
            return False
        keepers = journal.proposed.holders | journal.proposed.before
        holders, gone = choose_holders(self._hosts(), keepers), sorted(keepers - self._hosts().keys())
        if holders and gone:
            logger.error("parameter server %r goes on by force, without servers %s", self.session, gone)
            journal.force(holders)
            self._written.clear()
            self._send_all()
        return True

    def tick(self) -> None:
        """To be called some times a second: holders change, and what got no answer is sent again."""
        if self.journal is None or self.journal.fenced:
            return
        if self.journal.proposed is None:
            if self._waiting or self._changed or self._next_holders() != self._last.holders:
                self._go_on()
        elif self._now() - self._sent_at >= AGAIN_SECONDS:
            self._send_all()

    def may_renew(self, heard: Mapping[int, float], patience: float) -> bool:
        """Whether leases may be renewed: enough servers to prevent another controller have followed this one lately.

        `heard` has the seconds since each server has surely followed this controller; `patience` is how many may be.
        """
        if self.journal is None:
            return not self._recovering
        record = self.journal.committed or self.journal.proposed
        if self.journal.fenced or record is None:
            return False
        alive, dead = [server for server, seconds in heard.items() if seconds <= patience], self.journal.dead
        return may_write(record.holders, alive, dead) and may_write(record.before, alive, dead)

    def _go_on(self) -> None:
        """Propose the next record, if there is a reason and the last one is committed."""
        journal = self.journal
        if journal is None or journal.fenced or journal.proposed is not None or journal.committed is None:
            return
        last, content, holders = journal.committed, self._content(), self._next_holders()
        self._due, self._waiting, self._changed = self._waiting, [], False
        if last.settled and holders == last.holders and content == last.content:
            self._take_effect()
        else:
            journal.propose(content, holders)
            self._send_all()

    def _next_holders(self) -> frozenset[int]:
        """The holders of the next record: others than now only after a record that names no others."""
        last = self._last
        return (choose_holders(self._hosts(), last.holders) or last.holders) if last.settled else last.holders

    @property
    def _last(self) -> Record:
        assert self.journal is not None
        assert self.journal.committed is not None
        return self.journal.committed

    def _send_all(self) -> None:
        """Send the record that is on its way to all that have not confirmed it."""
        record = None if self.journal is None else self.journal.proposed
        if record is not None:
            self._sent_at = self._now()
            for server in sorted((record.holders | record.before) - self._written):
                self._send(server, record)

    def _committed(self) -> None:
        assert self.journal is not None
        assert self.journal.committed is not None
        self._written.clear()
        self._on_commit(self.journal.committed.content)
        self._take_effect()
        self._go_on()

    def _take_effect(self) -> None:
        due, self._due = self._due, []
        for effect in due:
            effect()

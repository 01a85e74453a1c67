"""Answers of a server that wait until ops are confirmed by the next servers of their chains: see `forwards.pyx`."""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING

from dps.engine.core.requests.frame cimport dps_header


@cython.final
cdef class Answers:
    """Answers that are due: each leaves at once, or, within a step, together with others to the same peer."""

    def __cinit__(self):
        self._waiting, self._collects = {}, False

    cdef int put(self, object peer, bytes answer) except -1:
        cdef list answers
        if not self._collects:
            peer.deliver(answer)
            return 0
        found = self._waiting.get(peer)
        if found is None:
            self._waiting[peer] = answer
        elif isinstance(found, bytes):
            self._waiting[peer] = [found, answer]
        else:
            answers = <list> found
            answers.append(answer)
        return 0

    cdef int collect(self) except -1:
        """Let answers wait until `deliver`."""
        self._collects = True
        return 0

    cdef int deliver(self) except -1:
        cdef dict waiting
        self._collects = False
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for peer, answers in waiting.items():
                peer.deliver(answers if isinstance(answers, bytes) else b"".join(answers))
        return 0


@cython.final
cdef class OwedAnswer:
    """An answer that a client is owed, once every forward of its request is confirmed, or one is refused.

    A refusal does not end the other forwards of the request. They may be sent again, to another successor or over
    another connection, so the request's body is needed until each of them has ended.

    Attributes
    ----------
    left : int
        Forwards for which the answer waits, and that are neither confirmed nor refused.
    learning : int
        Forwards to joiners that are still learning the rows. The answer does not wait for them, but they need the body.
    error : DPSError or None
        The first refusal.
    """

    def then(self, function) -> None:
        """Call `function` when all forwards are confirmed or one is refused; now, where that is so already."""
        self._then = function
        if self.left == 0 or self.error is not None:
            self._leave()

    def answer(self, Answers answers not None, peer, bytes answer not None, refuse) -> None:
        """Send a whole frame to `peer` when all forwards are confirmed; now, where that is so already.

        Where one is refused, `refuse` is called instead, if it is not None: with the peer, the number of its request,
        and the error.
        """
        self._answers, self._peer, self._answer, self._refuse = answers, peer, answer, refuse
        if self.left == 0 or self.error is not None:
            self._leave()

    def at_end(self, function) -> None:
        """Call `function` when no forward is under way any more, before the function of `then`; now, where none is."""
        if self.left == 0 and self.learning == 0:
            function()
        else:
            self._at_end = function

    cdef int _leave(self) except -1:
        """The answer is due."""
        then, self._then = self._then, None
        peer, self._peer = self._peer, None
        if then is not None:
            then()
        elif peer is not None and self.error is None:
            self._answers.put(peer, self._answer)
        elif peer is not None and self._refuse is not None:
            self._refuse(peer, (<const dps_header *> PyBytes_AS_STRING(self._answer)).request, self.error)
        return 0

    def confirm(self) -> None:
        """A forward is confirmed."""
        self._ended()

    def refuse(self, error) -> None:
        """A forward is refused; the answer is `error`."""
        if self.error is None:
            self.error = error
        self._ended()

    cdef int _ended(self) except -1:
        self.left -= 1
        self._release()
        if self.left == 0 or self.error is not None:
            self._leave()
        return 0

    cdef int _learned(self) except -1:
        """A forward to a joiner that was learning has ended: no answer waits for it."""
        self.learning -= 1
        return self._release()

    cdef int _release(self) except -1:
        if self.left == 0 and self.learning == 0 and self._at_end is not None:
            at_end, self._at_end = self._at_end, None
            at_end()
        return 0

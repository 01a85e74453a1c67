"""A plain tick: a header to the controller, and a header back, in one step with the interpreter's lock released.

The general way is `ask` and `answer` of `wire/channel.py`. This is the same for a tick without a report, over a
connection that is not encrypted and holds no half-read answer. What comes instead of the plain answer (an error, an
answer to an earlier request, nothing for a while) is left to the general way, with the bytes that have arrived.
"""

from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memset

from dps.engine.core.requests.exchange cimport Stream, iovec
from dps.engine.core.requests.frame cimport HEADER, MAGIC, OK, TICK, dps_header
from dps.engine.core.requests.polling cimport Polling, dps_polling

cdef extern from "exchange.h" nogil:
    const int DPS_BROKEN, DPS_NOTHING
    Py_ssize_t dps_receive(int fd, void *buffer, size_t size, dps_polling *polling, int slice, int64_t *waited)
    int dps_write(int fd, iovec *pieces, int count, int slice, int64_t *waited)

DECLINED, DONE, OPEN = 0, 1, 2  # the outcomes of a tick

cdef enum:
    SLICE = 250  # milliseconds of sleep, until the general way goes on


cdef class PlainTicks:
    """The plain ticks of one trainer, one after the other; see the module.

    Parameters
    ----------
    polling : Polling
        How long a wait polls before it sleeps.
    """

    def __cinit__(self, Polling polling not None):
        self.polling = polling
        self.received = b""

    def pass_clock(self, Stream stream not None, int64_t clock, int64_t planned) -> int:
        """Tell of a clock, and wait for the answer.

        DONE: `parties` and `start` are those of the answer. DECLINED: nothing was sent. OPEN: request `number` was
        sent, and `received` has come since. Where this raises, the connection is of no more use.
        """
        cdef dps_header head, answer
        cdef iovec piece
        cdef int64_t waited = 0
        cdef Py_ssize_t got = 0, part = DPS_NOTHING
        cdef int written
        if not 0 <= planned <= 0xFFFFFFFF:
            return DECLINED
        memset(&head, 0, HEADER)
        head.magic, head.kind, head.rows = MAGIC, TICK, -1
        head.clock, head.count = clock, <uint32_t> planned
        piece.iov_base, piece.iov_len = &head, HEADER
        stream.calls += 1  # first, because from then on no other thread closes the socket
        try:
            if stream.ended:
                return DECLINED
            self.number = head.request = stream.take()
            with nogil:
                written = dps_write(stream.fd, &piece, 1, SLICE, &waited)
                while written == 1 and got < HEADER:
                    part = dps_receive(
                        stream.fd, <char *> &answer + got, HEADER - got, &self.polling.state, SLICE, &waited
                    )
                    if part <= 0:
                        break
                    got += part
        finally:
            stream.leave()
        if written == DPS_NOTHING and piece.iov_len == HEADER:
            return DECLINED
        if written != 1 or part == 0 or part == DPS_BROKEN:
            raise ConnectionError("the connection broke during a tick")
        if got < HEADER or not _is_answer(&answer, self.number):
            self.received = (<char *> &answer)[:got]
            return OPEN
        self.parties, self.start = answer.parties, answer.start
        return DONE


cdef inline bint _is_answer(const dps_header *head, uint32_t number) noexcept:
    return head.magic == MAGIC and head.kind == OK and head.request == number and head.body == 0

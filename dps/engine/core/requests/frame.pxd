from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memset


cdef extern from "frame.h" nogil:
    ctypedef struct dps_header:
        uint16_t magic
        uint8_t kind, flags
        uint32_t request, table, epoch, trainer, number
        int64_t clock
        uint16_t shard, shards
        int32_t rows
        int64_t start
        uint32_t count
        uint16_t parties, attempt
        uint64_t body


cdef enum:  # the beginning of a header, its bytes, kinds of frames and their flags: as in dps/engine/wire/frames.py
    MAGIC = 0x5044
    HEADER = 64
    PULL = 16
    PUSH = 17
    REPLICATE = 19
    TICK = 34
    OK = 64
    RANGE = 1
    RULE_ADD = 2
    RULE_ASSIGN = 4
    RULE_DELETE = 6
    ANSWER = 8
    CERTIFICATE = 16
    CONTROL = 32
    NARROW = 32  # a flag of PULL and PUSH only: values travel as the table's `wire` says
    CHANGED = 128  # a flag of PULL only: rows are wanted that have other fingerprints than those named
    SHARED = 4  # a flag of PULL and its answer only: pieces may be, and are, in memory that both ends share
    LIST = 64  # a flag of PULL and PUSH only: the keys are a list that both ends keep


cdef inline void begin_answer(const dps_header *head, char *out, int64_t size) noexcept:
    """Write the header of an answer of `size` bytes to a request, and zeros behind its values."""
    cdef dps_header *answer = <dps_header *> out
    memset(out, 0, sizeof(dps_header))
    answer.magic, answer.kind, answer.request = head.magic, OK, head.request
    answer.clock, answer.rows, answer.count = -1, -1, head.count
    answer.body = size - sizeof(dps_header)
    if answer.body:
        memset(out + size - 8, 0, 8)

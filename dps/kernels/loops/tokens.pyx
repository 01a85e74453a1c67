"""Collapsed Gibbs sampling of topics, without the interpreter's lock: a new topic for each token of some documents.

The counts of words are those of the beginning of the pass, so the odds of topic k for word w,
(documents' tokens of k + alpha) * phi[w, k], fall into two parts (Yao, Mimno and McCallum 2009; Li, Ahmed, Ravi and
Smola 2014). The first part is a sum over the few topics that the document has. The second part, alpha * phi[w], is the
same for all tokens of the word, so its running sums are made once for a batch and searched by halves. Where counts
change with each token, such tables are out of date, and their draws are corrected by Metropolis-Hastings. Here only the
token itself is to be taken away, from one topic. So the draw is exact, in time that grows with the topics of a
document, not with all topics.
"""

from libc.stdint cimport int32_t, int64_t, uint16_t
from libc.stdlib cimport calloc, free, malloc

cimport numpy as cnp

from dps.engine.core.arrays cimport int32s, int64s, memory, writeable_int64s
from dps.engine.core.bounds cimport dps_all_inside_int32

from dps.errors import InputError

cnp.import_array()


cdef struct Draws:
    int64_t topics
    double alpha
    double eta
    const int64_t *counts  # [words, topics]
    const double *norms  # of each topic: 1 / (its tokens + words * eta)
    const double *own  # the same without the token itself: 1 / (its tokens - 1 + words * eta)
    const double *running  # [words, topics]: sums of phi over topics up to this one
    int64_t *here  # tokens of the document with each topic
    int32_t *there  # the topics that the document has
    int32_t *places  # of each topic in `there`
    double *sums  # odds of these topics, added up


def draw_topics(
    cnp.ndarray indptr not None,
    cnp.ndarray indices not None,
    cnp.ndarray repeats not None,
    cnp.ndarray topics not None,
    cnp.ndarray counts not None,
    cnp.ndarray totals not None,
    cnp.ndarray random not None,
    double alpha,
    double eta,
    int64_t words,
    cnp.ndarray made not None,
) -> None:
    """Draw a new topic for each token of some documents, one after the other.

    Parameters
    ----------
    indptr, indices, repeats : ndarray of int64, int32, int64
        CSR: how often each document has each of some words.
    topics : ndarray of uint16 [tokens]
        In: the topic of each token. Out: the new one.
    counts : ndarray of int64 [some words, topics]
    totals : ndarray of int64 [topics]
    random : ndarray of float64 [tokens]
        Numbers in [0, 1).
    alpha, eta : float
        The priors, above 0.
    words : int
        How many words there are in all.
    made : ndarray of int64 [some words, topics]
        The new topics are counted here, too.
    """
    cdef const int64_t *ends = int64s(indptr)
    cdef const int32_t *places = int32s(indices)
    cdef const int64_t *times = int64s(repeats)
    cdef uint16_t *now = <uint16_t *> memory(topics, cnp.NPY_UINT16, True)
    cdef const int64_t *table = int64s(counts)
    cdef const int64_t *sums = int64s(totals)
    cdef const double *numbers = <const double *> memory(random, cnp.NPY_FLOAT64, False)
    cdef int64_t *new = writeable_int64s(made)
    cdef int64_t documents = cnp.PyArray_SIZE(indptr) - 1, count = cnp.PyArray_SIZE(indices), i, tokens = 0
    cdef int64_t held = cnp.PyArray_SIZE(topics), k = cnp.PyArray_SIZE(totals), rows = counts.shape[0]
    cdef bint sound, enough = True
    if counts.ndim != 2 or counts.shape[1] != k or (<object> made).shape != (<object> counts).shape or k < 1:
        raise ValueError(f"counts of shape {(<object> counts).shape} and {k} topics")
    if cnp.PyArray_SIZE(repeats) != count or cnp.PyArray_SIZE(random) != held:
        raise ValueError(f"{cnp.PyArray_SIZE(repeats)} repeats for {count} words, and random numbers for {held} tokens")
    with nogil:
        sound = documents >= 0 and ends[0] == 0 and ends[documents] == count
        for i in range(documents):
            sound = sound and ends[i] <= ends[i + 1]
        for i in range(count):
            sound = sound and 0 <= times[i] <= held
            tokens += times[i] if sound else 0
            sound = sound and tokens <= held
        for i in range(held):
            sound = sound and now[i] < k
        sound = sound and tokens == held and dps_all_inside_int32(places, count, rows)
    if not sound:
        raise InputError(f"no matrix of documents with {held} tokens of {rows} words, whose topics are below {k}")
    with nogil:
        enough = _draw_all(ends, places, times, now, table, sums, numbers, documents, rows, k, alpha, eta, words, new)
    if not enough:
        raise MemoryError(f"no memory for the sums of {rows} words with {k} topics")


cdef bint _draw_all(
    const int64_t *ends, const int32_t *places, const int64_t *times, uint16_t *now, const int64_t *counts,
    const int64_t *totals, const double *random, int64_t documents, int64_t rows, int64_t topics, double alpha,
    double eta, int64_t words, int64_t *made,
) noexcept nogil:
    """Draw for each document in memory that all of them use; false if there is none."""
    cdef Draws d
    cdef double *held = <double *> malloc(<size_t> (rows * topics + 3 * topics) * sizeof(double))
    cdef int64_t *here = <int64_t *> calloc(<size_t> topics, sizeof(int64_t))
    cdef int32_t *there = <int32_t *> malloc(<size_t> (2 * topics) * sizeof(int32_t))
    cdef double *norms
    cdef double *own
    cdef int64_t k, i, token = 0, length, used, place
    cdef bint enough = held != NULL and here != NULL and there != NULL
    if enough:
        norms, own = held, held + topics
        for k in range(topics):
            norms[k] = 1.0 / (totals[k] + words * eta)
            own[k] = 1.0 / (totals[k] - 1 + words * eta)
        d.topics, d.alpha, d.eta, d.counts, d.norms, d.own = topics, alpha, eta, counts, norms, own
        d.sums, d.running, d.here, d.there, d.places = held + 2 * topics, held + 3 * topics, here, there, there + topics
        _add_up(&d, rows, held + 3 * topics)
        for i in range(documents):
            used, length = 0, 0
            for place in range(ends[i], ends[i + 1]):
                length += times[place]
            for k in range(token, token + length):
                used = _enter(&d, used, now[k])
            for place in range(ends[i], ends[i + 1]):
                for k in range(times[place]):
                    used = _leave(&d, used, now[token])
                    now[token] = <uint16_t> _drawn(&d, used, places[place], now[token], random[token])
                    used = _enter(&d, used, now[token])
                    made[places[place] * topics + now[token]] += 1
                    token += 1
            for k in range(used):
                here[there[k]] = 0
    free(held)
    free(here)
    free(there)
    return enough


cdef void _add_up(const Draws *d, int64_t rows, double *running) noexcept nogil:
    """Fill `running`."""
    cdef int64_t row, k
    cdef double total
    for row in range(rows):
        total = 0
        for k in range(d.topics):
            total += (d.counts[row * d.topics + k] + d.eta) * d.norms[k]
            running[row * d.topics + k] = total


cdef inline int64_t _enter(const Draws *d, int64_t used, int64_t topic) noexcept nogil:
    """Give the document a token of a topic; returns how many topics it has."""
    d.here[topic] += 1
    if d.here[topic] == 1:
        d.there[used], d.places[topic] = <int32_t> topic, <int32_t> used
        used += 1
    return used


cdef inline int64_t _leave(const Draws *d, int64_t used, int64_t topic) noexcept nogil:
    """Take a token of a topic away; the last topic of the list fills a gap."""
    d.here[topic] -= 1
    if d.here[topic] == 0:
        used -= 1
        d.there[d.places[topic]] = d.there[used]
        d.places[d.there[used]] = d.places[topic]
    return used


cdef inline int64_t _drawn(const Draws *d, int64_t used, int64_t word, int64_t old, double u) noexcept nogil:
    """The topic at the share `u` of all odds: those of the document's topics, then the old topic, then the others."""
    cdef const int64_t *row = d.counts + word * d.topics
    cdef const double *running = d.running + word * d.topics
    cdef double total = 0, itself = (row[old] - 1 + d.eta) * d.own[old], x, phi
    cdef double before = running[old - 1] if old else 0.0, rest = running[d.topics - 1] - (running[old] - before)
    cdef int64_t i, topic, low, high, middle
    for i in range(used):
        topic = d.there[i]
        phi = itself if topic == old else (row[topic] + d.eta) * d.norms[topic]
        total += d.here[topic] * phi
        d.sums[i] = total
    x = u * (total + d.alpha * (itself + rest))
    if x < total:
        low, high = 0, used - 1
        while low < high:
            middle = (low + high) // 2
            if d.sums[middle] > x:
                high = middle
            else:
                low = middle + 1
        return d.there[low]
    x = (x - total) / d.alpha
    if x < itself or d.topics == 1:
        return old
    x -= itself
    if x >= before:
        x += running[old] - before
    low, high = 0, d.topics - 1
    while low < high:
        middle = (low + high) // 2
        if running[middle] > x:
            high = middle
        else:
            low = middle + 1
    return low

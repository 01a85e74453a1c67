"""The E-step of latent Dirichlet allocation, without the interpreter's lock: topics of documents, given the topics.

`models/dirichlet.py` says what is computed, and tests compare with its equations written in numpy.
"""

from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

cimport numpy as cnp

from dps.engine.core.arrays cimport int32s, int64s, memory
from dps.engine.core.bounds cimport dps_all_inside_int32

from dps.errors import InputError

cnp.import_array()


cdef extern from "inference.h" nogil:
    ctypedef double dps_eight  # a vector of eight doubles; only pointers to it are used here

    ctypedef struct dps_document:
        int64_t words, width
        double topics
        dps_eight *counts
        dps_eight *weights
        dps_eight *alpha
        dps_eight *gamma
        dps_eight *shares
        dps_eight *sums
        dps_eight *ratios

    int DPS_LANES
    void dps_exp_digammas(const double *values, int64_t n, double *out)
    int64_t dps_fit(const dps_document *d, int64_t max_iter, double tol, double epsilon, int statistics)
    void dps_add_shares(double *row, const double *shares, double ratio, int64_t topics)


cdef enum:
    ALIGNMENT = 64  # bytes of eight doubles


cdef double *_doubles(cnp.ndarray array, bint written) except? NULL:
    return <double *> memory(array, cnp.NPY_FLOAT64, written)


def exp_digamma(cnp.ndarray values not None, cnp.ndarray out not None) -> None:
    """out = exp(digamma(values)), float64, for numbers above 0; `out` may be `values`."""
    cdef const double *x = _doubles(values, False)
    cdef double *y = _doubles(out, True)
    cdef int64_t n = cnp.PyArray_SIZE(values)
    if cnp.PyArray_SIZE(out) != n:
        raise ValueError(f"out has {cnp.PyArray_SIZE(out)} numbers, and values has {n}")
    with nogil:
        dps_exp_digammas(x, n, y)


def fit_documents(
    cnp.ndarray indptr not None,
    cnp.ndarray indices not None,
    cnp.ndarray counts not None,
    cnp.ndarray weights not None,
    double alpha,
    int64_t max_iter,
    double tol,
    double epsilon,
    cnp.ndarray gamma not None,
    cnp.ndarray statistics,
) -> int:
    """Fit gamma to each document of a CSR matrix; returns how many iterations that took.

    Parameters
    ----------
    indptr : ndarray of int64 [documents + 1]
    indices : ndarray of int32
    counts : ndarray of float64
    weights : ndarray of float64 [words, topics]
        exp(E[log beta]).
    gamma : ndarray of float64 [documents, topics]
        In: where each document begins, above 0. Out: the result.
    statistics : ndarray of float64 [words, topics], optional
        For each word, counts / probability * shares of its documents' topics are added.
    """
    cdef const int64_t *ends = int64s(indptr)
    cdef const int32_t *words = int32s(indices)
    cdef const double *numbers = _doubles(counts, False)
    cdef const double *table = _doubles(weights, False)
    cdef double *fitted = _doubles(gamma, True)
    cdef double *made = NULL
    cdef int64_t documents = cnp.PyArray_SIZE(indptr) - 1, count = cnp.PyArray_SIZE(indices), topics, longest = 0, i, n
    cdef bint sound
    if weights.ndim != 2 or gamma.ndim != 2 or gamma.shape[0] != documents or gamma.shape[1] != weights.shape[1]:
        raise ValueError(f"gamma of shape {(<object> gamma).shape} for {documents} documents")
    if statistics is not None:
        made = _doubles(statistics, True)
        if statistics.ndim != 2 or (<object> statistics).shape != (<object> weights).shape:
            raise ValueError("statistics have the shape of the weights")
    if cnp.PyArray_SIZE(counts) != count:
        raise InputError(f"{cnp.PyArray_SIZE(counts)} values for {count} indices")
    topics = weights.shape[1]
    with nogil:
        sound = documents >= 0 and ends[0] >= 0 and ends[documents] <= count
        for i in range(documents):
            sound = sound and ends[i] <= ends[i + 1]
            longest = max(longest, ends[i + 1] - ends[i])
        sound = sound and dps_all_inside_int32(words, count, weights.shape[0])
    if not sound or topics < 1:
        raise InputError(f"no matrix of documents with {count} counts of {weights.shape[0]} words and {topics} topics")
    with nogil:
        n = _fit_all(
            ends, words, numbers, table, documents, topics, longest, alpha, max_iter, tol, epsilon, fitted, made
        )
    if n < 0:
        raise MemoryError(f"no memory for a document of {longest} words with {topics} topics")
    return n


cdef int64_t _fit_all(
    const int64_t *ends, const int32_t *words, const double *counts, const double *table, int64_t documents,
    int64_t topics, int64_t longest, double alpha, int64_t max_iter, double tol, double epsilon, double *fitted,
    double *made,
) noexcept nogil:
    """Fit each document in memory that all of them use; -1: there is none."""
    cdef dps_document d
    cdef int64_t width = (topics + DPS_LANES - 1) // DPS_LANES, lanes = width * DPS_LANES, i, j, k, n, iterations = 0
    cdef int64_t room = (longest + DPS_LANES - 1) // DPS_LANES * DPS_LANES
    cdef char *held = <char *> calloc(<size_t> (room * (lanes + 2) + 4 * lanes) * sizeof(double) + ALIGNMENT, 1)
    cdef double *rows
    cdef double *prior
    cdef double *gamma
    cdef double *shares
    cdef double *sums
    cdef double *own
    cdef double *ratios
    if held == NULL:
        return -1
    rows = <double *> (held + (ALIGNMENT - <uintptr_t> held % ALIGNMENT) % ALIGNMENT)
    own = rows + room * lanes
    ratios = own + room
    prior = ratios + room
    gamma, shares, sums = prior + lanes, prior + 2 * lanes, prior + 3 * lanes
    d.width, d.topics = width, topics
    d.counts, d.ratios, d.weights = <dps_eight *> own, <dps_eight *> ratios, <dps_eight *> rows
    d.alpha, d.gamma = <dps_eight *> prior, <dps_eight *> gamma
    d.shares, d.sums = <dps_eight *> shares, <dps_eight *> sums
    for k in range(topics):
        prior[k] = alpha
    for i in range(documents):
        n = ends[i + 1] - ends[i]
        d.words = n
        memcpy(own, counts + ends[i], <size_t> n * sizeof(double))
        if n % DPS_LANES:
            memset(own + n, 0, <size_t> (DPS_LANES - n % DPS_LANES) * sizeof(double))
        for j in range(n):
            memcpy(rows + j * lanes, table + words[ends[i] + j] * topics, <size_t> topics * sizeof(double))
        memcpy(gamma, fitted + i * topics, <size_t> topics * sizeof(double))
        iterations += dps_fit(&d, max_iter, tol, epsilon, made != NULL)
        memcpy(fitted + i * topics, gamma, <size_t> topics * sizeof(double))
        if made != NULL:
            for j in range(n):
                dps_add_shares(made + words[ends[i] + j] * topics, shares, ratios[j], topics)
    free(held)
    return iterations

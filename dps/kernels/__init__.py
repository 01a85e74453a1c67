"""The compiled loops of the models, for training functions of one's own; each takes arrays of any dtype.

A sparse batch is CSR, as :func:`dps.localize` returns it: `indptr` ``[n + 1]``, int32 `indices` below k, and `data`,
float32 or float64, or ``None`` for "all ones" (hashed one-hot features; nothing is read for them then). Arrays of other
dtypes are converted, which costs a copy. Weights are float32, ``[k]`` for one output or ``[k, m]`` for m. Results are
float32; sums over rows are made in float64. All functions raise an `InputError` for arrays that do not fit each other.

======== =====================================================================
sparse   products of a sparse batch with weights; residuals; logistic regression
machines scores and gradients of factorization machines, plain and field-aware
factors  steps of factor models on pulled rows; least squares
words    steps of word2vec
ftrl     steps of logistic regression, row by row
topics   documents by variational inference and by Gibbs sampling
lines    rows of libsvm's and libffm's text
arrays   arrays as the loops take them
======== =====================================================================
"""

from dps.kernels.factors import least_squares, ranking_steps, rating_steps
from dps.kernels.ftrl import ftrl_steps, ftrl_weights
from dps.kernels.lines import TextRows, parse_rows
from dps.kernels.machines import field_gradient, field_scores, pair_gradient, pair_scores
from dps.kernels.sparse import binary_residuals, gradient, logistic, margins, multinomial_residuals
from dps.kernels.topics import draw_topics, exp_digamma, fit_documents
from dps.kernels.words import word_steps

__all__ = [
    "TextRows",
    "binary_residuals",
    "draw_topics",
    "exp_digamma",
    "field_gradient",
    "field_scores",
    "fit_documents",
    "ftrl_steps",
    "ftrl_weights",
    "gradient",
    "least_squares",
    "logistic",
    "margins",
    "multinomial_residuals",
    "pair_gradient",
    "pair_scores",
    "parse_rows",
    "ranking_steps",
    "rating_steps",
    "word_steps",
]

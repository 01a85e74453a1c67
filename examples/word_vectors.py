"""Vectors of words, from a text that is on every machine with dps: the documentation of numpy and scipy in their code.

Two trainers learn from the words around each word (word2vec). Words of one kind come to lie near each other.
"""

import inspect
import re

import numpy as np
import scipy.linalg
import scipy.optimize
import scipy.sparse
import scipy.special
import scipy.stats

import dps
from dps.models import Word2Vec

MODULES = [
    np,
    np.linalg,
    np.random,
    np.fft,
    np.ma,
    scipy.stats,
    scipy.linalg,
    scipy.optimize,
    scipy.sparse,
    scipy.special,
]


def sentences():
    """The paragraphs of all docstrings of these modules, each once, in small letters."""
    paragraphs = {}
    for module in MODULES:
        for name in dir(module):
            for text in (inspect.getdoc(getattr(module, name)) or "").split("\n\n"):
                paragraphs[tuple(re.findall(r"[a-z]{2,}[0-9]*", text.lower()))] = None
    return [list(words) for words in paragraphs if len(words) > 4]


if __name__ == "__main__":
    text = sentences()
    with dps.LocalCluster(servers=1, trainers=2) as cluster:
        model = Word2Vec(64, client=cluster, epochs=4, min_count=10, alpha=0.05, progress=False).fit(text)
    print(f"{sum(map(len, text))} words, {len(model.wv)} of them different and frequent")
    for word in ("float", "rows", "minimum", "eigenvalues"):
        near = ", ".join(f"{other} {score:.2f}" for other, score in model.wv.most_similar(word, topn=4))
        print(f"{word}: {near}")
    first, last = model.loss_curve_[0], model.loss_curve_[-1]
    print(f"the loss of a pair fell from {first:.3f} to {last:.3f}")

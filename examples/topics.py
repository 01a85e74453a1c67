"""Topics of documents on a Dask cluster, by three methods, and their perplexity beside scikit-learn's.

The documents are made from four topics, so it is known what is to be found. The perplexity is that of other documents
of the same kind. A model that takes all of the 120 words for equally probable has 120.
"""

import dask.array as da
import numpy as np
import scipy.sparse
from dask.distributed import Client
from sklearn.decomposition import LatentDirichletAllocation

import dps

TOPICS = {
    "kitchen": ["bread", "butter", "salt", "oven", "flour", "sugar", "pan", "bowl", "spoon", "recipe"],
    "garden": ["seed", "soil", "leaf", "root", "water", "frost", "tree", "flower", "spade", "fence"],
    "harbour": ["ship", "anchor", "sail", "rope", "tide", "crane", "cargo", "pilot", "wharf", "fog"],
    "theatre": ["stage", "actor", "curtain", "scene", "light", "voice", "costume", "script", "applause", "row"],
}
COMMON = [f"common{n}" for n in range(80)]  # words that each topic has
WORDS = np.array([word for words in TOPICS.values() for word in words] + COMMON)


def documents(count, seed, length=80):
    """Counts of words, [documents, words]."""
    rng = np.random.default_rng(seed)
    topics = np.array([np.isin(WORDS, words) * 0.08 + np.isin(WORDS, COMMON) * 0.2 / 80 for words in TOPICS.values()])
    shares = rng.dirichlet(np.full(len(TOPICS), 0.1), count)
    return scipy.sparse.csr_matrix(np.array([rng.multinomial(length, each @ topics) for each in shares]))


if __name__ == "__main__":
    X, test = documents(2_000, seed=0), documents(200, seed=1)
    alone = LatentDirichletAllocation(len(TOPICS), random_state=0).fit(X)
    print(f"scikit-learn: perplexity {alone.perplexity(test):.2f}")

    with dps.LocalCluster(servers=1, trainers=2) as cluster, Client(cluster) as client:
        lazy = da.map_blocks(scipy.sparse.csr_matrix, da.from_array(X.toarray(), chunks=(500, -1)))
        for method, passes in (("batch", 10), ("online", 5), ("gibbs", 40)):
            model = dps.models.LatentDirichletAllocation(
                len(TOPICS), client=client, learning_method=method, max_iter=passes, random_state=1
            ).fit(lazy)
            print(f"{method}: perplexity {model.perplexity(test):.2f}")
        shares = model.transform(lazy)  # lazy, as its documents are
        print(f"documents with a topic of more than half: {int((shares.max(axis=1) > 0.5).sum().compute())}")

    for words, coherence in zip(model.top_words(5, WORDS), model.coherence(X), strict=True):
        print(f"{coherence:8.1f}  {' '.join(words)}")

"""scikit-learn estimators that train on a parameter server. Written on the public interface only.

Needs scikit-learn, scipy and pandas: ``pip install dps[models]``. A stage for Spark's pipelines is in
``dps.models.spark``.
"""

from dps.errors import needing

with needing("models"):
    from dps.models.clusters.kmeans import KMeans
    from dps.models.clusters.similarity import Similarity
    from dps.models.factors.machines import FactorizationMachine, FactorizationMachineRegressor
    from dps.models.factors.matrix_factorization import MatrixFactorization
    from dps.models.factors.ranking import hits_at_k, mean_reciprocal_rank, ranks_of
    from dps.models.inputs.encoding import encode_frame
    from dps.models.inputs.files import read_files, read_libffm, read_libsvm
    from dps.models.linear.logistic import LogisticRegression
    from dps.models.linear.regressions import ElasticNet, Lasso, LinearRegression, LinearSVC, PoissonRegressor, Ridge
    from dps.models.topics.allocation import LatentDirichletAllocation
    from dps.models.words.node2vec import Node2Vec
    from dps.models.words.vectors import WordVectors
    from dps.models.words.word2vec import Word2Vec

__all__ = [
    "ElasticNet",
    "FactorizationMachine",
    "FactorizationMachineRegressor",
    "KMeans",
    "Lasso",
    "LatentDirichletAllocation",
    "LinearRegression",
    "LinearSVC",
    "LogisticRegression",
    "MatrixFactorization",
    "Node2Vec",
    "PoissonRegressor",
    "Ridge",
    "Similarity",
    "Word2Vec",
    "WordVectors",
    "encode_frame",
    "hits_at_k",
    "mean_reciprocal_rank",
    "ranks_of",
    "read_files",
    "read_libffm",
    "read_libsvm",
]

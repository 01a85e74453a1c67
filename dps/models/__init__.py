"""scikit-learn estimators that train on a parameter server. Written on the public interface only.

Needs scikit-learn, scipy and pandas: ``pip install dps[models]``. A stage for Spark's pipelines is in
``dps.models.spark``.
"""

from dps.errors import needing

with needing("models"):
    from dps.models.encoding import encode_frame
    from dps.models.factorization_machine import FactorizationMachine, FactorizationMachineRegressor
    from dps.models.files import read_files, read_libffm, read_libsvm
    from dps.models.kmeans import KMeans
    from dps.models.linear import ElasticNet, Lasso, LinearRegression, LinearSVC, PoissonRegressor, Ridge
    from dps.models.logistic import LogisticRegression
    from dps.models.matrix_factorization import MatrixFactorization
    from dps.models.node2vec import Node2Vec
    from dps.models.ranking import hits_at_k, mean_reciprocal_rank, ranks_of
    from dps.models.similarity import Similarity
    from dps.models.topics import LatentDirichletAllocation
    from dps.models.word2vec import Word2Vec
    from dps.models.word_vectors import WordVectors

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

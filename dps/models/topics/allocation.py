"""Latent Dirichlet allocation whose topics live on a parameter server while they are learnt."""

from __future__ import annotations

import math
import uuid
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self, TypeAlias, TypeVar

import dask
import numpy as np
import numpy.typing as npt
import scipy.sparse
from dask.base import is_dask_collection
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.utils import check_random_state
from sklearn.utils.metaestimators import available_if

import dps
from dps.errors import InputError
from dps.models.base import ServerModel
from dps.models.inputs.source import turns, whole_rows
from dps.models.prediction import refuse_spark, shared
from dps.models.settings import Number, OneOf, Rules, Whole
from dps.models.tables import WIRE, WireLike, wire_of_counts, wire_of_rows
from dps.models.topics.dirichlet import (
    Inference,
    bound_of_documents,
    bound_of_words,
    exp_expectations,
    log_expectations,
    topics_of_documents,
)
from dps.models.topics.documents import counts_of, documents_of
from dps.models.topics.gibbs import ASSIGNMENT_COLUMNS, MOST_TOPICS, learn_by_sampling
from dps.models.topics.plan import Learned, TopicPlan
from dps.models.topics.quality import leading_words, shared_documents, u_mass
from dps.models.topics.variational import learn_in_batches, learn_online
from dps.models.types import ClusterLike, Features, Labels, Predictions

if TYPE_CHECKING:
    from sklearn.utils import Tags

__all__ = ["LatentDirichletAllocation"]

R = TypeVar("R")

Training: TypeAlias = Callable[[dps.Trainer, list[Features], TopicPlan], Learned]
METHODS: dict[str, Training] = {"online": learn_online, "batch": learn_in_batches, "gibbs": learn_by_sampling}
TAKES = "data of Spark is for fit and partial_fit. transform, score and the others take what is"
PASSES = {"online": 10, "batch": 10, "gibbs": 100}
SETTLED = 0.01  # fall of the perplexity in the last fifth of the passes of Gibbs sampling, from which on `fit` warns
NUMBERS_AT_A_TIME = 1 << 22  # of an assign or pull of the driver
START = 100.0  # shape of the gamma distribution from which lambda is drawn, as of scikit-learn


class Topics(NamedTuple):
    """What documents are compared with; small enough to go to each task."""

    values: np.ndarray  # lambda [words, topics]
    totals: np.ndarray  # its sums over words
    inference: Inference

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


def learns_online(model: LatentDirichletAllocation) -> bool:
    """Whether the model has `partial_fit`; Gibbs sampling needs the topics of all tokens."""
    if model.learning_method == "gibbs":
        raise AttributeError('learning_method="gibbs" needs all documents at once; partial_fit goes with "online"')
    return True


@dataclass(kw_only=True, eq=False, repr=False)
class LatentDirichletAllocation(ClassNamePrefixFeaturesOutMixin, TransformerMixin, ServerModel[Topics]):
    """Topics of documents, learnt on a parameter server: by variational inference, or by Gibbs sampling.

    Parameters, attributes and results are those of scikit-learn's class of this name, beside those that say where and
    how it trains. In training, the topics are a table of the servers with a row for each word. A trainer pulls the
    rows of the words of its documents only.

    Parameters
    ----------
    n_components : int
        The number of topics.
    client : distributed.Client, cluster, str, SparkSession or dps.ParameterServer, optional
        Where to train: in a Dask cluster (by default the current client's; a str is its scheduler's address), where
        ``fit`` starts a parameter server and closes it, or on your own ParameterServer. No table stays behind.
    learning_method : {"batch", "online", "gibbs"}
        "batch" (Blei, Ng and Jordan 2003) updates the topics after each pass. "online" (Hoffman, Blei and Bach 2010)
        updates them after each mini-batch, and needs far fewer passes over many documents. "gibbs" (Griffiths and
        Steyvers 2004) draws a topic for each token: exact counts, whole numbers only, and more passes. The perplexity
        of held-out documents was 13 % and 7 % below that of scikit-learn's "batch" for articles and stories, and 6 %
        above it for the scenes of a series.
    doc_topic_prior, topic_word_prior : float, optional
        Parameters of the Dirichlet priors, alpha and eta; by default 1 / n_components.
    learning_decay, learning_offset : float
        "online": update t has the weight ``(learning_offset + t) ** -learning_decay``. The decay is above 0.5, and at
        most 1, where convergence is to be guaranteed.
    max_iter : int, optional
        Passes over the documents: by default 10, and 100 for "gibbs", which begins at random topics. Where these had
        not settled, ``fit`` warns: the perplexity of words, given their topics, fell by more than 1 % in the last fifth
        of the passes.
    batch_size : int, optional
        Documents in a step of a trainer. By default 128, and 2,048 for "gibbs", whose result does not depend on it: the
        more documents, the less traffic. "online": a mini-batch is a step of all trainers together, and the default is
        128 divided by their number, at least 32, because a larger mini-batch has fewer updates in a pass.
    evaluate_every : int
        After how many passes the perplexity of all documents is computed; 0 or less: never. It takes about as long as
        a pass.
    perp_tol : float
        Training ends when the perplexity has changed by less than this between two evaluations.
    total_samples : int
        ``partial_fit``: how many documents there are in all.
    mean_change_tol : float
        The mean change of a document's topics in an iteration, below which they are found.
    max_doc_update_iter : int
        The largest number of these iterations.
    random_state : int, RandomState or None
        Of the topics at the beginning, and of Gibbs sampling.
    staleness : int or math.inf
        "online": the number of steps by which the fastest trainer may lead the slowest. The others need no bound,
        because they read the topics of the pass before.
    aggregate : bool
        "online" with staleness 0: one update for each step of all trainers together. Then a second run gives the same
        numbers, and equals one process whose mini-batches are as many times as large as there are trainers. Otherwise
        a trainer may see what another one has pushed at the same step.
    wire : {"auto", "lists"} or dps.Wire, optional
        How the rows of words travel between trainers and servers, as for :class:`dps.models.LogisticRegression`. By
        default ``"lists"``, which loses nothing. "gibbs" counts in whole numbers, for which there are lists only.
    servers : int
        The number of servers that ``fit`` starts.
    progress : bool, optional
        Show a progress bar; by default in terminals and notebooks.

    Attributes
    ----------
    components_ : ndarray [n_components, words]
        Parameters of the topics' Dirichlet distributions, lambda: about how many times a topic has made a word, plus
        the prior. Divided by their sums they are the topics' distributions over words.
    exp_dirichlet_component_ : ndarray [n_components, words]
        exp(E[log p(word | topic)]).
    counts_ : ndarray of int64 [n_components, words]
        "gibbs": the number of tokens of each word with each topic.
    doc_topic_prior_, topic_word_prior_ : float
    perplexities_ : list of float
        With `evaluate_every`: the perplexity of all documents, in order.
    bound_ : float
        With `evaluate_every`: the last of these.
    n_iter_, n_batch_iter_ : int
        Passes that were made, and updates plus 1.
    n_features_in_ : int
    feature_names_in_ : ndarray
        Columns of a DataFrame.

    Examples
    --------
    >>> import numpy as np, dps
    >>> rng = np.random.default_rng(0)
    >>> topics = np.repeat(np.eye(2), 5, axis=1) / 5  # of ten words, each topic has five
    >>> X = np.array([rng.multinomial(30, topics[n % 2]) for n in range(40)])
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     model = dps.models.LatentDirichletAllocation(2, client=cluster, random_state=0, max_iter=20).fit(X)
    >>> sorted(sorted(words.tolist()) for words in model.top_words(5))
    [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    >>> model.transform(X).shape
    (40, 2)
    """

    RULES: ClassVar[Rules] = {
        "learning_method": OneOf(*METHODS), "n_components": Whole(), "max_iter": Whole(other=(None,)),
        "batch_size": Whole(other=(None,)), "max_doc_update_iter": Whole(),
        "doc_topic_prior": Number(inside=True, other=(None,)), "topic_word_prior": Number(inside=True, other=(None,)),
        "total_samples": Number(inside=True), "perp_tol": Number(), "mean_change_tol": Number(),
        "learning_decay": Number(), "learning_offset": Number(), "wire": WIRE,
    }  # fmt: skip
    n_components: int = field(default=10, kw_only=False)
    client: ClusterLike = None
    learning_method: str = "batch"
    doc_topic_prior: float | None = None
    topic_word_prior: float | None = None
    learning_decay: float = 0.7
    learning_offset: float = 10.0
    max_iter: int | None = None
    batch_size: int | None = None
    evaluate_every: int = -1
    total_samples: float = 1e6
    perp_tol: float = 0.1
    mean_change_tol: float = 1e-3
    max_doc_update_iter: int = 100
    random_state: int | np.random.RandomState | None = None
    staleness: float = 0
    aggregate: bool = False
    wire: WireLike = None
    servers: int = 1
    progress: bool | None = None

    # -- training

    def fit(self, X: Features, y: Labels = None) -> Self:
        """Learn the topics.

        Parameters
        ----------
        X : array_like, sparse matrix, DataFrame of numbers, dask array or dataframe, or data of Spark
            Counts, [documents, words]; with "online" and "batch" also weights, 0 or more. Dask arrays may have dense or
            sparse blocks. The counts of a Spark DataFrame are its column of vectors, or all its columns; the items of
            an RDD are blocks.
        y : object
            Not used; scikit-learn's pipelines pass it.

        Returns
        -------
        LatentDirichletAllocation
            Itself.

        Raises
        ------
        InputError, InputTypeError
            Data or settings from which no topics can be learnt. No table or server is left behind.
        """
        self.check()
        data, words = self._read(X)
        random = check_random_state(self.random_state)
        self.components_ = random.gamma(START, 1 / START, (self.n_components, words))
        self.n_batch_iter_ = 1
        passes = PASSES[self.learning_method] if self.max_iter is None else self.max_iter
        try:
            learnt = self._train(X, data, METHODS[self.learning_method], passes, None, random)
        except BaseException:
            del self.components_, self.n_batch_iter_
            raise
        self.n_iter_, self.perplexities_ = learnt.passes, learnt.perplexities
        if learnt.perplexities:
            self.bound_ = learnt.perplexities[-1]
        if learnt.fall > SETTLED:
            warnings.warn(
                f"after {passes} passes of Gibbs sampling the topics had not settled: in the last fifth of the passes "
                f"the perplexity of words, given their topics, fell by {learnt.fall:.1%}; give a larger max_iter",
                ConvergenceWarning,
                stacklevel=2,
            )
        return self

    @available_if(learns_online)
    def partial_fit(self, X: Features, y: Labels = None) -> Self:
        """Go on learning online, with one pass over these documents; they stand for ``total_samples`` of them.

        With a `client` that is no ParameterServer, each call starts servers of its own.

        Parameters
        ----------
        X, y
            As for :meth:`fit`.

        Returns
        -------
        LatentDirichletAllocation
            Itself.
        """
        self.check()
        begins = not self.__sklearn_is_fitted__()
        data, words = self._read(X, None if begins else self.n_features_in_)
        if begins:
            random = check_random_state(self.random_state)
            self.components_ = random.gamma(START, 1 / START, (self.n_components, words))
            self.n_batch_iter_, self.n_iter_ = 1, 0
        self._train(X, data, learn_online, 1, float(self.total_samples), None)
        return self

    def _read(self, X: Features, words: int | None = None) -> tuple[Features, int]:
        """(X as `ps.run` takes it, checked if it is in memory; how many words it has)."""
        data, given, columns = documents_of(X, words, self.learning_method == "gibbs")
        self.n_features_in_ = given
        self.__dict__.pop("feature_names_in_", None)
        if columns is not None:
            self.feature_names_in_ = np.array([str(each) for each in columns], object)
        return data, given

    def _train(
        self,
        X: Features,
        data: Features,
        function: Training,
        passes: int,
        total: float | None,
        random: np.random.RandomState | None,
    ) -> Learned:
        """Train from `components_` and update number `n_batch_iter_` on, and replace both; `data` is X for `ps.run`."""
        sampling = function is learn_by_sampling
        seed = int(random.randint(1 << 31)) if sampling and random is not None else 0
        plan = self._plan(passes, total, seed, sampling)
        with self.serving(X) as (ps, _), turns(ps, X):
            try:
                self._make_tables(ps, plan, "sum" if self.aggregate and function is learn_online else None)
                staleness = self.staleness if function is learn_online else math.inf
                learnt, *_ = ps.run(function, data, args=(plan,), staleness=staleness, progress=self.progress)
                self._take(ps, plan, learnt, sampling)
            finally:
                drop_tables(ps, plan)
        self.n_batch_iter_ += learnt.updates
        return learnt

    def _plan(self, passes: int, total: float | None, seed: int, sampling: bool) -> TopicPlan:
        tag = f"topics-{uuid.uuid4().hex[:8]}"
        return TopicPlan(
            tables=(f"{tag}-a", f"{tag}-b"), totals=f"{tag}-totals", history=f"{tag}-history", topics=self.n_components,
            words=self.n_features_in_, eta=self.topic_word_prior_, inference=self._inference, passes=passes,
            batch_size=self.batch_size, decay=float(self.learning_decay), offset=float(self.learning_offset),
            first=self.n_batch_iter_, total=total, evaluate_every=0 if total else self.evaluate_every,
            perp_tol=float(self.perp_tol), seed=seed,
            assignments=(f"{tag}-even", f"{tag}-odd") if sampling else None,
        )  # fmt: skip

    def _wire(self) -> dps.Wire | str:
        counts = self.learning_method == "gibbs"
        return wire_of_counts(self.wire) if counts else wire_of_rows(self.wire, self.n_components)

    def _make_tables(self, ps: dps.ParameterServer, plan: TopicPlan, aggregate: str | None) -> None:
        """Make the tables of a training; those of variational inference begin at `components_`."""
        narrow, wide = ("int64", "int64") if plan.assignments else ("float32", "float64")
        wire = self._wire()
        for name in plan.tables:
            ps.table(name, plan.topics, rows=plan.words, dtype=narrow, aggregate=aggregate, wire=wire)
        ps.table(plan.totals, plan.topics, rows=2, dtype=wide, aggregate=aggregate)
        ps.table(plan.history, rows=plan.passes, dtype="float64")
        for name in plan.assignments or ():
            ps.table(name, ASSIGNMENT_COLUMNS, dtype="int64", wire=wire)
        if plan.assignments:
            return
        client, values = ps.client(), self.components_.T - plan.eta
        for rows in slices(plan):
            client.assign(plan.tables[0], rows, values[rows])
        client.assign(plan.totals, [0], values.sum(axis=0)[None])

    def _take(self, ps: dps.ParameterServer, plan: TopicPlan, learnt: Learned, sampling: bool) -> None:
        """Copy what was learnt into this process."""
        client, table = ps.client(), plan.tables[learnt.table]
        values = [client.pull(table, rows).reshape(-1, plan.topics) for rows in slices(plan)]
        counts = np.concatenate(values).T
        if sampling:
            self.counts_ = np.ascontiguousarray(counts)
        self.components_ = np.ascontiguousarray(plan.eta + learnt.scale * counts.astype(np.float64))

    def check(self) -> None:
        """Refuse impossible settings before any server starts."""
        super().check()
        if not 0 < self.learning_decay <= 1 or self.learning_offset < 1:
            raise InputError(
                f"learning_decay is above 0 and at most 1, and learning_offset 1 or more; not {self.learning_decay!r} "
                f"and {self.learning_offset!r}: other weights of updates do not fall below 1, or not to 0"
            )
        if self.learning_method == "gibbs" and self.n_components > MOST_TOPICS:
            raise InputError(f"Gibbs sampling has at most {MOST_TOPICS:,} topics, not {self.n_components:,}")
        self._wire()

    # -- what was learnt

    @property
    def doc_topic_prior_(self) -> float:
        """Alpha: `doc_topic_prior`, or its default."""
        return float(1 / self.n_components if self.doc_topic_prior is None else self.doc_topic_prior)

    @property
    def topic_word_prior_(self) -> float:
        """Eta: `topic_word_prior`, or its default."""
        return float(1 / self.n_components if self.topic_word_prior is None else self.topic_word_prior)

    @property
    def exp_dirichlet_component_(self) -> np.ndarray:
        """exp(E[log p(word | topic)]), [n_components, words]."""
        topics = self._topics()
        return exp_expectations(topics.values, topics.totals).T

    @property
    def _inference(self) -> Inference:
        return Inference(self.doc_topic_prior_, self.max_doc_update_iter, float(self.mean_change_tol))

    def _topics(self) -> Topics:
        if not self.__sklearn_is_fitted__():
            raise NotFittedError(f"this {type(self).__name__} is not fitted yet; call fit")
        values = np.ascontiguousarray(np.asarray(self.components_, np.float64).T)
        return Topics(values, values.sum(axis=0), self._inference)

    def transform(self, X: Features, *, normalize: bool = True) -> Predictions:
        """The topics of documents.

        Parameters
        ----------
        X
            As for :meth:`fit`.
        normalize : bool
            Let the shares of a document add up to 1; otherwise they are parameters of its Dirichlet distribution.

        Returns
        -------
        ndarray [documents, n_components], or a lazy dask array for data of Dask
        """
        topics = self._topics()
        refuse_spark(X, TAKES, "calls them")
        if not is_dask_collection(X):
            return shares_of(X, topics, normalize)
        meta = np.empty((0, self.n_components))
        if hasattr(X, "to_dask_array"):
            return X.map_partitions(shares_of, shared(topics), normalize, meta=meta)
        X = whole_rows(X)
        chunks = (X.chunks[0], (self.n_components,))
        return X.map_blocks(shares_of, shared(topics), normalize, dtype=np.float64, chunks=chunks, meta=meta)

    def fit_transform(self, X: Features, y: Labels = None, *, normalize: bool = True) -> Predictions:
        """Learn the topics, and find those of the same documents; parameters as of the two methods."""
        refuse_spark(X, TAKES, "calls them")
        return self.fit(X, y).transform(X, normalize=normalize)

    def score(self, X: Features, y: Labels = None) -> float:
        """A lower bound on the logarithm of the documents' likelihood (the bound of variational inference)."""
        return self._bound(X)[0]

    def perplexity(self, X: Features) -> float:
        """exp(-bound / tokens) of documents: the smaller, the better the topics predict their words.

        Parameters
        ----------
        X
            As for :meth:`fit`. For documents that nothing was learnt from, it says how good the topics are.
        """
        bound, tokens = self._bound(X)
        if not tokens:
            raise InputError("all documents of X are without words: they have no perplexity")
        return float(np.exp(-bound / tokens))

    def _bound(self, X: Features) -> tuple[float, float]:
        """(the bound on the log-likelihood, tokens)."""
        topics = self._topics()
        parts = self._each_block(bound_of_block, X, topics)
        score, tokens = (float(each) for each in np.sum(parts, axis=0))
        return score + bound_of_words(topics.values, topics.totals, self.topic_word_prior_, len(topics.values)), tokens

    def coherence(self, X: Features, top_n: int = 10, measure: str = "u_mass") -> np.ndarray:
        """How well the leading words of each topic go together in documents.

        Parameters
        ----------
        X
            Documents, as for :meth:`fit`: usually those of the training.
        top_n : int
            How many words of a topic are looked at, 2 or more.
        measure : {"u_mass"}
            Mimno et al. (2011): the sum over pairs of words, of log((D(m, l) + 1) / D(l)), where D counts documents,
            and l is the more probable word. At most about 0; the larger, the better.

        Returns
        -------
        ndarray [n_components]
        """
        topics = self._topics()
        if measure != "u_mass":
            raise InputError(f"the measure of coherence is 'u_mass', not {measure!r}")
        if not isinstance(top_n, (int, np.integer)) or top_n < 2:
            raise InputError(
                f"top_n is a whole number, 2 or more, because coherence is of pairs of words; not {top_n!r}"
            )
        leading = leading_words(topics.values.T, int(top_n))
        words = np.unique(leading)
        return u_mass(leading, words, np.sum(self._each_block(pairs_of_block, X, len(topics.values), words), axis=0))

    def top_words(self, n: int = 10, vocabulary: Sequence[str] | npt.ArrayLike | None = None) -> list[np.ndarray]:
        """The most probable words of each topic, the most probable first.

        Parameters
        ----------
        n : int
            How many.
        vocabulary : sequence of str, optional
            The words by their numbers, as ``CountVectorizer.get_feature_names_out()`` gives them; by default, columns
            of the DataFrame, or the numbers themselves.

        Returns
        -------
        list of ndarray
        """
        topics = self._topics()
        names = getattr(self, "feature_names_in_", None) if vocabulary is None else np.asarray(vocabulary)
        if names is not None and len(names) != len(topics.values):
            raise InputError(f"the vocabulary has {len(names)} words, and the topics have {len(topics.values)}")
        return [each if names is None else names[each] for each in leading_words(topics.values.T, n)]

    def _each_block(self, function: Callable[..., R], X: Features, *arguments: object) -> list[R]:
        """The results of ``function(block, *arguments)`` for each block of X, of which there is one in memory."""
        refuse_spark(X, TAKES, "calls them")
        if not is_dask_collection(X):
            return [function(X, *arguments)]
        X = whole_rows(X)
        held = [shared(each) if isinstance(each, Topics) else each for each in arguments]
        return list(dask.compute(*(dask.delayed(function)(each, *held) for each in np.ravel(X.to_delayed()))))

    # -- as scikit-learn has it

    @property
    def _n_features_out(self) -> int:
        return int(self.n_components)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "components_")

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = True
        return tags


def slices(plan: TopicPlan) -> list[slice]:
    step = max(1, NUMBERS_AT_A_TIME // plan.topics)
    return [slice(start, min(start + step, plan.words)) for start in range(0, plan.words, step)]


def drop_tables(ps: dps.ParameterServer, plan: TopicPlan) -> None:
    """Drop what there is of a training's tables."""
    there = {} if ps.closed else ps.tables()
    for name in (*plan.tables, plan.totals, plan.history, *(plan.assignments or ())):
        if name in there:
            ps.drop_table(name)


# -- of one block of documents


def local_of(X: Features, words: int) -> tuple[np.ndarray, scipy.sparse.csr_matrix]:
    """(the words of a block, the block with these as columns)."""
    return dps.localize(counts_of(X, words), remember=False)


def shares_of(X: Features, topics: Topics, normalize: bool) -> np.ndarray:
    keys, local = local_of(X, len(topics.values))
    weights = exp_expectations(topics.values[keys], topics.totals)
    gamma, _ = topics_of_documents(local, weights, topics.inference)
    return gamma / gamma.sum(axis=1, keepdims=True) if normalize else gamma


def bound_of_block(X: Features, topics: Topics) -> tuple[float, float]:
    """(the part of the bound that is a block's, its tokens)."""
    keys, local = local_of(X, len(topics.values))
    logs = log_expectations(topics.values[keys], topics.totals)
    gamma, _ = topics_of_documents(local, np.exp(logs), topics.inference)
    return bound_of_documents(local, gamma, logs, topics.inference.alpha), float(local.data.sum(dtype=np.float64))


def pairs_of_block(X: Features, known: int, words: np.ndarray) -> np.ndarray:
    """In how many of a block's documents each two of some words are."""
    return shared_documents(counts_of(X, known), words)

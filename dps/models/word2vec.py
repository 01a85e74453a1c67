"""word2vec on a parameter server: the estimator, and the driver's part of its training."""

from __future__ import annotations

import contextlib
import uuid
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError

import dps
from dps.errors import InputError
from dps.graph import RandomWalks
from dps.models.classes import nonnegative
from dps.models.factor_tables import HomeTable, LiveTable
from dps.models.partitions import taking_turns
from dps.models.spark_pieces import is_spark
from dps.models.spark_sentences import SparkSentences, spark_sentences
from dps.models.types import ClusterLike, Settings
from dps.models.weights import drop, drop_later
from dps.models.where import Address, address_of, aside, serving
from dps.models.word_data import (
    Sentences,
    Vocabulary,
    count_words,
    sentence_parts,
    visited_vertices,
    vocabulary_of,
    walk_text,
)
from dps.models.word_training import WordPlan, train_walks, train_words, words_of_batch
from dps.models.word_vectors import WordVectors

if TYPE_CHECKING:
    from sklearn.utils import Tags

__all__ = ["Word2Vec"]

ASSIGN_ROWS = 1 << 15  # in one call

Text: TypeAlias = list | SparkSentences | RandomWalks  # what is read: partitions of sentences, or walks


class Word2Vec(BaseEstimator):
    """Vectors of words by skip-gram or CBOW with negative sampling, on a parameter server.

    Trainers pull the rows of the words of a batch of text, make small steps on them, and push how far these have come.
    The loss is that of Mikolov and others 2013 (arXiv:1310.4546, equation 4). Names and defaults are gensim's.

    Parameters
    ----------
    vector_size : int
    client : distributed.Client, cluster, str, SparkSession or dps.ParameterServer, optional
        Where to train, as for :class:`dps.models.LogisticRegression`: on your own ParameterServer the vectors stay on
        the servers, elsewhere ``fit`` copies them into this process.
    window : int
        The largest distance of two words of a pair. For each place, a distance from 1 to this is drawn.
    min_count : int
        Words that occur less often are left out.
    epochs : int
    alpha, min_alpha : float
        The learning rate at the first and behind the last batch; in between it falls linearly. A word with very many
        pairs in a step gets less, so that it does not overshoot.
    sg : {1, 0}
        1: skip-gram, a word predicts those around it. 0: CBOW, the mean of the words around predicts the word.
    negative : int
        How many negatives a pair counts for. The pairs of a step share a pool of 32, each with a part of the weight;
        of 64 where batches have less than 5,000 words, as those of short texts.
    ns_exponent : float
        Negatives are drawn by their counts to this power.
    sample : float
        The share of a word in the text from which on its places are left out at random; 0 keeps all.
    batch_words : int
        Words of a batch, at most: rows are pulled and pushed once for each. A larger one has fewer rows for each word.
        The text whose words were counted has at least 32 batches, unless these would have less than 1,000 words.
    staleness : int or math.inf
        The number of batches by which the fastest trainer may lead the slowest.
    servers : int
        The number of servers that ``fit`` starts.
    seed : int
        With one trainer it fixes the model.
    progress : bool, optional
        Show a progress bar; by default in terminals and notebooks.

    Attributes
    ----------
    wv : WordVectors
    counts_ : ndarray of int64
        How often each word occurs, in the order of ``wv.index_to_key``.
    loss_curve_ : list of float
        The mean loss of a pair in each epoch, measured during training.

    Examples
    --------
    >>> import numpy as np, dps
    >>> rng = np.random.default_rng(0)
    >>> groups = np.array([["cat", "dog", "cow", "pig"], ["red", "blue", "green", "pink"]])
    >>> sentences = [list(rng.choice(groups[n % 2], 8)) for n in range(400)]
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     model = dps.models.Word2Vec(8, client=cluster, epochs=20, sample=0, seed=0).fit(sentences)
    >>> sorted(word for word, _ in model.wv.most_similar("cat", topn=3))
    ['cow', 'dog', 'pig']
    """

    _vocabulary: Vocabulary | None = None
    _outside: HomeTable | LiveTable | None = None  # the vectors by which words are predicted
    _ps: dps.ParameterServer | None = None  # of the user, that has the tables
    _tables: tuple[str, str] | None = None
    _dropping: weakref.finalize | None = None
    wv: WordVectors
    counts_: np.ndarray
    loss_curve_: list[float]

    def __init__(
        self,
        vector_size: int = 100,
        *,
        client: ClusterLike = None,
        window: int = 5,
        min_count: int = 5,
        epochs: int = 5,
        alpha: float = 0.025,
        min_alpha: float = 0.0001,
        sg: int = 1,
        negative: int = 5,
        ns_exponent: float = 0.75,
        sample: float = 1e-3,
        batch_words: int = 50_000,
        staleness: float = 0,
        servers: int = 1,
        seed: int = 1,
        progress: bool | None = None,
    ):
        self.vector_size = vector_size
        self.client = client
        self.window = window
        self.min_count = min_count
        self.epochs = epochs
        self.alpha = alpha
        self.min_alpha = min_alpha
        self.sg = sg
        self.negative = negative
        self.ns_exponent = ns_exponent
        self.sample = sample
        self.batch_words = batch_words
        self.staleness = staleness
        self.servers = servers
        self.seed = seed
        self.progress = progress

    def fit(self, sentences: Sentences, y: None = None) -> Self:
        """Count the words, and learn a vector for each.

        Parameters
        ----------
        sentences : list, Dask bag, list of futures or delayed values, str or Path, DataFrame or RDD of Spark
            Lists of words; futures and delayed values hold lists of them. A str or Path names text files, as
            ``dask.bag.read_text`` takes them, each line a sentence of words between spaces. The sentences of a Spark
            DataFrame are its only column of arrays of strings; without one, its only column of strings, which are split
            at spaces. Or :class:`dps.graph.RandomWalks`, whose words are vertices; `client` is then their parameter
            server.
        y : None
            Not used.

        Returns
        -------
        Word2Vec
            Itself.

        Raises
        ------
        InputError, InputTypeError
            Sentences or settings from which no model can be trained. No table or server is left behind.
        """
        self.check()
        text = self._text(sentences)
        self.forget()
        try:
            return self._fit(text, self.epochs)
        except BaseException:
            self.forget()
            raise

    def partial_fit(self, sentences: Sentences, y: None = None, epochs: int | None = None) -> Self:
        """Go on with the vectors, in `epochs` passes (by default 1) over these sentences; the words stay the same.

        The first call counts the words, as `fit` does. Words that are new later are left out.
        """
        self.check()
        passes = 1 if epochs is None else epochs
        if not whole(passes, 1):
            raise InputError(f"epochs is a whole number, 1 or more; not {epochs!r}")
        return self._fit(self._text(sentences), passes)

    def forget(self) -> None:
        """Make the model unfitted again, and drop its tables on a parameter server that goes on."""
        if self._dropping is not None:
            _, _, arguments, _ = self._dropping.detach() or (None, None, None, None)
            if arguments is not None:
                drop(*arguments)
        for name in ("_vocabulary", "_outside", "_ps", "_tables", "_dropping", "wv", "counts_", "loss_curve_"):
            self.__dict__.pop(name, None)

    def _text(self, sentences: Sentences | RandomWalks) -> Text:
        if is_spark(sentences):
            return spark_sentences(sentences)
        if not isinstance(sentences, RandomWalks):
            return sentence_parts(sentences)
        if self.client is not sentences.ps:
            raise InputError("these walks lie on a parameter server, and the model trains there: pass client=walks.ps")
        sentences.check_open()
        return sentences

    def _count(self, ps: dps.ParameterServer, text: Text) -> Vocabulary:
        if isinstance(text, RandomWalks):
            return visited_vertices(text, self.min_count)
        data, *name = (text.partitions, text.name) if isinstance(text, SparkSentences) else (text,)
        with turns(ps, text):
            return vocabulary_of(ps.run(count_words, data, progress=False), self.min_count, *name)

    def _fit(self, text: Text, epochs: int) -> Self:
        with aside():
            if self._tables is not None and self._ps is not None:
                self._train(self._ps, text, epochs, self._tables)
                return self
            source = text.source if isinstance(text, SparkSentences) else text
            with serving(self.client, source, self.servers, detaches=lambda: self._dropping is None) as (ps, ours):
                if self._vocabulary is None:
                    self._vocabulary = self._count(ps, text)
                tables = self._make_tables(ps, self._vocabulary)
                try:
                    self._train(ps, text, epochs, tables)
                    self._keep(ps, tables, ours)
                finally:
                    if self._tables is None:
                        drop(ps, tables, False)
        return self

    def _make_tables(self, ps: dps.ParameterServer, vocabulary: Vocabulary) -> tuple[str, str]:
        """Make the tables, with the rows of the model so far, if there is one."""
        tag, count, spread = uuid.uuid4().hex[:8], len(vocabulary.words), 0.5 / self.vector_size
        tables = f"words-{tag}", f"contexts-{tag}"
        ps.table(tables[0], self.vector_size, rows=count, init=dps.Uniform(-spread, spread, seed=self.seed))
        ps.table(tables[1], self.vector_size, rows=count)
        if self._outside is not None:
            for name, values in zip(tables, (self.wv.vectors, self._outside.find(np.arange(count))[0]), strict=True):
                for first in range(0, count, ASSIGN_ROWS):
                    piece = np.arange(first, min(count, first + ASSIGN_ROWS))
                    ps.client().assign(name, piece, values[piece])
        return tables

    def _train(self, ps: dps.ParameterServer, text: Text, epochs: int, tables: tuple[str, str]) -> None:
        vocabulary = self._fitted()
        plan = WordPlan(
            *tables, cbow=not self.sg, window=self.window, negative=self.negative, alpha=self.alpha,
            min_alpha=self.min_alpha, epochs=epochs, seed=self.seed,
            batch_words=words_of_batch(self.batch_words, int(vocabulary.counts.sum())),
            noise=dps.sampling.unigram_table(vocabulary.counts, self.ns_exponent),
            keep=dps.sampling.subsample(vocabulary.counts, self.sample) if self.sample else None,
        )  # fmt: skip
        with turns(ps, text):
            function: Callable
            words: Any
            if isinstance(text, RandomWalks):
                function, data, columns = train_walks, text.data, text.columns
                words = walk_text(text, vocabulary.words)
            else:
                data = text.partitions if isinstance(text, SparkSentences) else text
                function, columns, words = train_words, None, vocabulary.words
            reports = ps.run(
                function, data, columns=columns, args=(plan, words), staleness=self.staleness, progress=self.progress
            )
        self.loss_curve_ = [*getattr(self, "loss_curve_", []), *reports[0]]

    def _keep(self, ps: dps.ParameterServer, tables: tuple[str, str], ours: bool) -> None:
        """Set the attributes of a fitted model."""
        vocabulary = self._fitted()
        live = [LiveTable(ps.client(), name, self.vector_size) for name in tables]
        everything = np.arange(len(vocabulary.words))
        self.counts_ = vocabulary.counts
        if ours:  # because the servers end here
            inside, outside = (table.find(everything)[0] for table in live)
            self.wv, self._outside = WordVectors(vocabulary.words, inside), HomeTable(everything, outside)
            return
        self.wv, self._outside = WordVectors(vocabulary.words, live[0]), live[1]
        self._ps, self._tables = ps, tables
        self._dropping = weakref.finalize(self.wv, drop_later, ps, tables, isinstance(self.client, Address))
        self._dropping.atexit = False  # at exit, the user's parameter server goes on and keeps the tables

    def _fitted(self) -> Vocabulary:
        if self._vocabulary is None:
            raise NotFittedError("this Word2Vec is not fitted yet; call fit")
        return self._vocabulary

    def check(self) -> None:
        """Refuse impossible settings before any server starts."""
        for name in ("vector_size", "window", "min_count", "epochs", "negative", "batch_words", "servers"):
            if not whole(getattr(self, name), 1):
                raise InputError(f"{name} is a whole number, 1 or more; not {getattr(self, name)!r}")
        for name in ("alpha", "min_alpha", "sample"):
            if not nonnegative(getattr(self, name)):
                raise InputError(f"{name} is a finite number, 0 or more; not {getattr(self, name)!r}")
        if not whole(self.seed, 0):
            raise InputError(f"seed is a whole number, 0 or more; not {self.seed!r}")
        if self.sg not in (0, 1):
            raise InputError(f"sg is 1 (skip-gram) or 0 (CBOW); not {self.sg!r}")

    # -- as scikit-learn has it

    def __sklearn_is_fitted__(self) -> bool:
        return self._outside is not None

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False  # X is text
        return tags

    def __sklearn_clone__(self) -> Self:
        """Clone with the same client object, because a cluster cannot be copied."""
        return type(self)(**self.get_params(deep=False))

    def __getstate__(self) -> Settings:
        """A pickled model has its vectors with it, and the address of the cluster to train in."""
        state = {**super().__getstate__(), "client": address_of(self.client)}
        if self._tables is not None and self._outside is not None:
            everything = np.arange(len(self.wv))
            state["wv"] = WordVectors(self.wv.index_to_key, self.wv.vectors)
            state["_outside"] = HomeTable(everything, self._outside.find(everything)[0])
            for name in ("_ps", "_tables", "_dropping"):
                state.pop(name, None)
        return state


def turns(ps: dps.ParameterServer, text: Text) -> AbstractContextManager[None]:
    """One fit at a time in a Dask cluster. Spark's trainers need none of its threads."""
    return contextlib.nullcontext() if isinstance(text, SparkSentences) else taking_turns(ps.dask_client)


def whole(value: object, least: int) -> bool:
    """Whether it is a whole number, `least` or more."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) >= least

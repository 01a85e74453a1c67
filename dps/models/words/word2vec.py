"""word2vec on a parameter server: the estimator, and the driver's part of its training."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import numpy as np

import dps
from dps.errors import InputError
from dps.graph import RandomWalks
from dps.models.base import ServerModel
from dps.models.inputs.pieces import Pieces
from dps.models.inputs.source import turns
from dps.models.rows import HomeTable, LiveTable, RowTable
from dps.models.settings import Number, OneOf, Rules, Whole, refuse_other
from dps.models.tables import WIRE, ModelTables, WireLike, drop, wire_of_rows
from dps.models.types import ClusterLike, Settings
from dps.models.vocabularies import VOCABULARY, VocabularyLike, words_at
from dps.models.where import aside
from dps.models.words.text import (
    Sentences,
    Text,
    Vocabulary,
    count_words,
    counted_words,
    text_of,
    visited_vertices,
    vocabulary_of,
    walk_text,
)
from dps.models.words.training import WordPlan, train_walks, train_words, words_of_batch
from dps.models.words.vectors import WordVectors

if TYPE_CHECKING:
    from sklearn.utils import Tags

    from dps.models.types import Part
    from dps.models.words.text import WalkText

__all__ = ["Word2Vec"]

ASSIGN_ROWS = 1 << 15  # in one call


class WordModel(NamedTuple):
    """What was learnt: the words and their two vectors, on the servers or in this process."""

    vocabulary: Vocabulary
    inside: RowTable  # the vectors of words
    outside: RowTable  # the vectors by which words are predicted

    def home(self) -> WordModel:
        everything = np.arange(len(self.vocabulary.words))
        inside, outside = (HomeTable(everything, table.find(everything)[0]) for table in self[1:])
        return WordModel(self.vocabulary, inside, outside)

    def vectors(self) -> WordVectors:
        return WordVectors(self.vocabulary.words, self.inside)


@dataclass(kw_only=True, eq=False, repr=False)
class VectorModel(ServerModel[WordModel]):
    """What models of words, and of vertices of walks, share: settings, training, what was learnt."""

    STATE: ClassVar = (*ServerModel.STATE, "wv")
    RULES: ClassVar[Rules] = {
        "vector_size": Whole(), "window": Whole(), "min_count": Whole(), "epochs": Whole(), "negative": Whole(),
        "batch_words": Whole(), "alpha": Number(), "min_alpha": Number(), "sample": Number(), "seed": Whole(0),
        "sg": OneOf(1, 0), "wire": WIRE,
    }  # fmt: skip
    vector_size: int = field(default=100, kw_only=False)
    client: ClusterLike = None
    window: int = 5
    epochs: int = 5
    alpha: float = 0.025
    min_alpha: float = 0.0001
    sg: int = 1
    negative: int = 5
    ns_exponent: float = 0.75
    sample: float = 1e-3
    batch_words: int = 50_000
    staleness: float = 0
    wire: WireLike = None
    servers: int = 1
    seed: int = 1
    progress: bool | None = None

    def check(self) -> None:
        """Refuse impossible settings before any server starts."""
        super().check()
        wire_of_rows(self.wire, self.vector_size)

    def learn(
        self,
        ps: dps.ParameterServer,
        text: Text | RandomWalks,
        epochs: int,
        ours: bool,
        counted: Vocabulary | None = None,
    ) -> None:
        """Make so many passes over the text, from what is learnt or from the beginning, and keep what comes of it.

        `ours`: the servers end with the fit, so that the vectors are copied into this process. `counted`: the words, if
        they need not be counted.
        """
        vocabulary = counted if self._learnt is None else self._learnt.vocabulary
        if isinstance(text, RandomWalks):
            self._learn(ps, text, vocabulary or visited_vertices(text, self.min_count), epochs, ours)
            return
        with contextlib.closing(text.pieces(ps)) as pieces:
            if vocabulary is None:
                with turns(ps, pieces.data):
                    counts = ps.run(count_words, pieces.data, progress=False)
                vocabulary = vocabulary_of(counts, self.min_count, text.name)
            self._learn(ps, pieces, vocabulary, epochs, ours)

    def _learn(
        self, ps: dps.ParameterServer, text: Pieces | RandomWalks, vocabulary: Vocabulary, epochs: int, ours: bool
    ) -> None:
        if self._tables is not None:
            self._train(ps, text, epochs, self._tables.names, vocabulary)
            return
        tables = self._make_tables(ps, vocabulary)
        try:
            self._train(ps, text, epochs, tables, vocabulary)
            live = WordModel(vocabulary, *(LiveTable(ps.client(), name, self.vector_size) for name in tables))
            self._learnt = live.home() if ours else live
            self.counts_, self.wv = vocabulary.counts, self._learnt.vectors()
            if not ours:
                self._tables = ModelTables(ps, tables, self.wv, self.client)
        finally:
            if self._tables is None:
                drop(ps, tables, False)

    def _make_tables(self, ps: dps.ParameterServer, vocabulary: Vocabulary) -> tuple[str, str]:
        """Make the tables, with the rows of the model so far, if there is one."""
        tag, count, spread = uuid.uuid4().hex[:8], len(vocabulary.words), 0.5 / self.vector_size
        tables, wire = (f"words-{tag}", f"contexts-{tag}"), wire_of_rows(self.wire, self.vector_size)
        init = dps.Uniform(-spread, spread, seed=self.seed)
        ps.table(tables[0], self.vector_size, rows=count, init=init, wire=wire)
        ps.table(tables[1], self.vector_size, rows=count, wire=wire)
        if self._learnt is not None:
            for name, table in zip(tables, self._learnt[1:], strict=True):
                values = table.find(np.arange(count))[0]
                for first in range(0, count, ASSIGN_ROWS):
                    piece = np.arange(first, min(count, first + ASSIGN_ROWS))
                    ps.client().assign(name, piece, values[piece])
        return tables

    def _train(
        self,
        ps: dps.ParameterServer,
        text: Pieces | RandomWalks,
        epochs: int,
        tables: tuple[str, ...],
        vocabulary: Vocabulary,
    ) -> None:
        words_table, contexts_table = tables
        plan = WordPlan(
            words_table, contexts_table, cbow=not self.sg, window=self.window, negative=self.negative, alpha=self.alpha,
            min_alpha=self.min_alpha, epochs=epochs, seed=self.seed,
            batch_words=words_of_batch(self.batch_words, int(vocabulary.counts.sum())),
            noise=dps.sampling.unigram_table(vocabulary.counts, self.ns_exponent),
            keep=dps.sampling.subsample(vocabulary.counts, self.sample) if self.sample else None,
        )  # fmt: skip
        function: Callable = train_words
        words: list[Part] | WalkText = vocabulary.words
        columns = None
        if isinstance(text, RandomWalks):
            function, columns, words = train_walks, text.columns, walk_text(text, vocabulary.words)
        with turns(ps, text.data):
            reports = ps.run(
                function, text.data, columns=columns, args=(plan, words), staleness=self.staleness,
                progress=self.progress,
            )  # fmt: skip
        self.loss_curve_ = [*getattr(self, "loss_curve_", []), *reports[0]]

    def portable(self) -> WordModel | None:
        """What was learnt, as a pickled model has it."""
        return None if self._learnt is None else self._learnt.home()

    # -- as scikit-learn has it

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = tags.input_tags.sparse = False  # X is text, or edges
        return tags

    def __getstate__(self) -> Settings:
        """A pickled model has its vectors with it, and the address of the cluster to train in."""
        state = super().__getstate__()
        if self._learnt is not None:
            state["wv"] = state["_learnt"].vectors()
        return state


@dataclass(kw_only=True, eq=False, repr=False)
class Word2Vec(VectorModel):
    """Vectors of words by skip-gram or CBOW with negative sampling, on a parameter server.

    Trainers pull the rows of the words of a batch of text, make small steps on them, and push how far these have come.
    The loss is that of Mikolov and others 2013 (arXiv:1310.4546, equation 4). Names and defaults are gensim's. On
    held-out pairs of three texts it is at most 1.4 % above that of gensim's vectors.

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
        of 64 where batches have less than 5,000 words, as those of short texts. With skip-gram and a window wider than
        5, steps have fewer places and the pool has more negatives, in proportion.
    ns_exponent : float
        Negatives are drawn by their counts to this power.
    sample : float
        The share of a word in the text from which on its places are left out at random; 0 keeps all.
    batch_words : int
        Words of a batch, at most: rows are pulled and pushed once for each. A larger one has fewer rows for each word.
        The text whose words were counted has at least 32 batches, unless these would have less than 1,000 words.
    staleness : int or math.inf
        The number of batches by which the fastest trainer may lead the slowest.
    wire : {"auto", "lists"} or dps.Wire, optional
        How the rows of vectors travel between trainers and servers, as for
        :class:`dps.models.LogisticRegression`. By default ``"lists"``, which loses nothing.
    servers : int
        The number of servers that ``fit`` starts.
    seed : int
        With one trainer it fixes the model.
    vocabulary : WordTable or str, optional
        A vocabulary with counts (:meth:`dps.ParameterServer.vocabulary`), or the name of one on the parameter server
        `client`. Its words are learnt, and the sentences are read once less, because nothing is counted.
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

    RULES: ClassVar[Rules] = {"vocabulary": VOCABULARY}
    min_count: int = 5
    vocabulary: VocabularyLike = None

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

        The first call counts the words, or takes those of a vocabulary, as `fit` does. Words that are new later are
        left out.
        """
        self.check()
        passes = 1 if epochs is None else epochs
        refuse_other("epochs", passes, Whole())
        return self._fit(self._text(sentences), passes)

    def _text(self, sentences: Sentences | RandomWalks) -> Text | RandomWalks:
        if not isinstance(sentences, RandomWalks):
            return text_of(sentences)
        if self.vocabulary is not None:
            raise InputError("the words of walks are vertices, and were counted with the walks: leave out vocabulary=")
        if self.client is not sentences.ps:
            raise InputError("these walks lie on a parameter server, and the model trains there: pass client=walks.ps")
        sentences.check_open()
        return sentences

    def _fit(self, text: Text | RandomWalks, epochs: int) -> Self:
        if self._tables is not None:
            with aside():
                self.learn(self._tables.ps, text, epochs, False)
            return self
        with self.serving(text.source if isinstance(text, Text) else text) as (ps, ours):
            words = words_at(ps, self.vocabulary) if self._learnt is None else None
            self.learn(ps, text, epochs, ours, None if words is None else counted_words(words, self.min_count))
        return self

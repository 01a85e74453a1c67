"""Matrix factorization: users and items as vectors whose inner products are ratings or preferences."""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt

import dps
from dps.errors import InputError
from dps.models.base import ServerModel
from dps.models.factors.als import ImplicitALS
from dps.models.factors.bpr import BPR
from dps.models.factors.factors import Factors, LikedPairs, best_items, similar
from dps.models.factors.ratings import RatingsLike, RatingSource, checked, checked_ids, source_of
from dps.models.factors.sgd import BiasedSGD, FactorReport
from dps.models.factors.steps import TableNames
from dps.models.inputs.source import turns
from dps.models.rows import LiveTable, RowTable
from dps.models.settings import Number, OneOf, Rules, Whole
from dps.models.tables import WIRE, ModelTables, WireLike, drop, wire_of_rows
from dps.models.types import ClusterLike
from dps.models.where import aside

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from scipy.sparse import spmatrix
    from sklearn.utils import Tags

    from dps.models.types import Part, Source

__all__ = ["MatrixFactorization"]

MAX_SEED = 2**32 - 1
KEPT_PAIRS = 1 << 24  # pairs of users and items that a model keeps, so that it can leave out what users know already
ASSIGN_ROWS = 1 << 15  # in one call


class FactorMethod(Protocol):
    """How factors are learnt: one of `METHODS` with its settings."""

    @property
    def staleness(self) -> float: ...

    @property
    def biases(self) -> int:
        """Values at the beginning of a row that are no factors."""

    def for_epochs(self, epochs: int) -> Self:
        """The same, with another number of epochs, for ratings that come to a model."""

    def curve(self, losses: np.ndarray) -> list[float]:
        """The loss of each epoch, given the sums of losses and weights [epochs, 2]."""

    def data(self, source: RatingSource, ps: dps.ParameterServer) -> AbstractContextManager[Source]:
        """The ratings as partitions for `ps.run`."""

    def train(
        self, trainer: dps.Trainer, partitions: Sequence[Part], tables: TableNames, mean: float | None, keep: int
    ) -> FactorReport:
        """The training function. `mean` is that of the model so far; pairs are returned if there are at most `keep`."""


def biased_sgd(model: MatrixFactorization, seed: int) -> FactorMethod:
    """Settings of "sgd".

    The defaults were chosen on held-out ratings of MovieLens 100k and of 60,000 generated ones. Their RMSE is 0.910 and
    0.633. It is 0.930 and 0.679 with those of Surprise's SVD (0.005, 0.02, 20 epochs), and 0.944 and 0.696 with biases
    alone.
    """
    return BiasedSGD(
        rate=0.01 if model.learning_rate is None else model.learning_rate,
        regularization=0.1 if model.regularization is None else model.regularization,
        epochs=model.epochs or 30,
        batch_size=model.batch_size,
        seed=seed,
        staleness=model.staleness,
    )


def implicit_als(model: MatrixFactorization, seed: int) -> FactorMethod:
    """Settings of "als"; the defaults are those of the package implicit."""
    return ImplicitALS(
        alpha=model.alpha,
        regularization=0.01 if model.regularization is None else model.regularization,
        epochs=model.epochs or 15,
        solver=model.solver,
        cg_steps=model.cg_steps,
    )


def bpr(model: MatrixFactorization, seed: int) -> FactorMethod:
    """Settings of "bpr"; the defaults are those of the package implicit."""
    return BPR(
        rate=0.01 if model.learning_rate is None else model.learning_rate,
        regularization=0.01 if model.regularization is None else model.regularization,
        epochs=model.epochs or 100,
        batch_size=model.batch_size,
        seed=seed,
        staleness=model.staleness,
    )


METHODS: dict[str, Callable[[MatrixFactorization, int], FactorMethod]] = {
    "sgd": biased_sgd,
    "als": implicit_als,
    "bpr": bpr,
}
SOLVERS = ("cg", "exact")  # of the systems of "als"


@dataclass(kw_only=True, eq=False, repr=False)
class MatrixFactorization(ServerModel[Factors]):
    """Factors of users and items from ratings or implicit feedback, on a parameter server.

    Parameters
    ----------
    method : {"sgd", "als", "bpr"}
        "sgd": explicit ratings, ``mean + b_u + b_i + p_u . q_i`` by stochastic gradients of the squared error (Funk
        2006; Koren, Bell and Volinsky 2009). "als": implicit feedback, weighted least squares of all pairs by turns of
        users and items (Hu, Koren and Volinsky 2008). "bpr": implicit feedback, pairwise ranking against items that
        are drawn (Rendle and others 2009); ratings above 0 are feedback.
    factors : int
        The length of the vectors.
    client : distributed.Client, cluster, str, SparkSession or dps.ParameterServer, optional
        Where to train, as for :class:`dps.models.LogisticRegression`: on your own ParameterServer the factors stay on
        the servers, elsewhere ``fit`` copies them into this process.
    learning_rate : float, optional
        Of "sgd" and "bpr" 0.01.
    regularization : float, optional
        The strength of the L2 penalty: of "sgd" 0.1 and of "bpr" 0.01, for each rating of a row; of "als" 0.01, for
        each row.
    epochs : int, optional
        Passes over the ratings: of "sgd" 30, of "bpr" 100; of "als" sweeps over users and items, 15.
    alpha : float
        Of "als": a rating r has the confidence 1 + alpha r.
    solver : {"cg", "exact"}
        Of "als": `cg_steps` steps of conjugate gradients for each user and item (Takács, Pilászy and Tikk 2011), or
        the solution of its linear system.
    cg_steps : int
        Of the solver "cg".
    batch_size : int
        Ratings in a mini-batch of a trainer, of "sgd" and "bpr": how many it handles on rows that it has pulled. With
        one trainer the method does not depend on it. A larger one has fewer rows to pull for each rating; several
        trainers see later what the others have learnt.
    init_std : float
        Standard deviation of the initial factors. Biases begin at 0.
    staleness : int or math.inf
        The number of steps by which the fastest trainer may lead the slowest. "als" always has 0.
    columns : tuple of str
        The columns of a DataFrame: users, items, ratings.
    wire : {"auto", "lists"} or dps.Wire, optional
        How the rows of users and items travel between trainers and servers, as for
        :class:`dps.models.LogisticRegression`. By default ``"lists"``, which loses nothing.
    servers : int
        The number of servers that ``fit`` starts.
    random_state : int, RandomState or None
        Seed of initial factors and of the order of ratings. With one trainer it fixes the model.
    progress : bool, optional
        Show a progress bar; by default in terminals and notebooks.

    Attributes
    ----------
    user_ids_, item_ids_ : ndarray of int64
        The ids that were seen, sorted.
    user_factors, item_factors : ndarray of float32 [ids, factors]
        In the order of the ids. Fetched from the servers on demand.
    user_biases, item_biases : ndarray of float32
        In the order of the ids.
    mean_ : float
        Of "sgd", the mean of the ratings; else 0.
    loss_curve_ : list of float
        Of "sgd" the root of the mean squared error in each epoch, measured during training; of "bpr" the mean of
        -log sigmoid(x_ui - x_uj); of "als" the loss after each sweep, divided by the sum of all confidences.
    n_iter_ : int
        The number of epochs that were made.
    seconds_ : dict
        Trainers' time, summed: "compute", "pull", "push", "wait", "serialise".

    Examples
    --------
    >>> import numpy as np, dps
    >>> rng = np.random.default_rng(0)
    >>> users, items = rng.integers(0, 30, 600), rng.integers(100, 120, 600)
    >>> ratings = 3.0 + (users % 2) - (items % 3)
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     model = dps.models.MatrixFactorization(factors=4, client=cluster, learning_rate=0.05, random_state=0)
    ...     model = model.fit((users, items, ratings))
    >>> bool(np.abs(model.predict(users, items) - ratings).mean() < 0.2), model.item_factors.shape
    (True, (20, 4))
    >>> ids, scores = model.recommend(users[0], N=3, filter_already_liked=False)
    >>> (ids % 3).tolist()
    [0, 0, 0]
    """

    RULES: ClassVar[Rules] = {
        "method": OneOf(*METHODS), "solver": OneOf(*SOLVERS), "factors": Whole(), "batch_size": Whole(),
        "epochs": Whole(other=(None,)), "cg_steps": Whole(), "learning_rate": Number(inside=True, other=(None,)),
        "regularization": Number(other=(None,)), "init_std": Number(inside=True), "alpha": Number(),
        "wire": WIRE,
    }  # fmt: skip
    method: str = field(default="sgd", kw_only=False)
    factors: int = 64
    client: ClusterLike = None
    learning_rate: float | None = None
    regularization: float | None = None
    epochs: int | None = None
    alpha: float = 1.0
    solver: str = "cg"
    cg_steps: int = 3
    batch_size: int = 20_000
    init_std: float = 0.1
    staleness: float = 0
    columns: tuple[str, str, str] = ("user", "item", "rating")
    wire: WireLike = None
    servers: int = 1
    random_state: int | np.random.RandomState | None = None
    progress: bool | None = None

    # -- training

    def fit(self, ratings: RatingsLike, y: None = None) -> MatrixFactorization:
        """Train a new model.

        Parameters
        ----------
        ratings : sparse matrix, tuple, ndarray, DataFrame, Dask collection, list, or Spark DataFrame
            A sparse matrix [users, items], whose numbers of rows and columns are the ids; three arrays ``(users,
            items, ratings)`` of numpy or Dask; an array [n, 3] of numpy or Dask; a DataFrame of pandas, Dask or Spark
            with the columns `columns`; or a list of futures or delayed values, each of them one of the former in
            memory. Ids are any int64.
        y : None
            Not used.

        Returns
        -------
        MatrixFactorization
            Itself.

        Raises
        ------
        InputError, InputTypeError
            Ratings or settings from which no model can be trained. No table or server is left behind.
        """
        self.check()
        self.forget()
        try:
            return self._fit(ratings, None)
        except BaseException:
            self.forget()
            raise

    def partial_fit(self, ratings: RatingsLike, y: None = None) -> MatrixFactorization:
        """Learn from more ratings. New users and items get rows.

        "sgd" and "bpr" make one more epoch, over these ratings; the mean stays that of the first call. "als" solves the
        users of these ratings, for which these are all that counts, and then the items that are new; the others stay.
        Parameters are those of :meth:`fit`.
        """
        self.check()
        if self._learnt is None:
            self.forget()
        return self._fit(ratings, 1)

    def _fit(self, ratings: RatingsLike, epochs: int | None) -> MatrixFactorization:
        source, seed = source_of(ratings, self.columns), seed_of(self.random_state)
        method = METHODS[self.method](self, seed)
        if epochs is not None:
            method = method.for_epochs(epochs)
        wire = wire_of_rows(self.wire, self.factors + method.biases)
        if self._tables is not None:
            users, items = self._tables.names
            with aside():
                self._train(self._tables.ps, source, method, TableNames(users, items, method.biases))
            return self
        with self.serving(ratings) as (ps, ours):
            tables = self._make_tables(ps, method.biases, seed, wire)
            try:
                factors = self._train(ps, source, method, tables)
            except BaseException:
                drop(ps, tables.names, False)
                raise
            if ours:
                self._learnt = factors.home()  # because the servers end here
            else:
                self._tables = ModelTables(ps, tables.names, factors.users, self.client)
        return self

    def _train(
        self, ps: dps.ParameterServer, source: RatingSource, method: FactorMethod, tables: TableNames
    ) -> Factors:
        """Train on these tables; the factors there."""
        mean = None if self._learnt is None else self._learnt.mean
        keep = KEPT_PAIRS if source.home is None else 0
        with contextlib.ExitStack() as stack:
            data = stack.enter_context(method.data(source, ps))
            stack.enter_context(turns(ps, data))
            reports = ps.run(
                train, data, args=(method, tables, mean, keep), staleness=method.staleness, progress=self.progress
            )
        self._note(method, reports)
        learnt = before = self._learnt
        if learnt is None or self._tables is None:
            users, items = (LiveTable(ps.client(), name, self.factors + method.biases) for name in tables.names)
            learnt = Factors(users, items, method.biases, reports[0].mean)
        self._learnt = learnt._replace(liked=liked_pairs(before, reports, source))
        return self._learnt

    def _make_tables(self, ps: dps.ParameterServer, biases: int, seed: int, wire: dps.Wire | str) -> TableNames:
        """Make the tables, with the rows of the model so far, if there is one."""
        tag, width = uuid.uuid4().hex[:8], self.factors + biases
        tables = TableNames(f"users-{tag}", f"items-{tag}", biases)
        for number, name in enumerate(tables.names, 1):  # each has a seed of its own, because rows are multiplied
            ps.table(name, width, init=dps.Normal(self.init_std, seed=2 * seed + number), wire=wire)
        if self._learnt is not None:
            for name, table in zip(tables.names, self._learnt[:2], strict=True):
                keys, values = table.everything()
                if values.shape[1] != width:
                    raise InputError(
                        f"the model has {values.shape[1] - biases} factors, and factors is {self.factors}: fit anew"
                    )
                for first in range(0, len(keys), ASSIGN_ROWS):
                    cut = slice(first, first + ASSIGN_ROWS)
                    ps.client().assign(name, keys[cut], values[cut])
        return tables

    def _note(self, method: FactorMethod, reports: list[FactorReport]) -> None:
        losses = np.sum([report.losses for report in reports], axis=0)
        self.loss_curve_ = [*getattr(self, "loss_curve_", []), *method.curve(losses)]
        self.n_iter_ = len(self.loss_curve_)
        self.seconds_ = getattr(self, "seconds_", dict.fromkeys(reports[0].seconds, 0.0))
        for report in reports:
            for kind, spent in report.seconds.items():
                self.seconds_[kind] += spent

    def check(self) -> None:
        """Refuse impossible settings before any server starts."""
        super().check()
        names = self.columns
        if not (isinstance(names, (tuple, list)) and len(names) == 3 and all(isinstance(each, str) for each in names)):
            raise InputError(f"columns are the names of three columns, (user, item, rating); not {names!r}")

    # -- predictions

    def predict(self, users: npt.ArrayLike, items: npt.ArrayLike) -> np.ndarray:
        """The rating, or preference, of each pair of a user and an item.

        A user or item that was not in the ratings counts as one with a bias of 0 and no factors: of "sgd" the mean is
        left, and the bias of the other one; of "bpr" the bias of the item; of "als" 0.

        Parameters
        ----------
        users, items : array_like of int
            Of one shape, or one of them a number.

        Returns
        -------
        ndarray of float32
        """
        factors = self._fitted()
        pair = np.broadcast_arrays(_as_ids(users, "users"), _as_ids(items, "items"))
        return factors.scores(*(each.reshape(-1) for each in pair)).reshape(pair[0].shape)

    def recommend(
        self,
        users: npt.ArrayLike,
        N: int = 10,
        *,
        filter_already_liked: bool = True,
        user_items: Sequence[npt.ArrayLike] | spmatrix | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The items with the largest scores for users, found where the items are.

        Parameters
        ----------
        users : int or array_like of int
        N : int
            How many items for each.
        filter_already_liked : bool
            Leave out the items of each user in the training data, or those of `user_items`.
        user_items : sparse matrix [users, items] or list of array_like of int, optional
            The items to leave out for each of `users`: a row whose columns are ids, or ids.

        Returns
        -------
        ids, scores : ndarray [N], or [users, N]
            The largest score first. For several users, places without an item have score -inf and id -1; for one user
            they are cut off.

        Raises
        ------
        InputError
            A user was not in the ratings; `user_items` has another number of rows than there are users; or the items of
            users are not known, because there were too many ratings: pass `user_items` then.
        """
        factors, ids = self._fitted(), _as_ids(users, "users")
        if not filter_already_liked:
            liked = None
        elif user_items is not None:
            liked = _as_liked(user_items, ids.size)
        elif factors.liked is not None:
            liked = factors.liked.items_of(ids.reshape(-1))
        else:
            raise InputError(
                f"the model keeps the items of its users up to {KEPT_PAIRS:,} ratings, and there were more: pass those "
                f"of these users as user_items=, or filter_already_liked=False"
            )
        return best_items(factors, liked, ids, N)

    def similar_items(self, items: npt.ArrayLike, N: int = 10) -> tuple[np.ndarray, np.ndarray]:
        """The items whose factors have the largest cosines with those of an item, itself the first.

        Parameters
        ----------
        items : int or array_like of int
        N : int
            How many items for each.

        Returns
        -------
        ids, scores : ndarray [N], or [items, N]
            The largest cosine first; places are filled as by :meth:`recommend`.

        Raises
        ------
        InputError
            An item was not in the ratings.
        """
        factors = self._fitted()
        return similar(factors.items, factors.biases, _as_ids(items, "items"), N, "items")

    def similar_users(self, users: npt.ArrayLike, N: int = 10) -> tuple[np.ndarray, np.ndarray]:
        """The users whose factors have the largest cosines with those of a user; as :meth:`similar_items`."""
        factors = self._fitted()
        return similar(factors.users, factors.biases, _as_ids(users, "users"), N, "users")

    def score(self, ratings: RatingsLike, y: None = None) -> float:
        """The negative root of the mean squared error of predictions of these ratings, in memory; of "sgd"."""
        users, items, values = checked(ratings, self.columns)
        return -float(np.sqrt(np.mean((self.predict(users, items) - values.astype(np.float64)) ** 2)))

    @property
    def user_ids_(self) -> np.ndarray:
        return self._fitted().users.everything()[0]

    @property
    def item_ids_(self) -> np.ndarray:
        return self._fitted().items.everything()[0]

    @property
    def user_factors(self) -> np.ndarray:
        factors = self._fitted()
        return factors.users.everything()[1][:, factors.biases :]

    @property
    def item_factors(self) -> np.ndarray:
        factors = self._fitted()
        return factors.items.everything()[1][:, factors.biases :]

    @property
    def user_biases(self) -> np.ndarray:
        return self._biases(self._fitted().users)

    @property
    def item_biases(self) -> np.ndarray:
        return self._biases(self._fitted().items)

    @property
    def mean_(self) -> float:
        return self._fitted().mean

    def _biases(self, table: RowTable) -> np.ndarray:
        keys, values = table.everything()
        return values[:, 0] if self._fitted().biases else np.zeros(len(keys), np.float32)

    def portable(self) -> Factors | None:
        """What was learnt, as a pickled model has it."""
        return None if self._learnt is None else self._learnt.home()

    # -- as scikit-learn has it

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False  # an array has rows of (user, item, rating), and no features
        tags.non_deterministic = self.random_state is None
        return tags


def liked_pairs(before: Factors | None, reports: list[FactorReport], source: RatingSource) -> LikedPairs | None:
    """The items of each user in these ratings and those before; None, if there are too many."""
    new = [report.pairs for report in reports] if source.home is None else [source.home[:2]]
    if any(pairs is None for pairs in new) or (before is not None and before.liked is None):
        return None
    pairs = LikedPairs.of(*(np.concatenate(column) for column in zip(*new, strict=True)))
    return pairs if before is None or before.liked is None else before.liked.with_more(pairs)


def train(
    trainer: dps.Trainer, partitions: list, method: FactorMethod, tables: TableNames, mean: float | None, keep: int
) -> FactorReport:
    return method.train(trainer, partitions, tables, mean, keep)


def seed_of(random_state: int | np.random.RandomState | None) -> int:
    """A seed for initial values and for generators."""
    if random_state is None:
        return int(np.random.SeedSequence().generate_state(1)[0])
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(MAX_SEED, dtype=np.int64))
    whole = isinstance(random_state, (int, np.integer)) and not isinstance(random_state, bool)
    if not (whole and 0 <= random_state <= MAX_SEED):
        raise InputError(
            f"random_state is a whole number from 0 to {MAX_SEED}, a RandomState or None; not {random_state!r}"
        )
    return int(random_state)


def _as_ids(ids: npt.ArrayLike, what: str) -> np.ndarray:
    made = np.asarray(ids)
    return checked_ids(made.reshape(-1), what).reshape(made.shape)


def _as_liked(user_items: Sequence[npt.ArrayLike] | spmatrix, users: int) -> list[np.ndarray]:
    """The ids of the items to leave out for each user; `users` says how many users there are."""
    if hasattr(user_items, "tocsr"):
        matrix = user_items.tocsr()
        rows = [matrix.indices[start:end] for start, end in itertools.pairwise(matrix.indptr)]
    else:
        rows = list(user_items)
    if len(rows) != users:
        raise InputError(f"user_items has {len(rows)} rows, and there are {users} users: pass a row for each")
    return [checked_ids(np.atleast_1d(row), "user_items") if np.size(row) else np.empty(0, np.int64) for row in rows]

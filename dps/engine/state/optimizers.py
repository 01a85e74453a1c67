"""Optimizers: the change that a push makes to a row. That is to add, to assign, or one step of an optimizer.

An optimizer is an immutable value: a name and numbers. (Those of the user: `custom.py`.) The state it needs lies beside
each row's values, in columns that the shard owns, so that it is placed, replicated, moved and stored with the
row. Compiled kernels do the work (:mod:`dps.engine.core.shards.optimizers`). If every step pushes to every row, the
results are those of ``torch.optim``.

In the equations g is the pushed update of one row, w its values; all products are column by column. eta is the learning
rate, ``lr``: a number, or a :mod:`schedule <dps.engine.state.schedules>` evaluated at the clock of the push (and, for
:class:`~dps.engine.state.schedules.StalenessAware`, at its lag).

``l1`` and ``l2`` are proximal: after the gradient step with a column's effective rate r,
w <- sign(w) max(\\|w\\| - r l1, 0) / (1 + r l2), so that l1 makes weights exactly zero (Duchi and Singer, 2009).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, dataclass_transform

import numpy as np

from dps.engine.core.shards import optimizers as kernels
from dps.engine.state.dtypes import DTYPES, REALS
from dps.engine.state.recipes import Recipe, flag, from_dict, number
from dps.engine.state.schedules import RATE, Schedule, StalenessAware

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Add",
    "Assign",
    "Momentum",
    "Optimizer",
    "RMSprop",
    "optimizer_from_dict",
]

WHOLE_TABLE = np.empty(0, dtype=np.int64)  # the index that means rows start, start + 1, ...


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Optimizer(Recipe):
    """Base of the optimizers, and of the user's own ones.

    A class of the user has a method :meth:`update` in numpy, and :meth:`init` if it needs state. It is a frozen
    dataclass without a decorator: its annotated attributes are its fields. Tables take it as they take dps's own.

    Attributes
    ----------
    kernel : callable
        ``kernel(rows, index, start, updates, numbers)``, see ``dps/engine/core/shards/optimizers.pyx``.
    states : int
        Columns of state for each column of values.
    repeats : str
        What happens to the updates of a key that is several times in one push: ``"sum"``, they are summed before the
        step; ``"any"``, single steps in any order give the same result; ``"last"``, the last one counts.
    dtypes : tuple of str
        The dtypes of tables on which the optimizer works.

    Examples
    --------
    >>> Adagrad(0.1).init(dim=64)
    64
    >>> Adagrad(0.1).to_dict()["lr"]
    {'name': 'Fixed', 'lr': 0.1}
    """

    kernel: ClassVar[Callable[..., None]]
    states: ClassVar[int] = 0
    dtypes: ClassVar[tuple[str, ...]] = REALS

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if not is_of_dps(cls):
            dataclass(frozen=True)(cls)

    @property
    def kind(self) -> str:
        """The name of the class."""
        return type(self).__name__

    @property
    def repeats(self) -> str:
        """What happens to the repeated keys of one push: see above."""
        return "sum"

    @property
    def derived(self) -> bool:
        """Whether the values follow from the state, so that ``add`` and ``assign`` would be undone by the next push."""
        return False

    @property
    def uses_lag(self) -> bool:
        """Whether the step of a push depends on the clocks by which it lags behind the latest one of its shard."""
        return any(isinstance(getattr(self, each.name), StalenessAware) for each in fields(self))

    def init(self, dim: int) -> int:
        """How many columns of state follow the `dim` columns of values; in a new row they hold `slot_start`."""
        return self.states * dim

    @property
    def slot_start(self) -> float:
        """The value in the columns of state of a new row."""
        return 0.0

    def update(self, values: np.ndarray, state: np.ndarray, gradients: np.ndarray, clock: int) -> None:
        """Step some rows in place. A class of the user overrides it; it may call that of the optimizer it derives from.

        A server calls it with copies of the rows of one shard that a push names, each row once. It puts the copies in
        place of the rows when `update` has returned for all of its shards; if one raises, no row has changed. Only the
        primary of a shard runs it, because its backups get the rows that it has made: so it may draw random numbers.
        After a failover, the next primary may run it anew for a push whose answer was lost; the push counts once. The
        server answers no other request meanwhile, so it has to be short.

        Parameters
        ----------
        values : ndarray
            [m, dim], to be changed in place. Of a table of float16 or bfloat16, these three are float32.
        state : ndarray
            [m, ``init(dim)``], to be changed in place.
        gradients : ndarray
            [m, dim], what was pushed. It cannot be written.
        clock : int
            The clock of the push.
        """
        dim = values.shape[1]
        rows = np.concatenate([values, state], axis=1)
        self.step(rows, np.ascontiguousarray(gradients), clock=clock)
        values[:], state[:] = rows[:, :dim], rows[:, dim:]

    def numbers(self, clock: int, lag: int = 0) -> np.ndarray:
        """The parameters of dps's own class in the order of its fields, float64; schedules are evaluated at `clock`,
        for a push that lags `lag` clocks behind."""
        own = next(kind for kind in type(self).__mro__ if is_of_dps(kind))
        values = [getattr(self, each.name) for each in fields(own)]
        return np.array([v(clock, lag) if isinstance(v, Schedule) else v for v in values], dtype=np.float64)

    def step(
        self, rows: np.ndarray, updates: np.ndarray, index: np.ndarray = WHOLE_TABLE, clock: int = 0, lag: int = 0
    ) -> None:
        """Apply `updates` to rows[index] (without an index: to the first rows), in place."""
        self.kernel(rows, index, 0, updates, self.numbers(clock, lag))


def is_of_dps(kind: type) -> bool:
    return kind.__module__.startswith("dps.")


def optimizer_from_dict(description: Mapping[str, object]) -> Optimizer:
    return from_dict(Optimizer, description)


@dataclass(frozen=True, repr=False)
class Add(Optimizer):
    """w <- w + g.

    Examples
    --------
    >>> rows = np.array([[1.0, 2.0]])
    >>> Add().step(rows, np.array([[10.0, 10.0]]))
    >>> rows
    array([[11., 12.]])
    """

    kernel = staticmethod(kernels.add)
    dtypes = DTYPES

    @property
    def repeats(self) -> str:
        """What happens to the repeated keys of one push: see :class:`Optimizer`."""
        return "any"


@dataclass(frozen=True, repr=False)
class Assign(Optimizer):
    """w <- g.

    Examples
    --------
    >>> rows = np.array([[1.0, 2.0]])
    >>> Assign().step(rows, np.array([[10.0, 10.0]]))
    >>> rows
    array([[10., 10.]])
    """

    kernel = staticmethod(kernels.assign)
    dtypes = DTYPES

    @property
    def repeats(self) -> str:
        """What happens to the repeated keys of one push: see :class:`Optimizer`."""
        return "last"


@dataclass(frozen=True, repr=False)
class SGD(Optimizer):
    """Stochastic gradient descent (Robbins and Monro, 1951): w <- w - eta g, then l1 and l2 with r = eta.

    Parameters
    ----------
    lr : float or schedule
        The learning rate eta.
    l1, l2 : float
        Strength of the proximal penalties.

    Examples
    --------
    >>> rows = np.array([[1.0, 2.0]])
    >>> SGD(lr=0.1).step(rows, np.array([[10.0, 10.0]]))
    >>> rows
    array([[0., 1.]])
    """

    lr: Schedule | float = field(metadata=RATE)
    l1: float = number(0.0, least=0)
    l2: float = number(0.0, least=0)
    kernel = staticmethod(kernels.sgd)

    @property
    def repeats(self) -> str:
        """What happens to the repeated keys of one push: see :class:`Optimizer`."""
        return "sum" if self.l1 or self.l2 else "any"


@dataclass(frozen=True, repr=False)
class Momentum(Optimizer):
    """Gradient descent with a velocity v (Polyak, 1964; Nesterov's form after Sutskever et al., 2013).

    v <- momentum v + g; w <- w - eta v, or with `nesterov` w <- w - eta (g + momentum v).

    Parameters
    ----------
    lr : float or schedule
        The learning rate eta.
    momentum : float
        Share of the velocity that is kept, below 1.
    nesterov : bool
        Look ahead along the velocity.

    Examples
    --------
    >>> rows = np.zeros((1, 2))  # one row: its value, its velocity
    >>> for _ in range(2):
    ...     Momentum(lr=0.5, momentum=0.5).step(rows, np.array([[1.0]]))
    >>> rows
    array([[-1.25,  1.5 ]])
    """

    lr: Schedule | float = field(metadata=RATE)
    momentum: float = number(0.9, least=0, below=1)
    nesterov: bool = flag(False)
    kernel = staticmethod(kernels.momentum)
    states = 1


@dataclass(frozen=True, repr=False)
class Adagrad(Optimizer):
    """A rate for each column that falls with its past gradients (Duchi, Hazan and Singer, 2011).

    n <- n + g^2; w <- w - eta g / (sqrt(n) + eps); then l1 and l2 with r = eta / (sqrt(n) + eps). n begins at
    `initial_accumulator`; a value above 0 makes the first steps of a rare row smaller.

    Parameters
    ----------
    lr : float or schedule
        The learning rate eta.
    eps : float
        Added to the root, against division by 0.
    initial_accumulator : float
        The first value of n.
    l1, l2 : float
        Strength of the proximal penalties.

    Examples
    --------
    >>> rows = np.zeros((1, 2))  # one row: its value, its n
    >>> Adagrad(lr=0.5).step(rows, np.array([[2.0]]))
    >>> rows
    array([[-0.5,  4. ]])
    """

    lr: Schedule | float = field(metadata=RATE)
    eps: float = number(1e-10, least=1e-30)
    initial_accumulator: float = number(0.0, least=0)
    l1: float = number(0.0, least=0)
    l2: float = number(0.0, least=0)
    kernel = staticmethod(kernels.adagrad)
    states = 1

    @property
    def slot_start(self) -> float:
        """The value in the columns of state of a new row: `initial_accumulator`."""
        return self.initial_accumulator


@dataclass(frozen=True, repr=False)
class RMSprop(Optimizer):
    """A rate for each column from its recent gradients (Tieleman and Hinton, 2012).

    n <- rho n + (1 - rho) g^2; w <- w - eta g / (sqrt(n) + eps).

    Parameters
    ----------
    lr : float or schedule
        The learning rate eta.
    rho : float
        Share of n that is kept, below 1.
    eps : float
        Added to the root.

    Examples
    --------
    >>> rows = np.zeros((1, 2))  # one row: its value, its n
    >>> RMSprop(lr=0.5, rho=0.75).step(rows, np.array([[2.0]]))
    >>> rows.round(6)
    array([[-1.,  1.]])
    """

    lr: Schedule | float = field(metadata=RATE)
    rho: float = number(0.99, least=0, below=1)
    eps: float = number(1e-8, least=1e-30)
    kernel = staticmethod(kernels.rmsprop)
    states = 1


@dataclass(frozen=True, repr=False)
class Adam(Optimizer):
    """Momentum and a rate for each column, both corrected for their start at zero (Kingma and Ba, 2015).

    m <- beta1 m + (1 - beta1) g; v <- beta2 v + (1 - beta2) g^2;
    w <- w - eta m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps).

    t counts the steps of the row, not of the table: a rare feature that is first seen after a million steps has an m
    and a v as young as those of any row in the first step, and needs the same correction. A row without a push keeps
    its m and v as they are.

    Parameters
    ----------
    lr : float or schedule
        The learning rate eta.
    beta1, beta2 : float
        Shares of m and v that are kept, below 1.
    eps : float
        Added to the root.

    Examples
    --------
    >>> rows = np.zeros((1, 4))  # one row: its value, m, v, t
    >>> Adam(lr=0.5).step(rows, np.array([[2.0]]))
    >>> rows.round(6)
    array([[-0.5  ,  0.2  ,  0.004,  1.   ]])
    """

    lr: Schedule | float = field(default=1e-3, metadata=RATE)
    beta1: float = number(0.9, least=0, below=1)
    beta2: float = number(0.999, least=0, below=1)
    eps: float = number(1e-8, least=1e-30)
    kernel = staticmethod(kernels.adam)
    states = 2

    def init(self, dim: int) -> int:
        """How many columns of state follow the values: m, v, and one count of steps."""
        return 2 * dim + 1


@dataclass(frozen=True, repr=False)
class AdamW(Adam):
    """:class:`Adam` with decoupled weight decay (Loshchilov and Hutter, 2019).

    First w <- (1 - eta weight_decay) w, then the step of Adam. Only rows that are pushed to decay.

    Parameters
    ----------
    lr, beta1, beta2, eps
        As for :class:`Adam`.
    weight_decay : float
        Share of the value that is taken off at each step, times eta.

    Examples
    --------
    >>> rows = np.array([[1.0, 0.0, 0.0, 0.0]])  # one row: its value, m, v, t
    >>> AdamW(lr=0.5, weight_decay=0.5).step(rows, np.array([[2.0]]))
    >>> rows.round(6)
    array([[0.25 , 0.2  , 0.004, 1.   ]])
    """

    weight_decay: float = number(0.01, least=0)


@dataclass(frozen=True, repr=False)
class FTRL(Optimizer):
    """Follow the regularised leader, for each column (McMahan et al., "Ad click prediction", 2013, Algorithm 1).

    sigma = (sqrt(n + g^2) - sqrt(n)) / alpha; z <- z + g - sigma w; n <- n + g^2; then w is solved for:
    w = 0 where \\|z\\| <= l1, elsewhere w = -(z - sign(z) l1) / ((beta + sqrt(n)) / alpha + l2).

    The paper computes w when it is needed; here it is kept as the row's value, so that a pull is a plain read and
    a row may begin elsewhere than at zero: a column keeps its initial value until its first gradient other than 0.

    Parameters
    ----------
    alpha : float
        The learning rate.
    beta : float
        Added to the root of n, so that the first steps are smaller.
    l1, l2 : float
        Strength of the penalties beside the summed losses.

    Examples
    --------
    >>> rows = np.zeros((1, 3))  # one row: its value, z, n
    >>> FTRL(alpha=1.0, beta=1.0, l1=1.0).step(rows, np.array([[3.0]]))
    >>> rows
    array([[-0.5,  3. ,  9. ]])
    """

    alpha: float = number(0.1, above=0)
    beta: float = number(1.0, least=0)
    l1: float = number(0.0, least=0)
    l2: float = number(0.0, least=0)
    kernel = staticmethod(kernels.ftrl)
    states = 2

    @property
    def derived(self) -> bool:
        """True, because the values follow from z and n."""
        return True

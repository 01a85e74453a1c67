"""A loss over data on trainers, as a function of x for a solver; and `minimize`, which is both together.

The solver runs in the driver. One run of trainers (`ps.run`) lasts as long as the minimisation, and each evaluation is
an epoch of it. Driver and trainers meet in a table, the board:

- The driver puts x on the servers, zeros the gradient, and writes the number of the evaluation on the board.
- Trainers lease portions of batches (``reassign=True``): for each batch they add the gradient to its table and then the
  loss, and 1, to the board. A batch counts once, whichever trainers work on it, because ops of a portion count once.
- When as many batches are counted as there are, all gradients are there, and the driver reads them.

A trainer that is run again begins at evaluation 1; `iterate` passes over those that are done, and the board says which
one is next. So it needs to remember nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.optimize import OptimizeResult

from dps.arrays import on
from dps.errors import ClosedError, DPSError, InputError, InputTypeError
from dps.optimize.minimization import counted, nonnegative, positive, start_of
from dps.optimize.quasi_newton import lbfgs
from dps.optimize.vectors import Vector, combine, dots, stored
from dps.spark import is_spark

if TYPE_CHECKING:
    import dps

__all__ = ["Objective", "minimize"]

# Batches of the largest trainer, about, if no batch size is given.
BATCHES_OF_TRAINER = 8
# Bounds of the pause between two looks at the board.
SHORTEST_SECONDS = 0.0002
LONGEST_SECONDS = 0.2
# Share of the time waited so far after which the driver looks again.
SHARE = 0.05
# Share of the expected time of an evaluation after which the driver looks for the first time.
EARLY = 0.95
# Factor of the expected time for the next evaluation, if this one had ended at the first look.
SOONER = 0.6

# Of all elements of x: a batch that needs fewer pulls these alone. A trainer has about 8 batches, and a key travels
# with each element.
FEW = 1 / 16
BESIDE_PAIRS = 20  # vectors that a solver may need at a time beside the pairs of L-BFGS
# Rows of the board: what the driver says, what the trainers add up, and how many batches there are.
NEWS = 0
SUMS = 1
TOTAL = 2
# Value with which the driver says that the minimisation is over.
END = -1.0

# The gradient of a batch: all its elements, or (elements, values) of those that are not 0.
BatchGradient: TypeAlias = np.ndarray | tuple[np.ndarray, np.ndarray]
BatchLoss: TypeAlias = Callable[..., tuple[float, BatchGradient]]
# Function for the elements of x that a batch needs; None: all.
Elements: TypeAlias = Callable[..., np.ndarray | None]


@dataclasses.dataclass(frozen=True)
class EvaluationPlan:
    x: Any  # tables, or vectors on the servers
    gradient: Any
    board: str
    size: int  # elements of x
    batch_size: int | None
    function: BatchLoss
    elements: Elements | None
    args: tuple


class Objective:
    """A sum of losses over data on trainers, as a function ``x -> (loss, gradient)``. A context manager.

    Parameters
    ----------
    ps : dps.ParameterServer
        Its trainers compute, and its servers add up.
    loss_and_gradient : callable
        ``loss_and_gradient(batch, x, *args)`` returns the loss and the gradient, both summed over the rows of the
        batch. A gradient with few elements may be a tuple (elements, values). It runs on the trainers.
    elements : callable, optional
        ``elements(batch, *args)`` returns the places in x of the elements that a batch needs, each once, or None for
        all of them. Then `loss_and_gradient` gets x at these places only, and returns the gradient there. So a trainer
        pulls what its sparse rows have, and not all of a long x.
    data : as for :meth:`dps.ParameterServer.run`
        Dask collections, futures, data in memory, or data of Spark, whose partitions stay with their trainers.
    size : int or PSVector
        Elements of x. With a vector on the servers, all x and gradients are such vectors, and none travels to the
        driver.
    scale : float
        A factor for the sum: one over the number of rows makes it a mean.
    l2 : float or vector
        The strength of a penalty ``l2 / 2 * |x|^2``, which is not scaled; a vector has one for each element.
    batch_size : int, optional
        Rows that a trainer works on between two additions. Small batches are shared out more evenly, and need more
        traffic. By default the largest trainer has about 8.
    trainers, retries, columns
        As for :meth:`dps.ParameterServer.run`.
    args : tuple
        More arguments for `loss_and_gradient`.

    Examples
    --------
    >>> import numpy as np
    >>> from dps import optimize
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(400, 3)); y = X @ [1.0, -2.0, 0.5]
    >>> def squares(batch, w):
    ...     X, y = batch
    ...     error = X @ w - y
    ...     return float(error @ error) / 2, X.T @ error
    >>> with dps.LocalCluster(servers=1, trainers=2, processes=False) as cluster:
    ...     with dps.ParameterServer(cluster) as ps, optimize.Objective(ps, squares, (X, y), 3, scale=1 / 400) as loss:
    ...         result = optimize.lbfgs(loss, np.zeros(3), tol=1e-8)
    >>> result.x.round(4)
    array([ 1. , -2. ,  0.5])
    """

    def __init__(
        self,
        ps: dps.ParameterServer,
        loss_and_gradient: BatchLoss,
        data: object,
        size: int | Vector,
        *,
        elements: Elements | None = None,
        scale: float = 1.0,
        l2: float | Vector = 0.0,
        batch_size: int | None = None,
        trainers: int | None = None,
        retries: int = 0,
        columns: object = None,
        args: tuple = (),
    ):
        if not callable(loss_and_gradient):
            raise InputTypeError(
                f"loss_and_gradient is a function of a batch and x, not a {type(loss_and_gradient).__name__}"
            )
        self._ps = ps
        self._data = data
        self._here = isinstance(size, int)
        self._size = size if isinstance(size, int) else size.shape[0]
        self._scale, self._l2 = positive("scale", scale), nonnegative("l2", l2) if np.ndim(l2) == 0 else l2
        batch_size = None if batch_size is None else counted("batch_size", batch_size)
        tag = uuid.uuid4().hex[:8]
        x, gradient, board = (f"optimize-{tag}-{what}" for what in ("x", "gradient", "board"))
        self._tables = [x, gradient, board] if self._here else [board]
        places: list = [x, gradient] if self._here else [stored(np.zeros_like(size)) for _ in range(2)]
        self._plan = EvaluationPlan(
            places[0], places[1], board, self._size, batch_size, loss_and_gradient, elements, args
        )
        if not self._here and isinstance(self._l2, np.ndarray):
            self._l2 = on(ps).asarray(self._l2, dtype="float64")  # once, and not in each evaluation
        self._options: dict[str, Any] = {
            "trainers": trainers,
            "retries": retries,
            "columns": columns,
            "progress": False,
        }
        # Trainers cannot fetch each other's Spark partitions. Their numbers of batches differ, so none waits in a tick.
        self._options |= {"staleness": math.inf} if is_spark(data) else {"reassign": True}
        self._evaluations, self._over = 0, False
        self._expected = 0.0  # seconds of the next evaluation
        self._failure: BaseException | None = None
        self._ended = threading.Event()  # the run of the trainers
        self._client = ps.client()
        self._run = threading.Thread(target=self._train, name="dps-optimize-run", daemon=True)

    def __enter__(self) -> Self:
        *vectors, board = self._tables
        try:
            for table in vectors:
                self._ps.table(table, rows=self._size, dtype="float64")
            self._ps.table(board, 2, rows=3, dtype="float64")
        except BaseException:
            self._drop_tables()
            raise
        self._run.start()
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            if self._run.is_alive():
                self._client.assign(self._plan.board, [NEWS], [[END, 0.0]])
        finally:
            self._run.join()
            self._over = True
            self._drop_tables()
        if exc[0] is None and self._failure is not None:
            raise self._failure

    def __call__(self, x: Vector) -> tuple[float, Vector]:
        """Loss and gradient at x, which is an array of numpy, or a vector on the servers as `size` is."""
        if self._here:
            x = np.asarray(x, np.float64)
        if x.shape != (self._size,):
            raise InputError(f"x has shape {x.shape}, and this loss is of {self._size} elements")
        if self._over or self._run.ident is None:
            raise ClosedError("the trainers of this loss are not there: call it within `with Objective(...) as loss:`")
        plan, client = self._plan, self._client
        if self._here:
            client.assign({plan.x: (None, x), plan.gradient: (None, np.zeros(self._size))})
        else:
            plan.x[:], plan.gradient[:] = stored(x), 0.0
            stored(plan.x), stored(plan.gradient)
        client.assign(plan.board, [SUMS], [[0.0, 0.0]])
        self._evaluations += 1
        client.assign(plan.board, [NEWS], [[self._evaluations, 0.0]])
        loss = self._when_counted() * self._scale
        gradient = client.pull(plan.gradient) if self._here else plan.gradient
        if isinstance(self._l2, float) and not self._l2:
            return loss, combine([self._scale], [gradient])
        pull = stored(self._l2 * x)
        return loss + float(dots([(pull, x)])[0]) / 2.0, combine([self._scale, 1.0], [gradient, pull])

    def _when_counted(self) -> float:
        """Wait until each batch is counted; the sum of the losses."""
        began = time.monotonic()
        self._ended.wait(EARLY * self._expected)  # because each look is a request
        for look in _looks(began):
            sums, total = self._client.pull(self._plan.board, [SUMS, TOTAL])
            if total[1] and sums[1] == total[1]:
                if self._evaluations > 1:  # at the first one, trainers prepare their data
                    self._expected = time.monotonic() - began if look else SOONER * self._expected
                return float(sums[0])
            if self._ended.is_set():
                raise self._failure or DPSError("the trainers have ended before the minimisation")
        raise AssertionError("looks do not end")

    def _train(self) -> None:
        try:
            self._ps.run(work, self._data, args=(self._plan,), **self._options)
        except BaseException as error:
            self._failure = error
        finally:
            self._ended.set()

    def _drop_tables(self) -> None:
        if self._ps.closed:
            return
        there = self._ps.tables()
        for name in self._tables:
            if name in there:
                self._ps.drop_table(name)


def minimize(
    ps: dps.ParameterServer,
    loss_and_gradient: BatchLoss,
    data: object,
    x0: npt.ArrayLike | Vector,
    *,
    solver: Callable[..., OptimizeResult] = lbfgs,
    elements: Elements | None = None,
    scale: float = 1.0,
    l2: float | Vector = 0.0,
    batch_size: int | None = None,
    trainers: int | None = None,
    retries: int = 0,
    columns: object = None,
    args: tuple = (),
    **settings: Any,
) -> OptimizeResult:
    """Minimise a loss over data on trainers, as DistBelief's Sandblaster did.

    Trainers compute the loss and the gradient of small portions of the data, more of them on fast trainers, and the
    last ones on two. Each portion counts once in each evaluation, also if trainers are run again or servers fail over.

    Parameters
    ----------
    ps, loss_and_gradient, data, elements, scale, l2, batch_size, trainers, retries, columns, args
        As for :class:`Objective`.
    x0 : array_like, PSVector or int
        Where to begin. With a vector on the servers, such as ``dps.arrays.on(ps).zeros(n)``, the solver's vectors
        lie there, too, and the driver sees numbers only. A number of elements stands for zeros on the servers.
    solver : callable
        :func:`lbfgs`, :func:`owlqn`, :func:`fista`, ...
    **settings
        Of the solver: tol, max_iter, callback, l1, ...

    Returns
    -------
    scipy.optimize.OptimizeResult
        As of the solver.

    Examples
    --------
    >>> import numpy as np
    >>> from dps import optimize
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(400, 3)); y = X @ [1.0, 0.0, 0.5]
    >>> def squares(batch, w):
    ...     X, y = batch
    ...     error = X @ w - y
    ...     return float(error @ error) / 2, X.T @ error
    >>> with dps.LocalCluster(servers=1, trainers=2, processes=False) as cluster, dps.ParameterServer(cluster) as ps:
    ...     result = optimize.minimize(ps, squares, (X, y), np.zeros(3), scale=1 / 400, solver=optimize.owlqn, l1=0.01)
    >>> np.round(result.x, 1) + 0.0
    array([1. , 0. , 0.5])
    """
    if isinstance(x0, int):
        x0 = on(ps).zeros(x0, capacity=2 * settings.get("m", 10) + BESIDE_PAIRS)
    start = start_of(x0)
    size = len(start) if isinstance(start, np.ndarray) else start
    options: dict[str, Any] = {"elements": elements, "scale": scale, "l2": l2, "batch_size": batch_size, "args": args}
    options |= {"trainers": trainers, "retries": retries, "columns": columns}
    with Objective(ps, loss_and_gradient, data, size, **options) as objective:
        return solver(objective, start, **settings)


# -- the trainers' side


def work(trainer: dps.Trainer, partitions: Sequence, plan: EvaluationPlan) -> None:
    """The training function: an epoch for each evaluation, until the driver ends it."""
    rows = [rows_of(partition) for partition in partitions]
    size = plan.batch_size
    if size is None:
        largest = int(trainer.allreduce(sum(rows), "max"))
        size = max(1, math.ceil(largest / BATCHES_OF_TRAINER))
    total = trainer.allreduce(sum(math.ceil(each / size) for each in rows))
    if not total:
        raise InputError("the data has no rows: there is no loss to minimise")
    if trainer.number == 0:
        trainer.assign(plan.board, [TOTAL], [[0.0, float(total)]])
    for evaluation in itertools.count(1):
        if not is_wanted(trainer, plan, evaluation):
            return
        point = PulledPoint(trainer, plan)
        for batch in trainer.iterate(partitions, batch_size=size):
            evaluate(trainer, batch, point, plan)


def is_wanted(trainer: dps.Trainer, plan: EvaluationPlan, evaluation: int) -> bool:
    """Wait until the driver asks for this evaluation; False if it has ended."""
    for _ in _looks():
        news = trainer.pull(plan.board, [NEWS])[0, 0]
        if news == END:
            return False
        if news >= evaluation:
            return True
    raise AssertionError("looks do not end")


class PulledPoint:
    """x of one evaluation, as a trainer pulls it: the elements that a batch needs, or all of them once."""

    def __init__(self, trainer: dps.Trainer, plan: EvaluationPlan):
        self._trainer, self._plan = trainer, plan
        self._whole: np.ndarray | None = None

    def at(self, places: np.ndarray | None) -> np.ndarray:
        """The elements at some places; None: all."""
        if self._whole is None:
            if places is not None and len(places) <= FEW * self._plan.size:
                return self._trainer.pull(self._plan.x, places)
            self._whole = self._trainer.pull(self._plan.x)
        return self._whole if places is None else self._whole[places]


def evaluate(trainer: dps.Trainer, batch: object, point: PulledPoint, plan: EvaluationPlan) -> None:
    """Add the gradient of a batch, and then its loss: so the gradients of all counted batches are there."""
    places = None if plan.elements is None else plan.elements(batch, *plan.args)
    x = point.at(places)
    loss, gradient = plan.function(batch, x, *plan.args)
    if places is None and isinstance(gradient, tuple):
        places, gradient = gradient
    elif np.shape(gradient) != x.shape:
        raise InputError(f"loss_and_gradient returns a gradient of shape {np.shape(gradient)}, and x has {x.shape}")
    trainer.add(plan.gradient, places, gradient)
    trainer.add(plan.board, [SUMS], [[float(loss), 1.0]])


def rows_of(partition: Any) -> int:
    """Rows of a partition: of its first part, if it has several."""
    if isinstance(partition, dict):
        partition = next(iter(partition.values()))
    while isinstance(partition, tuple):
        partition = partition[0]
    shape = getattr(partition, "shape", None)
    return int(shape[0]) if shape else len(partition)


def _looks(began: float | None = None) -> Iterator[int]:
    """0, 1, ... and longer and longer pauses in between; the longer, the longer ago it is that the waiting began."""
    began = time.monotonic() if began is None else began
    for look in itertools.count():
        yield look
        time.sleep(min(max(SHORTEST_SECONDS, (time.monotonic() - began) * SHARE), LONGEST_SECONDS))

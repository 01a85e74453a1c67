"""What an estimator's `fit` is given, as partitions for `ps.run`; and what has to be known of them beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import dask
import numpy as np
from dask.base import is_dask_collection
from dask.delayed import Delayed
from dask.distributed import Client as DaskClient
from dask.distributed import Future
from sklearn.utils.multiclass import check_classification_targets

import dps
from dps.errors import InputError, InputTypeError
from dps.models.encoding import Layout

__all__ = ["DaskPieces", "Survey", "Surveys", "piece_of", "summary", "survey_of", "trainers_threads"]


PARTS, LARGE = 4, 10_000  # data in memory: one part for each trainer, or 4 if they have so many rows each


class Survey(NamedTuple):
    """What has to be known of the data before training."""

    labels: np.ndarray
    layout: Layout
    dense: bool
    rows: int


Surveys = Callable[[], list[Survey]]  # of all the data, by pieces


class DaskPieces:
    """All that `fit` takes from Dask or from memory: futures of (block, labels, layout), made where the data lies.

    Blocks are encoded, checked and shuffled. With a `layout` they have to follow it.
    """

    def __init__(self, client: DaskClient, X: Any, y: Any, layout: Layout | None, bits: int, seed: int | None):
        pairs = _pairs(client, X, y)
        pieces = [dask.delayed(piece_of, pure=False)(n, pair, layout, bits, seed) for n, pair in enumerate(pairs)]
        self._client, self._pieces = client, client.compute(pieces)

    def surveys(self) -> list[Survey]:
        """Of each piece."""
        notes = self._client.map(survey_of, self._pieces, pure=False)
        try:
            return self._client.gather(notes)
        finally:
            _release(notes)

    def train(
        self, ps: dps.ParameterServer, plan: Callable[[Surveys], Any], function: Callable, **options: Any
    ) -> list[Any]:
        """``function(trainer, pieces, plan(surveys))`` on the trainers of a run; who plans calls `surveys` or not."""
        return ps.run(function, self._pieces, args=(plan(self.surveys),), **options)

    def close(self) -> None:
        """Let go of them."""
        _release(self._pieces)


def summary(surveys: list[Survey]) -> Survey:
    """Labels, width and kind of all pieces together."""
    wide = {each.layout for each in surveys}
    if len(wide) > 1:
        raise InputError(f"partitions differ: {' and '.join(map(str, sorted(wide, key=str)[:2]))}")
    found = [each for each in surveys if each.rows] or surveys[:1]
    labels = _distinct(np.concatenate([each.labels for each in found]))
    if len(labels):
        check_classification_targets(labels)
    return Survey(labels, found[0].layout, all(each.dense for each in found), sum(each.rows for each in found))


def _pairs(client: DaskClient, X: Any, y: Any) -> Sequence[Any]:
    """A list of (X, y): futures, delayed values or pairs of them."""
    if y is None:
        parts = [X] if isinstance(X, (Delayed, Future)) else X
        if isinstance(parts, (list, tuple)) and parts and all(isinstance(part, (Delayed, Future)) for part in parts):
            return parts
        raise InputTypeError(
            "y is missing: pass X and y (requires y to be passed, but the target y is None), or a list of futures or "
            "delayed values, each an (X, y)"
        )
    if is_dask_collection(X) != is_dask_collection(y):
        raise InputError("X and y are both Dask collections, or both in memory")
    if not is_dask_collection(X):
        return _scattered(client, X, y)
    if getattr(X, "numblocks", (1, 1))[1:] not in ((1,), ()):
        X = X.rechunk({1: -1})
    known = all(hasattr(each, "chunks") and not np.isnan(each.shape[0]) for each in (X, y))
    if known and X.shape[0] != y.shape[0]:
        raise InputError(f"X has {X.shape[0]} rows and y {y.shape[0]}")
    if known and X.chunks[0] != y.chunks[0]:
        y = y.rechunk({0: X.chunks[0]})
    rows, targets = (np.ravel(each.to_delayed()).tolist() for each in (X, y))
    if len(rows) != len(targets):
        raise InputError(f"X has {len(rows)} partitions and y {len(targets)}: repartition them alike")
    return list(zip(rows, targets, strict=True))


def _scattered(client: DaskClient, X: Any, y: Any) -> list[Future]:
    """Data in memory, sent to the workers in equal parts. Every n-th row goes into a part: sorted labels do no harm."""
    X = X.to_scipy_sparse() if hasattr(X, "to_scipy_sparse") else X
    X = X.tocsr() if hasattr(X, "tocsr") else X if hasattr(X, "iloc") else np.asarray(X)
    y = np.asarray(y)
    rows = X.shape[0] if X.ndim else 0
    if rows != len(y):
        raise InputError(
            f"Found input variables with inconsistent numbers of samples: X has {rows} rows and y {len(y)}"
        )
    if rows == 0:
        raise InputError("X has 0 rows: there is nothing to learn from")
    threads = trainers_threads(client)
    parts = min(max(1, sum(threads.values())) * (PARTS if rows >= PARTS * LARGE else 1), rows)
    cut = X.iloc if hasattr(X, "iloc") else X
    pairs = [(cut[n::parts], y[n::parts]) for n in range(parts)]
    return client.scatter(pairs, workers=list(threads) or None, hash=False)


def trainers_threads(client: DaskClient) -> dict[str, int]:
    """Threads of each worker that is no server's."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return {name: info["nthreads"] for name, info in workers.items() if not info.get("resources", {}).get("dps")}


def _release(futures: list[Future]) -> None:
    """Let go of data on the workers now; the traceback of an error may keep the futures themselves alive."""
    for future in futures:
        future.release()


# -- on the workers


def piece_of(
    number: int, pair: Any, layout: Layout | None, bits: int, seed: int | None
) -> tuple[Any, np.ndarray, Layout]:
    """A pair (X, y) encoded, checked and shuffled: (block, labels, layout)."""
    X, y = pair
    layout = layout or Layout.of(X if hasattr(X, "shape") and len(X.shape) == 2 else np.atleast_2d(X), bits)
    block, y = layout.block(X), np.asarray(y)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.dtype.kind == "O":  # a column of objects, or of a nullable dtype, may hold numbers
        plain = np.array(y.tolist())
        y = plain if plain.dtype.kind in "biuf" else y
    if y.ndim != 1 or len(y) != block.shape[0]:
        raise InputError(f"partition {number}: X has {block.shape[0]} rows, and y is of shape {y.shape}")
    if seed is not None:
        order = np.random.default_rng((seed, number)).permutation(len(y))
        block, y = block[order], y[order]
    return block, y, layout


def survey_of(piece: tuple[Any, np.ndarray, Layout]) -> Survey:
    """What has to be known of one piece."""
    X, y, layout = piece
    return Survey(_distinct(y), layout, isinstance(X, np.ndarray), len(y))


def _distinct(y: np.ndarray) -> np.ndarray:
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        raise InputError("Input y contains NaN or infinity")
    try:
        return np.unique(y)
    except TypeError as error:
        raise InputError(f"y has labels that cannot be sorted; some missing, or of several types? ({error})") from error

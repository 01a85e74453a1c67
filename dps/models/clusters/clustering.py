"""The driver's part of k-means: where it begins, its tables, and what comes of them."""

from __future__ import annotations

import math
import uuid
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import dps
from dps.errors import InputError, InputTypeError
from dps.models.clusters.centers import centers_of
from dps.models.clusters.kmeans_training import ClusterPlan, ClusterReport, lloyd, minibatch
from dps.models.clusters.seeding import SeedPlan, Seeds, reduced, seeds_of
from dps.models.inputs.features import Survey, summary
from dps.models.inputs.pieces import Pieces, Surveys
from dps.models.tables import drop

__all__ = ["Beginning", "Clustering", "begun_at", "trained"]


class Beginning(NamedTuple):
    """Where a training begins, and what was learnt of the data with it."""

    starts: np.ndarray  # [clusters, features]
    survey: Survey
    variance: float  # mean over the features


class Clustering(NamedTuple):
    centers: np.ndarray  # [clusters, features]
    counts: np.ndarray  # [clusters], the weights that the centers have
    sizes: np.ndarray  # [clusters], the weights of the rows nearest to each center
    inertia: float
    passes: int


def begun_at(
    ps: dps.ParameterServer, pieces: Pieces, clusters: int, init: str | npt.ArrayLike, seed: int, least_rows: int = 0
) -> Beginning:
    """Look at the data, and draw the rows from which the training begins, unless `init` has them."""
    table, seen = f"candidates-{uuid.uuid4().hex[:8]}", []
    given = None if isinstance(init, str) else starts_given(init, clusters)

    def plan(surveys: Surveys) -> SeedPlan:
        survey = summary(surveys())
        seen.append(survey)
        check_rows(survey, clusters, least_rows or clusters, given)
        ps.table(table, survey.layout.features)
        kind = str(init) if given is None else "given"
        return SeedPlan(clusters, survey.layout.features, kind, seed, table)

    try:
        seeds = [Seeds(*each) for each in pieces.train(plan, seeds_of, staleness=0, progress=False)]
        weight = sum(each.weight for each in seeds)
        mean, square = (total([getattr(each, name) for each in seeds]) / weight for name in ("sums", "squares"))
        variance = float(np.mean(square - mean**2))
        starts = given
        if starts is None and init == "random":
            keys, rows = (np.concatenate([each[place] for each in seeds]) for place in (-2, -1))
            chosen = rows[np.argsort(keys)[:clusters]]
            starts = chosen[np.arange(clusters) % len(chosen)].astype(np.float64)
        elif starts is None:
            weights = total([each.nearest_weights for each in seeds])
            rows = ps.client().pull(table, np.arange(len(weights))).reshape(len(weights), -1)
            starts = reduced(rows, weights, clusters, seed)
    finally:
        drop(ps, [table], False)
    return Beginning(starts, seen[-1], max(variance, 0.0))


def starts_given(init: npt.ArrayLike, clusters: int) -> np.ndarray:
    try:
        starts = np.asarray(init, np.float64)
    except (TypeError, ValueError) as error:
        raise InputTypeError(f"init is a matrix of numbers, [n_clusters, n_features] ({error})") from error
    if starts.ndim != 2 or len(starts) != clusters:
        raise InputError(f"init has shape {starts.shape}; of {clusters} clusters it is ({clusters}, n_features)")
    if not np.isfinite(starts).all():
        raise InputError("init has values that are NaN or infinite")
    return starts


def check_rows(survey: Survey, clusters: int, least_rows: int, given: np.ndarray | None) -> None:
    """Refuse too few rows, and centers of another width."""
    if survey.rows < least_rows:
        if not survey.rows:
            raise InputError("X has 0 rows: there is nothing to learn from")
        raise InputError(
            f"n_samples={survey.rows} should be >= n_clusters={clusters}: give more rows or fewer clusters"
        )
    if given is not None and given.shape[1] != survey.layout.features:
        raise InputError(f"X has {survey.layout.features} features, and init has {given.shape[1]}")


def trained(
    ps: dps.ParameterServer,
    pieces: Pieces,
    plan: ClusterPlan,
    begun: Beginning,
    staleness: float,
    progress: bool | None,
    counts: np.ndarray | None = None,
) -> Clustering:
    """Train from there, and copy the result into this process. With `counts`, centers already have so many rows."""
    k, features = plan.clusters, plan.features
    function = minibatch if plan.batch_size else lloyd
    try:
        for name, dim in (("centers", 2), ("sums", 1), ("starts", 0), ("before", 1)):
            # Without staleness, the pushes of a clock count together, so that a second training gives the same centers.
            together = "sum" if name == "centers" and plan.batch_size and staleness == 0 else None
            ps.table(getattr(plan, name), features + dim, rows=k, dtype="float64", aggregate=together)
        client = ps.client()
        client.assign(plan.starts, slice(None), begun.starts)
        client.assign(plan.before, slice(None), np.column_stack([begun.starts, np.zeros(k)]))
        if counts is not None:
            rows = np.column_stack([begun.starts * counts[:, None], counts, np.zeros(k)])
            client.assign(plan.centers, slice(None), rows)
        made = pieces.run(plan, function, staleness=staleness if plan.batch_size else 0, progress=progress)
        reports = [ClusterReport(*each) for each in made]
        rows, starts = client.pull(plan.centers), client.pull(plan.starts).reshape(k, features)
    finally:
        drop(ps, [plan.centers, plan.sums, plan.starts, plan.before], False)
    centers = centers_of(rows, starts)
    sizes = total([each.sizes for each in reports])
    inertia = math.fsum(each.inertia for each in reports)
    return Clustering(
        centers, rows[:, features] if plan.batch_size else sizes, sizes, inertia, max(each.passes for each in reports)
    )


def total(arrays: list[np.ndarray]) -> np.ndarray:
    return np.sum(arrays, axis=0)

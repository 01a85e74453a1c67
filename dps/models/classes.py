"""Classes of a classifier: the numbers and the weights of labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import dask
import numpy as np
from dask.base import is_dask_collection

from dps.errors import InputError, told
from dps.models.inputs.features import Piece, named
from dps.models.settings import Number
from dps.models.types import Block, Features, Labels, Predictions

__all__ = ["ClassPlan", "accuracy", "check_class_weight", "class_weights", "classes_at", "coded"]


class ClassPlan(Protocol):
    """What trainers need to know of the classes."""

    @property
    def classes(self) -> np.ndarray:
        """The labels, sorted."""

    @property
    def class_weights(self) -> np.ndarray | None:
        """A weight for each class; None: all 1."""


def check_class_weight(wanted: object) -> None:
    if isinstance(wanted, dict):
        wrong = {label: weight for label, weight in wanted.items() if not Number().allows(weight)}
        if wrong:
            raise InputError(f"class_weight has {wrong}: weights are numbers, 0 or more")
    elif wanted is not None and not (isinstance(wanted, str) and wanted == "balanced"):
        raise InputError(f'class_weight is a dict, "balanced" or None; not {told(wanted)}')


def class_weights(wanted: dict | str | None, classes: np.ndarray, counts: np.ndarray | None) -> np.ndarray | None:
    """A weight for each class, or None if all are 1. `counts` is the sum of the weights of each class's rows."""
    if wanted is None:
        return None
    if isinstance(wanted, dict):
        unknown = [label for label in wanted if label not in classes]
        if unknown:
            raise InputError(f"class_weight has {unknown[0]!r}, and the classes are {classes[:10].tolist()}")
        return np.array([wanted.get(label, 1.0) for label in classes.tolist()], np.float32)
    assert counts is not None  # partial_fit refuses "balanced"
    there = counts > 0
    return np.where(there, counts.sum() / (len(classes) * np.where(there, counts, 1.0)), 1.0).astype(np.float32)


def coded(piece: Piece, plan: ClassPlan) -> tuple[Block, np.ndarray, np.ndarray | None]:
    """(block, number of each row's class, weights) of a piece."""
    codes = _codes(piece.labels, plan.classes)
    if plan.class_weights is None:
        return piece.block, codes, piece.weights
    weights = plan.class_weights[codes]
    return piece.block, codes, weights if piece.weights is None else weights * piece.weights


def _codes(y: np.ndarray, classes: np.ndarray) -> np.ndarray:
    codes = np.minimum(np.searchsorted(classes, y), len(classes) - 1)
    unknown = classes[codes] != y
    if np.any(unknown):
        raise InputError(f"label {y[unknown][0]} is none of the model's classes {classes[:10].tolist()}")
    return codes


def classes_at(chosen: Predictions, classes: np.ndarray) -> Predictions:
    """The labels of numbers of classes; a lazy Dask array of a lazy one."""
    if is_dask_collection(chosen):
        return chosen.map_blocks(_taken, classes, dtype=classes.dtype)
    return classes[chosen]


def _taken(chosen: np.ndarray, classes: np.ndarray) -> np.ndarray:
    return classes[chosen]


def accuracy(predict: Callable[[Features], Predictions], X: Features, y: Labels, sample_weight: Labels = None) -> float:
    """The share of rows, by their weights, whose class is predicted; arguments as `fit` takes them."""
    X, y, sample_weight = named(X, y, sample_weight)
    predicted, y, sample_weight = (dask.compute(each)[0] for each in (predict(X), y, sample_weight))
    return float(np.average(predicted == np.asarray(y).reshape(-1), weights=sample_weight))

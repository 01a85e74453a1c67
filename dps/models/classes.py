"""Classes of a classifier: the numbers and the weights of labels."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from dps.errors import InputError, told
from dps.models.partitions import Piece
from dps.models.types import Block

__all__ = ["ClassPlan", "check_class_weight", "class_weights", "coded", "nonnegative"]


class ClassPlan(Protocol):
    """What trainers need to know of the classes."""

    @property
    def classes(self) -> np.ndarray:
        """The labels, sorted."""

    @property
    def class_weights(self) -> np.ndarray | None:
        """A weight for each class; None: all 1."""


def nonnegative(value: object) -> bool:
    """Whether this is a finite number, 0 or more.

    >>> nonnegative(0.5), nonnegative(math.nan), nonnegative("much")
    (True, False, False)
    """
    return isinstance(value, (int, float, np.integer, np.floating)) and bool(0 <= value < math.inf)


def check_class_weight(wanted: object) -> None:
    """Refuse weights of classes that are no numbers of 0 or more."""
    if isinstance(wanted, dict):
        wrong = {label: weight for label, weight in wanted.items() if not nonnegative(weight)}
        if wrong:
            raise InputError(f"class_weight has {wrong}: weights are numbers, 0 or more")
    elif wanted is not None and not (isinstance(wanted, str) and wanted == "balanced"):
        raise InputError(f'class_weight is a dict, "balanced" or None; not {told(wanted)}')


def class_weights(wanted: dict | str | None, classes: np.ndarray, counts: np.ndarray | None) -> np.ndarray | None:
    """A weight for each class, or None if all are 1. `counts` is the sum of the weights of each class's rows.

    Examples
    --------
    >>> class_weights("balanced", np.array(["no", "yes"]), np.array([30.0, 10.0]))
    array([0.6666667, 2.       ], dtype=float32)
    >>> class_weights({"yes": 3}, np.array(["no", "yes"]), None)
    array([1., 3.], dtype=float32)
    """
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
    """The number of each label among the classes."""
    codes = np.minimum(np.searchsorted(classes, y), len(classes) - 1)
    unknown = classes[codes] != y
    if np.any(unknown):
        raise InputError(f"label {y[unknown][0]} is none of the model's classes {classes[:10].tolist()}")
    return codes

"""Documents of Spark as partitions for `ps.run`: a column of vectors, columns of counts, or an RDD of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy.sparse

import dps
from dps.errors import DPSError, InputError, InputTypeError
from dps.models.inputs.spark_pieces import block_of, unwrapped
from dps.models.types import Block, Features

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["SparkDocuments", "spark_documents"]


class SparkDocuments(NamedTuple):
    """What `fit` needs of Spark's data."""

    partitions: Any  # for `ps.run`: each a block of counts, None if it is empty, or an error in the data
    words: int  # columns of the blocks
    columns: list[str] | None  # their names, unless they are places in vectors


def spark_documents(X: Features) -> SparkDocuments:
    """Choose the columns of counts, and look at the first document to see how many words there are.

    Parameters
    ----------
    X : DataFrame or RDD of Spark
        The counts of a DataFrame are its only column of vectors, or its column "features"; without vectors, all of its
        columns. The items of an RDD are blocks [documents, words].

    Raises
    ------
    InputError, InputTypeError
        It has no documents, or no counts of words.
    """
    if ".connect." in type(X).__module__:
        raise InputTypeError("Spark Connect does not tell of partitions: estimators take data of a classic session")
    if not hasattr(X, "mapInArrow"):
        first = X.take(1)
        if not first:
            raise InputError("Found array with 0 sample(s): X has no documents, and there is nothing to learn from")
        return SparkDocuments(dps.spark.read_with(X, _of_items), int(_checked(first[0]).shape[1]), None)
    kinds = {field.name: type(field.dataType).__name__ for field in X.schema.fields}
    vectors = [name for name, kind in kinds.items() if kind == "VectorUDT"]
    if len(vectors) > 1 and "features" not in vectors:
        raise InputError(f"{len(vectors)} columns of vectors, {', '.join(vectors)}: select the one with counts")
    if not vectors:
        wrong = [name for name, kind in kinds.items() if kind in ("StringType", "ArrayType", "MapType", "StructType")]
        if wrong or not kinds:
            raise InputTypeError(
                f"X has no column of vectors, and its column {wrong[0]!r} is no numbers; pyspark.ml's CountVectorizer "
                f"makes vectors of counts of lists of words"
                if wrong
                else "X has no columns"
            )
        return SparkDocuments(dps.spark.read_with(X, _of_columns), len(kinds), list(kinds))
    name = "features" if "features" in vectors else vectors[0]
    row = X.select(f"`{name}`").first()
    if row is None:
        raise InputError("Found array with 0 sample(s): X has no documents, and there is nothing to learn from")
    if row[0] is None:
        raise InputError(f"column {name!r} has no vector (null) in the first row: fill or drop such rows")
    return SparkDocuments(dps.spark.read_with(X.select(*unwrapped(name)), _of_vectors), int(row[0].size), None)


# -- in Spark's tasks. An error in the data is returned, because Spark would read anew what raises one


def _of_vectors(number: int, batches: Iterable[pa.RecordBatch]) -> Block | DPSError | None:
    return _stacked(batches, lambda batch: block_of(*batch.columns))


def _of_columns(number: int, batches: Iterable[pa.RecordBatch]) -> Block | DPSError | None:
    return _stacked(batches, _numbers)


def _of_items(number: int, items: Iterable[object]) -> Block | DPSError | None:
    return _stacked(items, _checked)


def _numbers(batch: pa.RecordBatch) -> Block:
    return np.column_stack([column.to_numpy(zero_copy_only=False).astype(np.float64) for column in batch.columns])


def _checked(item: Any) -> Block:
    if len(getattr(item, "shape", ())) != 2:
        raise InputTypeError(f"items of an RDD are blocks of counts, [documents, words], not {item!r:.80}")
    return item


def _stacked(pieces: Iterable[Any], block: Callable[[Any], Block]) -> Block | DPSError | None:
    try:
        blocks = [each for each in map(block, pieces) if each.shape[0]]
        if len({each.shape[1] for each in blocks}) > 1:
            widths = sorted({each.shape[1] for each in blocks})
            raise InputError(f"documents of different widths: {', '.join(map(str, widths))}")
    except DPSError as error:
        return error
    except (TypeError, ValueError) as error:
        return InputTypeError(f"X has values that are no numbers ({error})")
    if not blocks:
        return None
    if len(blocks) == 1:
        return blocks[0]
    return scipy.sparse.vstack([scipy.sparse.csr_matrix(each) for each in blocks], format="csr")

"""Sentences of Spark as partitions for `ps.run`: a column of arrays of words, a column of text, or an RDD of lists."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import dps
from dps.errors import DPSError, InputError, InputTypeError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["SparkSentences", "spark_sentences", "without_errors"]


class SparkSentences(NamedTuple):
    """Spark's data, and how trainers read it."""

    source: Any  # the DataFrame or RDD, whose session is that of the model
    partitions: Any  # for `ps.run`: each iterates over sentences, or is an error in the data
    name: str  # of the words' place, for errors


def spark_sentences(data: Any) -> SparkSentences:
    """Choose the column of words, and look whether there is a first sentence.

    Parameters
    ----------
    data : DataFrame or RDD of Spark
        The sentences of a DataFrame are its only column of arrays of strings; without such a column, its only column of
        strings, which are split at spaces. The items of an RDD are lists of words.

    Raises
    ------
    InputError, InputTypeError
        There are no sentences, no such column, or several.
    """
    if ".connect." in type(data).__module__:
        raise InputTypeError("Spark Connect does not tell of partitions: models take data of a classic session")
    if not hasattr(data, "mapInArrow"):
        if not hasattr(data, "mapPartitionsWithIndex"):
            raise InputTypeError(f"sentences of Spark are a DataFrame or an RDD, not a {type(data).__name__}")
        if data.isEmpty():
            raise InputError("the RDD has 0 items: there is nothing to learn from; give it lists of words")
        return SparkSentences(data, data, "this RDD")
    name, split = _column(data)
    quoted = name.replace("`", "``")
    chosen = data.selectExpr(f"`{quoted}` as sentence")  # because mapInArrow finds no column whose name has a dot
    if not chosen.take(1):
        raise InputError(f"column {name!r} has 0 rows: there is nothing to learn from; give it sentences")
    read = functools.partial(_read, name=name, split=split)
    return SparkSentences(data, dps.spark.read_with(chosen, read), f"column {name!r}")


def _column(frame: Any) -> tuple[str, bool]:
    """The name of the column of sentences, and whether they are text, which is split."""
    kinds = {field.name: field.dataType for field in frame.schema.fields}
    text = [name for name, kind in kinds.items() if _is_text(kind)]
    lists = [name for name, kind in kinds.items() if _is_text(getattr(kind, "elementType", None))]
    candidates, what = (lists, "arrays of strings") if lists else (text, "strings")
    if len(candidates) > 1:
        raise InputError(
            f"{len(candidates)} columns of {what}, {', '.join(candidates)}: select the one with the sentences, "
            f"frame.select({candidates[0]!r})"
        )
    if not candidates:
        there = ", ".join(f"{name} ({kind.simpleString()})" for name, kind in list(kinds.items())[:20])
        raise InputTypeError(
            f"sentences are a column of arrays of strings, or of strings, and the columns are {there or 'none'}; "
            f"pyspark.ml's Tokenizer makes arrays of words"
        )
    return candidates[0], not lists


def _is_text(kind: object) -> bool:
    return type(kind).__name__ in ("StringType", "VarcharType", "CharType")


# -- in Spark's tasks


class ArrowSentences:
    """The sentences of a partition, which stay in Arrow's few large buffers until they are iterated over."""

    def __init__(self, columns: Sequence[pa.Array], split: bool):
        self._columns = columns
        self._split = split

    def __iter__(self) -> Iterator[list[str]]:
        for column in self._columns:
            yield from map(str.split, column.to_pylist()) if self._split else column.to_pylist()


def _read(number: int, batches: Iterable[pa.RecordBatch], name: str, split: bool) -> ArrowSentences | DPSError:
    """A partition. An error in the data is returned, because Spark would read anew what raises one."""
    columns = [batch.column(0) for batch in batches]
    rows = sum(column.null_count for column in columns)
    if rows:
        return InputError(
            f"partition {number}: column {name!r} has no sentence (null) in {rows} rows; fill them or drop them, "
            f"frame.dropna(subset=[{name!r}])"
        )
    words = 0 if split else sum(column.flatten().null_count for column in columns)
    if words:
        return InputError(
            f"partition {number}: {words} words of column {name!r} are null; leave them out, "
            f"pyspark.sql.functions.array_compact({name!r})"
        )
    return ArrowSentences(columns, split)


def without_errors(partitions: Sequence[Any]) -> Sequence[Any]:
    """The partitions of a trainer; an error in the data of one is raised."""
    for partition in partitions:
        if isinstance(partition, DPSError):
            raise partition
    return partitions

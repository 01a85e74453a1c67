"""Frames of polars, Arrow and other libraries as pandas frames, once, where they come in.

narwhals reads them, so that the code below knows one kind of frame, and no library by its name.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from dps.engine.training.types import Partition
from dps.errors import InputError, InputTypeError, needing

if TYPE_CHECKING:
    import narwhals as nw
    from pandas import Categorical

__all__ = ["as_pandas", "names_of"]


def as_pandas(data: Partition, columns: Collection[object] | None = None) -> Partition:
    """A pandas DataFrame or Series of a frame or column of another library; anything else is returned as it is.

    Numbers and booleans become columns of numbers, with NaN for what is missing; text becomes text, and categories
    become categories. Columns of numbers without missing values are not copied.

    Parameters
    ----------
    data
        A frame or column of polars, Arrow or another library that narwhals reads, or anything else.
    columns : collection, optional
        Convert only these columns of a frame.

    Raises
    ------
    InputTypeError
        A frame that is lazy: its rows are not in memory.
    InputError
        Two columns of a frame have one name.

    Examples
    --------
    >>> import pyarrow as pa
    >>> as_pandas(pa.table({"city": ["Oslo", None], "age": [31, None]}))
       city   age
    0  Oslo  31.0
    1   NaN   NaN
    >>> as_pandas([1, 2])
    [1, 2]
    """
    opened: Any = _opened(data)
    if opened is None:
        return data
    with needing("models"):
        import pandas as pd

    if hasattr(opened, "columns"):
        chosen = [name for name in opened.columns if columns is None or name in columns]
        return pd.DataFrame({name: _values(opened[name]) for name in chosen}, copy=False)
    return pd.Series(_values(opened), name=opened.name, copy=False)


def names_of(data: object) -> list[str] | None:
    return list(getattr(_opened(data), "columns", ())) or None


def _opened(data: object) -> nw.DataFrame | nw.Series | None:
    """The frame or column as narwhals sees it; None for what is of pandas, or is no frame."""
    lazy = hasattr(data, "collect_schema")
    if isinstance(data, type) or hasattr(data, "iloc") or not (lazy or hasattr(data, "__arrow_c_stream__")):
        return None
    names = getattr(data, "column_names", [])  # an Arrow table may have two columns of one name
    if len(set(names)) < len(names):
        raise InputError(f"a {type(data).__name__} has several columns of one name: rename them")
    with needing("models"):
        import narwhals as nw

    opened = nw.from_native(data, pass_through=True, allow_series=True)
    if isinstance(opened, nw.LazyFrame):
        raise InputTypeError(
            f"a {type(data).__name__} is lazy, and its rows are not in memory: pass those, data.collect()"
        )
    return opened if isinstance(opened, (nw.DataFrame, nw.Series)) else None


def _values(column: nw.Series) -> np.ndarray | list | Categorical:
    """The values of a column, as the constructors of pandas take them."""
    import narwhals as nw

    if column.dtype in (nw.Categorical, nw.Enum):
        import pandas as pd

        return pd.Categorical(column.to_list())  # not to_numpy, because that of Arrow forgets missing categories
    if column.dtype == nw.Decimal or (
        (column.dtype == nw.Boolean or column.dtype.is_numeric()) and column.null_count()
    ):
        column = column.cast(nw.Float64)
    if column.dtype == nw.Unknown and column.null_count() == len(column):  # a column of nothing: of no type
        return np.full(len(column), None, object)
    values = column.to_numpy()
    return values if np.ndim(values) == 1 else list(values)

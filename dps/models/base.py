"""What all estimators share: where they train, what they have learnt, their tables, and what scikit-learn asks of them.

An estimator is a dataclass of settings. Its `fit` checks them by the rules that its class declares (`RULES`), enters
:meth:`ServerModel.serving`, and trains there. What it has learnt is one value, `_learnt`, which lies in one of two
places:

- in this process, where `fit` has started the servers, because these end with it;
- on the user's parameter server. Its tables (`_tables`) are then dropped with the model, or by :meth:`forget`.

A pickled model has what it has learnt with it, so that it needs no cluster, and the address of the cluster to train in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError

import dps
from dps.errors import InputError
from dps.models.inputs.encoding import Layout
from dps.models.settings import Rules, SettingRule, Whole, refuse_other
from dps.models.tables import ModelTables
from dps.models.types import ClusterLike, Features, Settings
from dps.models.vocabularies import check_vocabulary, name_of
from dps.models.where import address_of, aside, serving

if TYPE_CHECKING:
    from sklearn.utils import Tags

__all__ = ["HeldServers", "ServerModel"]

Learnt = TypeVar("Learnt")


class HeldServers(NamedTuple):
    """Servers that a model goes on to use after `fit` or `partial_fit` has returned, until `close` or `forget`."""

    ps: dps.ParameterServer
    ours: bool  # the model has started them, so that they end with it
    stack: contextlib.ExitStack  # closes them


class ServerModel(BaseEstimator, Generic[Learnt]):
    """An estimator that trains on a parameter server."""

    RULES: ClassVar[Rules] = {"servers": Whole()}  # what settings may be; a subclass adds its own
    # The private attributes of a fitted model, which `forget` removes together with those that end with "_".
    STATE: ClassVar[tuple[str, ...]] = ("_learnt", "_tables", "_held")
    client: ClusterLike
    servers: int
    _learnt: Learnt | None = None
    _tables: ModelTables | None = None
    _held: HeldServers | None = None

    def check(self) -> None:
        """Refuse impossible settings before any server starts."""
        for name, rule in self.rules().items():
            refuse_other(name, getattr(self, name), rule)
        staleness = getattr(self, "staleness", 0)
        if getattr(self, "aggregate", False) and staleness != 0:
            raise InputError(f"aggregate=True needs staleness=0, not {staleness!r}")
        check_vocabulary(getattr(self, "vocabulary", None), self.client)

    @classmethod
    def rules(cls) -> dict[str, SettingRule]:
        """The rules of this class and of those that it extends."""
        return {name: rule for each in reversed(cls.__mro__) for name, rule in vars(each).get("RULES", {}).items()}

    @contextlib.contextmanager
    def serving(self, X: Features) -> Iterator[tuple[dps.ParameterServer, bool]]:
        """(parameter server to train on, whether `fit` has started it, so that it ends with the fit)."""
        with aside(), self.servers_for(X) as found:
            yield found

    def servers_for(self, X: Features) -> AbstractContextManager[tuple[dps.ParameterServer, bool]]:
        """As `serving`. A parameter server to which this connects stays connected while the model has tables there."""
        return serving(self.client, X, self.servers, detaches=lambda: self._tables is None)

    def forget(self) -> None:
        """Make the model unfitted again, and drop its tables on a parameter server that goes on."""
        if self._held is not None:
            self._held.stack.close()
        if self._tables is not None:
            self._tables.drop()
        for name in [name for name in self.__dict__ if name.endswith("_") or name in self.STATE]:
            del self.__dict__[name]

    def note_layout(self, layout: Layout) -> None:
        """Set the attributes that say of which features the data was."""
        self.n_features_in_ = layout.features
        self.__dict__.pop("feature_names_in_", None)
        if layout.columns is not None:
            self.feature_names_in_ = np.array(layout.columns, object)

    def _fitted(self) -> Learnt:
        if self._learnt is None:
            raise NotFittedError(f"this {type(self).__name__} is not fitted yet; call fit")
        return self._learnt

    def portable(self) -> Learnt | None:
        """What was learnt, as a pickled model has it: in the process that unpickles it."""
        return self._learnt

    # -- as scikit-learn has it

    def __sklearn_is_fitted__(self) -> bool:
        return self._learnt is not None

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def __sklearn_clone__(self) -> Self:
        """Clone with the same client object, because a cluster cannot be copied."""
        return type(self)(**self.get_params(deep=False))

    def __getstate__(self) -> Settings:
        """A pickled model needs no cluster, and has the address of the cluster to train in.

        Of a vocabulary it has the name, because the vocabulary itself holds the secret of its servers.
        """
        state = {**super().__getstate__(), "client": address_of(self.client)}
        if "vocabulary" in state:
            state["vocabulary"] = name_of(state["vocabulary"])
        for name in ("_tables", "_held"):
            state.pop(name, None)
        if self._learnt is not None:
            state["_learnt"] = self.portable()
        return state

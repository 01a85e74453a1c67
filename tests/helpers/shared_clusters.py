"""A cluster that many examples use, one after the other, each as if it had made and closed its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import dps
from dps.engine.controller.plugin import Controller

__all__ = ["SharedClusters"]

CLOSE_SECONDS = 60.0  # the longest that parameter servers of an example take to end, on a busy machine


class SharedClusters:
    """The clusters that were made with :class:`dps.LocalCluster` within :meth:`shared`: one for each set of arguments.

    An example that leaves a parameter server open has it closed, as closing the cluster would have done.
    """

    def __init__(self) -> None:
        self._clusters: dict[str, Lasting] = {}
        self.made = 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Have dps.LocalCluster give the clusters of earlier examples; leave them empty at the end."""
        with mock.patch.object(dps, "LocalCluster", self._cluster):
            yield
        for cluster in self._clusters.values():
            cluster.empty()

    def _cluster(self, *arguments: Any, **options: Any) -> Lasting:
        key = repr((arguments, sorted(options.items())))
        if key not in self._clusters:
            self._clusters[key] = Lasting(*arguments, **options)
            self.made += 1
        return self._clusters[key]

    def close(self) -> None:
        """End all clusters."""
        while self._clusters:
            self._clusters.popitem()[1].end()


class Lasting(dps.LocalCluster):
    """A cluster whose `close` is for its owner: for the others it stays."""

    def close(self, timeout: float | None = None) -> None:
        return None

    def end(self) -> None:
        """Close it."""
        super().close()

    def empty(self) -> None:
        """End the parameter servers that are left in it."""
        controller = getattr(self.scheduler, "plugins", {}).get(Controller.name)
        if controller is not None:
            self.sync(controller.sessions.close_all, callback_timeout=CLOSE_SECONDS)

"""An application on YARN, seen through skein: submitted or taken up, asked for containers, ended."""

from __future__ import annotations

import contextlib
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

from dps import config
from dps.deploy.yarn_specification import read_specification, skein
from dps.errors import DPSError

__all__ = ["Application"]

POLL = 0.2  # seconds between two looks at its state
PENDING = ("NEW", "NEW_SAVING", "SUBMITTED", "ACCEPTED")  # states of one that does not yet run


class Application:
    """An application; every method waits for an answer, so it is called in threads of its own.

    Parameters
    ----------
    driver : skein.Client, optional
        The connection to YARN. Without it, one is made, and closed again.
    spec : skein.ApplicationSpec, optional
        Of an application to start.
    app_id : str, optional
        Of one that runs.
    client : skein.ApplicationClient, optional
        The connection to one that runs.
    """

    def __init__(self, driver: Any = None, spec: Any = None, app_id: str | None = None, client: Any = None):
        self.spec, self.client, self.id = spec, client, app_id if client is None else client.id
        self.started = False  # by us
        self._driver, self._own_driver = driver, driver is None and client is None
        self._finalizer: weakref.finalize | None = None

    def connect(self) -> None:
        """Start it, or take it up."""
        if self._own_driver:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it makes itself a certificate, the first time
                self._driver = skein.Client()
        if self.spec is not None:
            self.id = self._driver.submit(self.spec)
            self.started = True
        if self.client is None:
            self._await_start(config.seconds("yarn"))
            security = None if self.spec is None else self.spec.master.security
            self.client = self._driver.connect(self.id, wait=False, security=security)
        if self.started:
            self._finalizer = weakref.finalize(self, end, self.client)
        else:
            self.spec = read_specification(self.client.get_specification())

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Errors of skein, with what YARN has to say."""
        try:
            yield
        except skein.SkeinError as error:
            if self.id is None:
                raise DPSError(f"YARN did not take the application: {error}") from error
            raise DPSError(f"{self._report()}. Its logs: yarn logs -applicationId {self.id}") from error

    def _await_start(self, patience: float) -> None:
        until = time.monotonic() + patience
        while str(self._driver.application_report(self.id).state) in PENDING:
            if time.monotonic() > until:
                raise DPSError(f"{self._report()}, for {patience:g} s (dps.timeouts.yarn): is its queue full?")
            time.sleep(POLL)

    def _report(self) -> str:
        if self._driver is None:
            return f"application {self.id} is gone"
        report = self._driver.application_report(self.id)
        return f"application {self.id} is {report.state} ({report.final_status}) {report.diagnostics}".rstrip()

    def containers(self, *services: str) -> list[Any]:
        """Those that run, or are waited for."""
        return self.client.get_containers(services=services or None)

    def kill(self, names: list[str]) -> None:
        """End containers; they are not replaced."""
        for name in names:
            with contextlib.suppress(ValueError, KeyError):  # it has ended meanwhile
                self.client.kill_container(name)

    def close(self, status: str | None, diagnostics: str | None) -> None:
        """End it so, or with None only let go of it."""
        if self._finalizer is not None:
            self._finalizer.detach()
        if self.client is not None:
            if status is not None:
                end(self.client, status, diagnostics)
            self.client.close()
        elif self.started:  # submitted, and nothing came of it
            self._driver.kill_application(self.id)
        if self._own_driver and self._driver is not None:
            self._driver.close()


def end(client: Any, status: str = "SUCCEEDED", diagnostics: str | None = None) -> None:
    """End the application of this connection."""
    with contextlib.suppress(skein.exceptions.ConnectionError):  # it has ended already
        client.shutdown(status, diagnostics)

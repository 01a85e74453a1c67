"""An application on YARN, through skein: start it or connect to it, ask for its containers, end it."""

from __future__ import annotations

import contextlib
import time
import warnings
import weakref
from collections.abc import Iterator

from dps import config
from dps.engine.deploy.yarn_specification import read_specification, skein
from dps.errors import DPSError

__all__ = ["Application"]

# Pause between two requests for the application's state.
POLL_SECONDS = 0.2
PENDING = ("NEW", "NEW_SAVING", "SUBMITTED", "ACCEPTED")  # states of an application that does not run yet


class Application:
    """An application on YARN. Every method blocks until YARN answers, so the event loop calls it in other threads.

    Parameters
    ----------
    driver : skein.Client, optional
        The connection to YARN. By default `connect` makes one, and `close` closes it.
    spec : skein.ApplicationSpec, optional
        Of an application to start.
    app_id : str, optional
        The id of an application that runs.
    client : skein.ApplicationClient, optional
        The connection to an application that runs.
    """

    def __init__(
        self,
        driver: skein.Client = None,
        spec: skein.ApplicationSpec = None,
        app_id: str | None = None,
        client: skein.ApplicationClient = None,
    ):
        self.spec = spec
        self.client = client
        self.id = app_id if client is None else client.id
        self.started = False  # by this object
        self._driver, self._own_driver = driver, driver is None and client is None
        self._finalizer: weakref.finalize | None = None

    def connect(self) -> None:
        """Start the application, or connect to it if it runs."""
        if self._own_driver:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # skein warns the first time that it makes a certificate
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
        """Turn an error of skein into a DPSError with YARN's report of the application."""
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
            time.sleep(POLL_SECONDS)

    def _report(self) -> str:
        if self._driver is None:
            return f"application {self.id} is gone"
        report = self._driver.application_report(self.id)
        return f"application {self.id} is {report.state} ({report.final_status}) {report.diagnostics}".rstrip()

    def containers(self, *services: str) -> list[skein.model.Container]:
        """The containers that run, or that YARN has not started yet; of these services or of all."""
        return self.client.get_containers(services=services or None)

    def kill(self, names: list[str]) -> None:
        """End containers. YARN does not replace them."""
        for name in names:
            with contextlib.suppress(ValueError, KeyError):  # the container has ended meanwhile
                self.client.kill_container(name)

    def close(self, status: str | None, diagnostics: str | None) -> None:
        """End the application with this status, or only disconnect if the status is None."""
        if self._finalizer is not None:
            self._finalizer.detach()
        if self.client is not None:
            if status is not None:
                end(self.client, status, diagnostics)
            self.client.close()
        elif self.started:  # submitted, but it never ran
            self._driver.kill_application(self.id)
        if self._own_driver and self._driver is not None:
            self._driver.close()


def end(client: skein.ApplicationClient, status: str = "SUCCEEDED", diagnostics: str | None = None) -> None:
    """End the application to which `client` is connected."""
    with contextlib.suppress(skein.exceptions.ConnectionError):  # the application has ended already
        client.shutdown(status, diagnostics)

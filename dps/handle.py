"""Handle: a driver's connection to the controller, over Dask's control plane."""

from __future__ import annotations

import contextlib
import logging
import socket
from typing import Any

from distributed import Client as DaskClient

from dps.client import Client, Ticket
from dps.controller import Controller
from dps.cordon import close_client
from dps.dashboard import Surfaces
from dps.dask_side import ask_versions, own_version
from dps.errors import ClosedError, ControllerGoneError, DPSError, InputTypeError, NameInUseError
from dps.once import Once
from dps.refusals import value
from dps.server import Server

__all__ = ["Handle"]

logger = logging.getLogger(__name__)


class Handle:
    """What :class:`dps.ParameterServer` is made of beneath its methods: the Dask client, the ticket, calls."""

    def _prepare(self, client: Any, name: str) -> None:
        self.name = name
        self.copies = 1
        self.closed = False
        self._closing = Once(f"closing parameter server {name!r}")
        self._attached = False  # taken up, not started, by this handle: `with` then leaves the servers running
        self._own_client = client is not None and not isinstance(client, DaskClient)
        if client is None:
            self.dask_client: DaskClient = DaskClient.current()
        else:
            self.dask_client = DaskClient(client, set_as_default=False) if self._own_client else client
        if self.dask_client.asynchronous:
            raise InputTypeError("ParameterServer takes a synchronous Dask client: make it with asynchronous=False")
        self._client: Client | None = None
        try:
            ask_versions(self.dask_client, [])  # the plugin travels as names of classes, and they may mean other things
            self.dask_client.register_plugin(Controller(Server, Surfaces()))
        except ImportError as error:
            self._let_go()
            raise DPSError(f"the scheduler cannot import dps ({error}): install it there, in this version") from error
        except BaseException:
            self._let_go()
            raise

    def _start(self, servers: int, timeout: float) -> None:
        try:
            self._say_what_is_missing(servers, timeout)
            wish: dict[str, Any] = {"servers": servers, "copies": self.copies, "version": own_version()}
            self._attach(self._call("open", timeout=timeout, **wish))
        except BaseException as error:
            if not isinstance(error, NameInUseError):  # that one is somebody else's
                with contextlib.suppress(Exception):
                    self._call("close_session")
            raise

    def _say_what_is_missing(self, servers: int, timeout: float) -> None:
        """A wait for workers is announced at once, because nothing else tells it from a program that hangs."""
        there = self._call("workers", named=False)["workers"]
        missing = servers - len(there)
        if missing > 0:
            few = ", ".join(there[:5]) + (", ..." if len(there) > 5 else "")
            logger.warning(
                "parameter server %r: waiting up to %g s (dps.timeouts.start) for %d more worker%s with the resource "
                "dps; %d %s there%s; start more with `dask worker %s --resources dps=1`, or ask for fewer servers",
                *(self.name, timeout, missing, "" if missing == 1 else "s"),
                *(len(there), "is" if len(there) == 1 else "are", f": {few}" if few else "", self._scheduler_address()),
            )

    def _attach(self, about: dict[str, Any]) -> None:
        host, port = about["controller"]
        security = self.dask_client.security if self._scheduler_address().startswith("tls://") else None
        self.ticket = Ticket(self.name, (host, port), about["secret"], security)
        self.copies = about["copies"]

    def _call(self, verb: str, named: bool = True, **fields: Any) -> Any:
        """Ask the controller, over Dask's control plane."""
        if self.closed:
            raise ClosedError(f"parameter server {self.name!r} was closed")
        if self.dask_client.scheduler is None:
            if not self._is_there():  # Dask's client closes itself when its scheduler has gone
                raise ControllerGoneError(f"the scheduler of parameter server {self.name!r} is gone")
            raise ClosedError(
                f"the Dask client that parameter server {self.name!r} was started with is closed; with another one, "
                f"dps.ParameterServer.attach(client, {self.name!r}) takes it up"
            )
        if named:
            fields["name"] = self.name
        try:
            return value(self.dask_client.sync(getattr(self.dask_client.scheduler, f"dps_{verb}"), **fields))
        except (DPSError, KeyboardInterrupt):
            raise
        except (OSError, RuntimeError) as error:  # RuntimeError: the Dask client has given up, or was closed
            raise ControllerGoneError(f"the scheduler did not answer dps_{verb}: {error}") from error

    def _is_there(self) -> bool:
        """Whether anybody listens where the controller does."""
        try:
            socket.create_connection(self.ticket.controller, timeout=1).close()
        except OSError:
            return False
        return True

    def _let_go(self) -> None:
        self.closed = True
        if self._client is not None:
            self._client.close()
        if self._own_client:
            close_client(self.dask_client)

    def _scheduler_address(self) -> str:
        return str(self.dask_client.scheduler_info(n_workers=0).get("address", ""))

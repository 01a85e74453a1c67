"""DriverConnection: a driver's connection to the controller of one parameter server, over Dask's control plane."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
from distributed import Client as DaskClient
from distributed import get_client
from distributed.comm import get_address_host_port
from distributed.deploy import Cluster

from dps import config
from dps.engine.client.client import Client
from dps.engine.client.session import ClientSession
from dps.engine.client.ticket import Ticket
from dps.engine.controller.plugin import Controller
from dps.engine.dashboard import Surfaces
from dps.engine.daskapi.cordon import close_client
from dps.engine.daskapi.processes import check_versions_of, own_version
from dps.engine.daskapi.refusals import value
from dps.engine.server.actor import Server
from dps.engine.training.types import Json
from dps.engine.wire.messages import Description
from dps.engine.wire.once import Once
from dps.errors import ClosedError, ControllerGoneError, DPSError, InputError, InputTypeError, NameInUseError

__all__ = ["DaskLike", "DeferredConnection", "DriverConnection"]

DaskLike: TypeAlias = DaskClient | Cluster | str | None  # a client, what one is made of, or None for the current one

logger = logging.getLogger(__name__)

# Pause before a request to a controller that is gone is made again.
AGAIN_SECONDS = 1.0


class DriverConnection:
    """The Dask client, the ticket, and calls to the controller.

    Parameters
    ----------
    client : distributed.Client, cluster or None
        The Dask cluster; None for Dask's current client.

    Attributes
    ----------
    ticket : Ticket
        Once the parameter server was started or attached to.
    attached : bool
        Whether it was taken up, and not started: the end of a ``with`` block then leaves the servers running.
    copies : int
        How many servers hold each row, unless a table says otherwise.
    """

    ticket: Ticket

    def __init__(self, client: DaskLike, name: str):
        self.name = name
        self.copies = 1
        self._grace = 0.0  # seconds for which the servers outlive their scheduler
        self.closed = self.attached = False
        self._closing = Once(f"closing parameter server {name!r}")
        self._own = threading.local()  # .client: that of the thread
        self._clients: weakref.WeakSet[Client] = weakref.WeakSet()  # the clients of all threads, which `release` closes
        self._lock = threading.Lock()  # guards `_clients` and `closed`
        self._when_released: list[Callable[[], None]] = []
        self._registered: set[str] = set()  # functions that the servers have
        self._own_client = client is not None and not isinstance(client, DaskClient)
        if client is None:
            self.dask_client = DaskClient.current()
        elif isinstance(client, DaskClient):
            self.dask_client = client
        else:
            self.dask_client = DaskClient(client, set_as_default=False)
        if self.dask_client.asynchronous:
            raise InputTypeError("ParameterServer takes a synchronous Dask client: make it with asynchronous=False")
        try:
            # The plugin travels as names of classes, which may mean other things in another version.
            check_versions_of(self.dask_client, [])
            self.dask_client.register_plugin(Controller(Server, Surfaces()))
        except ImportError as error:
            self.release()
            raise DPSError(f"the scheduler cannot import dps ({error}): install it there, in this version") from error
        except BaseException:
            self.release()
            raise

        self._scheduler = str(self.dask_client.scheduler.address)  # where it was found, and not what it says of itself

    def start(self, servers: int, copies: int, timeout: float) -> None:
        """Start the parameter server; `timeout` in seconds."""
        self.copies = copies
        try:
            self._announce_wait(servers, timeout)
            fields: Json = {"servers": servers, "copies": copies, "version": own_version()}
            self._take(msgspec.msgpack.decode(self.call("open", timeout=timeout, **fields), type=Description))
        except BaseException as error:
            if not isinstance(error, NameInUseError):  # that session belongs to another driver
                with contextlib.suppress(Exception):
                    self.call("close_session", taken_over=False)
            self.release()
            raise

    def attach(self, force: bool = False) -> None:
        try:
            if force:
                self.call("force_takeover")
            self._take(self.describe())
            self.attached = True
        except BaseException:
            self.release()
            raise

    def _announce_wait(self, servers: int, timeout: float) -> None:
        """Log at once that workers are waited for, because nothing else tells the wait from a program that hangs."""
        present = self.call("workers")["workers"]
        missing = servers - len(present)
        if missing > 0:
            few = ", ".join(present[:5]) + (", ..." if len(present) > 5 else "")
            logger.warning(
                "parameter server %r: waiting up to %g s (dps.timeouts.start) for %d more worker%s with the resource "
                "dps; %d %s there%s; start more with `dask worker %s --resources dps=1`, or ask for fewer servers",
                *(self.name, timeout, missing, "" if missing == 1 else "s"),
                *(
                    len(present),
                    "is" if len(present) == 1 else "are",
                    f": {few}" if few else "",
                    self.scheduler_address(),
                ),
            )

    def _take(self, description: Description) -> None:
        security = self.dask_client.security if self.scheduler_address().startswith("tls://") else None
        self.ticket = Ticket(self.name, description.controller, description.secret, security)
        self.copies, self._grace = description.copies, description.grace

    def describe(self, callback_timeout: float | None = None) -> Description:
        answer = self.call("describe", callback_timeout=callback_timeout)
        return msgspec.msgpack.decode(answer, type=Description)

    def call(self, verb: str, *, callback_timeout: float | None = None, **fields: object) -> Any:
        """Ask the controller about this parameter server, over Dask's control plane: see `controller/verbs.py`.

        `callback_timeout` bounds the wait for the answer, in seconds.
        """
        if self.closed:
            raise ClosedError(f"parameter server {self.name!r} was closed")
        if self.dask_client.scheduler is None:
            if not self._controller_listens():  # Dask's client closes itself when its scheduler has gone
                raise ControllerGoneError(f"the scheduler of parameter server {self.name!r} is gone{self._remedy()}")
            raise ClosedError(
                f"the Dask client that parameter server {self.name!r} was started with is closed; with another one, "
                f"dps.ParameterServer.attach(client, {self.name!r}) takes it up"
            )
        try:
            answer = self._ask(verb, fields, callback_timeout)
            if answer is None:  # the scheduler is another one, to which Dask's client has connected again
                self.dask_client.register_plugin(Controller(Server, Surfaces()))
                self._take(self._found_again())
                answer = self._ask(verb, fields, callback_timeout)
            return value(answer)
        except (DPSError, KeyboardInterrupt):
            raise
        except (OSError, RuntimeError) as error:  # RuntimeError: the Dask client has given up, or was closed
            what = f"the scheduler did not answer dps_call({verb!r}): {error}"
            raise ControllerGoneError(f"{what}{self._remedy()}") from error

    def _found_again(self) -> Description:
        try:
            return msgspec.msgpack.decode(value(self._ask("describe", {})) or b"", type=Description)
        except ClosedError as error:
            raise ControllerGoneError(f"the scheduler is another one{self._remedy()} ({error})") from error

    def call_patiently(self, verb: str, **fields: Any) -> Any:
        """As `call`, about work that outlives the scheduler, as that of Spark's trainers does.

        Where the scheduler is gone, another one at its address may take the parameter server over within the grace.
        """
        lost, until = False, time.monotonic() + self._grace
        while True:
            try:
                if lost and self.dask_client.status == "closed":  # by itself: it looks for a scheduler for some seconds
                    self._connect_again()
                return self.call(verb, **fields)
            except (DPSError, OSError) as error:
                lost = lost or isinstance(error, ControllerGoneError)
                waits = isinstance(error, (ControllerGoneError, ClosedError, OSError))
                if self.closed or not (lost and waits) or time.monotonic() > until:
                    raise
            time.sleep(AGAIN_SECONDS)

    def _connect_again(self) -> None:
        old, address = self.dask_client, self._scheduler
        # First, because a Dask client that finds no scheduler leaves a thread behind.
        socket.create_connection(get_address_host_port(address), config.seconds("connect")).close()
        self.dask_client = DaskClient(
            address, security=old.security, set_as_default=False, timeout=config.seconds("connect")
        )
        if self._own_client:
            close_client(old)
        self._own_client = True

    def _remedy(self) -> str:
        """The end of an error, which tells the user what to do after the scheduler has died."""
        if not self._grace:
            return ""
        return (
            f". The servers wait {self._grace:g} s (dps.scheduler.grace) for another scheduler at its address: start "
            f"one, then dps.ParameterServer.attach(client, {self.name!r}), and resume_run for a run"
        )

    def _ask(self, verb: str, fields: dict[str, object], seconds: float | None = None) -> Any:
        """What the scheduler answers, within so many seconds; None where it has no controller."""
        call = self.dask_client.scheduler.dps_call
        return self.dask_client.sync(call, callback_timeout=seconds, verb=verb, name=self.name, fields=fields)

    def _controller_listens(self) -> bool:
        try:
            socket.create_connection(self.ticket.controller, timeout=1).close()
        except OSError:
            return False
        return True

    def client(self) -> Client:
        """A client of this thread, without a clock; the same one until it is closed.

        Each thread has its own, because a client is held by the thread that waits for an answer. It is closed when its
        thread has ended and nothing refers to it any more, at the latest with the connection.
        """
        client: Client | None = getattr(self._own, "client", None)
        if client is None or client.session.closed or self.closed:
            with self._lock:
                if self.closed:
                    raise ClosedError(f"parameter server {self.name!r} was closed")
                client = self._own.client = Client(self.ticket)
                self._clients.add(client)
            weakref.finalize(client, end_session, client.session).atexit = False
        return client

    def register(self, function: str, code: bytes) -> None:
        """Bring a function to all servers, once; one without code they have already."""
        if code and function not in self._registered:
            self.call("add_function", function=function, code=code)
            self._registered.add(function)

    def forget_routes(self) -> None:
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            client.forget_routes()

    def scheduler_address(self) -> str:
        return str(self.dask_client.scheduler_info(n_workers=0).get("address", ""))

    # -- the end

    def when_released(self, *actions: Callable[[], None]) -> None:
        self._when_released += actions

    def detach(self) -> None:
        """Let go of the servers without stopping them. Several threads may ask: one does it, the others wait for it."""
        self._closing(self.release)

    def close(self) -> None:
        """Stop the servers. Several threads may ask: one does it, and the others wait for it."""
        self._closing(self._close)

    def _close(self) -> None:
        try:
            with contextlib.suppress(OSError, ClosedError):
                self.call("close_session")
        finally:
            self.release()

    def release(self) -> None:
        """Close what this process has of the connection."""
        with self._lock:
            self.closed = True
            clients = list(self._clients)
        for client in clients:
            client.close()
        if self._own_client:
            close_client(self.dask_client)
        for action in self._when_released:
            action()


def end_session(session: ClientSession) -> None:
    """Wait for what a thread that has ended left on its way, because its pushes are to count; then close."""
    if session.closed:
        return
    with contextlib.suppress(DPSError, OSError):
        session.wait()
    session.close()


class DeferredConnection:
    """A connection that attaches when it is first used: that of a handle which came by pickle.

    It does so no earlier, because Dask unpickles arguments on the worker's event loop, which may not wait. In a worker
    it uses the worker's own client; elsewhere Dask's current one.
    """

    def __init__(self, name: str):
        self.name = name
        self._connection: DriverConnection | None = None

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # copy and pickle ask for such
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {attribute!r}")
        if self._connection is None:
            try:
                client = get_client()
            except ValueError as error:
                raise InputError(
                    f"parameter server {self.name!r} was pickled, and there is no Dask client to attach with here: "
                    f"make one, or pass ps.client(), which needs none"
                ) from error
            connection = DriverConnection(client, self.name)
            connection.attach()
            self._connection = connection
        return getattr(self._connection, attribute)

"""The client's end of the simulated network: `dps.engine.wire.channel.Channel` on virtual time, and its clients."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dps import config
from dps.engine.client.client import Client
from dps.engine.client.environment import LocalEndpoint, Probes
from dps.engine.client.row_cache import CacheShelf
from dps.engine.client.ticket import Ticket
from dps.engine.core.requests.exchange import Stream, Traffic
from dps.engine.core.requests.part import Part
from dps.engine.simulation.endpoint import SimEndpoint
from dps.engine.simulation.network import END, End, Network
from dps.engine.simulation.world import Main, Party, Task, Timer
from dps.engine.training.leased_batches import LeasedBatches
from dps.engine.training.participant import Participant
from dps.engine.training.trainer import Trainer
from dps.engine.wire import frames
from dps.engine.wire.channel import Channel, Request, Sink
from dps.engine.wire.frames import HEADER_SIZE, Header, byte_views, decode_header, encode_header
from dps.engine.wire.handshake import ConnectingHandshake
from dps.engine.wire.protocols import RoleConnection
from dps.engine.wire.rights import Handler as RoleHandler
from dps.engine.wire.sockets import SLICE_SECONDS
from dps.errors import DPSError, RequestTimeoutError, ServerGoneError

if TYPE_CHECKING:
    from collections.abc import Buffer

__all__ = ["SimChannel", "SimClient", "SimProcess", "SimTrainer"]

# A trainer looks so often whether another one of its process has gone on, because nothing wakes it in virtual time.
LOOK_SECONDS = 0.002
MAX_FETCH_SECONDS = 0.02  # that it takes to get another trainer's partition


class SimChannel(Channel, End):
    """One connection of a client to a server or to the controller."""

    def __init__(
        self,
        network: Network,
        host: Party,
        address: tuple[str, int],
        ticket: Ticket,
        what: str,
        gone: type[DPSError],
        idle: Callable[[], None] | None = None,
    ):
        End.__init__(self, host)
        self.what, self.closed, self.idle = what, False, idle
        self._gone, self.traffic = gone, Traffic()
        self._requests: dict[int, Request] = {}
        self._observers = network.observers
        self.stream, self._sinks = Stream(-1), 0
        self._limit = config.nbytes("frame")
        self._patience = config.seconds("request")
        self._waiter: Task | Main | None = None
        self._alarm: Timer | None = None
        self._alarm_at = 0.0  # on the host's clock
        self._handshake = ConnectingHandshake(ticket.session, ticket.secret, what)
        network.connect(self, address, self._handshake)
        deadline = host.now() + config.seconds("connect")
        try:
            while not self._handshake.done:
                left = deadline - host.now()
                if left <= 0 or self.over:
                    how = "refused" if self.over else "late"
                    raise gone(f"{what} cannot be reached at {address[0]}:{address[1]}: {how}")
                if not self._wait(min(left, SLICE_SECONDS)) and self.idle is not None:
                    self.idle()
                self._take_all()
        except BaseException:
            self.close()
            raise

    @property
    def is_plain(self) -> bool:
        """False, because there is no socket past which a call could go."""
        return False

    # -- out

    def send(self, header: Header, pieces: Iterable[Buffer], sink: Sink | None = None, size: int = 0) -> Request:
        if self.closed:
            raise self._gone(f"the connection to {self.what} is closed")
        number = self.stream.take()
        request = self._requests[number] = Request(self, sink, size)
        self.traffic.sent += HEADER_SIZE + header.body
        frame = bytearray(encode_header(header, number))
        for piece in pieces:
            frame += b"".join(byte_views([piece]))
        if len(frame) != HEADER_SIZE + header.body:
            raise RuntimeError(f"a frame of {len(frame) - HEADER_SIZE} bytes announces {header.body}")
        try:
            self.outward.write(frame, len(frame))
            self._drain()
        except BaseException as error:
            self._break(error)
            raise
        return request

    def post(self, part: Part) -> Request:
        if self.closed:
            raise self._gone(f"the connection to {self.what} is closed")
        number = self.stream.take()
        request = Request.carrying(part, self)
        self._expect(request, number)
        frame = bytearray()
        part.begin(number, self.stream.lists)
        while pieces := part.pieces():
            frame += b"".join(pieces)
        self.traffic.sent += len(frame)
        try:
            self.outward.write(frame, len(frame))
            self._drain()
        except BaseException as error:
            self._break(error)
            raise
        return request

    def _drain(self) -> None:
        """Wait until all bytes are sent. Read meanwhile, or a peer that waits in the same way would never take them."""
        unsent, began = self.outward.unsent, self.host.now()
        deadline = began + self._patience
        while self.outward.unsent:
            if self.outward.unsent < unsent:
                unsent, deadline = self.outward.unsent, self.host.now() + self._patience
            elif self.host.now() >= deadline:
                raise RequestTimeoutError(f"{self.what} has taken no bytes for {self._patience:g} s")
            self._wait(SLICE_SECONDS)
            self._take_all()
        self.traffic.stall(self.host.now() - began)

    # -- in

    def read_until(self, request: Request, deadline: float) -> None:
        if self.closed:
            raise self._gone(f"the connection to {self.what} is closed")
        began = self.host.now()
        try:
            self._take_all()
            while not request.done:
                left = deadline - self.host.now()
                if left <= 0:
                    raise RequestTimeoutError(f"{self.what} has not answered in time")
                if not self._wait(min(left, SLICE_SECONDS)) and self.idle is not None:
                    self.idle()
                self._take_all()
        except BaseException as error:
            self._break(error)
            raise
        finally:
            self.traffic.blocked += self.host.now() - began

    def poll(self) -> None:
        """Take the messages that have arrived."""
        try:
            self._take_all()
        except BaseException as error:
            self._break(error)
            raise

    def _wait(self, seconds: float) -> bool:
        """Wait for up to `seconds` until a message arrives or unsent bytes leave; whether a message has arrived."""
        if self.inward.inbox and not self.host.dead:
            return True
        until = self.host.now() + seconds
        if self._alarm is None or self._alarm.over or self._alarm_at > until:  # else an earlier wait's alarm is enough
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm, self._alarm_at = self.host.later(seconds, self._wake), until
        self._waiter = self.host.world.current()
        try:
            self.host.pause(self._waiter)
        finally:
            self._waiter = None
        return bool(self.inward.inbox)

    def _wake(self) -> None:
        if self._waiter is not None:
            self._waiter.resume()

    arrived = drained = _wake

    def _take_all(self) -> None:
        while self.inward.inbox:
            message = self.take()
            if message is END:
                self.finish()
                if not self._handshake.done:
                    return
                raise self._gone(f"{self.what} closed the connection")
            assert isinstance(message, bytearray)
            self._take_frame(message)

    def _take_frame(self, frame: bytearray) -> None:
        header, body = decode_header(frame, 0, self._limit), memoryview(frame)[HEADER_SIZE:]
        if not self._handshake.done:
            self._handshake.receive(header, body)
            return
        request = self._requests.get(header.request)
        self._take(header, body)
        if request is not None and header.kind != frames.ERROR:
            self._tell_observers(request)

    def _kept(self, body: memoryview) -> bytes:
        return bytes(body)

    def _tell_observers(self, request: Request) -> None:
        for observer in self._observers:
            observer.answered(request, self.peer_name)

    def close(self) -> None:
        self.closed = True
        if not self.host.dead:
            self.hang_up()


class SimProcess(NamedTuple):
    """The process of some trainers: the name of its machine (None: it has no other process), and its party."""

    machine: str | None
    party: Callable[[], Party]


class SimEnvironment:
    """What a client needs of its process, in a simulation: virtual time, and the simulated network."""

    probes: Probes = ()  # a simulation is the same on every machine

    def __init__(
        self, network: Network, host: Party, caches: CacheShelf | None = None, process: SimProcess | None = None
    ):
        self.caches, self._process = caches or CacheShelf(), process
        self.now: Callable[[], float] = host.now
        self.sleep: Callable[[float], None] = host.sleep
        self._network, self._host = network, host

    def connect(
        self, ticket: Ticket, address: tuple[str, int], what: str, gone: type[DPSError], idle: Callable[[], None]
    ) -> Channel:
        """A simulated connection."""
        return SimChannel(self._network, self._host, (address[0], address[1]), ticket, what, gone, idle)

    def release(self, channel: Channel) -> None:
        """Use it no more. Its peer learns of it when the party ends: the seeds of known faults count on that."""
        Channel.close(channel)

    def connect_locally(self, ticket: Ticket, name: str, what: str, idle: Callable[[], None]) -> Channel | None:
        """A connection to what listens on the machine of the process by that name."""
        address = self._local_address(name)
        listener = None if address is None else self._network.endpoints.get(address)
        if self._process is None or address is None or listener is None or listener.host_party.dead:
            return None
        with contextlib.suppress(ServerGoneError):
            return SimChannel(self._network, self._process.party(), address, ticket, what, ServerGoneError, idle)
        return None

    def listen_locally(
        self,
        ticket: Ticket,
        name: str,
        handlers: Mapping[int, RoleHandler],
        on_close: Callable[[RoleConnection], None],
    ) -> LocalEndpoint | None:
        """Listen on the machine of the process by that name."""
        address = self._local_address(name)
        if self._process is None or address is None:
            return None
        other = self._network.endpoints.get(address)
        if other is not None and not other.host_party.dead:
            return None
        endpoint = SimEndpoint(self._network, self._process.party(), dict(handlers), on_close, address)
        endpoint.secrets[ticket.session] = ticket.secret
        return endpoint

    def _local_address(self, name: str) -> tuple[str, int] | None:
        process = self._process
        return None if process is None or process.machine is None else (f"{process.machine}/{name}", 0)

    def await_change(self, condition: threading.Condition, seconds: float) -> None:
        """Let a little virtual time pass, because a greenlet that waited would stop all others."""
        condition.release()
        try:
            self.sleep(min(seconds, LOOK_SECONDS))
        finally:
            condition.acquire()


class SimClient(Client):
    """A client without a clock."""

    def __init__(self, network: Network, host: Party, ticket: Ticket):
        super().__init__(ticket, SimEnvironment(network, host))


class SimPartitions:
    """All partitions of a run, as a trainer of Dask fetches them from where they lie."""

    address = None

    def __init__(self, host: Party, partitions: Sequence[object]):
        self._host, self._partitions = host, partitions

    def fetch(self, partition: int, peer: str | None, check: Callable[[], None]) -> object:
        self._host.sleep(self._host.world.random.uniform(0.0, MAX_FETCH_SECONDS))
        return self._partitions[partition]


class SimTrainer(Trainer):
    """A trainer; an iteration takes it so many virtual seconds, on the average.

    With `leased`, a pair (all partitions, the partitions of each trainer), it works on leased batches.
    """

    def __init__(
        self,
        network: Network,
        host: Party,
        ticket: Ticket,
        run: int,
        trainer: int,
        incarnation: int,
        compute: float,
        leased: tuple[Sequence[object], Sequence[Sequence[int]]] | None = None,
        caches: CacheShelf | None = None,
        process: SimProcess | None = None,
    ):
        self._host, self._compute = host, compute
        environment = SimEnvironment(network, host, caches, process)
        participant = Participant(
            ticket, run, trainer, incarnation, host.name, environment=environment, leased=leased is not None
        )
        batches = None
        if leased is not None:
            data, shares = leased
            own = [data[number] for number in shares[trainer]]
            batches = LeasedBatches(participant, shares, own, SimPartitions(host, data))
        super().__init__(participant, (), batches)

    def tick(self) -> int:
        if self._compute:
            self._host.sleep(self._compute * self._host.slowness * self._host.world.random.uniform(0.5, 1.5))
        return super().tick()

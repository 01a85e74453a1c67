"""Network: simulated connections between parties. They keep what TCP promises and nothing more.

A wire is two pipes, one for each direction. A pipe delivers messages (whole frames) in order, each exactly once, after
a random delay, until the wire breaks. Then some of the last messages are lost, and each side notices the break soon,
late, or never. Messages that the receiver has not taken fill the pipe's window; further messages wait at the sender.
During a partition of the network no message arrives, and neither side notices; when the partition heals, all arrive.
Where links have a rate, all messages of a party share its link, one after the other, in each direction.

Wires are independent: a message on an old wire may arrive after a message that was sent later on a newer wire.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from dps.engine.simulation.observers import Observer
from dps.engine.simulation.world import Party, World
from dps.engine.wire.frames import Header, encode_header
from dps.engine.wire.handshake import ConnectingHandshake
from dps.engine.wire.sockets import DEAD_PEER_SECONDS

__all__ = ["END", "End", "ListeningEnd", "Network", "Pipe", "SimWire"]

END = "end"  # the last message of a pipe: the other side has hung up, or the wire has broken


class Pipe:
    """One direction of a wire."""

    __slots__ = (
        "_flying",
        "_late",
        "_network",
        "_outstanding",
        "_source",
        "_target",
        "_waiting",
        "_world",
        "broken",
        "inbox",
        "receiver",
        "sender",
        "until",
        "unsent",
    )

    def __init__(self, network: Network, sender: End, receiver: End):
        self._network, self._world = network, network.world
        self.sender, self.receiver = sender, receiver
        self._source, self._target = sender.host, receiver.host
        self.broken = False  # messages written from now on are lost
        self.inbox: deque[tuple[object, int]] = (
            deque()
        )  # messages that have arrived and are not taken yet, with their bytes
        self.unsent = 0  # bytes that wait for room in the window
        self.until = 0.0  # nothing arrives before that time
        self._waiting: deque[tuple[object, int]] = deque()
        self._flying: deque[tuple[object, int]] = deque()
        self._outstanding = 0  # bytes sent and not taken
        self._late = 0  # messages whose time came during a partition

    def write(self, message: object, nbytes: int) -> None:
        """Send a message, or let it wait if the window has no room."""
        if self.broken:
            return
        if self._waiting or (self._outstanding and self._outstanding + nbytes > self._network.window):
            self._waiting.append((message, nbytes))
            self.unsent += nbytes
        else:
            self._fly(message, nbytes)

    def took(self, nbytes: int) -> None:
        """The receiver has taken a message of `nbytes` out of its inbox."""
        self._outstanding -= nbytes
        if self._waiting and not self.broken:
            self._world.at(self._world.now + self._network.delay(self._target, self._source), None, self._room)

    def close(self, delay: float) -> None:
        """Send END after all messages. `delay`: seconds that END needs in addition."""
        self.broken = True
        self._waiting.append((END, 0))
        while self._waiting:  # the sender's kernel would send what waits, even after the process has closed the socket
            self._fly(*self._waiting.popleft(), delay)
        self.unsent = 0

    def cut(self, keep: int) -> None:
        """Lose all but the first `keep` of the messages that are on their way."""
        self.broken = True
        self._waiting.clear()
        self.unsent = 0
        while len(self._flying) > keep:
            self._flying.pop()

    @property
    def flying(self) -> int:
        """The number of messages on their way."""
        return len(self._flying)

    def heal(self) -> None:
        """Send the messages on their way again that a partition has held up."""
        late, self._late = self._late, 0
        for _ in range(late):
            self._announce(self._network.delay(self._source, self._target))

    def _fly(self, message: object, nbytes: int, delay: float = 0.0) -> None:
        self._outstanding += nbytes
        self._flying.append((message, nbytes))
        delay += self._network.transmission(self._source, self._target, nbytes)
        self._announce(delay + self._network.delay(self._source, self._target))

    def _announce(self, delay: float) -> None:
        """Let the next message arrive after `delay`. The event names no message, so that none overtakes another."""
        self._world.at(self._world.now + delay, None, self._arrive)

    def _arrive(self) -> None:
        if not self._flying:
            return  # the message was lost
        network, target = self._network, self._target
        if network.partitions and network.parted(self._source, target):
            self._late += 1
            return
        if self._world.now < self.until:
            self._world.at(self.until, None, self._arrive)
            return
        message = self._flying.popleft()
        if self.receiver.over:
            return
        if target.dead:
            if not (self.broken or target.silent):
                self.sender.inward.close(0.0)
            return
        self.inbox.append(message)
        if target.runs:
            self.receiver.arrived()

    def _room(self) -> None:
        if not self._waiting:
            return
        while self._waiting and not (
            self._outstanding and self._outstanding + self._waiting[0][1] > self._network.window
        ):
            message, nbytes = self._waiting.popleft()
            self.unsent -= nbytes
            self._fly(message, nbytes)
        if not self._waiting:
            self._world.at(self._world.now, self._source, self.sender.drained)


class End(ABC):
    """One end of a wire, at a party. A subclass handles the messages that arrive."""

    inward: Pipe
    outward: Pipe
    wire: SimWire

    def __init__(self, host: Party):
        self.host = host
        self.over = False  # this end sends and takes no more messages

    @property
    def filled(self) -> bool:
        """Whether a message has arrived and is not taken yet."""
        return bool(self.inward.inbox)

    @property
    def peer_name(self) -> str:
        """The name of the party at the other end."""
        return self.inward.sender.host.name

    def take(self) -> object:
        """Take the next message out of the inbox."""
        message, nbytes = self.inward.inbox.popleft()
        self.inward.took(nbytes)
        return message

    @abstractmethod
    def arrived(self) -> None:
        """A message is in the inbox."""

    @abstractmethod
    def drained(self) -> None:
        """All messages that waited for room in the window are on their way."""

    def hang_up(self, rudely: bool = False) -> None:
        """Close this end; `rudely`: without sending the messages that wait for room in the window."""
        if not self.over:
            if rudely:
                self.outward.cut(self.outward.flying)
            self.outward.close(0.0)
            self.finish()

    def finish(self) -> None:
        """Mark this end as closed, because it hung up or learnt that the other end did."""
        self.over = self.outward.broken = True
        self.inward.inbox.clear()
        self.host.ends.pop(self, None)
        if all(pipe.receiver.over for pipe in self.wire.pipes):
            self.wire.network.wires.pop(self.wire, None)


class SimWire:
    """A connection: two ends and the two pipes between them."""

    def __init__(self, network: Network, caller: End, called: End):
        self.network = network
        there, back = Pipe(network, caller, called), Pipe(network, called, caller)
        self.pipes = there, back
        for end, outward, inward in ((caller, there, back), (called, back, there)):
            end.wire, end.outward, end.inward = self, outward, inward
            end.host.ends[end] = None
        network.wires[self] = None

    def __repr__(self) -> str:
        return "-".join(pipe.sender.host.name for pipe in self.pipes)

    def snap(self, notice: Iterable[float | None] = (0.0, 0.0)) -> None:
        """Break the wire, and lose some of the messages on their way.

        The ends notice it after `notice` seconds; None: after the keep-alive time.
        """
        draw = self.network.world.random
        for pipe, seconds in zip(reversed(self.pipes), notice, strict=True):
            pipe.cut(draw.randint(0, pipe.flying))
            if not (pipe.receiver.over or pipe.receiver.host.dead):
                pipe.close(self.network.keep_alive if seconds is None else seconds)

    def delay(self, seconds: float) -> None:
        """Hold up the caller's messages for `seconds`, so that those on its next wire may arrive before them."""
        self.pipes[0].until = self.network.world.now + seconds


class ListeningEnd(End):
    """The accepted side of a connection, which greets the caller."""

    @abstractmethod
    def greet(self) -> tuple[Header, bytes]:
        """The frame with which the endpoint greets the caller."""


class Listener(Protocol):
    """What listens at an address: a `SimEndpoint` of `endpoint.py`, which imports this file."""

    host_party: Party

    def new_connection(self) -> ListeningEnd:
        """The accepted side of a new connection."""


class Network:
    """All wires, and the endpoint at each address."""

    def __init__(
        self,
        world: World,
        latency: tuple[float, float],
        window: int,
        observers: Sequence[Observer] = (),
        rate: float = math.inf,
    ):
        self.world, self.window, self.rate = world, window, rate
        self._free_at: dict[tuple[Party, str], float] = {}  # a party's link, by direction: when it has sent or got all
        self.endpoints: dict[tuple[str, int], Listener] = {}
        self.wires: dict[SimWire, None] = {}
        self.partitions: list[tuple[frozenset[str], frozenset[str]]] = []  # senders and receivers: no message arrives
        self.repeats = 0.0  # share of pushes that arrive twice
        self.journal = False  # whether the controller keeps its decisions with the servers, for another scheduler
        self.keep_alive: float = DEAD_PEER_SECONDS  # until TCP's keep-alive reports that the peer's host is gone
        self.observers = list(observers)
        self.dump_piece, self.dump_rate = 1 << 20, 400e6  # to a joiner: bytes in a frame, bytes a second
        self._least, self._rate = latency[0], 1.0 / max(latency[1], 1e-9)
        self._draw = world.random.expovariate

    def delay(self, source: Party, target: Party) -> float:
        """The seconds that the next message takes."""
        return (self._least + self._draw(self._rate)) * source.slowness * target.slowness

    def transmission(self, source: Party, target: Party, nbytes: int) -> float:
        """The seconds until a message has left the sender's link and entered the receiver's, behind all others."""
        if self.rate == math.inf:
            return 0.0
        ends = (source, "out"), (target, "in")
        done = max(self.world.now, *(self._free_at.get(end, 0.0) for end in ends)) + nbytes / self.rate
        self._free_at |= dict.fromkeys(ends, done)
        return done - self.world.now

    def parted(self, source: Party, target: Party) -> bool:
        """Whether a partition keeps messages of `source` from `target`."""
        return any(source.name in some and target.name in others for some, others in self.partitions)

    def refuses(self, caller: Party, address: tuple[str, int]) -> bool:
        """Whether the machine at that address answers that nothing listens there."""
        party = self.endpoints[address].host_party
        return party.dead and not (party.silent or self.parted(caller, party) or self.parted(party, caller))

    def crash(self, party: Party, silent: bool = False, notice: float = 0.0) -> None:
        """End a party and break its connections; its peers notice it after `notice` seconds (silent: `keep_alive`)."""
        party.silent = silent
        party.crash()
        for end in list(party.ends):
            seconds = None if silent else notice
            end.wire.snap((seconds, seconds))

    def part(self, some: Iterable[str], others: Iterable[str], one_way: bool = False) -> list[tuple]:
        """Begin a partition of the network; the answer is what `heal` needs to end it."""
        here, there = frozenset(some), frozenset(others)
        made = [(here, there)] if one_way else [(here, there), (there, here)]
        self.partitions += made
        return made

    def heal(self, made: Iterable[tuple]) -> None:
        """End a partition, and send the messages on their way again that it has held up."""
        for direction in made:
            self.partitions.remove(direction)
        for wire in list(self.wires):
            for pipe in wire.pipes:
                pipe.heal()

    def connect(self, caller: End, address: tuple[str, int], handshake: ConnectingHandshake) -> None:
        """Connect an end to the endpoint at `address`. The end receives the answer to its HELLO, or END.

        The listener's greeting takes no time, as if it came with the answer of the listener's TCP. So a simulated
        connection is there after one round trip, and the seeds of known faults stay what they are.
        """
        endpoint = self.endpoints.get(address)
        if endpoint is None:
            raise LookupError(f"no endpoint has ever listened at {address}")
        listener = endpoint.new_connection()
        SimWire(self, caller, listener)
        hello = handshake.receive(*listener.greet())
        if hello is not None:
            caller.outward.write(bytearray(encode_header(hello[0]) + hello[1]), 0)

"""Network: simulated connections between parties. They keep what TCP promises and nothing more.

A wire is two pipes, one for each direction. A pipe passes messages (whole frames) on in order, each exactly once, after
a random delay, until the wire breaks: then some of the last messages are lost on their way, and each side notices
soon, late, or never. What the receiver does not take fills the pipe's window; what does not fit waits at the sender.
While a partition lies between two parties nothing arrives, and nobody is told; when it heals, everything does.

Wires are independent: what was sent on an old one may arrive after what was sent on a newer one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dps.testing.losses import Losses
from dps.testing.world import Party, World
from dps.wire.quiet import GONE

if TYPE_CHECKING:
    from dps.testing.endpoint import SimEndpoint

__all__ = ["END", "End", "Network", "Pipe", "Wire"]

END = "end"  # the last message of a pipe: the other side has hung up, or the wire is known to be broken


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
        self.broken = False  # what is written from now on is lost
        self.inbox: deque[tuple[Any, int]] = deque()  # has arrived, and is not taken yet
        self.unsent = 0  # bytes that wait for room
        self.until = 0.0  # nothing arrives before that time
        self._waiting: deque[tuple[Any, int]] = deque()
        self._flying: deque[tuple[Any, int]] = deque()
        self._outstanding = 0  # bytes sent and not taken
        self._late = 0  # messages whose time came during a partition

    def write(self, message: Any, nbytes: int) -> None:
        """Pass a message on, as far as the window allows."""
        if self.broken:
            return
        if self._waiting or (self._outstanding and self._outstanding + nbytes > self._network.window):
            self._waiting.append((message, nbytes))
            self.unsent += nbytes
        else:
            self._fly(message, nbytes)

    def took(self, nbytes: int) -> None:
        """The receiver has taken so much out of its inbox."""
        self._outstanding -= nbytes
        if self._waiting and not self.broken:
            self._world.at(self._world.now + self._network.delay(self._target, self._source), None, self._room)

    def close(self, delay: float) -> None:
        """After what is on its way, let the receiver know that nothing more will come."""
        self.broken = True
        self._waiting.append((END, 0))
        while self._waiting:  # the kernel of the sender sees to it
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
        """How many messages are on their way."""
        return len(self._flying)

    def heal(self) -> None:
        """What a partition held up is on its way again."""
        late, self._late = self._late, 0
        for _ in range(late):
            self._announce(self._network.delay(self._source, self._target))

    def _fly(self, message: Any, nbytes: int, delay: float = 0.0) -> None:
        self._outstanding += nbytes
        self._flying.append((message, nbytes))
        self._announce(delay + self._network.delay(self._source, self._target))

    def _announce(self, delay: float) -> None:
        """In a while the next message arrives: events carry none of their own, so that none overtakes another."""
        self._world.at(self._world.now + delay, None, self._arrive)

    def _arrive(self) -> None:
        if not self._flying:
            return  # it was lost
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


class End:
    """One end of a wire, at a party. Subclasses say what is done with what arrives."""

    inward: Pipe
    outward: Pipe
    wire: Wire

    def __init__(self, host: Party):
        self.host = host
        self.over = False  # nothing is sent or taken any more

    @property
    def filled(self) -> bool:
        """Whether something has arrived and is not taken yet."""
        return bool(self.inward.inbox)

    @property
    def peer_name(self) -> str:
        """Whose the other end is."""
        return self.inward.sender.host.name

    def take(self) -> Any:
        """The next message."""
        message, nbytes = self.inward.inbox.popleft()
        self.inward.took(nbytes)
        return message

    def arrived(self) -> None:
        """There is something to take."""
        raise NotImplementedError

    def drained(self) -> None:
        """All that waited for room is on its way."""

    def hang_up(self, rudely: bool = False) -> None:
        """Send nothing more, take nothing more; rudely: what waits for room is not sent either."""
        if not self.over:
            if rudely:
                self.outward.cut(self.outward.flying)
            self.outward.close(0.0)
            self.finish()

    def finish(self) -> None:
        """This end is over: it hung up, or learnt that the other one did."""
        self.over = self.outward.broken = True
        self.inward.inbox.clear()
        self.host.ends.pop(self, None)
        if all(pipe.receiver.over for pipe in self.wire.pipes):
            self.wire.network.wires.pop(self.wire, None)


class Wire:
    """A connection: two ends and what is on its way between them."""

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
        """Break, and lose some of what is on its way; the ends learn of it after `notice` seconds, None: keep-alive."""
        draw = self.network.world.random
        for pipe, seconds in zip(reversed(self.pipes), notice, strict=True):
            pipe.cut(draw.randint(0, pipe.flying))
            if not (pipe.receiver.over or pipe.receiver.host.dead):
                pipe.close(self.network.keep_alive if seconds is None else seconds)

    def delay(self, seconds: float) -> None:
        """Hold up what the caller has sent: its next wire may be faster."""
        self.pipes[0].until = self.network.world.now + seconds


class Network:
    """All wires and who listens where."""

    def __init__(self, world: World, latency: tuple[float, float], window: int, losses: Losses | None = None):
        self.world, self.window = world, window
        self.endpoints: dict[tuple[str, int], SimEndpoint] = {}
        self.wires: dict[Wire, None] = {}
        self.partitions: list[tuple[frozenset[str], frozenset[str]]] = []  # from these to those nothing arrives
        self.repeats = 0.0  # share of pushes that arrive twice
        self.keep_alive: float = GONE  # seconds after which the system finds out that nobody is there any more
        self.losses = losses or Losses()
        self.dump_piece, self.dump_rate = 1 << 20, 400e6  # bytes in a frame, bytes a second, of what a joiner is given
        self._least, self._rate = latency[0], 1.0 / max(latency[1], 1e-9)
        self._draw = world.random.expovariate

    def delay(self, source: Party, target: Party) -> float:
        """How long a message takes."""
        return (self._least + self._draw(self._rate)) * source.slowness * target.slowness

    def parted(self, source: Party, target: Party) -> bool:
        """Whether a partition keeps messages of `source` from `target`."""
        return any(source.name in some and target.name in others for some, others in self.partitions)

    def crash(self, party: Party, silent: bool = False, notice: float = 0.0) -> None:
        """End a party. Its connections break; its peers learn of it after `notice` seconds (silent: `keep_alive`)."""
        party.silent = silent
        party.crash()
        for end in list(party.ends):
            seconds = None if silent else notice
            end.wire.snap((seconds, seconds))

    def part(self, some: Iterable[str], others: Iterable[str], one_way: bool = False) -> list[tuple]:
        """Begin a partition; its directions, for `heal`."""
        here, there = frozenset(some), frozenset(others)
        made = [(here, there)] if one_way else [(here, there), (there, here)]
        self.partitions += made
        return made

    def heal(self, made: Iterable[tuple]) -> None:
        """End it: what was held up is on its way again."""
        for direction in made:
            self.partitions.remove(direction)
        for wire in list(self.wires):
            for pipe in wire.pipes:
                pipe.heal()

    def connect(self, caller: End, address: tuple[str, int], introduction: tuple) -> None:
        """Wire an end to whoever listens there. It hears the answer to its introduction, or END."""
        endpoint = self.endpoints.get(address)
        if endpoint is None:
            raise LookupError(f"nobody has ever listened at {address}")
        Wire(self, caller, endpoint.new_connection())
        caller.outward.write(introduction, 0)

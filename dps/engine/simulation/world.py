"""World: virtual time, the parties that live in it, and their tasks.

All future events are in one heap, ordered by time, then by the order in which they were scheduled. `World.step` takes
the next event and carries it out. Nothing else moves time, and every choice is drawn from one seeded generator: the
same seed gives the same events in the same order.

Code that blocks (a training function) runs in a greenlet of its own. Where the code would wait for a socket or sleep,
its greenlet yields to the greenlet that calls `World.step`, and goes on when its event comes. Code outside all tasks,
such as a test that calls `client.pull`, calls `World.step` itself while it waits.

A party stands for a process. While a party is stopped (SIGSTOP), none of its events are carried out, and messages wait
in its sockets; when it goes on, all of them come at once. When a party crashes, its tasks end where they are.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

import greenlet

__all__ = ["Crashed", "Party", "StuckError", "Task", "Timer", "World"]

T = TypeVar("T")
TRACE_LINES = 100_000  # the least number of lines that the trace keeps for readers


class Crashed(BaseException):
    """Ends the tasks of a party that crashed. It is no Exception, because a training function must not catch it."""


class StuckError(RuntimeError):
    """A task still waits although no event is left, or although the time limit is over."""


class Timer:
    """A call that happens at some virtual time, unless it is cancelled before."""

    __slots__ = ("_args", "_function")

    def __init__(self, function: Callable[..., object], args: tuple):
        self._function: Callable[..., object] | None = function
        self._args = args

    @property
    def over(self) -> bool:
        """Whether the call has happened, or was cancelled."""
        return self._function is None

    def cancel(self) -> None:
        self._function = None

    def fire(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            function(*self._args)


class World:
    """The virtual time, the events and the trace of one simulation; see the module's docstring."""

    def __init__(self, seed: int):
        self.now = 0.0
        self.steps = 0
        self.random = random.Random(seed)
        self.parties: list[Party] = []
        self.main = Main(self)
        self._heap: list[tuple[float, int, Party | None, Callable[..., object], tuple]] = []
        self._count = 0
        self._hash = hashlib.blake2b(digest_size=8)
        self._lines: list[tuple[float, str, tuple]] = []

    def at(self, when: float, party: Party | None, function: Callable[..., object], *args: object) -> None:
        """Schedule a call of `function` at `when`, as an event of `party`; None: an event that no party can miss."""
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, party, function, args))

    def step(self) -> None:
        """Carry out the next event."""
        if not self._heap:
            raise StuckError(f"after {self.now:.6f} s nothing can happen any more, and a task still waits")
        when, _, party, function, args = heapq.heappop(self._heap)
        if when > self.now:
            self.now = when
        self.steps += 1
        if party is None or party.runs:
            function(*args)
        elif not party.dead:
            party.backlog.append((function, args))

    def current(self) -> Task | Main:
        """The task whose code is running, or `main`."""
        running = greenlet.getcurrent()
        return running if isinstance(running, Task) else self.main

    # -- the trace

    def note(self, text: str, *args: object) -> None:
        """Add a line to the trace: ``text % args``."""
        self._lines.append((self.now, text, args))
        if len(self._lines) >= 2 * TRACE_LINES:
            self._hash.update(self._text(TRACE_LINES))
            del self._lines[:TRACE_LINES]

    @property
    def trace(self) -> list[str]:
        """The last lines of the trace, at least 100,000; all lines, if there are fewer than 200,000."""
        return [_line(*entry) for entry in self._lines]

    def digest(self) -> str:
        """A hash of the whole trace."""
        whole = self._hash.copy()
        whole.update(self._text(len(self._lines)))
        return whole.hexdigest()

    def _text(self, count: int) -> bytes:
        """The oldest lines of the trace that are kept."""
        return "".join(f"{_line(*entry)}\n" for entry in self._lines[:count]).encode()


def _line(when: float, text: str, args: tuple) -> str:
    return f"{when:.9f} {text % args}"


class Main:
    """The code outside all tasks. While it waits, it carries out the world's events."""

    def __init__(self, world: World):
        self._world, self._resumed = world, False

    def pause(self) -> None:
        self._resumed = False
        while not self._resumed:
            self._world.step()

    def resume(self) -> None:
        self._resumed = True


class BreakableWire(Protocol):
    """A connection, as far as the crash of a party needs it: a `SimWire` of `network.py`, which imports this file."""

    def snap(self, notice: Iterable[float | None] = (0.0, 0.0)) -> None:
        """Break the wire; its ends notice it after `notice` seconds."""


class PartyEnd(Protocol):
    """One end of a wire, at a party: an `End` of `network.py`."""

    @property
    def wire(self) -> BreakableWire:
        """The connection."""

    @property
    def filled(self) -> bool:
        """Whether a message has arrived and is not taken yet."""

    @property
    def peer_name(self) -> str:
        """The name of the party at the other end."""

    def arrived(self) -> None:
        """A message is in the inbox."""


class Party:
    """A simulated process, with a clock, tasks, timers and ends of connections.

    Its clock starts at a random time, because no two machines agree on one. `rate` is the clock's speed, `slowness` the
    factor by which its messages take longer.
    """

    def __init__(self, world: World, name: str, rate: float = 1.0, slowness: float = 1.0):
        self.world, self.name, self.slowness = world, name, slowness
        self.runs, self.dead, self.stops = True, False, 0
        self.silent = False  # dead, and its host does not reject messages either
        self.backlog: list[tuple[Callable[..., object], tuple]] = []
        self.ends: dict[PartyEnd, None] = {}  # its ends of connections, in the order in which these were made
        self.tasks: dict[Task, None] = {}
        self._rate, self._offset = rate, world.random.uniform(0, 1e5)
        world.parties.append(self)

    def __repr__(self) -> str:
        return self.name

    # -- time

    def now(self) -> float:
        """Seconds on this party's own clock."""
        return self._offset + self.world.now * self._rate

    def later(self, seconds: float, function: Callable[..., object], *args: object) -> Timer:
        """Call `function` after `seconds` on this party's clock; the timer's `cancel` prevents the call."""
        timer = Timer(function, args)
        world = self.world
        world.at(world.now + (seconds / self._rate if seconds > 0 else 0.0), self, timer.fire)
        return timer

    def sleep(self, seconds: float) -> None:
        """Block the running task for `seconds` on this party's clock."""
        task = self.world.current()
        self.later(seconds, task.resume)
        self.pause(task)

    def pause(self, task: Task | Main) -> None:
        """Block the task until its `resume` is called."""
        if not self.dead:
            task.pause()
        if self.dead:
            raise Crashed(self.name)

    def spawn(self, function: Callable[..., T], *args: object) -> Task[T]:
        """Run `function` as a task of this party."""
        task = Task(self, function, args)
        self.world.at(self.world.now, self, task.switch)
        return task

    # -- faults

    def stop(self) -> None:
        """Stop the party, as SIGSTOP does. Stops are counted: it takes as many calls of `go_on`."""
        self.runs = False
        self.stops += 1

    def go_on(self) -> None:
        """End one stop, as SIGCONT does. Overdue timers come first, then the filled sockets in random order."""
        self.stops -= 1
        if self.dead or self.stops:
            return
        self.runs = True
        world, backlog, self.backlog = self.world, self.backlog, []
        waiting = [(end.arrived, ()) for end in self.ends if end.filled]
        world.random.shuffle(waiting)
        for function, args in [*backlog, *waiting]:
            world.at(world.now, self, function, *args)

    def crash(self) -> None:
        """End the party for ever, with all its tasks. The network breaks its connections: see `Network.crash`."""
        self.runs, self.dead = False, True
        self.backlog.clear()
        for task in list(self.tasks):
            if task:  # it has begun
                task.throw(Crashed(self.name))
            task.done = True
        self.tasks.clear()


class Task(greenlet.greenlet, Generic[T]):
    """A function that may block, in a greenlet, and its result or error."""

    def __init__(self, party: Party, function: Callable[..., T], args: tuple):
        maker = greenlet.getcurrent()
        # The parent is the greenlet to which a blocked task yields: the one that calls World.step.
        super().__init__(parent=maker.parent if isinstance(maker, Task) else maker)
        self.party = party
        self.done = False
        self.value: T | None = None
        self.error: BaseException | None = None
        self._call = function, args
        party.tasks[self] = None

    def run(self) -> None:
        function, args = self._call
        try:
            self.value = function(*args)
        except (Exception, Crashed) as error:
            self.error = error
        finally:
            self.done = True
            self.party.tasks.pop(self, None)

    def pause(self) -> None:
        self.parent.switch()

    def resume(self) -> None:
        if not self.done:
            self.switch()

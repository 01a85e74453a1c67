"""World: virtual time, the parties that live in it, and their tasks.

Everything that will happen stands in one heap, ordered by time; ties by who came first. `World.step` takes the next
event and carries it out. Nothing else moves time, and every choice is drawn from one seeded generator: the same seed
gives the same events in the same order.

Code that blocks (a training function) runs in a greenlet of its own. Where it would wait for a socket or sleep, it
gives way to the greenlet that turns the world, and goes on when its event comes. Code that is not in a task, such as
a test that calls `client.pull`, turns the world itself while it waits.

A party is what would be a process. While it is stopped (SIGSTOP) none of its events are carried out, and what arrives
waits in its sockets; when it goes on they come all at once. When it crashes its tasks end where they stand.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import greenlet

if TYPE_CHECKING:
    from dps.testing.network import End

__all__ = ["Crashed", "Party", "StuckError", "Task", "Timer", "World"]

KEEP = 100_000  # lines of a trace that are kept to be read


class Crashed(BaseException):
    """Ends the tasks of a party that crashed. Not an Exception: no training function should catch it."""


class StuckError(RuntimeError):
    """Nothing can happen any more, or has for too long, and somebody still waits."""


class Timer:
    """What is to happen at some time, unless it is cancelled."""

    __slots__ = ("_args", "_function")

    def __init__(self, function: Callable[..., Any], args: tuple):
        self._function: Callable[..., Any] | None = function
        self._args = args

    @property
    def over(self) -> bool:
        """Whether it has happened, or was cancelled."""
        return self._function is None

    def cancel(self) -> None:
        self._function = None

    def fire(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            function(*self._args)


class World:
    """One virtual time; see the module's docstring."""

    def __init__(self, seed: int):
        self.now = 0.0
        self.steps = 0
        self.random = random.Random(seed)
        self.parties: list[Party] = []
        self.main = Main(self)
        self._heap: list[tuple[float, int, Party | None, Callable[..., Any], tuple]] = []
        self._count = 0
        self._hash = hashlib.blake2b(digest_size=8)
        self._lines: list[tuple[float, str, tuple]] = []

    def at(self, when: float, party: Party | None, function: Callable[..., Any], *args: Any) -> None:
        """Have `function` called at `when`, as something that `party` does; None for what nobody does."""
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, party, function, args))

    def step(self) -> None:
        """Carry out the next event."""
        if not self._heap:
            raise StuckError(f"after {self.now:.6f} s nothing can happen any more, and somebody still waits")
        when, _, party, function, args = heapq.heappop(self._heap)
        if when > self.now:
            self.now = when
        self.steps += 1
        if party is None or party.runs:
            function(*args)
        elif not party.dead:
            party.backlog.append((function, args))

    def current(self) -> Task | Main:
        """Whose code is running."""
        running = greenlet.getcurrent()
        return running if isinstance(running, Task) else self.main

    # -- the trace

    def note(self, text: str, *args: Any) -> None:
        """Add a line to the trace: ``text % args``."""
        self._lines.append((self.now, text, args))
        if len(self._lines) >= 2 * KEEP:
            self._fold(self._hash, KEEP)
            del self._lines[:KEEP]

    @property
    def trace(self) -> list[str]:
        """The last lines of what happened; all of them, unless there are more than 200,000."""
        return [_line(*entry) for entry in self._lines]

    def digest(self) -> str:
        """A hash of the whole trace."""
        whole = self._hash.copy()
        self._fold(whole, len(self._lines))
        return whole.hexdigest()

    def _fold(self, into: Any, count: int) -> None:
        into.update("".join(f"{_line(*entry)}\n" for entry in self._lines[:count]).encode())


def _line(when: float, text: str, args: tuple) -> str:
    return f"{when:.9f} {text % args}"


class Main:
    """What runs outside all tasks; it waits by turning the world."""

    def __init__(self, world: World):
        self._world, self._resumed = world, False

    def pause(self) -> None:
        self._resumed = False
        while not self._resumed:
            self._world.step()

    def resume(self) -> None:
        self._resumed = True


class Party:
    """What would be a process: it has a clock, tasks, timers and ends of connections.

    Its clock begins anywhere, and may run a little faster or slower than true time.
    """

    def __init__(self, world: World, name: str, rate: float = 1.0, slowness: float = 1.0):
        self.world, self.name, self.slowness = world, name, slowness
        self.runs, self.dead, self.stops = True, False, 0
        self.silent = False  # dead, and nobody answers in its name
        self.backlog: list[tuple[Callable[..., Any], tuple]] = []
        self.ends: dict[End, None] = {}  # of its connections, in the order in which they were made
        self.tasks: dict[Task, None] = {}
        self._rate, self._offset = rate, world.random.uniform(0, 1e5)
        world.parties.append(self)

    def __repr__(self) -> str:
        return self.name

    # -- time

    def now(self) -> float:
        """Seconds on this party's own clock."""
        return self._offset + self.world.now * self._rate

    def later(self, seconds: float, function: Callable[..., Any], *args: Any) -> Timer:
        """Call `function` in a while; the timer's `cancel` prevents it."""
        timer = Timer(function, args)
        world = self.world
        world.at(world.now + (seconds / self._rate if seconds > 0 else 0.0), self, timer.fire)
        return timer

    def sleep(self, seconds: float) -> None:
        """Let so much time pass."""
        task = self.world.current()
        self.later(seconds, task.resume)
        self.pause(task)

    def pause(self, task: Task | Main) -> None:
        """Give way until somebody calls the task's `resume`."""
        if not self.dead:
            task.pause()
        if self.dead:
            raise Crashed(self.name)

    def spawn(self, function: Callable[..., Any], *args: Any) -> Task:
        """Run `function` as a task of this party."""
        task = Task(self, function, args)
        self.world.at(self.world.now, self, task.switch)
        return task

    # -- what befalls it

    def stop(self) -> None:
        """As SIGSTOP does."""
        self.runs = False
        self.stops += 1

    def go_on(self) -> None:
        """As SIGCONT does: overdue timers and filled sockets come all at once, in any order."""
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
        """End for ever, with all tasks. Its connections are the network's to break."""
        self.runs, self.dead = False, True
        self.backlog.clear()
        for task in list(self.tasks):
            if task:  # it has begun
                task.throw(Crashed(self.name))
            task.done = True
        self.tasks.clear()


class Task(greenlet.greenlet):
    """A function that may block, in a greenlet; its result or error."""

    def __init__(self, party: Party, function: Callable[..., Any], args: tuple):
        maker = greenlet.getcurrent()
        super().__init__(
            parent=maker.parent if isinstance(maker, Task) else maker
        )  # it gives way to who turns the world
        self.party = party
        self.done = False
        self.value: Any = None
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

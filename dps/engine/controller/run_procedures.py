"""Run procedures: how the servers learn that runs and tasks have ended. Pure.

At its end a run *settles*: each primary closes the clock that a table with `aggregate=` still holds open (after a
failure it drops it), and refuses ops of the run's trainers from now on. What holds, and why:

* The end of a run waits for placement as the pushes of clients do, for `dps.timeouts.request`, because a shard may be
  without a primary while its servers change. Rounds are repeated, with growing pauses, until each shard has been
  settled by its primary and the copies behind it. To settle a shard again does no harm.
* A shard counts by itself. So one whose copies do not confirm holds back no other shard of its server. A server that
  does not answer holds up a round for `dps.timeouts.silence` only, because by then another server has its shards.
* A shard without a replica, or of a table that was dropped, is not waited for.
* What is not done when the time is over stays *owed*, and the controller goes on, because every push of the run is
  acknowledged and must count. A run that begins first has the clock closed that is owed to an earlier one.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import TypeAlias

import msgspec

from dps import config
from dps.engine.controller.failover import Membership
from dps.engine.controller.procedures import CallServers, InEndpoint, Procedure, ServerCall, Sleep
from dps.engine.controller.runs import Runs
from dps.engine.controller.server_record import ServerRecord
from dps.engine.coordination.placement import Place
from dps.engine.wire.messages import Shards
from dps.errors import RequestTimeoutError

__all__ = ["RunProcedures"]

# Pauses between two rounds: the first, and the longest. A client pauses as long between two tries.
BACK_OFF_SECONDS = (0.002, 0.1)
MAX_REASONS = 3  # the most reasons that an error names, because shards that fail together mostly have the same one

ShardSet: TypeAlias = set[tuple[int, int]]  # (number of the table, shard)


class RunProcedures:
    """How the servers of one parameter server learn that runs and tasks have ended.

    `late` says whether the time of a call of `settle` was over, and something is still owed.
    """

    def __init__(
        self,
        membership: Membership,
        runs: Runs,
        up: Callable[[], list[ServerRecord]],
        clock: Callable[[], float],
    ):
        self.membership = membership
        self._runs = runs
        self._up = up
        self._now = clock
        self.late = False
        self._origins: list[list[int]] = []  # [first, how many] that have ended, which not all servers know yet
        self._closing = False  # the last clock of a run is to be closed, which not all servers have done yet

    def collecting(self) -> list[str]:
        """Names of the tables that collect the pushes of a clock (`aggregate=...`)."""
        return [name for name, spec in self.membership.specs.items() if spec["aggregate"] is not None]

    def settle(self, keep: bool | None) -> Procedure[None]:
        """A run has ended: close the clock that aggregating tables still hold open (or drop it, where `keep` is False),
        and have every primary refuse ops of the run's trainers from now on.

        Where `keep` is None no run has ended. Then only the origins of ended tasks are retired, and what is owed to
        earlier runs is done.

        Raises RequestTimeoutError if the open clock is neither closed nor dropped in some shards. Where only origins
        are not retired everywhere, no error is raised but an event noted, because a late op counts once all the same.
        """
        self.late = False
        self._origins += yield InEndpoint(self._runs.retire)
        closing = self._closing = bool(self.collecting()) and (self._closing or keep is True)
        if closing:
            yield from self._settle(True)
        if keep is False or not closing:
            yield from self._settle(False if keep is False else None)

    def _settle(self, keep: bool | None) -> Procedure[None]:
        over = list(self._origins)
        if not over and (keep is None or not self.collecting()):
            return
        done: ShardSet = set()
        left: ShardSet = yield InEndpoint(self._shards)
        until, pause = self._now() + config.seconds("request"), BACK_OFF_SECONDS[0]
        while left:
            servers = self._up()
            calls = tuple(ServerCall(server.number, "settle", (keep, over)) for server in servers)
            answers = yield CallServers(calls)
            failures: dict[int, str] = {}
            for server, answer in zip(servers, answers, strict=True):
                if isinstance(answer, BaseException):
                    failures[server.number] = str(answer)
                else:
                    done |= set(msgspec.msgpack.decode(answer, type=Shards))
            left = (yield InEndpoint(self._shards)) - done  # a split gives a table other shards
            if left and self._now() > until:
                yield InEndpoint(self._give_up, (keep, left, failures))
                return
            if left:
                yield Sleep(pause)
                pause = min(2 * pause, BACK_OFF_SECONDS[1])
        self._origins = [origins for origins in self._origins if origins not in over]
        self._closing = self._closing and not keep

    def _shards(self) -> ShardSet:
        specs = self.membership.specs.values()
        return {(spec["id"], n) for spec in specs for n in range(spec["shards"])} - self.membership.lost()

    def _give_up(self, keep: bool | None, left: ShardSet, failures: dict[int, str]) -> None:
        """The time is over: say what is done, what is owed, and why."""
        self.late = True
        places = self._places(left)
        collecting = self.collecting()
        of_sums = {(table, shard): place for (table, shard), place in places.items() if table in collecting}
        if keep is None or not of_sums:
            self._closing = False
            text = f"a run or task is over and all its pushes are acknowledged; {len(left)} shards do not know it yet"
            self.membership.note(f"{text}: {self._reasons(places.values(), failures)}", stands=lambda: self.late)
            return
        shards = f"{len(of_sums)} shards of {', '.join(sorted({repr(table) for table, _ in of_sums}))}"
        why = f"within {config.limit('request')}: {self._reasons(of_sums.values(), failures)}"
        if keep:
            raise RequestTimeoutError(
                f"all pushes of the run are acknowledged and none is lost, but {shards} have not added the sums of its "
                f"last clock to their rows {why}. The controller goes on, and nothing is to be repeated: the rows are "
                f"complete soon after `dask ps status` shows these servers up"
            )
        raise RequestTimeoutError(
            f"{shards} have not dropped the sums of a run that failed or lost its driver {why}. Begin the next run "
            f"when `dask ps status` shows these servers up"
        )

    def _places(self, left: ShardSet) -> dict[tuple[str, int], Place]:
        """Table and shard of those that are left -> where it is."""
        specs = self.membership.specs.items()
        return {
            (name, n): self.membership.places[name][n]
            for name, spec in specs
            for n in range(spec["shards"])
            if (spec["id"], n) in left
        }

    def _reasons(self, places: Iterable[Place], failures: dict[int, str]) -> str:
        """Why shards at these places are not settled, the most frequent reasons first."""
        counts = collections.Counter(self._reason(place, failures) for place in places)
        return "; ".join(f"{why} ({count})" for why, count in counts.most_common(MAX_REASONS))

    def _reason(self, place: Place, failures: dict[int, str]) -> str:
        primary, *copies = place.chain
        server = self.membership.servers.get(primary)
        if server is None or not server.up:
            return f"server {primary} is out of reach, and no other server can take its place"
        if place.stepping_down:
            return f"server {primary} is handing over to another server"
        if primary in failures:
            return failures[primary]
        return f"server {primary} waits for its placement, or for its copies on servers {copies}"

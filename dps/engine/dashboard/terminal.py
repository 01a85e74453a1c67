"""The monitor's snapshot and the status in a terminal, as rich draws them in the room that there is.

Names and errors come from users, so they are put in as plain text and never as rich's markup.
"""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from dps.engine.dashboard.palette import PART_COLOURS, STATE_COLOURS
from dps.engine.dashboard.rows import RunRow, run_row, shares_of, table_row
from dps.engine.dashboard.text import (
    crowded_first,
    duration_text,
    finding_text,
    hottest_key_text,
    learning_curve,
    machine_text,
    number_text,
    size_text,
    time_text,
)
from dps.engine.telemetry.snapshot import (
    PARTS,
    RunStatus,
    Status,
    Straggler,
    TimeSplit,
    TrainerPhase,
    TrainerStatus,
)

if TYPE_CHECKING:  # rich is optional, and imported where it draws
    from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = ["StatusOverview", "StatusView", "print_plain", "slowest_first", "split_bar"]

# Characters of the bars, which can be told apart without colours, too.
GLYPHS = dict(zip(PARTS, "█▒·▓░", strict=True))
WIDE_LINE_LENGTH = 120  # characters of a line from which there is room for more columns about each trainer
MAX_METRIC_NAME_LENGTH = 12  # characters of a metric's name at the head of a column
# Least rows of each section, if there is room for any.
MIN_ROWS = {"trainers": 4, "servers": 2, "tables": 1, "events": 2}
# Most rows of each section where the height is not bounded.
MAX_ROWS = {"trainers": 24, "servers": 16, "tables": 16, "events": 8, "runs": 4}
MAX_MACHINES = 4
# Characters of a table's name.
MAX_TABLE_NAME_LENGTH = 24
MAX_FINDINGS = 4


def slowest_first(run: RunStatus) -> list[int]:
    """Numbers of the trainers: stragglers first, then by the time that a clock takes, and trainers that left last."""
    stragglers = {finding.trainer: -(finding.factor or 0.0) for finding in run.stragglers}

    def rank(trainer: TrainerStatus) -> tuple[bool, bool, float, bool, float, int]:
        gone, n = trainer.state is TrainerPhase.LEFT, trainer.number
        lost = trainer.state is TrainerPhase.LOST
        return gone, n not in stragglers, stragglers.get(n, 0.0), not lost, -(trainer.step or 0.0), n

    return [trainer.number for trainer in sorted(run.trainers, key=rank)]


def last_values(run: RunStatus) -> list[float | None]:
    name = learning_curve(run.logged)
    return [None] * len(run.trainers) if name is None else run.logged[name]


def split_bar(fractions: Sequence[float], width: int) -> list[tuple[str, str]]:
    """A bar of `width` characters that shows where the time went, as pairs of (part, characters).

    Examples
    --------
    >>> "".join(text for _, text in split_bar([0.5, 0.1, 0.2, 0.1, 0.1], 10))
    '█████▒··▓░'
    >>> split_bar([0, 0, 0, 0, 0], 10)
    []
    """
    total = sum(fractions)
    if not total:
        return []
    edges = np.rint(np.cumsum(fractions) / total * width).astype(int)
    return [
        (part, GLYPHS[part] * int(count)) for part, count in zip(PARTS, np.diff(edges, prepend=0), strict=True) if count
    ]


class StatusOverview:
    """A snapshot for rich to print: runs, stragglers, trainers, servers, tables, events.

    The screen has `height` lines. The slowest trainers that fit are shown, and the others summed up in one line.
    """

    def __init__(self, snapshot: Status, height: int | None = None):
        self.snapshot = snapshot
        self.height = height
        self.run = snapshot.current_run

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width = options.max_width
        head = [*self._head(width), *finding_lines(self.run.stragglers if self.run else [])]
        lines = sum(len(text.wrap(console, width)) for text in head)
        wanted = {
            "trainers": len(self.run.trainers) if self.run else 0,
            "servers": len(self.snapshot.servers),
            "tables": len(self.snapshot.tables),
            "events": len(last_lines(self.snapshot.events, MAX_ROWS["events"], width - len("12:34:56  "))),
        }
        yield from head
        for section, rows in rooms(wanted, None if self.height is None else self.height - lines).items():
            if rows:
                yield ""
                yield getattr(self, f"_{section}")(rows, width)

    def _head(self, width: int) -> Iterator[Text]:
        snapshot, run = self.snapshot, self.run
        parts = [f"{snapshot.up} of {snapshot.wanted} servers", f"epoch {snapshot.epoch}"]
        parts += [f"shards on their way: {snapshot.moves}"] if snapshot.moves else []
        load = snapshot.throughput
        parts += [f"{number_text(newest(load.requests))} requests/s", f"{number_text(newest(load.keys))} keys/s"]
        parts += [f"p99 {duration_text(newest(load.p99))}", time.strftime("%H:%M:%S", time.localtime(snapshot.time))]
        yield packed([snapshot.name, *parts], width)
        for host in crowded_first(snapshot.hosts)[:MAX_MACHINES]:
            if host.overloaded and not (run and any(each.host == host.host for each in run.stragglers)):
                yield line((machine_text(host), "bold red"))
        if snapshot.checkpoints.error:
            yield line(("checkpoints: ", "bold red"), snapshot.checkpoints.error)
        if run is None:
            yield line("no run yet")
            return
        yield packed([f"run {run.run} {run.state}", *self._run_parts(run)], width)
        if run.error:
            yield line(("error: ", "bold red"), run.error)
        mean = average(run)
        legend: list[str | tuple[str, str]] = []
        for part, share in zip(PARTS, mean, strict=True):
            legend += [(GLYPHS[part] * 2, PART_COLOURS[part]), f" {part} {share:.0%}  "]
        if sum(mean):
            yield line(*legend)

    def _run_parts(self, run: RunStatus) -> Iterator[str]:
        planned = f" of {run.planned:,}" if run.planned else ""
        yield f"{duration_text(run.seconds)}"
        yield f"clocks {run.minimum:,} to {run.maximum:,}{planned}"
        bound = "none" if run.staleness is None else f"{run.staleness:g}"
        yield f"staleness {bound}{' (auto)' if run.auto else ''}"
        rates = [trainer.rate for trainer in run.trainers if trainer.rate is not None]
        yield f"{number_text(sum(rates))} clocks/s"
        curve = learning_curve(run.metrics)
        if curve is not None and run.metrics[curve].value:
            yield f"{curve} {number_text(run.metrics[curve].value[-1])}"
        if run.portions:
            yield f"portions: {run.portions.left} left, {run.portions.moved} moved"
        others = sum(not other.over for other in self.snapshot.runs if other is not run)
        if others:
            yield f"and {others} more going on"

    def _trainers(self, rows: int, width: int) -> Table:
        assert self.run is not None
        wide = width >= WIDE_LINE_LENGTH
        order, values = slowest_first(self.run), last_values(self.run)
        logged = learning_curve(self.run.logged) or "loss"
        names = ["trainer", "state", "clock", "step", "keys/s", logged[:MAX_METRIC_NAME_LENGTH]]
        names += ["clocks/s", "bytes/s", "cpu", "seen", "where"] if wide else []
        columns = grid(names, left=("trainer", "state", "where"), bar="where its time goes", place=3)
        more = len(order) > rows
        for n in order[: rows - more]:
            trainer = self.run.trainers[n]
            state = trainer.state
            numbers = [duration_text(trainer.step), number_text(trainer.keys_rate), number_text(values[n])]
            if wide:
                cpu = "-" if trainer.cpu is None else f"{trainer.cpu:.0%}"
                numbers += [number_text(trainer.rate), number_text(trainer.bytes_rate, "B"), cpu]
                numbers += [f"{duration_text(trainer.age)} ago", trainer.where]
            cells = [line(str(n)), line((state, STATE_COLOURS[state])), line(f"{trainer.clock:,}")]
            split = msgspec.structs.astuple(trainer.split or TimeSplit())
            columns.add_row(*cells, TimeSplitBar(split), *map(line, numbers))
        if more:
            columns.add_row(*self._others(order[rows - 1 :], wide))
        return columns

    def _others(self, rest: Sequence[int], wide: bool) -> list[ConsoleRenderable]:
        assert self.run is not None
        trainers, values = [self.run.trainers[n] for n in rest], last_values(self.run)
        clocks = [trainer.clock for trainer in trainers]
        reach = f"{min(clocks):,}" if min(clocks) == max(clocks) else f"{min(clocks):,}-{max(clocks):,}"
        step, logged = median(trainer.step for trainer in trainers), median(values[n] for n in rest)
        keys = sum(trainer.keys_rate or 0.0 for trainer in trainers)
        numbers = [duration_text(step), number_text(keys), number_text(logged)]
        if wide:
            rate, nbytes = (
                sum(getattr(trainer, name) or 0.0 for trainer in trainers) for name in ("rate", "bytes_rate")
            )
            numbers += [number_text(rate), number_text(nbytes, "B"), "", "", ""]
        waiting = sum(trainer.state is TrainerPhase.WAITING for trainer in trainers)
        cells = [line(f"{len(rest):,} more"), line(f"{waiting:,} wait"), line(reach)]
        return [*cells, TimeSplitBar(shares_of(self.run)[:, list(rest)].sum(1).tolist()), *map(line, numbers)]

    def _servers(self, rows: int, width: int) -> Table:
        wide = width >= WIDE_LINE_LENGTH
        names = ["server", "state", "cpu", "memory", "requests/s", "keys/s", "busy", "p50", "p99"]
        names += ["lag", "behind", "unconfirmed", "rows", "shards", "worker"] if wide else []
        columns = grid(names, left=("state", "worker"))
        servers = sorted(self.snapshot.servers, key=lambda server: (server.alive, -server.p99))
        for server in servers[:rows]:
            cells = [f"{server.number}", server.state, f"{server.cpu:.0%}", number_text(server.memory, "B")]
            cells += [number_text(server.requests_rate), number_text(server.keys_rate), f"{server.busy:.0%}"]
            cells += [duration_text(server.p50), duration_text(server.p99)]
            if wide:
                cells += [
                    duration_text(server.lag),
                    duration_text(server.behind),
                    number_text(server.unconfirmed),
                ]
                cells += [number_text(server.rows), f"{server.shards}", str(server.worker)]
            columns.add_row(*map(line, cells))
        return titled(columns, len(servers) - rows)

    def _tables(self, rows: int, width: int) -> Table:
        names = ["table", "rows", "memory", "requests/s", "keys/s", "p50", "p99", "hottest shard"]
        wide = width >= WIDE_LINE_LENGTH
        names += ["hottest key"] if wide else []
        columns = grid(names, left=("table",))
        tables = sorted(self.snapshot.tables.items(), key=lambda entry: -entry[1].keys_rate)
        for name, table in tables[:rows]:
            cells = [number_text(table.rows), number_text(table.bytes, "B"), number_text(table.requests_rate)]
            cells += [
                number_text(table.keys_rate),
                duration_text(table.p50),
                duration_text(table.p99),
                hottest(table.load),
            ]
            cells += [hottest_key_text(table)] if wide else []
            columns.add_row(line(shortened(name)), *map(line, cells))
        return titled(columns, len(tables) - rows)

    def _events(self, rows: int, width: int) -> Table:
        columns = grid(["time", "event"], left=("time", "event"))
        for when, text in last_lines(self.snapshot.events, rows, width - len("12:34:56  ")):
            columns.add_row(line(when), line(text))
        return columns


def last_lines(events: Sequence[tuple[float, str]], rows: int, width: int) -> list[tuple[str, str]]:
    """The newest events in so many lines, broken between words: (time at the first line of an event, text).

    Of the oldest event that is shown, the end may be left out, and "..." says so.

    >>> last_lines([(0.0, "server 1 is lost"), (0.0, "run 2: trainer 1 is slow")], 3, 12)[1:]
    [('', 'trainer 1 is'), ('', 'slow')]
    """
    lines: list[tuple[str, str]] = []
    for when, text in reversed(events):
        left = rows - len(lines)
        if left < 1:
            break
        parts = textwrap.wrap(text, max(width, 1), max_lines=left, placeholder=" ...") or [""]
        times = [time.strftime("%H:%M:%S", time.localtime(when)), *[""] * len(parts)]
        lines[:0] = zip(times, parts, strict=False)
    return lines


def average(run: RunStatus) -> list[float]:
    """Where the recent time of all trainers went: the mean share of each part."""
    shares = shares_of(run)
    at_work = shares[:, shares.sum(0) > 0]
    return at_work.mean(1).tolist() if at_work.size else [0.0] * len(PARTS)


def newest(values: Sequence[float]) -> float | None:
    return values[-1] if values else None


def median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def hottest(load: Sequence[float]) -> str:
    """The shard with the most keys per second, if that is more than twice the median of the shards.

    >>> hottest([10.0, 100.0, 12.0, 9.0]), hottest([10.0, 11.0]), hottest([])
    ('1: 9.1 times', '', '')
    """
    median = float(np.median(load)) if len(load) else 0.0
    shard = int(np.argmax(load)) if len(load) else 0
    return f"{shard}: {load[shard] / median:.1f} times" if median > 0 and load[shard] > 2 * median else ""


def rooms(wanted: Mapping[str, int], height: int | None) -> dict[str, int]:
    """Rows for each section that fit into `height` lines. Each section also takes a blank line and a line of heads.

    >>> rooms({"trainers": 1000, "servers": 2, "tables": 1, "events": 9}, 20)
    {'trainers': 6, 'servers': 2, 'tables': 1, 'events': 3}
    >>> rooms({"trainers": 1000, "servers": 2, "tables": 1, "events": 9}, 7)
    {'trainers': 5}
    """
    if height is None:
        return {section: min(rows, MAX_ROWS[section]) for section, rows in wanted.items()}
    given: dict[str, int] = {}
    left = height
    for section, least in MIN_ROWS.items():
        rows = min(wanted[section], least, left - 2)
        if rows > 0:
            given[section] = rows
            left -= rows + 2
    for part in (0.6, 1.0):  # in the first round each section leaves some lines to those after it
        for section in given:
            more = min(int(left * part), wanted[section] - given[section])
            given[section] += more
            left -= more
    return given


class StatusView:
    """The status of :meth:`dps.ParameterServer.status`, for rich to print."""

    def __init__(self, status: Status):
        self.status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        status, width = self.status, options.max_width
        yield packed([status.name, f"{status.up} of {status.wanted} servers"], width)
        if status.adapt is not None:
            yield line(status.adapt.text)
        if status.rebalancing is not None and status.rebalancing.text:
            yield line(status.rebalancing.text)
        last, error = status.checkpoints.last, status.checkpoints.error
        if last is not None:
            yield line(f"last checkpoint: {last.name}, {last.rows:,} rows")
        if error is not None:
            yield line(("checkpoints: ", "bold red"), error)
        yield from finding_lines(status.stragglers)
        if status.servers:
            yield from ("", self._servers())
        if status.tables:
            yield from ("", self._tables())
        for run in map(run_row, status.runs[: MAX_ROWS["runs"]]):
            yield from ("", *self._run(run, width))
        for host in crowded_first(status.hosts)[:MAX_MACHINES]:
            yield line(machine_text(host))
        for when, text in status.news[-MAX_ROWS["events"] :]:
            yield line(f"{time_text(when)}  {text}")

    def _servers(self) -> Table:
        servers = self.status.servers
        columns = grid(["server", "state", "rows", "memory", "requests", "worker"], left=("state", "worker"))
        for server in servers[: MAX_ROWS["servers"]]:
            cells = [f"{server.number}", server.state, number_text(server.rows), size_text(server.bytes)]
            columns.add_row(*map(line, [*cells, number_text(server.requests), server.worker]))
        return titled(columns, len(servers) - MAX_ROWS["servers"])

    def _tables(self) -> Table:
        names = ["table", "keys", "row", "shards x copies", "rows", "memory", "optimizer"]
        columns = grid(names, left=("table", "optimizer"))
        tables = list(self.status.tables.values())
        for table in tables[: MAX_ROWS["tables"]]:
            row = table_row(table)
            cells = [shortened(table.name), "any" if table.keys is None else f"{table.keys:,}", row.row, row.shape]
            cells += [number_text(table.rows), row.nbytes, table.optimizer.partition("(")[0]]
            columns.add_row(*map(line, cells))
        return titled(columns, len(tables) - MAX_ROWS["tables"])

    def _run(self, run: RunRow, width: int) -> Iterator[RenderableType]:
        done = f"{run.done:,}{f' of {run.planned:,}' if run.planned else ''} iterations"
        parts = [f"run {run.number}", done, f"staleness {run.staleness}"]
        parts += ["finished"] if run.over and not run.stopped else []
        yield packed(parts + ([run.summary] if run.summary else []), width)
        if run.stopped:
            yield line((run.stopped, "red"))
        columns = grid(["trainer", "clock", "state"], left=("trainer", "state"))
        for trainer in run.trainers:
            planned = f" of {trainer.planned:,}" if trainer.planned else ""
            columns.add_row(*map(line, [f"{trainer.number}", f"{trainer.clock:,}{planned}", trainer.state]))
        yield titled(columns, run.hidden)


class TimeSplitBar:
    """A bar that shows where the time went, as wide as its column."""

    def __init__(self, fractions: Sequence[float]):
        self.fractions = fractions

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        bar = split_bar(self.fractions, options.max_width)
        yield line(*((text, PART_COLOURS[part]) for part, text in bar))


def finding_lines(findings: Sequence[Straggler]) -> Iterator[Text]:
    """The first findings, each with its reason and its remedy."""
    for finding in findings[:MAX_FINDINGS]:
        yield line((finding_text(finding), "bold red"), f": {finding.why}")
        yield line(("  do: ", "bold"), finding.remedy)
    if len(findings) > MAX_FINDINGS:
        yield line(f"... and {len(findings) - MAX_FINDINGS} more stragglers")


def shortened(name: str) -> str:
    return name if len(name) <= MAX_TABLE_NAME_LENGTH else f"{name[: MAX_TABLE_NAME_LENGTH - 3]}..."


def packed(pieces: Sequence[str], width: int) -> Text:
    """Pieces in lines of at most `width` characters, which break between pieces only. The first piece is bold."""
    lines = [""]
    for piece in pieces:
        longer = f"{lines[-1]}  {piece}" if lines[-1] else piece
        if len(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(piece)
    text = "\n".join(lines)
    return line((text[: len(pieces[0])], "bold"), text[len(pieces[0]) :])


def line(*parts: str | tuple[str, str]) -> Text:
    """Text with styles, in which rich finds no markup."""
    from rich.text import Text

    return Text.assemble(*parts)


def grid(names: Sequence[str], left: Sequence[str], bar: str | None = None, place: int = 0) -> Table:
    """A table without lines; the column `bar` comes at `place`."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", expand=bar is not None)
    for n, name in enumerate(names):
        if bar is not None and n == place:
            table.add_column(bar, no_wrap=True, ratio=1, min_width=8)
        least = len("12:34:56") if name == "time" else None
        table.add_column(line(name), justify="left" if name in left else "right", no_wrap=True, min_width=least)
    return table


def titled(table: Table, hidden: int) -> Table:
    if hidden > 0:
        table.columns[0].header = f"{table.columns[0].header} ({hidden} more)"
    return table


def print_plain(view: StatusView) -> str | None:
    """What rich prints of a view, as text for IPython; None where rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(force_terminal=sys.stdout.isatty(), force_jupyter=False)
    with console.capture() as capture:
        console.print(view)
    return str(capture.get().rstrip("\n"))

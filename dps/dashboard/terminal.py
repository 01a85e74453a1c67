"""What the monitor knows, in a terminal: a snapshot as rich draws it, in whatever room there is.

Names and errors are anybody's, so they are put in as plain text and never as rich's markup.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dps.dashboard.palette import PART_COLOURS, PARTS, STATE_COLOURS
from dps.dashboard.words import crowded_first, finding_text, learning_curve, machine_text, moment, short, span
from dps.display import Status, about_run, about_server, about_table
from dps.state.ops import TableSpec

__all__ = ["Overview", "StatusView", "current_run", "slowest_first", "split_bar"]

GLYPHS = dict(zip(PARTS, "█▒·▓░", strict=True))  # told apart without colours too
WIDE = 120  # columns from which there is room for more about each trainer
LONGEST = 12  # characters of a metric's name at the head of a column
LEAST = {"trainers": 4, "servers": 2, "tables": 1, "events": 2}  # rows, as long as there is room for any
MOST = {"trainers": 24, "servers": 16, "tables": 16, "events": 8, "runs": 4}  # where the height is not bounded
MACHINES = 4  # of which the load is told
NAME = 24  # characters of a table's
FINDINGS = 4  # stragglers, one by one


def current_run(snapshot: Mapping[str, Any]) -> dict[str, Any] | None:
    """The newest run that goes on, or else the newest."""
    runs = snapshot["runs"]
    return next((run for run in runs if run["state"] == "running"), runs[0] if runs else None)


def slowest_first(run: Mapping[str, Any]) -> list[int]:
    """Numbers of the trainers: stragglers, then those that work longest on a clock, and last who is done."""
    named = {finding["trainer"]: -(finding["factor"] or 0.0) for finding in run["stragglers"]}
    of = columns_of(run)

    def rank(n: int) -> tuple[bool, bool, float, bool, float, int]:
        state = of["state"][n]
        return state == "left", n not in named, named.get(n, 0.0), state != "lost", -(of["step"][n] or 0.0), n

    return sorted(range(len(of["state"])), key=rank)


def columns_of(run: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What is known of each trainer, by name; of very many the controller keeps no more than the clocks."""
    of, count = run["trainers"], len(run["trainers"]["state"])
    unknown = dict.fromkeys(("step", "rate", "keys_rate", "bytes_rate", "rows_rate", "cpu", "logged"), [None] * count)
    logged = run["logged"]
    told = {"logged": logged[str(learning_curve(logged))]} if logged else {}
    return {**unknown, **dict.fromkeys(PARTS, [0.0] * count), **of, **told}


def split_bar(fractions: Sequence[float], width: int) -> list[tuple[str, str]]:
    """A bar of `width` characters as (part, characters): where the time went.

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


class Overview:
    """A snapshot for rich to print: runs, stragglers, trainers, servers, tables, events.

    Parameters
    ----------
    snapshot : dict
        What the controller's monitor says.
    height : int, optional
        Lines there are: as much is shown as fits, the slowest trainers first and the others summed up.
    """

    def __init__(self, snapshot: Mapping[str, Any], height: int | None = None):
        self.snapshot = snapshot
        self.height = height
        self.run = current_run(snapshot)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        width = options.max_width
        head = [*self._head(width), *findings(self.run["stragglers"] if self.run else [])]
        lines = sum(len(text.wrap(console, width)) for text in head)
        wanted = {
            "trainers": len(self.run["trainers"]["state"]) if self.run else 0,
            "servers": len(self.snapshot["servers"]),
            "tables": len(self.snapshot["tables"]),
            "events": len(self.snapshot["events"]),
        }
        yield from head
        for section, rows in rooms(wanted, None if self.height is None else self.height - lines).items():
            if rows:
                yield ""
                yield getattr(self, f"_{section}")(rows, width >= WIDE)

    def _head(self, width: int) -> Iterator[Any]:
        snapshot, run = self.snapshot, self.run
        up = sum(server["alive"] for server in snapshot["servers"])
        parts = [f"{up} of {snapshot['wanted']} servers", f"epoch {snapshot['epoch']}"]
        parts += [f"shards on their way: {snapshot['moves']}"] if snapshot["moves"] else []
        load = {name: (values or [None])[-1] for name, values in snapshot["throughput"].items()}
        parts += [f"{short(load['requests'])} requests/s", f"{short(load['keys'])} keys/s"]
        parts += [f"p99 {span(load['p99'])}", time.strftime("%H:%M:%S", time.localtime(snapshot["time"]))]
        yield packed([snapshot["name"], *parts], width)
        for host in crowded_first(snapshot["hosts"])[:MACHINES]:
            if host["overloaded"]:
                yield line((machine_text(host), "bold red"))
        if snapshot["checkpoints"]["error"]:
            yield line(("checkpoints: ", "bold red"), snapshot["checkpoints"]["error"])
        if run is None:
            yield line("no run yet")
            return
        yield packed([f"run {run['run']} {run['state']}", *self._about(run)], width)
        if run["error"]:
            yield line(("error: ", "bold red"), run["error"])
        mean = average(run)
        legend: list[Any] = []
        for part, share in zip(PARTS, mean, strict=True):
            legend += [(GLYPHS[part] * 2, PART_COLOURS[part]), f" {part} {share:.0%}  "]
        if sum(mean):
            yield line(*legend)

    def _about(self, run: Mapping[str, Any]) -> Iterator[str]:
        planned = f" of {run['planned']:,}" if run["planned"] else ""
        yield f"{span(run['seconds'])}"
        yield f"clocks {run['minimum']:,} to {run['maximum']:,}{planned}"
        bound = "none" if run["staleness"] is None else run["staleness"]
        yield f"staleness {bound}{' (auto)' if run['auto'] else ''}"
        rates = [rate for rate in columns_of(run)["rate"] if rate is not None]
        yield f"{short(sum(rates))} clocks/s"
        curve = learning_curve(run["metrics"])
        if curve is not None and run["metrics"][curve]["value"]:
            yield f"{curve} {short(run['metrics'][curve]['value'][-1])}"
        if run["portions"]:
            yield f"portions: {run['portions']['left']} left, {run['portions']['moved']} moved"
        others = sum(other["state"] == "running" for other in self.snapshot["runs"] if other is not run)
        if others:
            yield f"and {others} more going on"

    def _trainers(self, rows: int, wide: bool) -> Any:
        assert self.run is not None
        of, order = columns_of(self.run), slowest_first(self.run)
        logged = learning_curve(self.run["logged"]) or "loss"
        names = ["trainer", "state", "clock", "step", "keys/s", logged[:LONGEST]]
        names += ["clocks/s", "bytes/s", "cpu", "seen", "where"] if wide else []
        columns = grid(names, left=("trainer", "state", "where"), bar="where its time goes", place=3)
        more = len(order) > rows
        for n in order[: rows - more]:
            state = of["state"][n]
            numbers = [span(of["step"][n]), short(of["keys_rate"][n]), short(of["logged"][n])]
            if wide:
                seen = f"{span(of['age'][n])} ago"
                ran = "-" if of["cpu"][n] is None else f"{of['cpu'][n]:.0%}"  # of its computing
                numbers += [short(of["rate"][n]), short(of["bytes_rate"][n], "B"), ran, seen, str(of["where"][n])]
            cells = [line(str(n)), line((state, STATE_COLOURS.get(state, ""))), line(f"{of['clock'][n]:,}")]
            columns.add_row(*cells, Split([of[part][n] for part in PARTS]), *map(line, numbers))
        if more:
            columns.add_row(*self._others(order[rows - 1 :], wide))
        return columns

    def _others(self, rest: Sequence[int], wide: bool) -> list[Any]:
        """The trainers for which there was no room, in one row."""
        assert self.run is not None
        of = columns_of(self.run)

        def known(name: str) -> list[float]:
            return [of[name][n] for n in rest if of[name][n] is not None]

        clocks = known("clock")
        reach = f"{min(clocks):,}" if min(clocks) == max(clocks) else f"{min(clocks):,}-{max(clocks):,}"
        step, logged = (float(np.median(known(name))) if known(name) else None for name in ("step", "logged"))
        numbers = [span(step), short(sum(known("keys_rate"))), short(logged)]
        if wide:
            numbers += [short(sum(known("rate"))), short(sum(known("bytes_rate")), "B"), "", "", ""]
        waiting = sum(of["state"][n] == "waiting" for n in rest)
        cells = [line(f"{len(rest):,} more"), line(f"{waiting:,} wait"), line(reach)]
        return [*cells, Split([sum(known(part)) for part in PARTS]), *map(line, numbers)]

    def _servers(self, rows: int, wide: bool) -> Any:
        names = ["server", "state", "cpu", "memory", "requests/s", "keys/s", "queue", "p50", "p99"]
        names += ["busy", "wait", "lag", "behind", "unconfirmed", "rows", "shards", "worker"] if wide else []
        columns = grid(names, left=("state", "worker"))
        servers = sorted(self.snapshot["servers"], key=lambda server: (server["alive"], -(server["p99"] or 0.0)))
        for server in servers[:rows]:
            state = "leaving" if server["leaving"] else "up" if server["alive"] else "gone"
            cells = [str(server["number"]), state, f"{server['cpu'] or 0:.0%}", short(server["memory"], "B")]
            cells += [short(server["requests_rate"]), short(server["keys_rate"]), short(server["queue"])]
            cells += [span(server["p50"]), span(server["p99"])]
            if wide:
                cells += [f"{server['busy']:.0%}", span(server["wait"])]
                cells += [span(server["lag"]), span(server["behind"]), short(server["unconfirmed"])]
                cells += [short(server["rows"]), f"{server['shards']}", str(server["worker"])]
            columns.add_row(*map(line, cells))
        return titled(columns, len(servers) - rows)

    def _tables(self, rows: int, wide: bool) -> Any:
        names = ["table", "rows", "memory", "requests/s", "keys/s", "p50", "p99", "hottest shard"]
        columns = grid(names, left=("table",))
        tables = sorted(self.snapshot["tables"].items(), key=lambda entry: -(entry[1]["keys_rate"] or 0.0))
        for name, table in tables[:rows]:
            cells = [short(table["rows"]), short(table["bytes"], "B"), short(table["requests_rate"])]
            cells += [short(table["keys_rate"]), span(table["p50"]), span(table["p99"]), hottest(table["load"])]
            columns.add_row(line(named(name)), *map(line, cells))
        return titled(columns, len(tables) - rows)

    def _events(self, rows: int, wide: bool) -> Any:
        columns = grid(["time", "event"], left=("time", "event"))
        for when, text in self.snapshot["events"][-rows:]:
            columns.add_row(line(time.strftime("%H:%M:%S", time.localtime(when))), line(text))
        return columns


def average(run: Mapping[str, Any]) -> list[float]:
    """Where the time of all trainers went lately."""
    of = columns_of(run)
    shares = np.array([of[part] for part in PARTS], np.float64).reshape(len(PARTS), -1)
    at_work = shares[:, shares.sum(0) > 0]
    return at_work.mean(1).tolist() if at_work.size else [0.0] * len(PARTS)


def hottest(load: Sequence[float]) -> str:
    """The shard that most keys go to, where it is more than twice what is usual.

    >>> hottest([10.0, 100.0, 12.0, 9.0]), hottest([10.0, 11.0]), hottest([])
    ('1: 9.1 times', '', '')
    """
    usual = float(np.median(load)) if len(load) else 0.0
    most = int(np.argmax(load)) if len(load) else 0
    return f"{most}: {load[most] / usual:.1f} times" if usual > 0 and load[most] > 2 * usual else ""


def rooms(wanted: Mapping[str, int], height: int | None) -> dict[str, int]:
    """Rows for each section; with its head and a blank line before, a section takes two lines more.

    >>> rooms({"trainers": 1000, "servers": 2, "tables": 1, "events": 9}, 20)
    {'trainers': 6, 'servers': 2, 'tables': 1, 'events': 3}
    >>> rooms({"trainers": 1000, "servers": 2, "tables": 1, "events": 9}, 7)
    {'trainers': 5}
    """
    if height is None:
        return {section: min(rows, MOST[section]) for section, rows in wanted.items()}
    given: dict[str, int] = {}
    left = height
    for section, least in LEAST.items():
        rows = min(wanted[section], least, left - 2)
        if rows > 0:
            given[section] = rows
            left -= rows + 2
    for part in (0.6, 1.0):  # first nobody takes all that is left
        for section in given:
            more = min(int(left * part), wanted[section] - given[section])
            given[section] += more
            left -= more
    return given


class StatusView:
    """What :meth:`dps.ParameterServer.status` says, for rich to print."""

    def __init__(self, status: Status):
        self.status = status

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        status, width = self.status, options.max_width
        servers = [about_server(server) for server in status["servers"]]
        up = sum(server["state"] == "up" for server in servers)
        yield packed([status["name"], f"{up} of {status.get('wanted', len(servers))} servers"], width)
        if status.get("adapt"):
            yield line(status["adapt"]["text"])
        last, error = (status.get("checkpoints", {}).get(key) for key in ("last", "error"))
        if last:
            yield line(f"last checkpoint: {last['name']}, {last['rows']:,} rows")
        if error:
            yield line(("checkpoints: ", "bold red"), str(error))
        yield from findings(status.get("stragglers", []))
        if servers:
            yield from ("", self._servers(servers))
        if status["tables"]:
            yield from ("", self._tables(servers))
        for run in map(about_run, status["runs"][::-1][: MOST["runs"]]):
            yield from ("", *self._run(run, width))
        for host in crowded_first(status.get("hosts", []))[:MACHINES]:
            yield line(machine_text(host))
        for when, text in status.get("news", [])[-MOST["events"] :]:
            yield line(f"{moment(when)}  {text}")

    def _servers(self, servers: Sequence[dict[str, Any]]) -> Any:
        names = ["server", "state", "rows", "memory", "requests", "queue", "worker"]
        columns = grid(names, left=("state", "worker"))
        for server in servers[: MOST["servers"]]:
            cells = [f"{server['number']}", server["state"], short(server["rows"]), server["nbytes"]]
            cells += [short(server.get("requests")), short(server.get("queue")), str(server["worker"])]
            columns.add_row(*map(line, cells))
        return titled(columns, len(servers) - MOST["servers"])

    def _tables(self, servers: Sequence[dict[str, Any]]) -> Any:
        names = ["table", "keys", "row", "shards x copies", "rows", "memory", "optimizer"]
        columns = grid(names, left=("table", "optimizer"))
        tables = list(self.status["tables"].values())
        for table in tables[: MOST["tables"]]:
            about = about_table(TableSpec.from_dict(table["spec"]), table["chains"], servers)
            spec: TableSpec = about["spec"]
            cells = [named(spec.name), "any" if spec.keyed else f"{spec.rows:,}", f"{spec.dim} x {spec.dtype}"]
            cells += [f"{spec.shards} x {spec.copies}", short(about["rows"]), about["nbytes"]]
            cells += [type(spec.optimizer).__name__]
            columns.add_row(*map(line, cells))
        return titled(columns, len(tables) - MOST["tables"])

    def _run(self, run: Mapping[str, Any], width: int) -> Iterator[Any]:
        done = f"{run['done']:,}{' of {:,}'.format(run['planned']) if run['planned'] else ''} iterations"
        parts = [f"run {run['number']}", done, f"staleness {run['staleness']}"]
        parts += ["finished"] if run["over"] and not run["stopped"] else []
        yield packed(parts + ([run["summary"]] if run["summary"] else []), width)
        if run["stopped"]:
            yield line((str(run["stopped"]), "red"))
        columns = grid(["trainer", "clock", "state"], left=("trainer", "state"))
        for trainer in run["trainers"]:
            planned = f" of {trainer['planned']:,}" if trainer["planned"] else ""
            columns.add_row(*map(line, [f"{trainer['number']}", f"{trainer['clock']:,}{planned}", trainer["state"]]))
        yield titled(columns, run["hidden"])


class Split:
    """The bar of where the time went, as wide as its column."""

    def __init__(self, fractions: Sequence[float]):
        self.fractions = fractions

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        bar = split_bar(self.fractions, options.max_width)
        yield line(*((text, PART_COLOURS[part]) for part, text in bar))


def findings(found: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """Who is slow, why, and what to do."""
    for finding in found[:FINDINGS]:
        yield line((finding_text(finding), "bold red"), f": {finding['why']}")
        yield line(("  do: ", "bold"), finding["remedy"])
    if len(found) > FINDINGS:
        yield line(f"... and {len(found) - FINDINGS} more stragglers")


def named(name: str) -> str:
    """A name, cut where it is very long."""
    return name if len(name) <= NAME else f"{name[: NAME - 3]}..."


def packed(pieces: Sequence[str], width: int) -> Any:
    """Pieces in lines of at most `width` that break between them only; the first one is set off."""
    lines = [""]
    for piece in pieces:
        longer = f"{lines[-1]}  {piece}" if lines[-1] else piece
        if len(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(piece)
    text = "\n".join(lines)
    return line((text[: len(pieces[0])], "bold"), text[len(pieces[0]) :])


def line(*parts: str | tuple[str, str]) -> Any:
    """Text with styles, in which nothing is markup."""
    from rich.text import Text

    return Text.assemble(*parts)


def grid(names: Sequence[str], left: Sequence[str], bar: str | None = None, place: int = 0) -> Any:
    """A table without lines; the column `bar` comes at `place`."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", expand=bar is not None)
    for n, name in enumerate(names):
        if bar is not None and n == place:
            table.add_column(bar, no_wrap=True, ratio=1, min_width=8)
        least = len("12:34:56") if name == "time" else None
        table.add_column(line(name), justify="left" if name in left else "right", no_wrap=True, min_width=least)
    return table


def titled(table: Any, hidden: int) -> Any:
    """A table that says how many rows were left out."""
    if hidden > 0:
        table.columns[0].header = f"{table.columns[0].header} ({hidden} more)"
    return table


def pretty(status: Status, printer: Any, cycle: bool) -> None:
    """What IPython shows in a terminal: the tables, or the dict where rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        printer.text(repr(status))
        return
    console = Console(force_terminal=sys.stdout.isatty(), force_jupyter=False)
    with console.capture() as capture:
        console.print(StatusView(status))
    printer.text(capture.get().rstrip("\n"))


# What is shown in a notebook knows nothing of the terminal.
Status.__rich__ = lambda status: StatusView(status)  # type: ignore[attr-defined]
Status._repr_pretty_ = pretty  # type: ignore[attr-defined]

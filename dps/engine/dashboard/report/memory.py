"""What the report of a run says of memory: tables with their budgets and the rows that went, servers with theirs."""

from __future__ import annotations

from collections.abc import Iterator

from dps.engine.dashboard.markup import escape, html_table
from dps.engine.dashboard.text import budget_text, number_text, size_text, turnover_text
from dps.engine.telemetry.snapshot import ServerStatus, Status, TableStatus

__all__ = ["memory"]

MAX_ROWS = 50  # of each table: the largest ones


def memory(status: Status | None) -> Iterator[str]:
    """The section, as the servers answered when the report was written; nothing if they did not."""
    if status is None or not status.tables:
        return
    yield '<h2>Tables and memory</h2><p class="soft">When this was written, with all copies.</p>'
    tables = sorted(status.tables.values(), key=lambda table: -table.bytes)
    head = ["table", "rows", "memory", "rows that came and went"]
    yield html_table(head, [of_table(table) for table in tables[:MAX_ROWS]], (1, 2), "wide")
    yield more(len(tables) - MAX_ROWS)
    servers = sorted(status.servers, key=lambda server: (-server.full, -server.bytes))
    head = ["server", "rows", "of its tables", "memory of its process, and dps.memory"]
    yield html_table(head, [of_server(server) for server in servers[:MAX_ROWS]], (1, 2), "wide")
    yield more(len(servers) - MAX_ROWS)


def of_table(table: TableStatus) -> list[str]:
    came = turnover_text(table.turnover) if table.turnover is not None else "rows stay"
    return [escape(table.name), number_text(table.rows), size_text(table.bytes), escape(came) or "none"]


def of_server(server: ServerStatus) -> list[str]:
    return [f"{server.number}", number_text(server.rows), size_text(server.bytes), escape(budget_text(server))]


def more(count: int) -> str:
    return f'<p class="soft">... and {count:,} smaller ones</p>' if count > 0 else ""

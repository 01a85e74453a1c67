"""Spans of OpenTelemetry around pulls, pushes, calls of functions and ticks, and for the events of servers and runs.

Theory of operation
-------------------
:func:`instrument` replaces methods of :class:`dps.Client` and :class:`dps.Trainer` by wrappers that make a span. Until
then no code of OpenTelemetry runs, and none is imported, so a process without traces pays nothing. This is how
OpenTelemetry's own packages instrument a library.

A handle of a table and a trainer call the methods of a client, so each call makes one span, whichever object the user
called. A verb that is made of another one (``delete`` of ``delete_async``) makes one span, too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from distributed import Scheduler, SchedulerPlugin, Worker

from dps.engine.client.client import Client
from dps.engine.training.trainer import Trainer
from dps.errors import needing

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer, TracerProvider

__all__ = ["instrument", "uninstrument"]

OF_TABLES = ["pull", "pull_certified", "push", "add", "assign", "delete", "clear", "push_pull"]
OF_TABLES += [f"{verb}_async" for verb in OF_TABLES]  # their spans last until the request is written
OF_TRAINERS = ["tick", "barrier", "allreduce", "broadcast", "allgather"]
TOPIC = "dps"  # of Dask's event log
MAX_EVENT_CHARACTERS = 1000  # of the text of an event
MAX_NAME_CHARACTERS = 200  # of a table or function

Attributes: TypeAlias = dict[str, str | int]  # of a span

originals: dict[tuple[type, str], Callable[..., object]] = {}
in_call: ContextVar[bool] = ContextVar("in_call", default=False)


def instrument(tracer_provider: TracerProvider | None = None) -> None:
    """Make spans in this process from now on. A second call changes nothing.

    Each process has to be told: the program, and Dask's workers and scheduler by ``--preload dps.opentelemetry``.

    ======================================= =============================================================
    span                                    attributes
    ======================================= =============================================================
    ``pull clicks``, ``push clicks``, ...   ``db.operation.name``, ``db.collection.name`` (the table),
                                            ``dps.parameter_server``, ``dps.keys`` (a number, where known)
    ``call nrm2``                           the same, and ``dps.function``
    ``tick``, ``barrier``, ...              ``dps.parameter_server``, ``dps.run``, ``dps.trainer``,
                                            ``dps.clock`` (before the tick)
    ``dps event`` (of the scheduler)        ``dps.parameter_server``, ``dps.event`` (its text)
    ======================================= =============================================================

    All have ``db.system.name`` = ``dps``. A span of several tables has their names, divided by commas. The error that a
    call raises is recorded in its span.

    Parameters
    ----------
    tracer_provider : opentelemetry.trace.TracerProvider, optional
        Where spans go; by default the provider of the process.

    Raises
    ------
    ImportError
        The package opentelemetry-api is missing; the message says how to install it.

    Examples
    --------
    >>> import dps.opentelemetry
    >>> from opentelemetry.sdk.trace import TracerProvider
    >>> from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    >>> from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    >>> spans, provider = InMemorySpanExporter(), TracerProvider()
    >>> provider.add_span_processor(SimpleSpanProcessor(spans))
    >>> dps.opentelemetry.instrument(provider)
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     with dps.ParameterServer(cluster) as ps:
    ...         w = ps.table("w")
    ...         w.push([1, 2], 1.0)
    ...         w.pull([1])
    array([1.], dtype=float32)
    >>> [(span.name, span.attributes["dps.keys"]) for span in spans.get_finished_spans()]
    [('push w', 2), ('pull w', 1)]
    >>> dps.opentelemetry.uninstrument()
    """
    tracer = _tracer(tracer_provider)
    if originals:
        return
    for verb in OF_TABLES:
        _wrap(Client, verb, functools.partial(_of_table, tracer, verb))
    _wrap(Client, "call", functools.partial(_of_function, tracer))
    for verb in OF_TRAINERS:
        _wrap(Trainer, verb, functools.partial(_of_trainer, tracer, verb))


def uninstrument() -> None:
    """Make no more spans in this process."""
    while originals:
        (kind, verb), method = originals.popitem()
        setattr(kind, verb, method)


class EventSpans(SchedulerPlugin):
    """Makes a span of each event of a parameter server: servers that come and go, failovers, findings, runs."""

    name = "dps-event-spans"

    def __init__(self, tracer: Tracer):
        self._tracer = tracer

    def log_event(self, topic: str, msg: object) -> None:
        """What the scheduler calls for each event of any topic."""
        if topic == TOPIC and isinstance(msg, Mapping) and "event" in msg:
            attributes = {
                "db.system.name": "dps",
                "dps.parameter_server": str(msg.get("parameter_server", "")),
                "dps.event": str(msg["event"])[:MAX_EVENT_CHARACTERS],
            }
            self._tracer.start_span("dps event", attributes=attributes).end()


async def dask_setup(process: Scheduler | Worker) -> None:
    """What Dask calls for ``--preload dps.opentelemetry``, with the scheduler or a worker."""
    instrument()
    if isinstance(process, Scheduler):
        process.add_plugin(EventSpans(_tracer(None)), idempotent=True)


async def dask_teardown(process: Scheduler | Worker) -> None:
    """What Dask calls when the scheduler, or the worker, closes."""
    uninstrument()


def _tracer(provider: TracerProvider | None) -> Tracer:
    with needing("opentelemetry"):
        from opentelemetry import trace

    return trace.get_tracer("dps", tracer_provider=provider)


def _wrap(kind: type, verb: str, span: Callable[..., contextlib.AbstractContextManager[object]]) -> None:
    """Have a method run within what `span` makes of its arguments, unless it is part of another one that does."""
    method = originals[kind, verb] = getattr(kind, verb)

    @functools.wraps(method)
    def wrapper(*arguments: object, **named: object) -> object:
        if in_call.get():
            return method(*arguments, **named)
        with _alone(), span(*arguments, **named):
            return method(*arguments, **named)

    setattr(kind, verb, wrapper)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Within, methods make no spans."""
    token = in_call.set(True)
    try:
        yield
    finally:
        in_call.reset(token)


def _of_table(
    tracer: Tracer, verb: str, client: Client, table: object, keys: object = None, *others: object, **named: object
) -> contextlib.AbstractContextManager[object]:
    tables = ",".join(map(_label, table)) if isinstance(table, Mapping) else _label(table)
    attributes: Attributes = {
        "db.system.name": "dps",
        "db.operation.name": verb,
        "db.collection.name": tables,
        "dps.parameter_server": client.ticket.session,
    }
    count = _keys_of(table) if isinstance(table, Mapping) else _count(keys)
    if count is not None:
        attributes["dps.keys"] = count
    return tracer.start_as_current_span(f"{verb} {tables}", attributes=attributes)


def _of_function(
    tracer: Tracer, client: Client, function: object, table: object, /, keys: object = None, **arguments: object
) -> contextlib.AbstractContextManager[object]:
    name = _label(function)
    attributes: Attributes = {
        "db.system.name": "dps",
        "db.operation.name": "call",
        "db.collection.name": _label(table),
        "dps.parameter_server": client.ticket.session,
        "dps.function": name,
    }
    count = _count(keys)
    if count is not None:
        attributes["dps.keys"] = count
    return tracer.start_as_current_span(f"call {name}", attributes=attributes)


def _of_trainer(
    tracer: Tracer, verb: str, trainer: Trainer, *others: object, **named: object
) -> contextlib.AbstractContextManager[object]:
    attributes: Attributes = {
        "db.system.name": "dps",
        "dps.parameter_server": trainer.ticket.session,
        "dps.run": trainer.run,
        "dps.trainer": trainer.number,
        "dps.clock": trainer.clock,
    }
    return tracer.start_as_current_span(verb, attributes=attributes)


def _label(thing: object) -> str:
    """The name of a table or function; of anything else its text, because the call itself will refuse it."""
    return str(getattr(thing, "name", thing))[:MAX_NAME_CHARACTERS]


def _count(keys: object) -> int | None:
    """How many keys a call names; None where that is not known without reading them."""
    if isinstance(keys, np.ndarray):
        return keys.size
    return len(keys) if isinstance(keys, Collection) else None


def _keys_of(tables: Mapping[object, object]) -> int | None:
    """How many keys a call of several tables names: {table: keys} or {table: (keys, values)}."""
    counts = [_count(each[0] if isinstance(each, tuple) else each) for each in tables.values()]
    return None if None in counts else sum(count for count in counts if count is not None)

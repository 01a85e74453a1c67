"""Spans of OpenTelemetry: one for each call, with its table, keys and error; none, and no cost, until asked for."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import dps
from dps.errors import InputError, UnknownTableError
from dps.functions import library

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import dps.opentelemetry as tracing


@pytest.fixture(scope="module")
def cluster():
    with dps.LocalCluster(servers=1, trainers=1, processes=False, dashboard_address=None) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ps(cluster):
    with dps.ParameterServer(cluster) as ps:
        yield ps


@pytest.fixture
def provider():
    provider = TracerProvider()
    yield provider
    tracing.uninstrument()
    provider.shutdown()


@pytest.fixture
def spans(provider):
    """A function: the spans since it was last called, as (name, attributes)."""
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def taken():
        ended = exporter.get_finished_spans()
        exporter.clear()
        return ended

    return taken


def test_each_call_makes_one_span_whichever_object_was_called(ps, provider, spans):
    w = ps.table("w", optimizer=dps.Add())
    client = ps.client()
    tracing.instrument(provider)
    tracing.instrument(provider)  # changes nothing
    keys = np.arange(6).reshape(2, 3)
    w.push(keys, 1.0)
    client.pull("w", keys)
    client.pull_async("w", [1, 2]).result()
    client.delete("w", [5])  # of delete_async
    client.call(library.nnz, "w", keys=[0, 1])
    client.pull({"w": [1], w: [2, 3]})
    client.push({"w": ([1, 2, 3], 1.0)})
    w.clear()
    found = spans()
    assert [(span.name, span.attributes.get("dps.keys")) for span in found] == [
        ("push w", 6),
        ("pull w", 6),
        ("pull_async w", 2),
        ("delete w", 1),
        ("call nnz", 2),
        ("pull w,w", 3),
        ("push w", 3),
        ("clear w", None),
    ]
    assert {span.attributes["db.system.name"] for span in found} == {"dps"}
    assert {span.attributes["dps.parameter_server"] for span in found} == {ps.name}
    assert found[4].attributes["dps.function"] == "nnz"
    assert [span.attributes["db.operation.name"] for span in found[:4]] == ["push", "pull", "pull_async", "delete"]
    assert all(span.end_time >= span.start_time for span in found)


def test_an_error_is_recorded_and_raised(ps, provider, spans):
    tracing.instrument(provider)
    with pytest.raises(UnknownTableError):
        ps.client().pull("absent", [1])
    (span,) = spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.events[0].attributes["exception.type"].endswith("UnknownTableError")
    with pytest.raises(InputError):
        ps.client().pull(3.5, [1])
    assert [span.name for span in spans()] == ["pull 3.5"]


def test_calls_are_children_of_the_users_own_span(ps, provider, spans):
    ps.table("children")
    tracing.instrument(provider)
    with provider.get_tracer("user").start_as_current_span("request") as request:
        ps.client().pull("children", [1])
    pulled, _ = spans()
    assert pulled.parent.span_id == request.get_span_context().span_id


def test_ticks_say_who_and_when(ps, provider, spans):
    ps.table("ticked")
    tracing.instrument(provider)

    def train(trainer, partitions):
        for _ in range(2):
            trainer.push("ticked", [1], 1.0)
            trainer.tick()

    ps.run(train, [[0]])
    found = [span for span in spans() if span.name in {"tick", "push ticked"}]
    assert [span.name for span in found] == ["push ticked", "tick"] * 2
    assert [span.attributes["dps.clock"] for span in found[1::2]] == [0, 1]
    assert {span.attributes["dps.trainer"] for span in found[1::2]} == {0}


def test_afterwards_there_are_none(ps, provider, spans):
    methods = {verb: getattr(dps.Client, verb) for verb in tracing.OF_TABLES}
    tracing.instrument(provider)
    assert dps.Client.pull is not methods["pull"]
    tracing.uninstrument()
    assert {verb: getattr(dps.Client, verb) for verb in tracing.OF_TABLES} == methods
    ps.table("after")
    ps.client().pull("after", [1])
    assert spans() == ()


def test_events_of_the_scheduler_become_spans(cluster, provider, spans):
    plugin = tracing.EventSpans(provider.get_tracer("dps"))
    cluster.scheduler.add_plugin(plugin)
    cluster.scheduler.log_event("dps", {"parameter_server": "clicks", "event": "server 1 was lost"})
    cluster.scheduler.remove_plugin(plugin.name)
    (span,) = spans()
    assert (span.name, span.attributes["dps.parameter_server"]) == ("dps event", "clicks")
    assert span.attributes["dps.event"] == "server 1 was lost"
    plugin.log_event("other", {"event": "x"})
    plugin.log_event("dps", {"parameter_server": "p", "event": "e" * 5000})
    assert [len(span.attributes["dps.event"]) for span in spans()] == [tracing.MAX_EVENT_CHARACTERS]


def test_preloaded_processes_make_spans(cluster, provider):
    pull = dps.Client.pull
    cluster.sync(tracing.dask_setup, cluster.scheduler)
    assert isinstance(cluster.scheduler.plugins[tracing.EventSpans.name], tracing.EventSpans)
    assert dps.Client.pull is not pull
    cluster.sync(tracing.dask_teardown, cluster.scheduler)
    assert dps.Client.pull is pull
    cluster.scheduler.remove_plugin(tracing.EventSpans.name)


def test_dps_itself_imports_nothing_of_it():
    script = "import sys, dps; assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    subprocess.run([sys.executable, "-c", script], check=True)

"""What a span costs a pull of one key: without an SDK of OpenTelemetry, and with one that keeps the span.

A process that does not call `dps.opentelemetry.instrument` has the methods as they are in the source, so it pays
nothing: tests/telemetry/test_opentelemetry.py compares the methods themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import dps
import dps.opentelemetry
from benchmarks.common import Report, interleave, parser

try:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
except ImportError as error:
    raise SystemExit(f"{error}: pip install opentelemetry-sdk") from error

ROUNDS = 7


class Dropped(SpanExporter):
    """Takes spans and keeps none."""

    def export(self, spans: Any) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def instrumented(provider: TracerProvider | None) -> Callable[..., Any]:
    """`dps.Client.pull`, as it is where spans go to that provider."""
    dps.opentelemetry.instrument(provider)
    method = dps.Client.pull
    dps.opentelemetry.uninstrument()
    return method


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__).parse_args(argv)
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Dropped()))
    with (
        Report("spans of OpenTelemetry", args.json) as report,
        dps.LocalCluster(servers=1, trainers=1, dashboard_address=None) as cluster,
        dps.ParameterServer(cluster, servers=1) as ps,
    ):
        ps.table("w").push([1], 1.0)
        methods = {"plain": dps.Client.pull, "no SDK": instrumented(None), "an SDK": instrumented(provider)}
        cases = {name: functools.partial(method, ps.client(), "w", [1]) for name, method in methods.items()}
        found = interleave(cases, 3 if args.quick else ROUNDS)
        report.duration("pull of one key", found["plain"])
        report.duration("with a span, without an SDK", found["no SDK"], "a pull", found["plain"])
        report.duration("with a span that an SDK keeps", found["an SDK"], "a pull", found["plain"])
    provider.shutdown()


if __name__ == "__main__":
    main()

"""Training loops and models on generated data, each beside the plain program of one process.

``--rows overlap`` measures what is named only. Each model has a module with a function ``measure(report, quick)``; a
new one is added to MODELS.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import model_factors, model_fm, model_graph, model_overlap, model_topics, model_torch, model_words
from benchmarks.common import Report, parser

MODELS: dict[str, Callable[[Report, bool], None]] = {
    "overlap": model_overlap.measure,
    "mf": model_factors.measure,
    "fm": model_fm.measure,
    "pagerank": model_graph.measure,
    "topics": model_topics.measure,
    "torch": model_torch.measure,
    "words": model_words.measure,
}


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--rows", nargs="+", choices=MODELS, default=list(MODELS), help="measure these only")
    args = options.parse_args(argv)
    with Report("models", args.json) as report:
        for name in args.rows:
            MODELS[name](report, args.quick)


if __name__ == "__main__":
    main()

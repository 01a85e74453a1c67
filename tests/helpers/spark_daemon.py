"""The process from which Spark forks its Python workers, in tests: it has imported what each worker would import.

Without it, each worker imports numpy, pandas, scikit-learn and dps itself, which is most of the time of a short test.
"""

from pyspark.daemon import manager

import dps.models.spark  # noqa: F401

if __name__ == "__main__":
    manager()

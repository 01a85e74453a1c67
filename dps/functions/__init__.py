"""Functions that run where the parameters are.

========== ====================================================================================
definition ``@dps.function``: a part that runs on each shard, and how the results are merged
rows       what a part sees: the rows of one shard
deletion   functions that delete the rows for which a predicate holds
library    functions that come with dps: aggregates, element by element, initial values, queries
neighbours functions that find the nearest rows, dense or sparse, and the closest pairs of rows
products   functions on rows that are vectors of features: Gramian, nearest rows, rows that there are
========== ====================================================================================
"""

from dps.functions.definition import Function, function
from dps.functions.deletion import deleting
from dps.functions.rows import Rows

__all__ = ["Function", "Rows", "deleting", "function"]

"""Functions that run where the parameters are: what users write, and those that come with dps.

========== ====================================================================================
library    aggregates, element by element, initial values, queries
neighbours functions that find the nearest rows, dense or sparse, and the closest pairs of rows
products   functions on rows that are vectors of features: Gramian, nearest rows, rows that there are
========== ====================================================================================
"""

from dps.engine.functions.definition import Function, function
from dps.engine.functions.deletion import deleting
from dps.engine.functions.rows import Rows
from dps.engine.wire.remembered import Remembered

__all__ = ["Function", "Remembered", "Rows", "deleting", "function"]

"""From raw data to int64 keys.

========= ===================================================================
hashing   stable 64-bit keys for text and categories
========= ===================================================================
"""

from dps.engine.training.dataframes import as_pandas
from dps.engine.training.localize import forget, localize

__all__ = ["as_pandas", "forget", "localize"]

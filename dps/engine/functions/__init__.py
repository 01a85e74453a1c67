"""Functions that run where the parameters are.

========== ====================================================================================
definition ``@dps.function``: a part that runs on each shard, and how the results are merged
rows       what a part sees: the rows of one shard
deletion   functions that delete the rows for which a predicate holds
combining  rows combined with values by numpy's binary functions
words      how words lie in a table, and the function that gives them ids
========== ====================================================================================
"""

"""The compiled core: the loops that every request runs through, and the classes that own their memory.

============ =====================================================================================
requests/    the way of a request, at the client and at the server
shards/      what a shard is made of: index, rows, optimizers, initial values, cuts, ledger
(here)       what both are made of: arrays, keys and their hashes, groups of keys, portable numbers
============ =====================================================================================

The modules are Cython, compiled when dps is installed (see setup.py). Loops that a processor can vectorise stand in C
headers beside them: `DPS_CLONES` of clones.h compiles these for several generations of processors, and the best one is
chosen when the module is loaded. All variants give the same bits, because only exactly rounded operations are used,
in the written order. Nothing here knows Dask. A module checks the dtype, layout and length of its arrays, and whether
numbers of rows lie inside.
"""

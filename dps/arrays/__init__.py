"""Vectors and matrices whose elements lie on the servers and compute there.

================= ==============================================================================
array.py          ``PSArray``: operators, numpy's protocols, conversion
vector.py         ``PSVector``
matrix.py         ``PSMatrix``
sparse_vector.py  ``PSSparseVector``
servers.py        ``on(ps)``: the namespace of a parameter server
namespace.py      the array API standard; arrays of zeros, random numbers, ...
functions.py      numpy's functions beyond ufuncs
shapes.py         ... and those that change shapes
indexing.py       elements by index
statistics.py     reductions as numpy defines their results
text.py           how arrays show themselves
----------------- ------------------------------------------------------------------------------
space.py          the arrays of one parameter server, and what computes them
sparse_space.py   ... and its sparse vectors
pools.py          rows of a table for many vectors of one length, given out and taken back
store.py          what arrays need of a parameter server
server_store.py   ... and how its client gives it
----------------- ------------------------------------------------------------------------------
expressions.py    nodes: what a vector is computed from. Pure
operations.py     what can be computed element by element. Pure
programs.py       expressions compiled to a program that travels. Pure
evaluation.py     a program on one shard, chunk by chunk. Pure
mapping.py        a user's function of elements, carried out on the servers
reductions.py     partial results and how they are joined. Pure
implicit.py       expressions at the keys that a sparse vector does not have. Pure
layout.py         where the elements of a vector lie. Pure
================= ==============================================================================
"""

from dps.arrays.array import PSArray
from dps.arrays.matrix import PSMatrix
from dps.arrays.namespace import ArrayNamespace
from dps.arrays.server_store import ServerStore
from dps.arrays.servers import on
from dps.arrays.space import Space
from dps.arrays.sparse_vector import PSSparseVector
from dps.arrays.vector import PSVector

__all__ = ["ArrayNamespace", "PSArray", "PSMatrix", "PSSparseVector", "PSVector", "ServerStore", "Space", "on"]

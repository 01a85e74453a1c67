"""The compiled core: the loops that every request runs through, and the classes that own their memory.

The modules are Cython, compiled when dps is installed (see setup.py). Loops that a processor can vectorise stand in C
headers beside them: `DPS_CLONES` of clones.h compiles these for several generations of processors, and the best one is
chosen when the module is loaded. All variants give the same bits, because only exactly rounded operations are used,
in the written order. Nothing here knows Dask; call.pyx, part.pyx, exchange.pyx, tick.pyx and service.pyx know frames,
exchange.pyx, tick.pyx and socket_calls.pyx know sockets. A module checks the dtype, layout and length of its arrays,
and whether numbers of rows lie inside.
"""

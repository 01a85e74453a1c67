"""The user's handle on a parameter server.

================= ==================================================================
parameter_server  ParameterServer: start, tables, run, status, checkpoint, close
connection        a driver's connection to the controller, over Dask's control plane
adaptive          how many servers a driver asks for
worker_scaling    has a cluster start and end workers for servers
archive           checkpoints, exports and reports, as the handle writes them
running           ps.run and ps.resume_run, to the end of the run
lazy              lazy stages on Dask collections
mapping           ps.map: a function of partitions and tables, lazily
vocabularies      the tables of a vocabulary
kinds             which kind of Dask collection a value is
preload           --preload dps for `dask scheduler` and `dask worker`
================= ==================================================================
"""

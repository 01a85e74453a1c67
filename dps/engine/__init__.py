"""The engine: a parameter server that knows no model. What users import of it, `dps` itself gives them.

================ ======================================================================================
core/            compiled loops over keys and rows, and the classes that own their memory. Cython and C
state/           what a server holds: tables, shards, key index, optimizers, ledgers. Pure
coordination/    which server holds a shard, which trainer may go on: placement, clocks, leases, meetings. Pure
wire/            how bytes travel: frames, the endpoint that listens, channels and links that connect
daskapi/         everything that touches Dask's own processes and private interfaces
functions/       functions that run on the servers: what a user writes, and what they see
checkpoints/     a model as files: shards, manifests, the store of them; export
telemetry/       count, report, keep, diagnose
---------------- --------------------------------------------------------------------------------------
client/          pull, push, add, assign, push_pull; again after failures   ] the three parties:
server/          the Dask actor that holds shards, and answers frames       ] they never import
controller/      the scheduler plugin: failover, runs, checkpoints, scaling ] each other
---------------- --------------------------------------------------------------------------------------
training/        the loop on each partition: trainers, batches, tasks, Spark
driver/          the user's handle: start, tables, run, status, checkpoint, close; lazy stages
dashboard/       pages on the scheduler's dashboard, metrics, reports; the notebook and the terminal
deploy/          LocalCluster, YarnCluster
cli/             ``dask ps``
simulation/      the same parties in one thread, on virtual time, with faults
================ ======================================================================================

Each room's ``__init__.py`` lists its files. Imports run downwards in ``tests/project/test_style.py`` (ENGINE);
``docs/design.md`` walks a push, a tick and a failover through these files.
"""

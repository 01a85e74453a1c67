"""What a server holds: tables cut into shards, their rows, and which ops they have seen. Pure rules on top
of :mod:`dps.engine.core`, which holds the loops.

Nothing here knows of sockets, threads or time. Each replica of a shard holds the same values, because the same ops are
applied to it in the same order.

================== ===============================================================================
ops                TableSpec, the definition of a table; Op, one change to a shard
op_views           typed views of ops that are not about rows and values
partition          keys to shards: hash, ranges, grouping, repeated keys
partitioning       which keys of a keyed table lie together: blocks, fields of bits, ranges
names              the one rule for names of tables, servers, runs, checkpoints and metrics
shard              DenseShard, KeyedShard: rows, ledger, optimizer state, sums of an open clock; every op is
                   applied here
deletion           rows of a keyed shard that go, and the memory that they give back
spill              which rows lie in a file of the server because a budget is full, and come back when they are named
disk_rows          the file: rows looked up by key, read together, appended
shrinking          memory of rows given back bit by bit
spilled            what shards and cuts ask of the file
beside             large ops, carried out on a copy of the shard, and put in place in one step
optimizers         SGD, Momentum, Adagrad, RMSprop, Adam, AdamW, FTRL, Add, Assign
columns            columns of a row with initializers and optimizers of their own
custom             an optimizer of the user, as it travels and steps
wire_format        in which numbers rows travel between trainers and servers
user_code          code of the user as cloudpickle, with a hash of what it does
schedules          learning rates that change with the clock
initializers       a new row's values as a function of (seed, key)
recipes            optimizers, initialisers and schedules as dicts, and back
snapshot           Cut: a shard as of a clock, read while ops go on
gone               the keys of rows that went lately, and why, for readers
memory             bytes that shards take, and by how many an op makes them grow
precopy            rows of a shard, copied while ops go on, and again where ops have changed them
table_edges        which edges the shards of a table may have after a split or a merge
resharding         a shard as several shards of a table that is cut into more
merging            several shards as one of a table that is cut into fewer
ledger_parts       their ledgers: what each part of a merged shard has seen
scan               the rows of a keyed shard in a range of keys, piece after piece while ops go on
transfer           copying a shard to another server while ops go on
================== ===============================================================================
"""

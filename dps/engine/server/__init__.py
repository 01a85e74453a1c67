"""What runs on a server's worker: the actor, and the role that answers frames.

================== ==============================================================================
actor              the Dask actor: gives the role a worker and a thread
requests           the role: what a server does with each frame
tables             the replicas of one table; a request is cut by shard here, and answered
changes            where ops are applied and passed on; a change that breaks off ends the server
replicas           a server's replica of a shard, primary or backup; feeds bring joiners up to date
pace               when a feed's next piece leaves, and what it is held back for
replication        passes ops on along a shard's chain, and knows which ones the chain has confirmed
dumps              takes the pieces of a shard that the server is to hold
memory             the budget of the server: what is refused, and what has to go
backup_pulls       pulls that a backup answers, when it has the version that the primary tells
changed_pulls      pulls of rows that a trainer has: those that differ are sent
gone               tells readers which keys went, when all copies know
functions          runs functions of users on the rows of shards, which are held meanwhile
function_work      a function on the shards of one call, wherever it runs
function_thread    the thread in which those of dps run, each under a time limit
function_process   the process in which those of users run, each under a time limit
function_exchange  what the server and that process exchange: messages, and arrays in memory that both map
function_child     what runs in that process
function_boot      the program with which it starts
large_ops          carries large ops out in a thread beside the loop, and puts them in place between requests
resharding         makes the shards of a table that is cut into more, or fewer, of the replicas here, piece by piece
late_parts         a push of which some parts of a merged shard have their rows: the others get theirs
merged_ops         pushes that stand for those of several trainers: all of them count, or none
closings           closes clocks with many sums, shard by shard, between requests
beside_thread      the thread in which such work is done
hold               keeps the worker's process when its scheduler is lost, and joins the next scheduler
holder             the server's part in the controller's journal
grants             lets primaries go on without the controller, while other servers agree
heartbeat          heartbeats to the controller, and the lease that they renew
checkpoint_writer  cuts shards at a clock, and writes them while training goes on
================== ==============================================================================
"""

"""Placement, clocks, leases: rules on plain values. Pure: no sockets, no threads, and time is an argument.

============ =============================================================================
clock        the clock of a run: which trainers may go on under a staleness bound
placement    which servers hold which shard, and the steps from one placement to the next
leases       the batches of an epoch, leased to trainers in portions
meetings     collectives: every trainer brings a payload, all get one answer
liveness     which servers have sent no heartbeat for too long
autoscaling  how many servers a load asks for
rebalancing  which shards move, or which one is split, because of the load
shard_parts  where a hot shard is divided so that its parts have equal loads
origins      the origin and the attempt of the ops that a Dask task makes
seats        which worker threads of the cluster the trainers of a run take
holding      what a worker's process does with its servers when the scheduler is lost
journal      the controller's last decision, kept by the servers for the next controller
============ =============================================================================
"""

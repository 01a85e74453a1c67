"""What runs in the scheduler's process: one plugin, a session for each parameter server.

============= ========================================================================================
plugin        the SchedulerPlugin, and all parameter servers of its scheduler
verbs         what drivers ask of one parameter server, by verb
session       one parameter server's parts, put together; checkpoint_procedures.py and autoscaling_procedures.py have
              the controller's part in checkpoints, and how the number of servers follows the load;
              rebalancing_procedures.py lets shards follow it
server_record what the controller knows of one server
failover      membership: which servers are up, which takes over, which shards move; the route
journaling    the journal of one session, as the scheduler's loop sees it
takeover      a parameter server whose controller has died is taken over, when its servers are back;
              takeover_procedures.py has the steps
holders       the servers that keep the journal, as the membership sees them
announcements the placement and the route that servers and clients know
recorder      commits decisions to the journal of the servers before they take effect
session_record what a record of the journal says, and the numbers that it sets aside; run_records.py has the part of
              runs
handovers     primaries that are asked to hand a shard over
event_log     the events of one parameter server
freezes       tables whose replicas do not change, because they are cut anew; resharding_procedures.py has the steps
gathering     neighbouring shards that are brought to the same servers, because they are to be merged
placement_rest since when no shard moves and no server comes or goes
actors        the servers as Dask workers and actors; server_procedures.py, table_procedures.py and
              function_procedures.py have the steps
run           the state of one run
runs          the frames of runs: trainers join, tick, meet, leave; run_procedures.py has the steps of their end
interrupted_runs the runs of a controller that has died, in the one that took over
work_leases   the frames by which trainers lease batches
origin_numbers the numbers of parties that make ops
collectives   the results of allreduce, allgather, broadcast and barrier
procedures    what takes several steps, as generators that yield instructions; executor.py carries these out
seating       gives each trainer a thread of its own
============= ========================================================================================
"""

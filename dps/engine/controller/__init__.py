"""What runs in the scheduler's process: one plugin, a session for each parameter server.

============= ========================================================================================
plugin        the SchedulerPlugin, and all parameter servers of its scheduler
verbs         what drivers ask of one parameter server, by verb
session       one parameter server's parts, put together; checkpoint_procedures.py and autoscaling_procedures.py have
              the controller's part in checkpoints, and how the number of servers follows the load
server_record what the controller knows of one server
failover      membership: which servers are up, which takes over, which shards move; the route
freezes       tables whose replicas do not change, because they are being split; resharding_procedures.py has the steps
actors        the servers as Dask workers and actors; server_procedures.py, table_procedures.py and
              function_procedures.py have the steps
run           the state of one run
runs          the frames of runs: trainers join, tick, meet, leave; run_procedures.py has the steps of their end
work_leases   the frames by which trainers lease batches
collectives   the results of allreduce, allgather, broadcast and barrier
procedures    what takes several steps, as generators that yield instructions; executor.py carries these out
seating       gives each trainer a thread of its own
============= ========================================================================================
"""

"""Everything that touches Dask's own processes and private interfaces.

============== ===================================================================================================
cordon         keeps ordinary tasks off the workers of servers; a task's key and run; all private names of Dask's
               scheduler
failed_tasks   failed tasks of dps in a worker's log
lost_scheduler a worker that has lost its scheduler: how to tell, and how its process joins another one
nanny          what servers have their nanny do: stop its memory monitor, go on after the loss of a scheduler
protocols      what dps uses of the scheduler, its workers and its tasks
processes      hosts, TLS, and which version of dps each process has
refusals       errors that come back from the scheduler as values
worker_ttl     workers are not removed because the scheduler itself stood still
workers        what the scheduler says of its workers
============== ===================================================================================================
"""

"""Everything that touches Dask's own processes and private interfaces.

============ =====================================================================================================
cordon       keeps ordinary tasks off the workers of servers; a task's key and run; all private names of Dask's
             scheduler
failed_tasks failed tasks of dps in a worker's log
protocols    what dps uses of the scheduler, its workers and its tasks
processes    hosts, TLS, and which version of dps each process has
refusals     errors that come back from the scheduler as values
workers      what the scheduler says of its workers
============ =====================================================================================================
"""

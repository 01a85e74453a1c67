"""The parties in one thread, on virtual time, with faults on demand; `dps.testing` gives it to users.

================= ============================================================================================
simulation.py     Simulation: the public face
faults.py         Faults: what goes wrong, as named numbers; Mischief carries it out
roles.py          the controller
server.py         the servers
journal.py        the controller's journal
schedulers.py     schedulers, one after another, and processes of servers that outlive them
beside.py         what a server does beside its loop: functions, large ops, files of checkpoints
executor.py       carries out the controller's procedures
disk.py           the store of checkpoints
trainers.py       SimTrainers: starts the trainers, and starts lost trainers again
channel.py        the clients' and trainers' end of a connection
endpoint.py       the controller's and servers' end of a connection
network.py        connections: order, delay, breaks, partitions
work.py           the work of servers and shards, as a test wants it
observers.py      what a test may watch: tables, answers, placements, records
world.py          time, parties, tasks
================= ============================================================================================
"""

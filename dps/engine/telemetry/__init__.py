"""Count, report, keep, diagnose.

Trainers and servers count their own work and send a report with ticks and heartbeats. The controller keeps the reports,
and rules find out from them which party is slow, and why.

================= ====================================================================
trainer_meter     a trainer's own counts: where its time went, calls, keys, bytes
server_meter      a server's own counts
reports           what travels: a trainer's report, a server's report
history           reports of a run's trainers, lately and in the whole run; other numbers over time
run_history       all that is kept of a run, as typed values for its report and timeline
hosts             what a process gets of its machine's processors, and how loaded the machines are
rates             one clock's cost, beside the others', and how much of that is chance
diagnosis         which party holds a run up, of what kind that is, and what helps
slow_servers      servers at which trainers lose time
overload          machines whose processors do not suffice
findings          a diagnosis in words, with its remedy
autostaleness     a staleness that lowers waiting and does not hurt the loss
run_telemetry     what the controller keeps of a run's reports
server_telemetry  what it keeps of a server's
shard_work        the work of each shard, which servers report by table
rebalance_report  what was done to even the load of servers out
snapshot          the state of a parameter server as typed values, which all views show
monitored         what the monitor reads of the controller's runs and membership
monitor           makes that state of all that is known
================= ====================================================================
"""

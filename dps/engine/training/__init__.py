"""The loop on each partition: trainers, their data and batches, and how they are started.

=============== =======================================================
trainer         Trainer: a client with a clock
participant     what a trainer tells and asks the controller
allreduce       large arrays combined between the trainers themselves, in a ring of connections
trainer_port    where a trainer listens to other trainers, and what one fetches of another
batches         partitions cut into batches, and the batches of each epoch
merging         values merged by key before they are sent
model_copy      rows kept and gradients gathered between two exchanges
pulled_rows     rows of a table as a batch needs them, each once
local_rows      rows that are changed in place, and pushed as differences
row_sums        rows summed by key, before they are sent
read_gate       where a trainer waits before it reads a table that has a staleness of its own
epochs          epochs that all trainers end at one clock
rows_ahead      the rows of batches, pulled while earlier batches are computed, and which of them are stale
leased_batches  batches leased in portions, this trainer's or another's
partition_peer  partitions that trainers on Spark lend each other
types           names for what passes through: data, partitions, JSON
data            what a user calls data, as partitions on workers, and which trainer takes which
dataframes      frames of polars, Arrow and others as pandas frames
localize        the unique feature ids of a batch, and the batch re-indexed to them
launch          ps.run: one trainer for each free thread
threads         the threads of a run, as the driver asks for them
tasks           the tasks of a run: one for each trainer
vacancies       seats that new trainers take while a run goes on
open_run        a run whose callers come from anywhere
lazy_tasks      the task of one partition of a lazy stage
lazy_reads      the task of one partition of ps.map, which only reads tables
progress_bar    a table of clocks in a notebook, a bar in a terminal
spark           Spark: the driver's side
spark_tasks     Spark: the Python workers' side
=============== =======================================================
"""

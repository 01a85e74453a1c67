"""What a caller holds: pull, push, add, assign, push_pull. No thread and no loop.

=========== ===============================================================================
verbs       the verbs, each with its signature, types and documentation
client      what carries them out
table       the handle of a table, which calls the client with the table's name
word_table  words to ids that the servers keep, and back
copy_reads  which copy answers pulls of a table that all copies may answer
reads       where a trainer waits for others before a read, if the table asks it to
scans       the rows of a keyed table in a range of keys, or the keys of all, piece after piece
forgotten   the keys of rows that went by themselves, batch after batch
shard_requests  requests that read something of one shard, sent again where it has moved
inputs      keys and values as users have them, as int64 keys and rows of the table's dtype
byte_rows   bytes of a fixed width as rows of uint8, and back
plain       the plain way of a call whose caller waits: one compiled step
cached_tables  pulls and pushes past the rows that a trainer's process keeps
merged_pushes  a trainer's pushes that wait until its process sums them
push_meetings  where the trainers of a process put them together
machine_meeting  where the processes of a machine do so with their sums
sum_choice  whether it pays to sum
row_cache   the rules of these rows: which of them a trainer may use
eviction    which of them go when others need their room
stamped_rows  the memory of such rows, and of those that are held back
wire_choice  the rules by which a trainer chooses how rows travel between machines
rows_under_way  rows that were asked for, until they are here and among these
comparisons  whether it pays to ask the servers which of them have changed
refreshed_rows  which of them have changed: the pull that asks, and what its answers say
requests    a table by its route; calls prepared, and what is wrong with them
route_changes  what servers have lost by a new route; and whether the controller is to be asked for it
functions   calls of functions on the servers: prepared on all, then committed
session     connections and routes; requests in order, and again where a server has failed
origin      under which number ops reach the servers, and the place of the next op
environment time and connections of a process
ticket      the right to call a parameter server; the future of a call on its way
=========== ===============================================================================
"""

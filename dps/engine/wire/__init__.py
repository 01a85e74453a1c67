"""How bytes travel: frames, the endpoint that listens, channels and links that connect.

=================== ======================================================
frames              the header of 64 bytes, and bodies
headers             typed views of the header, for kinds that are not about rows
table_sums          sums of pushes on their way between processes of a machine
changed_rows        the answer to a pull that wants only rows that have changed
frame_reader        whole frames out of bytes that arrive in any chunks
handshake           both sides' proof that they know the session secret
rights              which role may send which kind and flag
endpoint            the listening side: one thread, one loop
connection          the endpoint's end of the connection to one peer
plain_answers       answers to plain frames, made in one compiled step
channel             the connecting side: blocking, in the caller's thread
link                a connection that an endpoint opens to another endpoint
pool                idle channels, kept for the next client of a process
shared_memory       memory of a client and a server of one machine, for large answers
loans               memory of a client's caller, for those of a server in the same process
sockets             Unix sockets, TCP with keepalive, TLS
memory              buffers for large bodies, and the bound on their sum
departures          bytes leave at once, or together at the end of a turn of the loop
log_limit           a bound on warnings a second
protocols           what a role may ask of an endpoint, a connection and a link
messages            typed messages of runs, membership, placement, functions and drivers, as bytes and back
structs             types of messages are read before several threads decode them
remembered          values that travel once, and are known again by their hash
values              arguments and results of functions as bytes
bandwidth           the bytes a second that work in the background may take of a link
once                an object that several threads may close is closed once
=================== ======================================================
"""

"""How bytes travel: frames, the endpoint that listens, channels and links that connect.

=================== ======================================================
frames              the header of 64 bytes, and bodies
headers             typed views of the header, for kinds that are not about rows
frame_reader        whole frames out of bytes that arrive in any chunks
handshake           both sides' proof that they know the session secret
rights              which role may send which kind and flag
endpoint            the listening side: one thread, one loop
connection          the endpoint's end of the connection to one peer
plain_answers       answers to plain frames, made in one compiled step
channel             the connecting side: blocking, in the caller's thread
link                a connection that an endpoint opens to another endpoint
pool                idle channels, kept for the next client of a process
sockets             plain TCP and TLS underneath a channel
memory              buffers for large bodies, and the bound on their sum
direct              bytes that leave at once, past the event loop
coalescer           frames of one turn of the loop leave together
keepalive           TCP keepalive finds a peer whose machine is dead
log_limit           a bound on warnings a second
protocols           what a role may ask of an endpoint, a connection and a link
bodies              typed messages as the bodies of frames, and back
run_messages        the messages of runs: join, leave, lease, ...
membership_messages what servers tell the controller of themselves and of shards
function_messages   what a call of a function says beside its rows, and its answer
remembered          values that travel once, and are known again by their hash
values              arguments and results of functions as bytes
driver_messages     what drivers ask of the controller, and its answers
once                an object that several threads may close is closed once
=================== ======================================================
"""

"""The compiled way of a request: what a client sends and waits for, and the step in which a server answers.

call, part, form, meter, exchange and tick are the client's; request, service, gathering, forwards and answers are the
server's. frame, ring and polling are used by both. call.pyx, part.pyx, exchange.pyx, tick.pyx and service.pyx know
frames; exchange.pyx, tick.pyx and socket_calls.pyx know sockets.
"""

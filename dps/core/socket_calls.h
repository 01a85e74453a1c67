/* Calls of a socket that never block. No interpreter. */
#ifndef DPS_SOCKET_CALLS_H
#define DPS_SOCKET_CALLS_H

#include <stddef.h>
#include <sys/socket.h>
#include <sys/types.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

/* How many bytes the system has taken; 0 where it takes none now, or the connection is broken. */
static inline ssize_t dps_send(int fd, const void *buffer, size_t size) {
    const ssize_t sent = send(fd, buffer, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    return sent > 0 ? sent : 0;
}

#endif

/* Calls of a socket that never block, or not for long. No interpreter. */
#ifndef DPS_SOCKET_CALLS_H
#define DPS_SOCKET_CALLS_H

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <time.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

/* How many bytes the system has taken; 0 where it takes none now, or the connection is broken. */
static inline ssize_t dps_send(int fd, const void *buffer, size_t size) {
    const ssize_t sent = send(fd, buffer, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    return sent > 0 ? sent : 0;
}

/* How many bytes the system has taken within `*patience` nanoseconds, which the time of the waits is taken from. */
static inline ssize_t dps_send_soon(int fd, const char *buffer, size_t size, int64_t *patience) {
    ssize_t sent = dps_send(fd, buffer, size);
    while ((size_t)sent < size && *patience > 0) {
        struct timespec before, after, most = {(time_t)(*patience / 1000000000), *patience % 1000000000};
        struct pollfd wait = {fd, POLLOUT, 0};
        clock_gettime(CLOCK_MONOTONIC, &before);
        const int ready = ppoll(&wait, 1, &most, NULL);
        clock_gettime(CLOCK_MONOTONIC, &after);
        *patience -= (after.tv_sec - before.tv_sec) * (int64_t)1000000000 + after.tv_nsec - before.tv_nsec;
        const ssize_t more = ready > 0 ? dps_send(fd, buffer + sent, size - (size_t)sent) : 0;
        if (more == 0) {
            break;
        }
        sent += more;
    }
    return sent;
}

#endif

/* Reading and writing a socket that does not block, with waiting that polls before it sleeps. No interpreter. */
#ifndef DPS_EXCHANGE_H
#define DPS_EXCHANGE_H

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "frame.h"
#include "polling.h"

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

enum { DPS_BROKEN = -1, DPS_NOTHING = -2 };

static inline int dps_would_block(void) { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

/* Up to `size` bytes. It polls first, because to wake a sleeping core takes longer than a server needs to answer, and
 * then sleeps for up to `slice` milliseconds. The time of the wait is added to `waited`. */
static ssize_t dps_receive(int fd, void *buffer, size_t size, dps_polling *polling, int slice, int64_t *waited) {
    ssize_t got = recv(fd, buffer, size, MSG_DONTWAIT);
    if (got >= 0 || !dps_would_block()) {
        return got >= 0 ? got : DPS_BROKEN;
    }
    int64_t began = dps_now(), now = began;
    while (now - began < polling->now) {
        sched_yield(); /* another thread on this core may be the one that answers */
        got = recv(fd, buffer, size, MSG_DONTWAIT);
        if (got >= 0 || !dps_would_block()) {
            goto done;
        }
        now = dps_now();
    }
    polling->spent += now - began;
    struct pollfd wait = {fd, POLLIN, 0};
    poll(&wait, 1, slice);
    got = recv(fd, buffer, size, MSG_DONTWAIT);
    now = dps_now();
    goto adapt;
done:
    now = dps_now();
    polling->spent += now - began;
adapt:
    dps_adapt(polling, now - began);
    *waited += now - began;
    return got >= 0 ? got : dps_would_block() ? DPS_NOTHING : DPS_BROKEN;
}

/* Write what is left of the pieces, which it shortens by that. 1: all is written; DPS_NOTHING: the peer has taken
 * nothing more for `slice` milliseconds; DPS_BROKEN. */
static int dps_write(int fd, struct iovec *pieces, int count, int slice, int64_t *waited) {
    int first = 0;
    for (;;) {
        while (first < count && pieces[first].iov_len == 0) {
            first++;
        }
        if (first == count) {
            return 1;
        }
        struct msghdr message = {0};
        message.msg_iov = pieces + first;
        message.msg_iovlen = count - first;
        ssize_t sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0) {
            if (!dps_would_block()) {
                return DPS_BROKEN;
            }
            int64_t began = dps_now();
            struct pollfd wait = {fd, POLLOUT, 0};
            int ready = poll(&wait, 1, slice);
            *waited += dps_now() - began;
            if (ready <= 0) {
                return DPS_NOTHING;
            }
            continue;
        }
        for (int i = first; i < count && sent > 0; i++) {
            size_t part = (size_t)sent < pieces[i].iov_len ? (size_t)sent : pieces[i].iov_len;
            pieces[i].iov_base = (char *)pieces[i].iov_base + part;
            pieces[i].iov_len -= part;
            sent -= part;
        }
    }
}

#endif

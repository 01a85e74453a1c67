/* How long a wait polls before it sleeps: the rule, and the loop. See polling.pyx. */
#ifndef DPS_POLLING_H
#define DPS_POLLING_H

#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <time.h>

enum {
    DPS_AWAY = 20000, /* nanoseconds away from the core, after which another program is known to want it */
    DPS_REST = 64,    /* waits that do not poll after that */
};

/* How long the waits of one caller poll before they sleep, in nanoseconds: see polling.pyx. */
typedef struct {
    int64_t most, now;
    int64_t spent, away; /* processor time that polling took, and the time in which others had the core meanwhile */
    int32_t rest; /* waits that sleep at once, because another program wanted the core */
} dps_polling;

static inline int64_t dps_clock(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline int64_t dps_now(void) { return dps_clock(CLOCK_MONOTONIC); }

/* Adapt to a wait that has taken `waited` nanoseconds. */
static inline void dps_adapt(dps_polling *polling, int64_t waited) {
    const int64_t least = polling->most / 8;
    if (polling->rest > 0) {
        polling->rest--;
    } else if (waited > 2 * polling->most) {
        polling->now = polling->now / 2 < least ? 0 : polling->now / 2;
    } else if (polling->now < polling->most) {
        const int64_t more = polling->now < least ? least : 2 * polling->now;
        polling->now = more < polling->most ? more : polling->most;
    }
}

/* After a yield of the core at `before` that brought nothing, in a wait that polls since `began`: whether to poll on.
 * Linux lets a thread that yields wait for another one's whole slice, and wakes a thread that sleeps ahead of it. So
 * where another program wants the core, waits had better sleep. */
static inline int dps_poll_on(dps_polling *polling, int64_t began, int64_t before, int64_t now) {
    if (now - before > DPS_AWAY) {
        polling->now = 0;
        polling->rest = DPS_REST;
    }
    return now - began < polling->now;
}

/* Poll until one of the files that the epoll instance `fd` watches is ready, or the time is up: whether one is. The
 * thread's processor time is added to `spent`, and not the time in which it was away from the core. */
static inline int dps_watch(int fd, dps_polling *polling) {
    struct pollfd ready = {fd, POLLIN, 0};
    int found = poll(&ready, 1, 0) > 0;
    if (found) {
        return 1;
    }
    const int64_t spent = dps_clock(CLOCK_THREAD_CPUTIME_ID), began = dps_now();
    int64_t now = began, before = began;
    while (!found && dps_poll_on(polling, began, before, now)) {
        before = now;
        sched_yield(); /* another thread on this core may be the peer */
        found = poll(&ready, 1, 0) > 0;
        now = dps_now();
    }
    const int64_t ran = dps_clock(CLOCK_THREAD_CPUTIME_ID) - spent;
    polling->spent += ran;
    polling->away += now - began > ran ? now - began - ran : 0;
    return found;
}

#endif

/* How long a wait polls before it sleeps: the rule. See polling.pyx. */
#ifndef DPS_POLLING_H
#define DPS_POLLING_H

#include <stdint.h>

/* How long the waits of one caller poll before they sleep, in nanoseconds: see polling.pyx. */
typedef struct {
    int64_t most, now, spent;
} dps_polling;

/* Adapt to a wait that has taken `waited` nanoseconds. */
static inline void dps_adapt(dps_polling *polling, int64_t waited) {
    const int64_t least = polling->most / 8;
    if (waited > 2 * polling->most) {
        polling->now = polling->now / 2 < least ? 0 : polling->now / 2;
    } else if (polling->now < polling->most) {
        const int64_t more = polling->now < least ? least : 2 * polling->now;
        polling->now = more < polling->most ? more : polling->most;
    }
}

#endif

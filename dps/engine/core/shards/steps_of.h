/* Included by steps.h, once for each TYPE of numbers. ROOT is its square root; without one, there is no
   optimizer but Add and Assign. SUM adds numbers that C cannot add. */

#define OF_TYPE(name) DPS_JOIN(step_, name, TYPE)

static inline TYPE *OF_TYPE(row)(const dps_push *push, int64_t i) {
    TYPE *rows = push->rows;
    if (!push->index) {
        return rows + push->width * (push->start + i);
    }
    if (i + DPS_AHEAD < push->count) {
        const TYPE *next = rows + push->width * push->index[i + DPS_AHEAD];
        __builtin_prefetch(next, 1);
        if (push->width * sizeof(TYPE) > DPS_LINE) { /* its end, where its state and its record are */
            __builtin_prefetch((const char *)(next + push->width) - 1, 1);
        }
    }
    return rows + push->width * push->index[i];
}

static inline const TYPE *OF_TYPE(update)(const dps_push *push, int64_t i) {
    return (const TYPE *)push->updates + push->stride * i;
}

/* w <- w + g */
DPS_STEP OF_TYPE(add)(dps_push push, int64_t dim) {
    for (int64_t i = 0; i < push.count; i++) {
        TYPE *restrict w = OF_TYPE(row)(&push, i);
        const TYPE *restrict g = OF_TYPE(update)(&push, i);
        for (int64_t j = 0; j < dim; j++) {
#ifdef SUM
            w[j] = SUM(w[j], g[j]);
#else
            w[j] += g[j];
#endif
        }
    }
}
DPS_COMPILED(add)

/* w <- g */
DPS_STEP OF_TYPE(assign)(dps_push push, int64_t dim) {
    for (int64_t i = 0; i < push.count; i++) {
        TYPE *restrict w = OF_TYPE(row)(&push, i);
        const TYPE *restrict g = OF_TYPE(update)(&push, i);
        for (int64_t j = 0; j < dim; j++) {
            w[j] = g[j];
        }
    }
}
DPS_COMPILED(assign)

#ifdef ROOT

static inline TYPE OF_TYPE(clip)(TYPE x, TYPE limit) {
    TYPE above = -limit > x ? -limit : x;
    return limit < above ? limit : above;
}

/* argmin over x of (x - w)^2 / 2 + rate l1 |x| + rate l2 x^2 / 2 */
static inline TYPE OF_TYPE(proximal)(TYPE w, TYPE rate, TYPE l1, TYPE l2) {
    return (w - OF_TYPE(clip)(w, rate * l1)) / (1 + rate * l2);
}

DPS_STEP OF_TYPE(sgd)(dps_push push, int64_t dim) {
    const TYPE lr = (TYPE)push.numbers[0], l1 = (TYPE)push.numbers[1], l2 = (TYPE)push.numbers[2];
    for (int64_t i = 0; i < push.count; i++) {
        TYPE *restrict w = OF_TYPE(row)(&push, i);
        const TYPE *restrict g = OF_TYPE(update)(&push, i);
        for (int64_t j = 0; j < dim; j++) {
            w[j] -= lr * g[j];
        }
        if (l1 > 0 || l2 > 0) {
            for (int64_t j = 0; j < dim; j++) {
                w[j] = OF_TYPE(proximal)(w[j], lr, l1, l2);
            }
        }
    }
}
DPS_COMPILED(sgd)

DPS_STEP OF_TYPE(momentum)(dps_push push, int64_t dim) {
    const TYPE lr = (TYPE)push.numbers[0], keep = (TYPE)push.numbers[1];
    const int nesterov = push.numbers[2] > 0;
    const TYPE from_gradient = nesterov ? 1 : 0, from_velocity = nesterov ? keep : 1;
    for (int64_t i = 0; i < push.count; i++) {
        TYPE *row = OF_TYPE(row)(&push, i);
        TYPE *restrict w = row, *restrict v = row + push.state;
        const TYPE *restrict g = OF_TYPE(update)(&push, i);
        for (int64_t j = 0; j < dim; j++) {
            v[j] = keep * v[j] + g[j];
            w[j] -= lr * (from_gradient * g[j] + from_velocity * v[j]);
        }
    }
}
DPS_COMPILED(momentum)

DPS_STEP OF_TYPE(adagrad)(dps_push push, int64_t dim) {
    const TYPE lr = (TYPE)push.numbers[0], eps = (TYPE)push.numbers[1];
    const TYPE l1 = (TYPE)push.numbers[3], l2 = (TYPE)push.numbers[4];
    for (int64_t i = 0; i < push.count; i++) {
        TYPE *row = OF_TYPE(row)(&push, i);
        TYPE *restrict w = row, *restrict n = row + push.state;
        const TYPE *restrict g = OF_TYPE(update)(&push, i);
        for (int64_t j = 0; j < dim; j++) {
            n[j] = n[j] + g[j] * g[j];
            w[j] -= lr * g[j] / (ROOT(n[j]) + eps);
        }
        if (l1 > 0 || l2 > 0) {
            for (int64_t j = 0; j < dim; j++) {
                w[j] = OF_TYPE(proximal)(w[j], lr / (ROOT(n[j]) + eps), l1, l2);
            }
        }
    }
}
DPS_COMPILED(adagrad)

DPS_STEP OF_TYPE(rmsprop)(dps_push push, int64_t dim) {
    const TYPE lr = (TYPE)push.numbers[0], rho = (TYPE)push.numbers[1];
    const TYPE rest = (TYPE)(1.0 - push.numbers[1]), eps = (TYPE)push.numbers[2];
    for (int64_t i = 0; i < push.count; i++) {
        TYPE *row = OF_TYPE(row)(&push, i);
        TYPE *restrict w = row, *restrict n = row + push.state;
        const TYPE *restrict g = OF_TYPE(update)(&push, i);
        for (int64_t j = 0; j < dim; j++) {
            n[j] = rho * n[j] + rest * g[j] * g[j];
            w[j] -= lr * g[j] / (ROOT(n[j]) + eps);
        }
    }
}
DPS_COMPILED(rmsprop)

/* Adam and AdamW. A row has first moments, second moments, and in its last column the number of its steps. */
DPS_STEP OF_TYPE(adam)(dps_push push, int64_t dim) {
    const double lr = push.numbers[0];
    const TYPE beta1 = (TYPE)push.numbers[1], beta2 = (TYPE)push.numbers[2], eps = (TYPE)push.numbers[3];
    const TYPE rest1 = (TYPE)(1.0 - push.numbers[1]), rest2 = (TYPE)(1.0 - push.numbers[2]);
    const TYPE keep = push.parameters > 4 ? (TYPE)(1.0 - lr * push.numbers[4]) : 1; /* AdamW's weight decay */
    TYPE size = 0, scale = 0;
    int64_t known = 0; /* the number of steps for which size and scale were computed */
    for (int64_t i = 0; i < push.count; i++) {
        TYPE *row = OF_TYPE(row)(&push, i);
        TYPE *restrict w = row, *restrict m = row + push.state, *restrict v = row + push.state + dim;
        const TYPE *restrict g = OF_TYPE(update)(&push, i);
        v[dim] += 1; /* in float it stays at 2^24; the bias correction is 1 long before */
        const int64_t steps = (int64_t)v[dim];
        if (steps != known) {
            known = steps;
            size = (TYPE)(lr / (1.0 - dps_power(push.numbers[1], (uint64_t)steps)));
            scale = (TYPE)(1.0 / sqrt(1.0 - dps_power(push.numbers[2], (uint64_t)steps)));
        }
        for (int64_t j = 0; j < dim; j++) {
            m[j] = beta1 * m[j] + rest1 * g[j];
            v[j] = beta2 * v[j] + rest2 * g[j] * g[j];
            w[j] = keep * w[j] - size * m[j] / (ROOT(v[j]) * scale + eps);
        }
    }
}
DPS_COMPILED(adam)

DPS_STEP OF_TYPE(ftrl)(dps_push push, int64_t dim) {
    const TYPE per_alpha = (TYPE)(1.0 / push.numbers[0]), beta = (TYPE)push.numbers[1];
    const TYPE l1 = (TYPE)push.numbers[2], l2 = (TYPE)push.numbers[3];
    for (int64_t i = 0; i < push.count; i++) {
        TYPE *row = OF_TYPE(row)(&push, i);
        TYPE *restrict w = row, *restrict z = row + push.state, *restrict n = row + push.state + dim;
        const TYPE *restrict g = OF_TYPE(update)(&push, i);
        for (int64_t j = 0; j < dim; j++) {
            const TYPE total = n[j] + g[j] * g[j], root = ROOT(total);
            const TYPE slope = z[j] + g[j] - (root - ROOT(n[j])) * per_alpha * w[j];
            const TYPE solved = (OF_TYPE(clip)(slope, l1) - slope) / ((beta + root) * per_alpha + l2);
            z[j] = slope;
            n[j] = total;
            w[j] = total == 0 ? w[j] : solved; /* no gradient yet: the initial value stands */
        }
    }
}
DPS_COMPILED(ftrl)

#endif
#undef OF_TYPE

/* Included by initializers.h, once for each TYPE of numbers. Values are computed in double and rounded once, by
   STORE. STATE is the type of the optimizer's state. */

#ifndef STATE
#define STATE TYPE
#define STORE (TYPE)
#define IS_ITS_OWN
#endif

#define OF_TYPE(name) DPS_JOIN(dps_fill_, name, TYPE)

static inline __attribute__((always_inline)) void OF_TYPE(columns)(
    const dps_initializer *init, TYPE *row, int64_t key, int has_state
) {
    const double a = init->a, b = init->b;
    const int64_t dim = init->dim;
    const uint64_t stream = dps_mix((dps_mix(init->seed) ^ (uint64_t)key) - DPS_GAMMA);
    TYPE *values = row + init->first;
    STATE *state = (STATE *)(row + init->state);
    if (init->kind == DPS_UNIFORM) {
        for (int64_t j = 0; j < dim; j++) {
            const uint64_t hash = dps_mix(stream + (uint64_t)j * (2 * DPS_GAMMA));
            values[j] = STORE(a + (b - a) * (dps_top53(hash) * DPS_BY_2_53));
        }
    } else if (init->kind == DPS_NORMAL) {
        for (int64_t j = 0; j < dim; j++) {
            const uint64_t even = dps_mix(stream + (uint64_t)j * (2 * DPS_GAMMA));
            const uint64_t odd = dps_mix(stream + (uint64_t)j * (2 * DPS_GAMMA) + DPS_GAMMA);
            const double u = (dps_top53(even) + 1.0) * DPS_BY_2_53, v = (dps_top53(odd) + 0.5) * DPS_BY_2_53;
            values[j] = STORE(a + b * (sqrt(-2.0 * dps_logarithm(u)) * dps_sine(DPS_PI * (v - 0.5))));
        }
    } else {
        for (int64_t j = 0; j < dim; j++) {
            values[j] = STORE(a);
        }
    }
    if (has_state) {
        for (int64_t j = 0; j < init->slots; j++) {
            state[j] = (STATE)init->slot_start;
        }
    }
}

static inline __attribute__((always_inline)) void OF_TYPE(row)(
    const dps_row_start *start, const dps_filling *to, int64_t number, int64_t key
) {
    TYPE *row = (TYPE *)to->rows + to->width * number;
    for (int64_t n = 0; n < start->count; n++) {
        OF_TYPE(columns)(start->columns + n, row, key, to->width > to->dim);
    }
}

/* The rows that do not exist: row i for every i with index[i] < 0 */
DPS_CLONES
static void OF_TYPE(missing)(const dps_row_start *start, const dps_filling *to) {
    for (int64_t i = 0; i < to->count; i++) {
        if (to->index[i] < 0) {
            OF_TYPE(row)(start, to, i, to->keys[i]);
        }
    }
}

/* The rows just created: row index[i] for every i with index[i] >= first, or where the row was vacant. Returns 0 at a
   row that does not exist. */
DPS_CLONES
static int OF_TYPE(new)(const dps_row_start *start, const dps_filling *to) {
    for (int64_t i = 0; i < to->count; i++) {
        const int64_t r = to->index[i];
        if (r < to->first && !(to->vacant && r >= 0 && to->vacant[r])) {
            continue;
        }
        if (r >= to->capacity) {
            return 0;
        }
        OF_TYPE(row)(start, to, r, to->keys[i]);
    }
    return 1;
}

/* All rows: row i is that of key first + i. */
DPS_CLONES
static void OF_TYPE(range)(const dps_row_start *start, const dps_filling *to) {
    for (int64_t i = 0; i < to->capacity; i++) {
        OF_TYPE(row)(start, to, i, to->first + i);
    }
}

#undef OF_TYPE
#ifdef IS_ITS_OWN
#undef STATE
#undef STORE
#undef IS_ITS_OWN
#endif

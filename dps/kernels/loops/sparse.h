/* Products of a sparse batch (CSR) with dense weights, for each kind of values: all ones, float or double. */
#ifndef DPS_SPARSE_H
#define DPS_SPARSE_H

#include <stdint.h>

#include "clones.h"

typedef struct {
    const int64_t *ends; /* row i has the non-zeros ends[i] to ends[i + 1] - 1 */
    const uint32_t *indices; /* unsigned, because sign extension would cost an instruction at every access */
    const void *values; /* NULL: all ones */
    int64_t rows;
} dps_batch;

/* The loops for one kind of values; sparse_of.h says what each does. */
typedef struct {
    void (*margins)(const dps_batch *batch, const float *w, float b, int64_t start, int64_t stop, float *out);
    void (*gradient)(const dps_batch *batch, const float *residual, int64_t start, int64_t stop, float *out);
    void (*margins_of_many)(const dps_batch *batch, const float *w, const float *b, int64_t m, float *out);
    void (*gradient_of_many)(const dps_batch *batch, const float *residual, int64_t m, float *out);
} dps_loops;

#define DPS_JOIN3(a, b) a##_##b
#define DPS_JOIN(a, b) DPS_JOIN3(a, b)

#define KIND ones
#define TYPE float
#define VALUE(j) 1.0f
#include "sparse_of.h"
#undef KIND
#undef TYPE
#undef VALUE

#define VALUE(j) values[j]
#define KIND float
#define TYPE float
#include "sparse_of.h"
#undef KIND
#undef TYPE

#define KIND double
#define TYPE double
#include "sparse_of.h"
#undef KIND
#undef TYPE
#undef VALUE

#endif

/* Included by sparse.h, once for each KIND of values. VALUE(j) is that of non-zero j; TYPE that of the sums of a
   row. */

#define OF_KIND(name) DPS_JOIN(dps_##name, KIND)

/* out[i - start] = X[i] @ w + b for the rows start <= i < stop, one output.

   The non-zeros of a row are added up in three sums, so that the adds overlap: number j of a row goes to sum j % 3, and
   those that are left over after the last whole three go to the first sum. Compilers would make vectors of two or four
   sums, whose shuffles take longer than the adds. */
static void OF_KIND(margins)(
    const dps_batch *batch, const float *restrict w, float b, int64_t start, int64_t stop, float *restrict out
) {
    const uint32_t *restrict indices = batch->indices;
    const TYPE *restrict values = batch->values;
    (void)values;
    for (int64_t i = start; i < stop; i++) {
        int64_t j = batch->ends[i];
        const int64_t end = batch->ends[i + 1];
        TYPE sum0 = 0, sum1 = 0, sum2 = 0;
        for (; j + 3 <= end; j += 3) {
            sum0 += VALUE(j) * w[indices[j]];
            sum1 += VALUE(j + 1) * w[indices[j + 1]];
            sum2 += VALUE(j + 2) * w[indices[j + 2]];
        }
        for (; j < end; j++) {
            sum0 += VALUE(j) * w[indices[j]];
        }
        out[i - start] = (float)(((sum0 + sum1) + sum2) + b);
    }
}

/* out += X[start:stop].T @ residual, one output. */
static void OF_KIND(gradient)(
    const dps_batch *batch, const float *restrict residual, int64_t start, int64_t stop, float *restrict out
) {
    const uint32_t *restrict indices = batch->indices;
    const TYPE *restrict values = batch->values;
    (void)values;
    for (int64_t i = start; i < stop; i++) {
        const float r = residual[i - start];
        for (int64_t j = batch->ends[i]; j < batch->ends[i + 1]; j++) {
            out[indices[j]] = (float)(out[indices[j]] + r * VALUE(j));
        }
    }
}

/* z = b + the sum of w[k] over the non-zeros of row i: `width` columns of m, in their order. A constant width lets
   the sums stay in registers. */
static inline __attribute__((always_inline)) void OF_KIND(margins_of_columns)(
    const dps_batch *batch, int64_t i, const float *restrict w, const float *restrict b, int64_t m, int width,
    float *restrict z
) {
    const TYPE *values = batch->values;
    float sums[16];
    (void)values;
    for (int c = 0; c < width; c++) {
        sums[c] = b[c];
    }
    for (int64_t j = batch->ends[i]; j < batch->ends[i + 1]; j++) {
        const float *restrict row = w + m * batch->indices[j];
        const TYPE value = VALUE(j);
        for (int c = 0; c < width; c++) {
            sums[c] = (float)(sums[c] + value * row[c]);
        }
    }
    for (int c = 0; c < width; c++) {
        z[c] = sums[c];
    }
}

/* out[i] = X[i] @ w + b, m outputs. */
DPS_CLONES
static void OF_KIND(margins_of_many)(
    const dps_batch *batch, const float *restrict w, const float *restrict b, int64_t m, float *restrict out
) {
    for (int64_t i = 0; i < batch->rows; i++) {
        int64_t c = 0;
        for (; c + 16 <= m; c += 16) {
            OF_KIND(margins_of_columns)(batch, i, w + c, b + c, m, 16, out + m * i + c);
        }
        for (; c + 4 <= m; c += 4) {
            OF_KIND(margins_of_columns)(batch, i, w + c, b + c, m, 4, out + m * i + c);
        }
        if (c < m) {
            OF_KIND(margins_of_columns)(batch, i, w + c, b + c, m, (int)(m - c), out + m * i + c);
        }
    }
}

/* out += X.T @ residual, m outputs. */
DPS_CLONES
static void OF_KIND(gradient_of_many)(
    const dps_batch *batch, const float *restrict residual, int64_t m, float *restrict out
) {
    const TYPE *values = batch->values;
    (void)values;
    for (int64_t i = 0; i < batch->rows; i++) {
        const float *restrict r = residual + m * i;
        for (int64_t j = batch->ends[i]; j < batch->ends[i + 1]; j++) {
            float *restrict row = out + m * batch->indices[j];
            const TYPE value = VALUE(j);
            for (int64_t c = 0; c < m; c++) {
                row[c] = (float)(row[c] + value * r[c]);
            }
        }
    }
}

static const dps_loops OF_KIND(loops) = {
    OF_KIND(margins), OF_KIND(gradient), OF_KIND(margins_of_many), OF_KIND(gradient_of_many)
};

#undef OF_KIND

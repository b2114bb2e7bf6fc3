/* Packing rows by plans of bits, many at once: see lowrank_kv/stores/bit_plan.py, token_plans.py. */
#include <stdint.h>
#include <stdlib.h>

#include "pack.h"

/* The class of each row of all coefficients, (tokens, stride). */
void classify_rows(const struct importance *gate, const float *coef, int64_t stride, int64_t tokens, int64_t threads, int64_t *found) {
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens > 1)
    for (int64_t t = 0; t < tokens; t++) found[t] = class_of_row(gate, coef + t * stride);
}

/* Writes rows (tokens, stride) at their first bytes of `out`; class: NULL where all are of one plan. Returns 0, or 1 when there
 * is no memory. */
int pack_rows(const struct coder *const *coders, const float *coef, int64_t stride, int64_t tokens, const int64_t *class,
              const int64_t *start, int64_t threads, uint8_t *out) {
    float *units = malloc(threads * stride * sizeof(float));
    int32_t *codes = malloc(threads * stride * sizeof(int32_t));
    const int failed = !units || !codes;
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens > 1)
    for (int64_t thread = 0; thread < (failed ? 0 : threads); thread++)
        for (int64_t t = tokens * thread / threads; t < tokens * (thread + 1) / threads; t++)
            pack_row(coders[class ? class[t] : 0], coef + t * stride, units + thread * stride, codes + thread * stride, out + start[t]);
    free(codes);
    free(units);
    return failed;
}

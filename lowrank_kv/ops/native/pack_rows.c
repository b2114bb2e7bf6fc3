/* Packing rows by plans of bits, many at once: see lowrank_kv/stores/bit_plan.py, token_plans.py. */
#include <stdint.h>
#include <stdlib.h>

#include "pack.h"

/* Where rows of classes go: behind those that are there. */
struct rows_of_classes {
    uint8_t *stored, *packed;  /* bytes of all rows; classes of four rows to a byte, the first in its low bits */
    int32_t *mark;             /* the first byte of every ROWS_BETWEEN_MARKS rows */
    int64_t rows, bytes;       /* that are there */
};

/* The class of each row of all coefficients, (tokens, stride). */
void classify_rows(const struct importance *gate, const float *coef, int64_t stride, int64_t tokens, int64_t threads, int64_t *found) {
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens > 1)
    for (int64_t t = 0; t < tokens; t++) found[t] = class_of_row(gate, coef + t * stride);
}

/* Writes rows (tokens, stride) at their first bytes of `out`; class: NULL where all are of one plan. Returns 0, or 1 when there
 * is no memory. */
int pack_rows(const struct coder *const *coders, const float *coef, int64_t stride, int64_t tokens, const int64_t *class,
              const int64_t *start, int64_t threads, uint8_t *out) {
    const int64_t room = packing_room(stride);
    float *rooms = malloc(threads * room * sizeof(float));
    const int failed = !rooms;
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens > 1)
    for (int64_t thread = 0; thread < (failed ? 0 : threads); thread++)
        for (int64_t t = tokens * thread / threads; t < tokens * (thread + 1) / threads; t++)
            pack_row(coders[class ? class[t] : 0], coef + t * stride, rooms + thread * room, out + start[t]);
    free(rooms);
    return failed;
}

/* The bytes of rows of these classes. */
int64_t bytes_of_rows(const struct coder *const *coders, const int64_t *class, int64_t tokens) {
    int64_t bytes = 0;
    for (int64_t t = 0; t < tokens; t++) bytes += coders[class[t]]->row_bytes;
    return bytes;
}

/* Writes rows (tokens, stride), their classes and the marks among them behind those that are there. Counts stay as they are. Returns
 * 0, or 1 when there is no memory. */
int append_rows(const struct coder *const *coders, const float *coef, int64_t stride, int64_t tokens, const int64_t *class,
                int64_t threads, const struct rows_of_classes *into) {
    int64_t *start = malloc(tokens * sizeof(int64_t));
    if (!start) return 1;
    int64_t byte = into->bytes;
    for (int64_t t = 0; t < tokens; t++) {
        const int64_t row = into->rows + t;
        const int shift = row % 4 * 2;
        uint8_t *packed = into->packed + row / 4; /* of which bits beyond the rows say nothing */
        *packed = (shift ? *packed & ((1 << shift) - 1) : 0) | class[t] << shift;
        if (row % ROWS_BETWEEN_MARKS == 0) into->mark[row / ROWS_BETWEEN_MARKS] = byte;
        start[t] = byte;
        byte += coders[class[t]]->row_bytes;
    }
    const int failed = pack_rows(coders, coef, stride, tokens, class, start, threads, into->stored);
    free(start);
    return failed;
}

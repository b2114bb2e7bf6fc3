/* Coefficients of tokens' keys and values: keys are turned back, and both multiplied by a matrix. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"
#include "new_tokens.h"
#include "scores.h"
#include "store.h"

enum { TOGETHER = 24 }; /* tokens whose states stay in the first cache beside the matrix's rows */

static void load(const struct projecting *task, int64_t which, int64_t t, float *out) {
    const struct states *states = task->states + which;
    for (int64_t g = 0; g < task->num_kv_heads; g++, out += task->head_dim) {
        const uint8_t *head = states->start + t * states->token_stride + g * states->head_stride;
        if (task->kind == FLOAT32)
            memcpy(out, head, task->head_dim * sizeof(float));
        else
            for (int64_t d = 0; d < task->head_dim; d++) out[d] = from_bfloat16(((const uint16_t *)head)[d]);
        if (which == 0) rotate(task->pairs, task->cos + task->position[t] * task->pairs, task->sin + task->position[t] * task->pairs, out);
    }
}

int project_states(const struct projecting *task) {
    const int64_t width = task->num_kv_heads * task->head_dim, tiles = (task->tokens + TOGETHER - 1) / TOGETHER;
    float *memory = malloc(task->threads * TOGETHER * width * sizeof(float));
    if (!memory) return 1;
#pragma omp parallel for num_threads(task->threads) schedule(static) if (task->tokens > 1)
    for (int64_t thread = 0; thread < task->threads; thread++) {
        float *state = memory + thread * TOGETHER * width;
        for (int64_t i = 2 * tiles * thread / task->threads; i < 2 * tiles * (thread + 1) / task->threads; i++) {
            const int64_t which = i % 2, first = i / 2 * TOGETHER, left = task->tokens - first; /* each thread has as many keys as values */
            const int64_t count = left < TOGETHER ? left : TOGETHER, stride = task->stride[which];
            for (int64_t t = 0; t < count; t++) load(task, which, first + t, state + t * width);
            product(count, stride, width, state, width, 1, task->vectors[which], stride, task->coef[which] + first * stride, stride, 0);
        }
    }
    free(memory);
    return 0;
}

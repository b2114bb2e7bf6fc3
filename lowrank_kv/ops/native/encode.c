/* Encodes a few new tokens of a layer and appends them to stores. The rotation of keys is undone; then keys and values, each
 * on a thread of its own, are projected and gated, which gives their ranks. If the stores have room for all of them, they are
 * written after those of their ranks. */
#include <stdlib.h>
#include <string.h>

#include "common.h"
#include "store.h"

/* How a layer's keys, or its values, are encoded. */
struct gate {
    const float *basis;  /* (width, width) */
    const float *scale;  /* (width): of the coefficients before the gate */
    const float *weight; /* (width, width) */
    const float *bias;   /* (width) */
    const float *coef_scale; /* (width): coefficients are divided by it once the gate has seen them; NULL: they are not */
    int64_t granularity;
    float threshold;
};

struct states {
    const void *start; /* (batch, heads, tokens, head_dim) */
    int64_t batch_stride, head_stride, token_stride, dim_stride;
};

struct encoding {
    struct gate gates[2];   /* keys, values */
    const float *cos, *sin; /* (batch or 1, tokens, rotary): rotated the keys; NULL where they are not rotated */
    int64_t rope_stride;    /* from one sequence to the next; 0 where all share one rotation */
    int64_t rotary;
    struct states states[2];
    float *coef;          /* (2, batch, tokens, width), out */
    int64_t *rank;        /* (2, batch, tokens), out */
    struct store **stores; /* (2, batch): keys' and values' of each sequence; NULL: the tokens go nowhere */
    int64_t batch, tokens, heads, head_dim, threads;
    int64_t kind; /* of the states, FLOAT32 or BFLOAT16; every step rounds to it, as torch does: ranks depend on it */
};

/* The number of cutoffs i for which softmax(logit)[0] + … + softmax(logit)[i] exceeds the threshold; width is a multiple of
 * LANES. */
static int64_t kept(float *logit, int64_t width, float threshold) {
    float largest = logit[0], sum = 0, cumulative = 0;
    for (int64_t i = 1; i < width; i++) largest = logit[i] > largest ? logit[i] : largest;
    for (int64_t i = 0; i < width; i += LANES) *(vector *)(logit + i) = exponential(*(vector *)(logit + i) - largest);
    for (int64_t i = 0; i < width; i++) sum += logit[i];
    int64_t below = 0;
    for (; below < width; below++) {
        cumulative += logit[below] / sum;
        if (cumulative > threshold) break;
    }
    return width - below;
}

static inline float state_at(const struct encoding *task, const struct states *states, int64_t place) {
    if (task->kind == FLOAT32) return ((const float *)states->start)[place];
    return from_bfloat16(((const uint16_t *)states->start)[place]);
}

static void round_all(const struct encoding *task, int64_t count, float *values) {
    if (task->kind == BFLOAT16)
        for (int64_t i = 0; i < count; i++) values[i] = from_bfloat16(to_bfloat16(values[i]));
}

/* The states of all tokens, (batch, tokens, width), heads side by side and keys as they were before rotation. */
static void gather(const struct encoding *task, int which, float *restrict out) {
    const struct states *states = task->states + which;
    const int64_t half = task->rotary / 2, step = states->dim_stride;
    const int rotated = which == 0 && task->cos != NULL;
    for (int64_t b = 0; b < task->batch; b++)
        for (int64_t t = 0; t < task->tokens; t++) {
            const float *cos = rotated ? task->cos + b * task->rope_stride + t * task->rotary : NULL;
            const float *sin = rotated ? task->sin + b * task->rope_stride + t * task->rotary : NULL;
            for (int64_t g = 0; g < task->heads; g++, out += task->head_dim) {
                const int64_t state = b * states->batch_stride + g * states->head_stride + t * states->token_stride;
                for (int64_t d = 0; d < task->head_dim; d++) out[d] = state_at(task, states, state + d * step);
                for (int64_t f = 0; rotated && f < half; f++) {
                    /* out rotated by (cos, sin) is state; some rotary kinds scale both, so that the squares do not add up to 1 */
                    const float c1 = cos[f], s1 = sin[f], c2 = cos[f + half], s2 = sin[f + half], scale = 1 / (c1 * c2 + s1 * s2);
                    const float first = out[f], second = out[f + half];
                    out[f] = (first * c2 + second * s1) * scale;
                    out[f + half] = (second * c1 - first * s2) * scale;
                }
            }
        }
}

/* out (tokens, width) += states (tokens, width) · matrix (width, width). At every token the matrix comes from memory, and comes
 * more than twice as fast when read in order, row after row, than in blocks of rows and columns. */
static void multiply(int64_t tokens, int64_t width, const float *states, const float *matrix, float *out) {
    for (int64_t k = 0; k < width; k++, matrix += width)
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t i = 0; i < width; i += LANES)
                *(vector *)(out + t * width + i) += states[t * width + k] * *(const vector *)(matrix + i);
}

static void encode_side(const struct encoding *task, int which, float *scratch) {
    const struct gate *gate = task->gates + which;
    const int64_t tokens = task->batch * task->tokens, width = task->heads * task->head_dim;
    const int64_t granularity = gate->granularity, least = granularity < width ? granularity : width;
    int64_t *ranks = task->rank + which * tokens;
    float *coef = task->coef + which * tokens * width, *logit = scratch, *state = logit + tokens * width, *scaled = state;
    gather(task, which, state);
    round_all(task, tokens * width, state);
    memset(coef, 0, tokens * width * sizeof(float));
    multiply(tokens, width, state, gate->basis, coef);
    round_all(task, tokens * width, coef);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = 0; i < width; i++) scaled[t * width + i] = coef[t * width + i] * gate->scale[i];
    memset(logit, 0, tokens * width * sizeof(float));
    multiply(tokens, width, scaled, gate->weight, logit);
    round_all(task, tokens * width, logit);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = 0; i < width; i++) logit[t * width + i] += gate->bias[i];
    round_all(task, tokens * width, logit);
    for (int64_t t = 0; t < tokens; t++) {
        int64_t rank = kept(logit + t * width, width, gate->threshold);
        rank = (rank + granularity / 2) / granularity * granularity;
        ranks[t] = rank < least ? least : rank > width ? width : rank;
        for (int64_t i = 0; gate->coef_scale && i < width; i++) coef[t * width + i] /= gate->coef_scale[i];
    }
}

/* Appends all tokens to their stores and returns 1, or appends none and returns 0 if one store has no room for its tokens. */
static int append_all(const struct encoding *task) {
    const int64_t width = task->heads * task->head_dim;
    for (int64_t i = 0; i < 2 * task->batch; i++)
        if (!has_room(task->stores[i], task->rank + i * task->tokens, task->tokens)) return 0;
    for (int64_t i = 0; i < 2 * task->batch * task->tokens; i++)
        append(task->stores[i / task->tokens], task->coef + i * width, task->rank[i]);
    return 1;
}

/* Returns 1 if the tokens are in the stores, 0 if they are in none, and -1 when there is no memory. */
int64_t encode(const struct encoding *task) {
    const int64_t size = 2 * task->batch * task->tokens * task->heads * task->head_dim;
    float *scratch = aligned_alloc(64, (2 * size * sizeof(float) + 63) / 64 * 64);
    if (!scratch) return -1;
#pragma omp parallel for num_threads(task->threads) schedule(static, 1)
    for (int which = 0; which < 2; which++) encode_side(task, which, scratch + which * size);
    free(scratch);
    return task->stores && append_all(task);
}

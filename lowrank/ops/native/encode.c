/* A few new tokens of a layer on their way into a cache: keys are turned back to before their rotation, then keys and values
 * are projected, gated, told how many coefficients they keep and written behind those of their ranks, each on a thread of
 * its own. */
#include <stdlib.h>
#include <string.h>

#include "common.h"
#include "store.h"

struct side {
    const float *basis;  /* (width, width) */
    const float *scale;  /* (width): of the coefficients before the gate */
    const float *gate;   /* (width, width) */
    const float *bias;   /* (width) */
    const float *spread; /* (width): what coefficients are divided by once the gate has seen them; NULL: nothing */
    int64_t granularity;
    float threshold;
    float *coef;         /* (batch, tokens, width), out */
    int64_t *rank;       /* (batch, tokens), out */
    const float *states; /* (batch, heads, tokens, head_dim), of the strides below */
    int64_t batch_stride, head_stride, token_stride;
};

/* Where a sequence's tokens go. */
struct entrance {
    struct store *stores[2]; /* keys, values; NULL: nowhere */
    int64_t slot;            /* of its first token */
    int64_t appended[2];     /* tokens, out: those before the first for whose rank there was no room */
};

struct encoding {
    struct side sides[2];    /* keys, values */
    struct entrance *entrances; /* (batch) */
    int64_t batch, tokens, heads, head_dim, threads;
    const float *cos, *sin; /* (batch or 1, tokens, rotary): rotated the keys; NULL where they are not rotated */
    int64_t rope_stride;    /* from one sequence to the next; 0 where all share one rotation */
    int64_t rotary;
};

/* How many cutoffs i have softmax(logit)[0] + … + softmax(logit)[i] above the threshold; width is a
 * multiple of LANES. */
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

/* The states of all tokens, (batch, tokens, width), heads side by side and keys as they were before rotation. */
static void gather(const struct encoding *task, const struct side *side, int rotated, float *restrict out) {
    const int64_t half = task->rotary / 2;
    for (int64_t b = 0; b < task->batch; b++)
        for (int64_t t = 0; t < task->tokens; t++) {
            const float *cos = rotated ? task->cos + b * task->rope_stride + t * task->rotary : NULL;
            const float *sin = rotated ? task->sin + b * task->rope_stride + t * task->rotary : NULL;
            for (int64_t g = 0; g < task->heads; g++, out += task->head_dim) {
                const float *state = side->states + b * side->batch_stride + g * side->head_stride + t * side->token_stride;
                memcpy(out, state, task->head_dim * sizeof(float));
                for (int64_t f = 0; rotated && f < half; f++) {
                    /* out turned by (cos, sin) is state; some rotary kinds scale both, so that the squares do not add up to 1 */
                    const float c1 = cos[f], s1 = sin[f], c2 = cos[f + half], s2 = sin[f + half], scale = 1 / (c1 * c2 + s1 * s2);
                    out[f] = (state[f] * c2 + state[f + half] * s1) * scale;
                    out[f + half] = (state[f + half] * c1 - state[f] * s2) * scale;
                }
            }
        }
}

static void encode_side(const struct encoding *task, int which, float *scratch) {
    const struct side *side = task->sides + which;
    const int64_t tokens = task->batch * task->tokens, width = task->heads * task->head_dim;
    const int64_t granularity = side->granularity, least = granularity < width ? granularity : width;
    float *coef = side->coef, *logit = scratch, *state = logit + tokens * width, *scaled = state;
    gather(task, side, which == 0 && task->cos != NULL, state);
    product(tokens, width, width, state, width, 1, side->basis, width, coef, width, 0);
    for (int64_t t = 0; t < tokens; t++) {
        memcpy(logit + t * width, side->bias, width * sizeof(float));
        for (int64_t i = 0; i < width; i++) scaled[t * width + i] = coef[t * width + i] * side->scale[i];
    }
    product(tokens, width, width, scaled, width, 1, side->gate, width, logit, width, 1);
    for (int64_t t = 0; t < tokens; t++) {
        int64_t rank = kept(logit + t * width, width, side->threshold);
        rank = (rank + granularity / 2) / granularity * granularity;
        side->rank[t] = rank < least ? least : rank > width ? width : rank;
        for (int64_t i = 0; side->spread && i < width; i++) coef[t * width + i] /= side->spread[i];
    }
    for (int64_t b = 0; b < task->batch; b++) {
        struct entrance *entrance = task->entrances + b;
        int64_t t = 0;
        for (const int64_t *rank = side->rank + b * task->tokens; entrance->stores[which] && t < task->tokens; t++)
            if (!append(entrance->stores[which], coef + (b * task->tokens + t) * width, rank[t], entrance->slot + t)) break;
        entrance->appended[which] = t;
    }
}

/* Returns 0, or 1 when there is no memory. */
int encode(const struct encoding *task) {
    const int64_t size = 2 * task->batch * task->tokens * task->heads * task->head_dim;
    float *scratch = aligned_alloc(64, (2 * size * sizeof(float) + 63) / 64 * 64);
    if (!scratch) return 1;
#pragma omp parallel for num_threads(task->threads) schedule(static, 1)
    for (int which = 0; which < 2; which++) encode_side(task, which, scratch + which * size);
    free(scratch);
    return 0;
}

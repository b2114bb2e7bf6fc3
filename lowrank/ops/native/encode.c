/* A few new tokens of a layer on their way into a cache, in one pass: keys are turned back to before their rotation, then keys
 * and values are projected, gated and told how many coefficients they keep, each on a thread of its own. */
#include <string.h>

#include "common.h"

struct side {
    const float *basis;  /* (width, width) */
    const float *scale;  /* (width): of the coefficients before the gate */
    const float *gate;   /* (width, width) */
    const float *bias;   /* (width) */
    const float *states; /* (batch, heads, tokens, head_dim), of the strides below */
    int64_t batch_stride, head_stride, token_stride;
};

struct encoding {
    struct side sides[2];    /* keys, values */
    const float *cos, *sin;  /* (batch or 1, tokens, rotary): turn keys back; NULL where they are not rotated */
    float *coef;             /* (2, batch, tokens, width), out */
    int64_t *rank;           /* (2, batch, tokens), out */
    float *scratch;          /* (2, 2, batch, tokens, width) */
    int64_t rope_stride;     /* from one sequence to the next; 0 where all share one rotation */
    int64_t batch, tokens, heads, head_dim, rotary, threads, granularity;
    float threshold;
};

/* How many cutoffs i have softmax(logit)[0] + … + softmax(logit)[i] above the threshold. */
static int64_t kept(float *logit, int64_t width, float threshold) {
    float largest = logit[0], sum = 0, cumulative = 0;
    for (int64_t i = 1; i < width; i++) largest = logit[i] > largest ? logit[i] : largest;
#pragma omp simd
    for (int64_t i = 0; i < width; i++) logit[i] = exponential(logit[i] - largest);
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
                    out[f] = state[f] * cos[f] - state[f + half] * sin[f];
                    out[f + half] = state[f + half] * cos[f + half] + state[f] * sin[f + half];
                }
            }
        }
}

static void encode_side(const struct encoding *task, int which) {
    const struct side *side = task->sides + which;
    const int64_t tokens = task->batch * task->tokens, width = task->heads * task->head_dim;
    const int64_t granularity = task->granularity, least = granularity < width ? granularity : width;
    float *coef = task->coef + which * tokens * width, *logit = task->scratch + which * 2 * tokens * width;
    float *state = logit + tokens * width, *scaled = state;
    gather(task, side, which == 0 && task->cos != NULL, state);
    product(tokens, width, width, state, width, 1, side->basis, width, coef, width, 0);
    for (int64_t t = 0; t < tokens; t++) {
        memcpy(logit + t * width, side->bias, width * sizeof(float));
        for (int64_t i = 0; i < width; i++) scaled[t * width + i] = coef[t * width + i] * side->scale[i];
    }
    product(tokens, width, width, scaled, width, 1, side->gate, width, logit, width, 1);
    for (int64_t t = 0; t < tokens; t++) {
        int64_t rank = kept(logit + t * width, width, task->threshold);
        rank = (rank + granularity / 2) / granularity * granularity;
        task->rank[which * tokens + t] = rank < least ? least : rank > width ? width : rank;
    }
}

void encode(const struct encoding *task) {
#pragma omp parallel for num_threads(task->threads) schedule(static, 1)
    for (int which = 0; which < 2; which++) encode_side(task, which);
}

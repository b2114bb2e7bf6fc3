/* A few new tokens on their way into a cache: projected, gated and told how many coefficients they keep, in one pass. */
#include <string.h>

#include "common.h"

struct encoding {
    const float *state;  /* (tokens, width) */
    const float *basis;  /* (width, width) */
    const float *scale;  /* (width): of the coefficients before the gate */
    const float *gate;   /* (width, width) */
    const float *bias;   /* (width) */
    float *coef;         /* (tokens, width), out */
    float *scaled;       /* (tokens, width), scratch */
    float *logit;        /* (tokens, width), scratch */
    int64_t *rank;       /* (tokens), out */
    int64_t tokens, width; /* a multiple of LANES */
    int64_t granularity;
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

void encode(const struct encoding *task) {
    const int64_t width = task->width, tokens = task->tokens, granularity = task->granularity;
    product(tokens, width, width, task->state, width, 1, task->basis, width, task->coef, width, 0);
    for (int64_t t = 0; t < tokens; t++) {
        memcpy(task->logit + t * width, task->bias, width * sizeof(float));
        for (int64_t i = 0; i < width; i++) task->scaled[t * width + i] = task->coef[t * width + i] * task->scale[i];
    }
    product(tokens, width, width, task->scaled, width, 1, task->gate, width, task->logit, width, 1);
    for (int64_t t = 0; t < tokens; t++) {
        int64_t rank = kept(task->logit + t * width, width, task->threshold);
        rank = (rank + granularity / 2) / granularity * granularity;
        const int64_t least = granularity < width ? granularity : width;
        task->rank[t] = rank < least ? least : rank > width ? width : rank;
    }
}

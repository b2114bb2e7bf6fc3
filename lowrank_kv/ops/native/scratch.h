/* What a thread of decode attention holds, and what becomes of a token's scores. */
#pragma once
#include <float.h>
#include <math.h>
#include <stdint.h>

#include "ahead.h"
#include "common.h"
#include "slow.h"
#include "store.h"
#include "task.h"
#include "tiles.h"

enum { BLOCK = 24 }; /* tokens whose keys of one head, and partial sums of their scores, stay in the first cache */
enum { PAIRS_AT_ONCE = 2 * LANES }; /* room for pairs of tokens that are weighed together, BLOCK at most */
/* Slots, and bytes of their values, that a thread serves at once at most: they stay in its second cache. */
enum { STRETCH = 1024, STRETCH_BYTES = 1 << 19 };

/* The tokens of a stretch by their classes, or as of the first one where there are none. */
struct arranged {
    int64_t count[CLASSES];
    const uint8_t *row[CLASSES][STRETCH];
    int32_t slot[CLASSES][STRETCH];
};

/* One thread's own memory. */
struct scratch {
    float *coef;    /* (BLOCK, padded rank) */
    float *key;     /* (BLOCK, decoder_stride), of one head where it fills vectors; or partial sums */
    float *of_tiles; /* where tile registers are used: keys that they write, (BLOCK, depth); pass 2: weights, (lanes, PAIRS_AT_ONCE) */
    float *score;   /* (BLOCK, lanes); pass 2: weights */
    float *largest; /* (lanes): score so far */
    float *scaled;  /* (lanes): the same when the two sums were last scaled */
    float *sum;     /* (lanes): Σ softmax */
    float *latents; /* of each task (heads, padded rank of its values): Σ softmax · coefficients */
    float *latent;  /* of the running one */
    float *scores;  /* of the stretch (STRETCH, lanes) */
    int64_t start, end; /* the stretch's first slot, and the one behind its last */
    struct share *keys, *values; /* of the stretch, in each bucket */
    struct ahead ahead;          /* of its values */
    struct share *next_keys, *next_values; /* this thread's of the next task, in each bucket */
    struct ahead next[2];        /* of these */
    int64_t slot[BLOCK], place[BLOCK]; /* the latter as an offset in `cos` and `sin` */
    struct arranged arranged;    /* of the stretch, where they are served class by class */
    float *memory_of_nodes;      /* see slow.h */
    struct tiling tiling;
};

/* Prefetches some rows of the next task, which are at full rank and few: while values are summed, nothing else is. */
static inline void prefetch_next(struct scratch *scratch) {
    prefetch_some(scratch->next);
    prefetch_some(scratch->next + 1);
}

/* Prefetches the rotation of a slot's first `pairs` pairs, and returns its offset in `cos` and `sin`. */
static inline int64_t rotation_of(const struct task *task, int64_t slot, int64_t pairs) {
    const int64_t place = task->pairs * (task->place ? task->place[slot] : slot + task->first_place);
    for (int64_t f = 0; f < pairs; f += 16) { /* needed once the block is rebuilt */
        __builtin_prefetch(task->cos + place + f);
        __builtin_prefetch(task->sin + place + f);
    }
    return place;
}

/* Caps a token's scores, (lanes), and masks those of queries that may not see it. */
static void cap_and_mask(const struct task *task, int64_t slot, float *score) {
    for (int64_t m = 0; m < task->lanes; m++) {
        if (task->softcap) score[m] = task->softcap * tanhf(score[m] / task->softcap);
        if (task->mask && !task->mask[m % task->queries * task->mask_stride + slot]) score[m] = -FLT_MAX;
    }
}

/* Keeps a token's products with the queries as its scores; `largest` rises to the largest of each head's. */
static inline void keep_scores(const struct task *task, int64_t slot, float *found, struct scratch *scratch) {
    const int64_t lanes = task->lanes;
    float *score = scratch->scores + (slot - scratch->start) * lanes, *largest = scratch->largest;
    for (int64_t m = 0; m < lanes; m += LANES) *(vector *)(found + m) *= task->scaling;
    if (task->softcap || task->mask) cap_and_mask(task, slot, found);
    for (int64_t m = 0; m < lanes; m += LANES) {
        const vector new = *(vector *)(found + m), old = *(vector *)(largest + m);
        *(vector *)(score + m) = new;
        *(vector *)(largest + m) = where(new > old, new, old); /* NaN counts only in the sum */
    }
}

/* The weight of each score of a slot, which is added to `sum`. */
static inline vector weight_of(const struct task *task, int64_t slot, int64_t m, struct scratch *scratch) {
    const float *score = scratch->scores + (slot - scratch->start) * task->lanes;
    const vector each = exponential(*(const vector *)(score + m) - *(const vector *)(scratch->largest + m));
    *(vector *)(scratch->sum + m) += each;
    return each;
}

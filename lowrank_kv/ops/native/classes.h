/* The tokens of a stretch by their classes, or as of one where all have the same plan: served class by class, those of one rank
 * fill whole tiles, and what is read of a plan is read once for many rows. */
#pragma once
#include <stdint.h>
#include <string.h>

#include "plan.h"
#include "scratch.h"
#include "store.h"

static void arrange(const struct store *store, const struct share *shares, struct arranged *found) {
    const struct classes *classes = store->classes;
    int64_t count[CLASSES] = {0};
    for (int64_t p = 0; p < store->num_buckets; p++) {
        const struct bucket *bucket = store->buckets + p;
        if (shares[p].first == shares[p].end) continue;
        const uint8_t *row = row_at(store, bucket, shares[p].first);
        for (int64_t t = shares[p].first; t < shares[p].end; t++) {
            const int k = classes ? class_of(bucket, t) : 0;
            const int64_t i = count[k]++;
            found->row[k][i] = row;
            found->slot[k][i] = slot_of(store, bucket, t);
            row += classes ? classes->row_bytes[k] : bucket->row_bytes;
        }
    }
    memcpy(found->count, count, sizeof count);
}

/* Tokens of one class. */
struct alike {
    int64_t count, left, rank, row_bytes; /* left: how many more follow them */
    const struct plan *plan;
    const uint8_t *const *row;
    const int32_t *slot;
};

static struct alike tokens_of_class(const struct store *store, const struct arranged *arranged, int k) {
    const struct classes *classes = store->classes;
    struct alike found = {.count = arranged->count[k], .rank = store->buckets->rank, .row_bytes = store->buckets->row_bytes,
                          .plan = store->plan, .row = arranged->row[k], .slot = arranged->slot[k]};
    if (classes) found.rank = classes->rank[k], found.row_bytes = classes->row_bytes[k], found.plan = classes->plan[k];
    return found;
}

/* The next ones, at most so many. */
static struct alike next_tokens(const struct alike *of, int64_t first, int64_t most) {
    struct alike found = *of;
    found.row += first, found.slot += first;
    found.count = of->count - first < most ? of->count - first : most;
    found.left = of->count - first - found.count;
    return found;
}

/* Their coefficients as floats, divided by their scales, (count, padded(rank)), zero beyond the rank; the rows that follow are
 * prefetched. */
static struct rows rows_of_class(const struct alike *tokens, float *out) {
    const uint8_t *const *next = tokens->row + tokens->count;
    for (int64_t t = 0; t < tokens->count && t < tokens->left; t++) {
        __builtin_prefetch(next[t]);
        __builtin_prefetch(next[t] + tokens->row_bytes - 1);
    }
    read_alike(tokens->plan, tokens->row, tokens->count, tokens->row_bytes, tokens->rank, out);
    return (struct rows){out, padded(tokens->rank)};
}

/* Keeps the scores of tokens whose coefficients were divided by their scales. */
static inline void keep_scaled(const struct task *task, const struct alike *tokens, struct scratch *scratch) {
    const int64_t lanes = task->lanes;
    for (int64_t t = 0; t < tokens->count; t++) {
        const float scale = scale_of(tokens->row[t][0]);
        for (int64_t m = 0; m < lanes; m += LANES) *(vector *)(scratch->score + t * lanes + m) *= scale;
        keep_scores(task, tokens->slot[t], scratch->score + t * lanes, scratch);
    }
}

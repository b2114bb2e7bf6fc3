/* Prefetching coefficients.
 *
 * A core waits for some twenty lines of memory at a time. Coefficients that are prefetched a block at a time take nearly as
 * long as those that are not; prefetched a few lines at a time, between products that read no memory, they arrive meanwhile.
 */
#pragma once
#include <stdint.h>

#include "store.h"

enum { LINE = 64 }; /* bytes */

/* The part of some shares of a store that is still to be prefetched. */
struct ahead {
    const struct store *store;
    const struct share *shares; /* of each bucket */
    int64_t parts, lines;       /* lines at a time; 0: nothing is left */
    const uint8_t *next, *end;  /* of one part of one bucket */
    int64_t bucket, part;
};

/* Moves to the rows that follow the present ones. */
static void next_rows(struct ahead *ahead) {
    while (ahead->next >= ahead->end) {
        if (++ahead->part == ahead->parts) {
            ahead->part = 0;
            ahead->bucket++;
        }
        if (ahead->bucket == ahead->store->num_buckets) {
            ahead->lines = 0;
            return;
        }
        const struct bucket *bucket = ahead->store->buckets + ahead->bucket;
        const struct share share = ahead->shares[ahead->bucket];
        ahead->next = bucket->rows + ahead->part * bucket->part_bytes + share.first * bucket->row_bytes;
        ahead->end = ahead->next + (share.end - share.first) * bucket->row_bytes;
    }
}

/* Prefetches all of some shares in `calls` calls. */
static struct ahead ahead_of(const struct store *store, const struct share *shares, int64_t parts, int64_t calls) {
    int64_t bytes = 0;
    for (int64_t p = 0; p < store->num_buckets; p++) bytes += (shares[p].end - shares[p].first) * store->buckets[p].row_bytes * parts;
    struct ahead ahead = {store, shares, parts, calls ? bytes / LINE / calls + 1 : 0, NULL, NULL, 0, -1};
    if (ahead.lines) next_rows(&ahead);
    return ahead;
}

static inline __attribute__((always_inline)) void prefetch_some(struct ahead *ahead) {
    for (int64_t i = 0; i < ahead->lines; i++) __builtin_prefetch(ahead->next + i * LINE);
    ahead->next += ahead->lines * LINE;
    if (ahead->lines && ahead->next >= ahead->end) next_rows(ahead);
}

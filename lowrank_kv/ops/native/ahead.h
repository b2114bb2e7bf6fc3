/* Asking for coefficients before they are read.
 *
 * A core waits for some twenty lines of memory at a time. Asked for block by block, coefficients are waited for nearly as long
 * as if they were not; a few lines at a time, between products that read no memory, they come meanwhile.
 */
#pragma once
#include <stdint.h>

#include "store.h"

enum { LINE = 64 }; /* bytes */

/* What is still to be asked for of some shares of a store. */
struct ahead {
    const struct store *store;
    const struct share *shares; /* of each piece */
    int64_t parts, lines;       /* at a time; 0: nothing is left */
    const uint8_t *next, *end;  /* of one part of one piece */
    int64_t piece, part;
};

/* Goes on to the rows that follow the present ones. */
static void next_rows(struct ahead *ahead) {
    while (ahead->next >= ahead->end) {
        if (++ahead->part == ahead->parts) {
            ahead->part = 0;
            ahead->piece++;
        }
        if (ahead->piece == ahead->store->count) {
            ahead->lines = 0;
            return;
        }
        const struct piece *piece = ahead->store->pieces + ahead->piece;
        const struct share share = ahead->shares[ahead->piece];
        ahead->next = piece->rows + ahead->part * piece->part_bytes + share.first * piece->row_bytes;
        ahead->end = ahead->next + (share.end - share.first) * piece->row_bytes;
    }
}

/* All of some shares, asked for in so many calls. */
static struct ahead ahead_of(const struct store *store, const struct share *shares, int64_t parts, int64_t calls) {
    int64_t bytes = 0;
    for (int64_t p = 0; p < store->count; p++) bytes += (shares[p].end - shares[p].first) * store->pieces[p].row_bytes * parts;
    struct ahead ahead = {store, shares, parts, calls ? bytes / LINE / calls + 1 : 0, NULL, NULL, 0, -1};
    if (ahead.lines) next_rows(&ahead);
    return ahead;
}

static inline __attribute__((always_inline)) void ask(struct ahead *ahead) {
    for (int64_t i = 0; i < ahead->lines; i++) __builtin_prefetch(ahead->next + i * LINE);
    ahead->next += ahead->lines * LINE;
    if (ahead->lines && ahead->next >= ahead->end) next_rows(ahead);
}

/* Writing tokens into pages, and attention over them: see lowrank_kv/stores/arena.py for what a page holds. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"
#include "new_tokens.h"
#include "pack.h"
#include "store.h"
#include "task.h"

/* Where keys, or values, are in a page, in bytes from its start, and how their rows are packed. */
struct side {
    int64_t packed, mark, rows, sinks, end;
    int64_t rank, row_bytes; /* of a row; where rows differ, their mean */
    const struct plan *plan;        /* where all rows are of one class; else NULL */
    const struct classes *classes; /* else */
    const struct importance *gate; /* else */
    const struct coder *coder[CLASSES];
    int64_t kind, group_size, granularity; /* of ranked rows; else PLANNED. Granularity: 0 where all have one rank */
};

/* The pages of one layer. */
struct pages {
    uint8_t *start;
    int64_t stride, block; /* bytes, and tokens, of a page */
    int64_t num_sinks;     /* first tokens of a sequence, which are exact */
    int64_t num_kv_heads, head_dim, kind; /* FLOAT32 or BFLOAT16, of exact states */
    const int32_t *order;  /* 0, 1, … */
    struct side sides[2];  /* keys, values */
};

static inline int64_t itemsize(const struct pages *pages) { return pages->kind == FLOAT32 ? 4 : 2; }

/* -- writing ------------------------------------------------------------------------------------------------------- */

/* Where a token goes: the row, or the exact states of a sink; NULL where it has no page. */
struct target { uint8_t *at; uint16_t level; uint8_t is_sink; }; /* level: its class, or rank */

/* Whether rows differ in size. */
static inline int has_levels(const struct side *side) { return side->classes || side->granularity; }

static inline int64_t size_of_level(const struct side *side, int64_t level) {
    return side->classes ? side->classes->row_bytes[level] : ranked_bytes(side->kind, side->group_size, level);
}

static inline int64_t least_level(const struct side *side) {
    if (side->classes) return 0;
    return side->granularity < side->rank ? side->granularity : side->rank;
}

static inline int64_t next_cheaper(const struct side *side, int64_t level) {
    return side->classes ? level - 1 : (level - 1) / side->granularity * side->granularity;
}

static struct store store_of(const struct side *side, struct bucket *buckets, int64_t count) {
    return (struct store){.buckets = buckets, .num_buckets = count, .rank = side->rank, .kind = side->kind, .slot_bytes = 4,
                          .group_size = side->group_size, .plan = side->plan, .classes = side->classes, .ranked = side->kind != PLANNED};
}

static struct bucket page_rows(const struct side *side, uint8_t *page) {
    return (struct bucket){.rows = page + side->rows, .rank = side->rank, .row_bytes = side->row_bytes,
                           .packed = page + side->packed, .mark = has_levels(side) ? (const int32_t *)(page + side->mark) : NULL};
}

/* Finds the places of all tokens in their order, and notes the classes of those that have some. Returns how many rows are of
 * a cheaper class than they asked for, because their page is full. */
static int64_t place_all(const struct pages *pages, const struct side *side, const struct writing *task, struct target *target) {
    int64_t cut = 0, last_page = -1, last_row = -1, next = 0;
    const struct store store = store_of(side, NULL, 0);
    const int64_t least = least_level(side), least_bytes = has_levels(side) ? size_of_level(side, least) : 0;
    for (int64_t t = 0; t < task->tokens; t++) {
        target[t].at = NULL;
        if (task->slot[t] < 0) continue;
        const int is_first = task->position[t] < pages->block;
        const int64_t number = task->slot[t] / pages->block, skipped = is_first ? pages->num_sinks : 0;
        const int64_t row = task->slot[t] % pages->block - skipped;
        uint8_t *page = pages->start + number * pages->stride;
        target[t].is_sink = row < 0;
        if (row < 0) {
            target[t].at = page + side->sinks + (row + skipped) * pages->num_kv_heads * pages->head_dim * itemsize(pages);
            continue;
        }
        if (!has_levels(side)) {
            target[t].at = page + side->rows + row * side->row_bytes;
            target[t].level = side->kind == PLANNED ? 0 : side->rank;
            continue;
        }
        struct bucket rows = page_rows(side, page);
        if (number != last_page || row != last_row + 1)
            next = row ? row_at(&store, &rows, row - 1) - rows.rows + size_of_row(&store, &rows, row - 1) : 0;
        const int64_t budget = (is_first ? side->sinks : side->end) - side->rows;
        const int64_t reserved = (pages->block - skipped - row - 1) * least_bytes;
        int64_t level = target[t].level;
        while (level > least && next + size_of_level(side, level) + reserved > budget) level = next_cheaper(side, level);
        cut += level < target[t].level;
        target[t].level = level;
        target[t].at = rows.rows + next;
        if (side->classes) {
            uint8_t *packed = page + side->packed + row / 4;
            *packed = (*packed & ~(3 << row % 4 * 2)) | level << row % 4 * 2;
        } else {
            ((uint16_t *)(page + side->packed))[row] = level;
        }
        if (row % ROWS_BETWEEN_MARKS == 0) ((int32_t *)(page + side->mark))[row / ROWS_BETWEEN_MARKS] = next;
        next += size_of_level(side, level);
        last_page = number;
        last_row = row;
    }
    return cut;
}

static void write_one(const struct pages *pages, const struct side *side, const struct states *states, const float *coef, int64_t t,
                      const struct target *target, float *room) {
    if (!target->at) return;
    if (!target->is_sink) {
        if (side->kind == PLANNED)
            pack_row(side->coder[target->level], coef, room, target->at);
        else
            pack_ranked(side->kind, side->group_size, coef, target->level, target->at);
        return;
    }
    const int64_t bytes = pages->head_dim * itemsize(pages);
    for (int64_t g = 0; g < pages->num_kv_heads; g++)
        memcpy(target->at + g * bytes, states->start + t * states->token_stride + g * states->head_stride, bytes);
}

int64_t write_pages(const struct pages *pages, const struct writing *task) {
    const int64_t tokens = task->tokens, threads = task->threads, room = packing_room(pages->num_kv_heads * pages->head_dim);
    struct target *targets = malloc((2 * tokens + 1) * sizeof(struct target));
    float *rooms = malloc(threads * room * sizeof(float));
    int64_t cut = targets && rooms ? 0 : -1;
    if (!cut) {
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens > 1)
        for (int64_t i = 0; i < 2 * tokens; i++) {
            const struct side *side = pages->sides + i / tokens;
            const float *coef = task->coef[i / tokens] + i % tokens * task->coef_stride[i / tokens];
            const int64_t *rank = task->rank[i / tokens];
            targets[i].level = side->gate ? class_of_row(side->gate, coef) : rank ? rank[i % tokens] : 0;
        }
        for (int which = 0; which < 2; which++) cut += place_all(pages, pages->sides + which, task, targets + which * tokens);
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t thread = 0; thread < threads; thread++)
            for (int64_t i = 2 * tokens * thread / threads; i < 2 * tokens * (thread + 1) / threads; i++) {
                const int64_t which = i % 2, t = i / 2; /* keys take longer than values: each thread has as many of both */
                write_one(pages, pages->sides + which, task->states + which, task->coef[which] + t * task->coef_stride[which], t,
                          targets + which * tokens + t, rooms + thread * room);
            }
    }
    free(rooms);
    free(targets);
    return cut;
}

/* -- reading ------------------------------------------------------------------------------------------------------- */

/* The rows of a sequence's pages; `lengths` are theirs. Those of the first page follow its sinks. */
static void fill_buckets(const struct pages *pages, const struct side *side, const int32_t *table, int64_t rows,
                         struct bucket *buckets, int64_t *lengths) {
    for (int64_t page = 0, slot = 0; slot < rows; page++) {
        const int64_t most = pages->block - (page ? 0 : pages->num_sinks);
        lengths[page] = rows - slot < most ? rows - slot : most;
        buckets[page] = page_rows(side, pages->start + table[page] * pages->stride);
        buckets[page].length = lengths + page;
        buckets[page].capacity = most;
        buckets[page].slot = (void *)(pages->order + slot);
        slot += lengths[page];
    }
}

static inline int64_t pages_of(const struct pages *pages, int64_t rows) {
    return rows ? (rows + pages->num_sinks + pages->block - 1) / pages->block : 0;
}

/* The coefficients of a sequence's first `rows` rows, (rows, padded(rank)); which: 0 of keys, 1 of values. Returns 0, or 1 when
 * there is no memory. */
int read_pages(const struct pages *pages, int64_t which, const int32_t *table, int64_t rows, int64_t threads, float *out) {
    const struct side *side = pages->sides + which;
    const int64_t count = pages_of(pages, rows);
    struct bucket *buckets = malloc((count + 1) * sizeof(struct bucket));
    int64_t *lengths = malloc((count + 1) * sizeof(int64_t));
    if (buckets && lengths) {
        fill_buckets(pages, side, table, rows, buckets, lengths);
        const struct store store = store_of(side, buckets, count);
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t p = 0; p < count; p++)
            read_block(&store, buckets + p, 0, 0, lengths[p], out + (p ? p * pages->block - pages->num_sinks : 0) * padded(side->rank));
    }
    const int failed = !buckets || !lengths;
    free(lengths);
    free(buckets);
    return failed;
}

/* -- attention ----------------------------------------------------------------------------------------------------- */

/* Exact tokens of a sequence as a store: their heads are its parts. */
static struct store exact_store(const struct pages *pages, const struct states *states, struct bucket *bucket, int64_t *length) {
    *bucket = (struct bucket){.rows = (uint8_t *)states->start, .length = length, .capacity = *length, .rank = pages->head_dim,
                              .row_bytes = states->token_stride, .part_bytes = states->head_stride};
    return (struct store){.buckets = bucket, .num_buckets = 1, .rank = pages->head_dim, .kind = pages->kind};
}

/* One sequence's memory. */
struct sequence {
    struct bucket *buckets; /* of pages: keys, then values */
    int64_t *lengths;
    float *query;  /* (heads, new tokens, head_dim) */
    uint8_t *mask; /* (new tokens, new tokens) */
};

static int attend_one(const struct pages *pages, const struct querying *all, int64_t s, int64_t threads) {
    const int64_t start = all->first[s], queries = all->first[s + 1] - start, past = all->length[s] - (all->sees_itself ? queries : 0);
    int64_t sinks = past < pages->num_sinks ? past : pages->num_sinks, rows = past - sinks, count = pages_of(pages, rows), new = queries;
    const int64_t dim = pages->head_dim, bytes = dim * itemsize(pages);
    const int32_t *table = all->table + s * all->table_stride;
    struct sequence own = {malloc((2 * count + 1) * sizeof(struct bucket)), malloc((count + 1) * sizeof(int64_t)),
                           malloc(queries * all->heads * dim * sizeof(float)), malloc(queries * queries)};
    int failed = !own.buckets || !own.lengths || !own.query || !own.mask;
    if (!failed) {
        for (int64_t t = 0; t < queries; t++) {
            for (int64_t h = 0; h < all->heads; h++)
                memcpy(own.query + (h * queries + t) * dim, all->query + ((start + t) * all->heads + h) * dim, dim * sizeof(float));
            for (int64_t u = 0; u < queries; u++) own.mask[t * queries + u] = u <= t;
        }
        for (int which = 0; which < 2; which++)
            fill_buckets(pages, pages->sides + which, table, rows, own.buckets + which * count, own.lengths);
        const int paired = all->decoder_pairs && multiplies_pairs(dim, all->pairs);
        const struct task common = {
            .query = own.query, .depth = dim, .output = all->output + start * all->heads * dim, .num_kv_heads = pages->num_kv_heads,
            .heads = all->heads * queries, .lanes = padded(all->heads * queries), .head_dim = dim, .queries = queries,
            .threads = threads, .scaling = all->scaling, .softcap = all->softcap, .parts = pages->num_kv_heads};
        struct store store[6];
        struct bucket exact[4];
        struct task tasks[3];
        int n = 0;
        if (rows) {
            for (int which = 0; which < 2; which++) store[which] = store_of(pages->sides + which, own.buckets + which * count, count);
            tasks[n] = common;
            tasks[n].keys = store, tasks[n].values = store + 1, tasks[n].slots = rows, tasks[n].first_place = pages->num_sinks;
            tasks[n].cos = all->cos, tasks[n].sin = all->sin, tasks[n].pairs = all->pairs, tasks[n].slow = all->slow;
            tasks[n].parts = 1, tasks[n].decoder_columns = all->decoder_columns;
            tasks[n].decoder = paired ? all->decoder_pairs : all->decoder, tasks[n].value_decoder = all->value_decoder;
            tasks[n].decoder_stride = paired ? all->pairs_stride : all->decoder_stride, tasks[n].value_width = all->value_width;
            tasks[n++].paired = paired;
        }
        if (sinks) {
            for (int which = 0; which < 2; which++) {
                const struct states held = {pages->start + table[0] * pages->stride + pages->sides[which].sinks,
                                            pages->num_kv_heads * bytes, bytes};
                store[2 + which] = exact_store(pages, &held, exact + which, &sinks);
            }
            tasks[n] = common;
            tasks[n].keys = store + 2, tasks[n].values = store + 3, tasks[n++].slots = sinks;
        }
        if (all->sees_itself) {
            for (int which = 0; which < 2; which++) {
                struct states held = all->states[which];
                held.start += start * held.token_stride;
                store[4 + which] = exact_store(pages, &held, exact + 2 + which, &new);
            }
            tasks[n] = common;
            tasks[n].keys = store + 4, tasks[n].values = store + 5, tasks[n].slots = queries;
            tasks[n].mask = queries > 1 ? own.mask : NULL, tasks[n++].mask_stride = queries;
        }
        failed = attend(tasks, n);
    }
    free(own.mask);
    free(own.query);
    free(own.lengths);
    free(own.buckets);
    return failed;
}

int attend_pages(const struct pages *pages, const struct querying *all) {
    int failed = 0;
    if (all->count < all->threads) { /* few sequences: threads share each */
        for (int64_t i = 0; i < all->count; i++) failed |= attend_one(pages, all, all->served[i], all->threads);
        return failed;
    }
#pragma omp parallel for num_threads(all->threads) schedule(dynamic, 1) reduction(| : failed)
    for (int64_t i = 0; i < all->count; i++) failed |= attend_one(pages, all, all->served[i], 1);
    return failed;
}

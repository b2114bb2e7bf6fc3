/* Products of queries with keys that lie in memory, and with keys that are rebuilt and rotated in registers. */
#pragma once
#include <stdint.h>
#include <string.h>

#include "ahead.h"
#include "common.h"
#include "plan.h"
#include "tiles.h"

/* Turns the pairs (f, f + pairs) of one head's key. */
static void rotate(int64_t pairs, const float *restrict cos, const float *restrict sin, float *key) {
    float *restrict first = key, *restrict second = key + pairs;
#pragma omp simd
    for (int64_t f = 0; f < pairs; f++) {
        const float x = first[f], y = second[f];
        first[f] = x * cos[f] - y * sin[f];
        second[f] = y * cos[f] + x * sin[f];
    }
}

enum { ROWS_AHEAD = 24 }; /* states are prefetched this many rows before they are read */

/* Products of queries with the states of tokens, score[t][m]; `tokens` and `queries` are constants here, LANES in product
 * at most. */
static inline __attribute__((always_inline)) void score_tile(
    const int tokens, const int queries, int64_t depth, const float *query, int64_t query_stride, const float *state,
    int64_t stride, float *score, int64_t lanes) {
    vector sum[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < tokens * queries; i++) sum[i] = (vector){0};
    int64_t d = 0;
    for (; d + LANES <= depth; d += LANES)
#pragma GCC unroll 16
        for (int t = 0; t < tokens; t++) {
            __builtin_prefetch(state + (t + ROWS_AHEAD) * stride + d);
#pragma GCC unroll 16
            for (int m = 0; m < queries; m++)
                sum[t * queries + m] += *(const vector *)(query + m * query_stride + d) * *(const vector *)(state + t * stride + d);
        }
    const vector found = totals(tokens * queries, sum);
    for (int t = 0; t < tokens; t++) {
        memcpy(score + t * lanes, (const float *)&found + t * queries, queries * sizeof(float));
        for (int64_t i = d; i < depth; i++)
            for (int m = 0; m < queries; m++) score[t * lanes + m] += query[m * query_stride + i] * state[t * stride + i];
    }
}

/* The same for any number of tokens. */
static inline __attribute__((always_inline)) void score_tokens(
    const int queries, int64_t count, int64_t depth, const float *query, int64_t query_stride, const float *state,
    int64_t stride, float *score, int64_t lanes) {
    const int at_once = LANES / queries;
    int64_t t = 0;
    for (; t + at_once <= count; t += at_once)
        score_tile(at_once, queries, depth, query, query_stride, state + t * stride, stride, score + t * lanes, lanes);
    for (; at_once > 1 && t < count; t++)
        score_tile(1, queries, depth, query, query_stride, state + t * stride, stride, score + t * lanes, lanes);
}

#define SCORES(M)                                                                                                  \
    case M:                                                                                                     \
        score_tokens(M, count, depth, query + m * query_stride, query_stride, state, stride, score + m, lanes); \
        break;

/* The same for any number of queries. */
static void score_rows(int64_t queries, int64_t count, int64_t depth, const float *query, int64_t query_stride,
                       const float *state, int64_t stride, float *score, int64_t lanes) {
    for (int64_t m = 0; m < queries; m += LANES)
        switch (queries - m < LANES ? queries - m : LANES) {
            EACH_LANE(SCORES)
        }
}

/* -- keys that never leave the registers ---------------------------------------------------------------------------- */

/* Keys of one head that are rebuilt and rotated in all their dims. */
struct rebuilt {
    const float *coef, *decoder; /* (tokens, rank), (rank, depth) */
    const float *cos, *sin;      /* (places, depth / 2) */
    const int64_t *place;        /* (tokens): as an offset in them */
    int64_t coef_stride, decoder_stride, rank, depth;
    int64_t pairs;               /* those rebuilt, the first ones */
    int64_t paired;              /* whether `coef` and `decoder` hold pairs; ranks are then of these */
    float *key;                  /* (tokens, depth): written by tile registers, where they are used; else NULL */
    struct tiling *tiling;
};

/* Where keys that are rotated come from: products of floats, or of pairs, in registers, or memory. */
enum source { FLOATS, PAIRS, MEMORY };

/* HALF vectors of each half of a key, which are rotated together, are rebuilt at once: as many as leave registers for ROWS
 * tokens. */
enum { HALF = VECTORS / 2, STEP = HALF * LANES };

/* Whether keys of `depth` dims that `queries` queries share are rebuilt in registers. */
static inline int fits_registers(int64_t depth, int64_t queries) { return depth % (2 * STEP) == 0 && queries <= LANES; }

/* Dims d to d + half · LANES of both halves of the keys of some tokens, multiplied with the queries: for each token and query
 * a vector, whose lanes are still to be added. `tokens`, `half`, `adds` and `source` are constants here. */
static inline __attribute__((always_inline)) void rebuilt_tile(
    const int tokens, const int half, const int adds, const enum source source, const struct rebuilt *keys, int64_t first,
    int64_t d, int64_t queries, const float *query, float *partial) {
    const int64_t depth = keys->depth, far = depth / 2;
    const int vectors = 2 * half;
    vector key[TILE];
#pragma GCC unroll 32
    for (int i = 0; i < tokens * vectors; i++) {
        const int t = i / vectors, j = i % vectors;
        key[i] = (vector){0};
        if (source == MEMORY)
            key[i] = *(const vector *)(keys->key + (first + t) * depth + d + (j < half ? j * LANES : far + (j - half) * LANES));
    }
    if (source != MEMORY)
        accumulate(tokens, vectors, source == PAIRS, keys->rank, keys->coef + first * keys->coef_stride, keys->coef_stride, 1,
                   keys->decoder + d, keys->decoder_stride, far, key);
#pragma GCC unroll 16
    for (int t = 0; t < tokens; t++) {
        vector *own = key + t * vectors;
        const float *cosine = keys->cos + keys->place[first + t] + d, *sine = keys->sin + keys->place[first + t] + d;
#pragma GCC unroll 4
        for (int j = 0; j < half; j++) {
            const vector cos = *(const vector *)(cosine + j * LANES), x = own[j];
            const vector sin = *(const vector *)(sine + j * LANES), y = own[j + half];
            own[j] = x * cos - y * sin;
            own[j + half] = y * cos + x * sin;
        }
    }
    partial += first * queries * LANES;
    query += d;
    for (int64_t m = 0; m < queries; m++, query += depth, partial += LANES) {
        vector with[VECTORS]; /* read once for all tokens */
#pragma GCC unroll 4
        for (int j = 0; j < half; j++) {
            with[j] = *(const vector *)(query + j * LANES);
            with[j + half] = *(const vector *)(query + far + j * LANES);
        }
#pragma GCC unroll 16
        for (int t = 0; t < tokens; t++) {
            vector *found = (vector *)(partial + t * queries * LANES), sum = adds ? *found : (vector){0};
#pragma GCC unroll 4
            for (int j = 0; j < half; j++) {
                sum += key[t * vectors + j] * with[j];
                sum += key[t * vectors + j + half] * with[j + half];
            }
            *found = sum;
        }
    }
}

/* Adds the lanes of each token's vectors; `queries` is a constant of at most LANES. */
static inline __attribute__((always_inline)) void add_lanes(
    const int queries, int64_t count, const float *partial, float *score, int64_t lanes) {
    const int at_once = LANES / queries;
    for (int64_t t = 0; t < count; t += at_once) {
        vector sum[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < at_once * queries; i++) sum[i] = *(const vector *)(partial + (t * queries + i) * LANES);
        const vector found = totals(at_once * queries, sum);
        for (int i = 0; i < at_once && t + i < count; i++)
            memcpy(score + (t + i) * lanes, (const float *)&found + i * queries, queries * sizeof(float));
    }
}

/* Floats of `partial` below; 0 where keys are not rebuilt so. */
static inline int64_t partial_size(int64_t count, int64_t depth, int64_t queries) {
    return fits_registers(depth, queries) ? (count + LANES) * queries * LANES : 0;
}

/* Calls of `prefetch_some` while the keys of `count` tokens and `heads` heads are scored, of which so many pairs are rebuilt. */
static inline int64_t prefetch_calls(int64_t count, int64_t heads, int64_t pairs) { return count * heads * pairs / (STEP * ROWS); }

#define REBUILT_FROM(T, SOURCE, WIDTH)                                                                              \
    case T * 6 + SOURCE: rebuilt_tile(T, WIDTH, 0, SOURCE, keys, first, d, queries, query, partial); break; \
    case T * 6 + 3 + SOURCE: rebuilt_tile(T, WIDTH, 1, SOURCE, keys, first, d, queries, query, partial); break;
#define REBUILT(T) REBUILT_FROM(T, FLOATS, HALF) REBUILT_FROM(T, PAIRS, HALF) REBUILT_FROM(T, MEMORY, HALF)
#define NARROW_REBUILT(T) REBUILT_FROM(T, PAIRS, 1) REBUILT_FROM(T, MEMORY, 1)

/* Scores of `count` tokens, while coefficients of others are prefetched. */
static void rebuilt_scores(const struct rebuilt *keys, int64_t count, int64_t queries, const float *query, float *partial,
                           float *score, int64_t lanes, struct ahead *ahead) {
    /* Pairs that do not fill the registers of ROWS tokens leave room for more tokens. */
    const int half = keys->pairs % STEP ? 1 : HALF, most = ROWS * HALF / half;
    const int64_t tiles = (count + most - 1) / most; /* of about equal size */
    const enum source source = keys->key ? MEMORY : HAS_PAIRS && keys->paired ? PAIRS : FLOATS;
    for (int64_t dim = 0; source == MEMORY && dim < keys->depth; dim += keys->depth / 2)
        product_of_pairs(count, keys->pairs, keys->rank, keys->coef, keys->coef_stride, keys->decoder + dim, keys->decoder_stride,
                         keys->key + dim, keys->depth, keys->tiling);
    for (int64_t d = 0; d < keys->pairs; d += half * LANES)
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t first = count * tile / tiles, tokens = count * (tile + 1) / tiles - first;
            const int64_t variant = tokens * 6 + (d > 0) * 3 + source;
            prefetch_some(ahead);
            if (half == HALF) switch (variant) {
                REBUILT(1) REBUILT(2) REBUILT(3) REBUILT(4) REBUILT(5) REBUILT(6)
            }
#if HAS_PAIRS
            else switch (variant) {
                NARROW_REBUILT(1) NARROW_REBUILT(2) NARROW_REBUILT(3) NARROW_REBUILT(4) NARROW_REBUILT(5) NARROW_REBUILT(6)
                NARROW_REBUILT(7) NARROW_REBUILT(8) NARROW_REBUILT(9) NARROW_REBUILT(10) NARROW_REBUILT(11) NARROW_REBUILT(12)
            }
#endif
        }
    switch (queries) {
#define ADDED(M) case M: add_lanes(M, count, partial, score, lanes); break;
        EACH_LANE(ADDED)
#undef ADDED
    }
}

/* The same of more queries than share keys in registers: these are written to `key`, (count, depth), first. All their pairs
 * are rebuilt, from coefficients and a decoder in pairs. */
static void stored_scores(const struct rebuilt *keys, int64_t count, int64_t queries, const float *query, float *key,
                          float *score, int64_t lanes) {
    const int64_t depth = keys->depth;
    product_of_pairs(count, depth, keys->rank, keys->coef, keys->coef_stride, keys->decoder, keys->decoder_stride, key, depth,
                     keys->tiling);
    for (int64_t t = 0; t < count; t++)
        rotate(keys->pairs, keys->cos + keys->place[t], keys->sin + keys->place[t], key + t * depth);
    score_rows(queries, count, depth, query, depth, key, depth, score, lanes);
}

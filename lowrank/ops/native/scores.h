/* Products of queries with keys: of keys that lie in memory, and of keys that are rebuilt and turned on the way. */
#pragma once
#include <stdint.h>
#include <string.h>

#include "common.h"

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
        for (int t = 0; t < tokens; t++)
#pragma GCC unroll 16
            for (int m = 0; m < queries; m++)
                sum[t * queries + m] += *(const vector *)(query + m * query_stride + d) * *(const vector *)(state + t * stride + d);
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
            SCORES(1) SCORES(2) SCORES(3) SCORES(4)
#if VECTOR_BYTES >= 32
            SCORES(5) SCORES(6) SCORES(7) SCORES(8)
#endif
#if VECTOR_BYTES >= 64
            SCORES(9) SCORES(10) SCORES(11) SCORES(12) SCORES(13) SCORES(14) SCORES(15) SCORES(16)
#endif
        }
}

/* -- keys that never leave the registers ---------------------------------------------------------------------------- */

/* (places, pairs) each. */
struct turns { const float *cos, *sin; };

/* One head's keys of some tokens: rebuilt, turned in all their dims and multiplied with the queries. For each token and
 * query a vector, whose lanes are still to be added; `tokens` and `vectors`, those of a head, are constants here. */
static inline __attribute__((always_inline)) void turned_tile(
    const int tokens, const int vectors, int64_t rank, const float *coef, int64_t coef_stride, const float *decoder,
    int64_t decoder_stride, struct turns turns, const int64_t *place, int64_t queries, const float *query, float *partial) {
    const int half = vectors / 2;
    vector key[TILE];
#pragma GCC unroll 32
    for (int i = 0; i < tokens * vectors; i++) key[i] = (vector){0};
    accumulate(tokens, vectors, rank, coef, coef_stride, 1, decoder, decoder_stride, key);
#pragma GCC unroll 16
    for (int t = 0; t < tokens; t++) {
        vector *own = key + t * vectors;
#pragma GCC unroll 4
        for (int j = 0; j < half; j++) {
            const vector cos = *(const vector *)(turns.cos + place[t] + j * LANES), x = own[j];
            const vector sin = *(const vector *)(turns.sin + place[t] + j * LANES), y = own[j + half];
            own[j] = x * cos - y * sin;
            own[j + half] = y * cos + x * sin;
        }
        for (int64_t m = 0; m < queries; m++, query += vectors * LANES, partial += LANES) {
            vector sum = own[0] * *(const vector *)query;
#pragma GCC unroll 8
            for (int j = 1; j < vectors; j++) sum += own[j] * *(const vector *)(query + j * LANES);
            *(vector *)partial = sum;
        }
        query -= queries * vectors * LANES;
    }
}

/* Adds the lanes of each token's vectors; `queries` is a constant of at most LANES. */
static inline __attribute__((always_inline)) void add_lanes(const int queries, int64_t count, const float *partial, float *score,
                                                            int64_t lanes) {
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

/* Tokens whose keys fill the registers, of heads of `depth` dims; 0 where there are no such tiles. */
static inline int64_t tokens_at_once(int64_t depth) {
    switch (depth) {
    case 2 * LANES: return 6;
#if defined(HAS_32_REGISTERS)
    case 4 * LANES: return 6;
    case 8 * LANES: return 3;
#endif
    default: return 0;
    }
}

/* Floats of `partial` below; 0 where :scores_in_registers does not serve. */
static inline int64_t partial_size(int64_t count, int64_t depth, int64_t queries) {
    return queries <= LANES && tokens_at_once(depth) ? (count + LANES) * queries * LANES : 0;
}

/* Scores of `count` tokens whose rebuilt keys are turned by the angles at `place`. */
static void scores_in_registers(int64_t count, int64_t depth, int64_t rank, const float *coef, int64_t coef_stride,
                                const float *decoder, int64_t decoder_stride, struct turns turns, const int64_t *place,
                                int64_t queries, const float *query, float *partial, float *score, int64_t lanes) {
    const int64_t most = tokens_at_once(depth), tiles = (count + most - 1) / most; /* of about equal size */
    for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t t = count * tile / tiles, tokens = count * (tile + 1) / tiles - t;
        switch (depth / LANES * 8 + tokens) {
#define TURNED(V, T)                                                                                                    \
    case V * 8 + T:                                                                                                     \
        turned_tile(T, V, rank, coef + t * coef_stride, coef_stride, decoder, decoder_stride, turns, place + t, queries, \
                    query, partial + t * queries * LANES);                                                              \
        break;
            TURNED(2, 1) TURNED(2, 2) TURNED(2, 3) TURNED(2, 4) TURNED(2, 5) TURNED(2, 6)
#if defined(HAS_32_REGISTERS)
            TURNED(4, 1) TURNED(4, 2) TURNED(4, 3) TURNED(4, 4) TURNED(4, 5) TURNED(4, 6)
            TURNED(8, 1) TURNED(8, 2) TURNED(8, 3)
#endif
#undef TURNED
        }
    }
    switch (queries) {
#define ADDED(M) case M: add_lanes(M, count, partial, score, lanes); break;
        ADDED(1) ADDED(2) ADDED(3) ADDED(4)
#if VECTOR_BYTES >= 32
        ADDED(5) ADDED(6) ADDED(7) ADDED(8)
#endif
#if VECTOR_BYTES >= 64
        ADDED(9) ADDED(10) ADDED(11) ADDED(12) ADDED(13) ADDED(14) ADDED(15) ADDED(16)
#endif
#undef ADDED
    }
}

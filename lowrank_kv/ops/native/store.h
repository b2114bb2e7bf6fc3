/* A store of coefficients: buckets of one rank each, as floats, as integers with scales, or packed by a plan of bits. */
#pragma once
#include <stdint.h>
#include <string.h>

#include "common.h"
#include "plan.h"

enum kind { FLOAT32, BFLOAT16, INT8, INT4, PLANNED };

/* Tokens of one rank. If heads are compressed separately, each part's coefficients lie `part_bytes` after those before. */
struct bucket {
    uint8_t *rows;         /* (parts, capacity, row_bytes) */
    const uint8_t *scales; /* integers: (parts, capacity, 2K) bfloat16, K steps and then K least values */
    void *slot;            /* each token's row in the scores, rising; NULL: 0, 1, … */
    int64_t *length;       /* tokens; Python reads the same number */
    int64_t capacity, rank, row_bytes, part_bytes, scale_part_bytes;
    /* Where rows are of classes or of ranks of their own, else NULL: */
    const uint8_t *packed; /* classes of four rows to a byte, the first in its low bits; ranks as uint16 */
    const int32_t *mark;   /* the first byte of every ROWS_BETWEEN_MARKS rows */
};

/* Rows whose plans differ: they lie one after another, each with the bytes of its class. */
enum { CLASSES = 4, ROWS_BETWEEN_MARKS = 32 };
struct classes {
    const struct plan *plan[CLASSES];
    int64_t rank[CLASSES], row_bytes[CLASSES];
};

struct store {
    struct bucket *buckets;
    int64_t num_buckets;
    int64_t *length;    /* tokens of all buckets, and the next one's slot; NULL if nothing is appended */
    int64_t rank;       /* the largest; with several parts, the rows of the decoder of each */
    int32_t kind;       /* of the rows */
    int32_t slot_bytes; /* 2, 4 or 8 */
    int64_t group_size; /* integers: coefficients that share a scale; 0 when all of a row do */
    const struct plan *plan; /* of planned rows that are all of one class */
    const struct classes *classes; /* of others; NULL where there are none */
    int64_t ranked; /* whether floats, or scales and then integers, lie one row behind another, of ranks of their own where
                     * buckets have marks; `rank` of the bucket is then the largest */
};

/* Bytes of such a row, which are even. */
static inline int64_t ranked_bytes(int32_t kind, int64_t group_size, int64_t rank) {
    if (kind == FLOAT32 || kind == BFLOAT16) return rank * (kind == FLOAT32 ? 4 : 2);
    const int64_t groups = group_size ? (rank + group_size - 1) / group_size : 1, codes = kind == INT8 ? rank : (rank + 1) / 2;
    return 4 * groups + codes + codes % 2;
}

static inline int class_of(const struct bucket *bucket, int64_t token) {
    return bucket->packed[token / 4] >> token % 4 * 2 & 3;
}

static inline int64_t rank_of(const struct bucket *bucket, int64_t token) {
    return bucket->mark ? ((const uint16_t *)bucket->packed)[token] : bucket->rank;
}

/* Bytes of a token's row. */
static inline int64_t size_of_row(const struct store *store, const struct bucket *bucket, int64_t token) {
    if (store->classes) return store->classes->row_bytes[class_of(bucket, token)];
    return store->ranked ? ranked_bytes(store->kind, store->group_size, rank_of(bucket, token)) : bucket->row_bytes;
}

/* Where the row of a token of one part begins. */
static const uint8_t *row_at(const struct store *store, const struct bucket *bucket, int64_t token) {
    if (!bucket->mark) return bucket->rows + token * bucket->row_bytes;
    int64_t i = token / ROWS_BETWEEN_MARKS * ROWS_BETWEEN_MARKS;
    const uint8_t *row = bucket->rows + bucket->mark[token / ROWS_BETWEEN_MARKS];
    for (; i < token; i++) row += size_of_row(store, bucket, i);
    return row;
}

/* The largest rank of tokens `first` to `first + count`. */
static int64_t largest_rank(const struct store *store, const struct bucket *bucket, int64_t first, int64_t count) {
    if (!store->ranked || !bucket->mark) return bucket->rank;
    int64_t largest = 0;
    for (int64_t t = first; t < first + count; t++) largest = rank_of(bucket, t) > largest ? rank_of(bucket, t) : largest;
    return largest;
}

static inline int64_t slot_of(const struct store *store, const struct bucket *bucket, int64_t token) {
    if (!bucket->slot) return token;
    switch (store->slot_bytes) {
    case 2: return ((const int16_t *)bucket->slot)[token];
    case 4: return ((const int32_t *)bucket->slot)[token];
    default: return ((const int64_t *)bucket->slot)[token];
    }
}

/* Whether the buckets, in order of rank, have room for tokens of these ranks, and their slots can be written. */
int has_room(const struct store *store, const int64_t *ranks, int64_t tokens);

/* Writes one row after those of its rank, and its slot beside it; returns 1, or 0 if there is no room for it. The buckets are
 * in order of rank, have slots and one part, and hold floats or bfloat16. */
int append(struct store *store, const float *coef, int64_t rank);

/* -- reading coefficients ---------------------------------------------------------------------------------------- */

static void dequantize(const struct store *store, const uint8_t *row, const uint16_t *scales, int64_t rank, float *out) {
    const int64_t size = store->group_size ? store->group_size : rank, num_groups = (rank + size - 1) / size;
    if (store->kind == INT8) {
        for (int64_t r = 0; r < rank; r++) out[r] = row[r];
    } else { /* the first half of a row in the low bits, the second in the high ones */
        const int64_t half = (rank + 1) / 2;
        for (int64_t r = 0; r < half; r++) out[r] = row[r] & 15;
        for (int64_t r = half; r < rank; r++) out[r] = row[r - half] >> 4;
    }
    for (int64_t k = 0; k < num_groups; k++) {
        const float step = from_bfloat16(scales[k]), least = from_bfloat16(scales[num_groups + k]);
        const int64_t end = (k + 1) * size < rank ? (k + 1) * size : rank;
        for (int64_t r = k * size; r < end; r++) out[r] = out[r] * step + least;
    }
}

/* A row whose scales stand before its coefficients. */
static void read_ranked(const struct store *store, const uint8_t *row, int64_t rank, float *out) {
    if (store->kind == FLOAT32) {
        memcpy(out, row, rank * sizeof(float));
    } else if (store->kind == BFLOAT16) {
        for (int64_t r = 0; r < rank; r++) out[r] = from_bfloat16(((const uint16_t *)row)[r]);
    } else {
        const int64_t groups = store->group_size ? (rank + store->group_size - 1) / store->group_size : 1;
        dequantize(store, row + 4 * groups, (const uint16_t *)row, rank, out);
    }
}

/* Tokens `first` to `first + count` of a bucket's part as floats, (count, padded(rank)), zero beyond the rank. */
static void read_block(const struct store *store, const struct bucket *bucket, int64_t part, int64_t first, int64_t count,
                       float *out) {
    const int64_t rank = bucket->rank, width = padded(rank);
    if (!rank) return;
    if (store->classes) {
        const struct classes *classes = store->classes;
        const uint8_t *row = row_at(store, bucket, first);
        for (int64_t t = 0; t < count; t++, out += width) {
            const int k = class_of(bucket, first + t);
            read_row(classes->plan[k], row, classes->row_bytes[k], classes->rank[k], scale_of(row[0]), out);
            for (int64_t r = classes->rank[k]; r < width; r++) out[r] = 0;
            row += classes->row_bytes[k];
        }
        return;
    }
    if (store->ranked) {
        const uint8_t *row = row_at(store, bucket, first);
        for (int64_t t = 0; t < count; t++, out += width) {
            const int64_t own = rank_of(bucket, first + t);
            read_ranked(store, row, own, out);
            for (int64_t r = own; r < width; r++) out[r] = 0;
            row += ranked_bytes(store->kind, store->group_size, own);
        }
        return;
    }
    const int64_t num_groups = store->group_size ? (rank + store->group_size - 1) / store->group_size : 1;
    for (int64_t t = 0; t < count; t++, out += width) {
        const uint8_t *row = bucket->rows + part * bucket->part_bytes + (first + t) * bucket->row_bytes;
        const uint8_t *scales = bucket->scales + part * bucket->scale_part_bytes;
        switch (store->kind) {
        case FLOAT32: memcpy(out, row, rank * sizeof(float)); break;
        case BFLOAT16:
            for (int64_t r = 0; r < rank; r++) out[r] = from_bfloat16(((const uint16_t *)row)[r]);
            break;
        case PLANNED:
            read_row(store->plan, row, bucket->row_bytes, rank, scale_of(row[0]), out);
            break;
        default: dequantize(store, row, (const uint16_t *)scales + (first + t) * 2 * num_groups, rank, out);
        }
        for (int64_t r = rank; r < width; r++) out[r] = 0;
    }
}

/* The same without copying floats: where the first row starts, and the floats from one row to the next. What lies beyond the
 * rank is undefined. */
struct rows { const float *start; int64_t stride; };

static struct rows rows_of(const struct store *store, const struct bucket *bucket, int64_t part, int64_t first, int64_t count,
                           float *scratch) {
    if (store->kind == FLOAT32 && !store->ranked)
        return (struct rows){(const float *)(bucket->rows + part * bucket->part_bytes + first * bucket->row_bytes),
                             bucket->row_bytes / (int64_t)sizeof(float)};
    read_block(store, bucket, part, first, count, scratch);
    return (struct rows){scratch, padded(bucket->rank)};
}

/* -- dividing the work ------------------------------------------------------------------------------------------- */

/* Tokens first..end of a bucket. */
struct share { int64_t first, end; };

/* The first token of a bucket, from `first` on, whose slot is at least this one. */
static int64_t token_from(const struct store *store, const struct bucket *bucket, int64_t slot, int64_t first) {
    if (!bucket->slot) return slot < *bucket->length ? slot : *bucket->length;
    int64_t end = *bucket->length;
    while (first < end) {
        const int64_t middle = (first + end) / 2;
        if (slot_of(store, bucket, middle) < slot)
            first = middle + 1;
        else
            end = middle;
    }
    return first;
}

/* Moves each bucket's share to the tokens that follow it and have slots before this one. */
static void move_shares(const struct store *store, int64_t slot, struct share *shares) {
    for (int64_t p = 0; p < store->num_buckets; p++) {
        shares[p].first = shares[p].end;
        shares[p].end = token_from(store, store->buckets + p, slot, shares[p].first);
    }
}

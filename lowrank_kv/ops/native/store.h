/* Coefficients as a cache holds them: pieces of one rank each, as floats or as integers with scales. */
#pragma once
#include <stdint.h>
#include <string.h>

#include "common.h"

enum kind { FLOAT32, BFLOAT16, INT8, INT4 };

/* Tokens of one rank. Where heads are compressed apart, each part's coefficients lie `part_bytes` after the part before. */
struct piece {
    uint8_t *rows;         /* (parts, capacity, row_bytes) */
    const uint8_t *scales; /* integers: (parts, capacity, 2K) bfloat16, K steps and then K least values */
    void *slot;            /* each token's row in the scores, rising; NULL: 0, 1, … */
    int64_t *length;       /* tokens; Python reads the same number */
    int64_t capacity, rank, row_bytes, part_bytes, scale_part_bytes;
};

struct store {
    struct piece *pieces;
    int64_t count;      /* of pieces */
    int64_t *length;    /* tokens of all pieces, and the next one's slot; NULL where nothing is appended */
    int64_t rank;       /* the largest; with several parts as many as the decoder of each has rows */
    int32_t kind;       /* of the rows */
    int32_t slot_bytes; /* 2, 4 or 8 */
    int64_t group;      /* integers: coefficients that share a scale; 0 when all of a row do */
};

static inline float from_bfloat16(uint16_t bits) {
    union { uint32_t bits; float value; } u = {(uint32_t)bits << 16};
    return u.value;
}

/* The nearest, of two as near the even one, as torch rounds. */
static inline uint16_t to_bfloat16(float value) {
    union { float value; uint32_t bits; } u = {value};
    if (value != value) return 0x7fc0;
    return (u.bits + 0x7fff + (u.bits >> 16 & 1)) >> 16;
}

static inline int64_t slot_of(const struct store *store, const struct piece *piece, int64_t token) {
    if (!piece->slot) return token;
    switch (store->slot_bytes) {
    case 2: return ((const int16_t *)piece->slot)[token];
    case 4: return ((const int32_t *)piece->slot)[token];
    default: return ((const int64_t *)piece->slot)[token];
    }
}

/* Whether pieces have room for tokens of these ranks, and their slots can be written. Pieces are in order of rank. */
int has_room(const struct store *store, const int64_t *ranks, int64_t tokens);

/* Writes one row behind those of its rank and its slot beside it; returns 1, or 0 where it does not have room. The pieces are
 * in order of rank, have slots and one part and hold floats or bfloat16. */
int append(struct store *store, const float *coef, int64_t rank);

/* -- reading coefficients ---------------------------------------------------------------------------------------- */

static void dequantize(const struct store *store, const uint8_t *row, const uint16_t *scales, int64_t rank, float *out) {
    const int64_t size = store->group ? store->group : rank, groups = (rank + size - 1) / size;
    if (store->kind == INT8) {
        for (int64_t r = 0; r < rank; r++) out[r] = row[r];
    } else { /* the first half of a row in the low bits, the second in the high ones */
        const int64_t half = (rank + 1) / 2;
        for (int64_t r = 0; r < half; r++) out[r] = row[r] & 15;
        for (int64_t r = half; r < rank; r++) out[r] = row[r - half] >> 4;
    }
    for (int64_t k = 0; k < groups; k++) {
        const float step = from_bfloat16(scales[k]), least = from_bfloat16(scales[groups + k]);
        const int64_t end = (k + 1) * size < rank ? (k + 1) * size : rank;
        for (int64_t r = k * size; r < end; r++) out[r] = out[r] * step + least;
    }
}

/* Tokens `first` to `first + count` of a piece's part as floats, (count, padded(rank)), zero beyond the rank. */
static void read_block(const struct store *store, const struct piece *piece, int64_t part, int64_t first, int64_t count,
                       float *out) {
    const int64_t rank = piece->rank, width = padded(rank);
    if (!rank) return;
    const int64_t groups = store->group ? (rank + store->group - 1) / store->group : 1;
    for (int64_t t = 0; t < count; t++, out += width) {
        const uint8_t *row = piece->rows + part * piece->part_bytes + (first + t) * piece->row_bytes;
        const uint8_t *scales = piece->scales + part * piece->scale_part_bytes;
        switch (store->kind) {
        case FLOAT32: memcpy(out, row, rank * sizeof(float)); break;
        case BFLOAT16:
            for (int64_t r = 0; r < rank; r++) out[r] = from_bfloat16(((const uint16_t *)row)[r]);
            break;
        default: dequantize(store, row, (const uint16_t *)scales + (first + t) * 2 * groups, rank, out);
        }
        for (int64_t r = rank; r < width; r++) out[r] = 0;
    }
}

/* The same without copying what is held as floats: where a row is, and after how many floats the next. Beyond the rank may
 * be anything. */
struct rows { const float *start; int64_t stride; };

static struct rows rows_of(const struct store *store, const struct piece *piece, int64_t part, int64_t first, int64_t count,
                           float *scratch) {
    if (store->kind == FLOAT32)
        return (struct rows){(const float *)(piece->rows + part * piece->part_bytes + first * piece->row_bytes),
                             piece->row_bytes / (int64_t)sizeof(float)};
    read_block(store, piece, part, first, count, scratch);
    return (struct rows){scratch, padded(piece->rank)};
}

/* -- dividing the work ------------------------------------------------------------------------------------------- */

/* Tokens first..end of a piece. */
struct share { int64_t first, end; };

/* The first token of a piece, none before `first`, that is in this slot or one after it. */
static int64_t token_from(const struct store *store, const struct piece *piece, int64_t slot, int64_t first) {
    if (!piece->slot) return slot < *piece->length ? slot : *piece->length;
    int64_t end = *piece->length;
    while (first < end) {
        const int64_t middle = (first + end) / 2;
        if (slot_of(store, piece, middle) < slot)
            first = middle + 1;
        else
            end = middle;
    }
    return first;
}

/* Moves each piece's share on to the tokens after it that are in slots before this one. */
static void move_shares(const struct store *store, int64_t slot, struct share *shares) {
    for (int64_t p = 0; p < store->count; p++) {
        shares[p].first = shares[p].end;
        shares[p].end = token_from(store, store->pieces + p, slot, shares[p].first);
    }
}

/* Rows of coefficients at widths of their own: see lowrank_kv/stores/bit_plan.py. */
#pragma once
#include <stdint.h>
#include <string.h>

#include "common.h"

#if defined(__AVX512VBMI__)
#include <immintrin.h>
#endif

enum { AT_ONCE = 16 }; /* coefficients that are read together where a register holds as many */

/* How AT_ONCE neighbours find their levels: in the first registers of `table`, or one by one. */
enum lookup { IN_TWO_REGISTERS, IN_NEXT_TWO_REGISTERS, ONE_BY_ONE };

struct plan {
    int64_t uncoded;      /* coefficients that are bfloat16, which come first */
    const int32_t *byte;  /* of each coefficient: its code is in the two bytes of the row from this one on, */
    const int32_t *shift; /* after so many bits, */
    const int32_t *mask;  /* under this mask; */
    const int32_t *level; /* and the place in `table` of code 0 */
    const float *table;
    /* Of each AT_ONCE coded coefficients: */
    const int32_t *first;  /* the first byte; */
    const uint8_t *window; /* (64): for each lane the two bytes of its code, counted from there, and two that are zeroed; */
    const uint8_t *lookup; /* see `enum lookup` */
    /* For readers of bfloat16, whose registers hold the levels of up to 5 bits: */
    int64_t wide;                 /* coefficients that come first and have more bits */
    const uint16_t *narrow_table; /* (64) */
    const int32_t *narrow_first;  /* of each AT_ONCE_NARROW others the first byte; */
    const uint8_t *narrow;        /* (4, 64): for each eight of them the eight bytes that hold their codes, counted from there; in
                                   * these 64 bits where each code begins; its mask; and the place of its code 0 */
};

enum { AT_ONCE_NARROW = 64 };

/* Whether coefficients of bfloat16 are multiplied two at a time. */
#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

/* Numbers that a row takes which is read AT_ONCE_NARROW at a time. */
static inline int64_t narrow_stride(int64_t rank) { return (rank + 2 * AT_ONCE_NARROW - 1) / AT_ONCE_NARROW * AT_ONCE_NARROW; }

/* 2^((code − 128) / 8). */
static inline float scale_of(uint8_t code) {
    static const float eighths[] = {1,          1.09050773f, 1.18920712f, 1.29683955f,
                                    1.41421356f, 1.54221083f, 1.68179283f, 1.83400809f};
    union { uint32_t bits; float value; } octave = {(uint32_t)(code / 8 - 16 + 127) << 23};
    return eighths[code % 8] * octave.value;
}

static inline float read_one(const struct plan *plan, const uint8_t *row, const uint8_t *end, int64_t i) {
    const uint8_t *at = row + plan->byte[i];
    const int word = at[0] | (at + 1 < end ? at[1] << 8 : 0);
    return i < plan->uncoded ? from_bfloat16(word) : plan->table[plan->level[i] + (word >> plan->shift[i] & plan->mask[i])];
}

#if defined(__AVX512VBMI__)
/* The levels of the AT_ONCE coded coefficients of a block. */
static inline __attribute__((always_inline)) __m512 levels_of_block(
    const struct plan *plan, const uint8_t *row, const uint8_t *end, int64_t block) {
    const uint8_t *at = row + plan->first[block];
    const int64_t bytes = end - at, i = plan->uncoded + block * AT_ONCE;
    const __mmask64 inside = bytes < 64 ? ((__mmask64)1 << bytes) - 1 : ~(__mmask64)0;
    const __m512i window = _mm512_loadu_si512(plan->window + block * 64);
    const __m512i words = _mm512_maskz_permutexvar_epi8(0x3333333333333333, window, _mm512_maskz_loadu_epi8(inside, at));
    const __m512i shift = _mm512_loadu_si512(plan->shift + i), mask = _mm512_loadu_si512(plan->mask + i);
    const __m512i code = _mm512_and_si512(_mm512_srlv_epi32(words, shift), mask);
    const __m512i place = _mm512_add_epi32(code, _mm512_loadu_si512(plan->level + i));
    if (plan->lookup[block] == ONE_BY_ONE) return _mm512_i32gather_ps(place, plan->table, 4);
    /* A register's lookup reads the low bits of a place. */
    const float *table = plan->table + (plan->lookup[block] == IN_TWO_REGISTERS ? 0 : 32);
    return _mm512_permutex2var_ps(_mm512_loadu_ps(table), place, _mm512_loadu_ps(table + 16));
}
#endif

/* A row's first `rank` coefficients. */
static void read_row(const struct plan *plan, const uint8_t *row, int64_t row_bytes, int64_t rank, float *out) {
    const uint8_t *end = row + row_bytes;
    const float scale = scale_of(row[0]);
    int64_t i = 0;
#if defined(__AVX512VBMI__)
    for (; i < rank && i < plan->uncoded; i++) out[i] = read_one(plan, row, end, i) * scale;
    const __m512 factor = _mm512_set1_ps(scale);
    for (int64_t block = 0; i < rank; block++, i += AT_ONCE) {
        const __m512 found = _mm512_mul_ps(levels_of_block(plan, row, end, block), factor);
        const int64_t left = rank - i;
        _mm512_mask_storeu_ps(out + i, left < AT_ONCE ? (1 << left) - 1 : 0xffff, found);
    }
#else
    for (; i < rank; i++) out[i] = read_one(plan, row, end, i) * scale;
#endif
}

#if HAS_PAIRS
/* The levels of the 64 coefficients of a block, as two registers of bfloat16. */
static inline __attribute__((always_inline)) void read_narrow_block(
    const struct plan *plan, const uint8_t *row, const uint8_t *end, int64_t block, __m512i found[2]) {
    const uint8_t *at = row + plan->narrow_first[block], *lanes = plan->narrow + block * 4 * AT_ONCE_NARROW;
    const int64_t bytes = end - at;
    const __mmask64 inside = bytes < 64 ? ((__mmask64)1 << bytes) - 1 : ~(__mmask64)0;
    const __m512i words = _mm512_permutexvar_epi8(_mm512_loadu_si512(lanes), _mm512_maskz_loadu_epi8(inside, at));
    const __m512i shifted = _mm512_multishift_epi64_epi8(_mm512_loadu_si512(lanes + 64), words);
    const __m512i code = _mm512_and_si512(shifted, _mm512_loadu_si512(lanes + 128));
    const __m512i place = _mm512_add_epi8(code, _mm512_loadu_si512(lanes + 192));
    const __m512i low = _mm512_loadu_si512(plan->narrow_table), high = _mm512_loadu_si512(plan->narrow_table + 32);
    found[0] = _mm512_permutex2var_epi16(low, _mm512_cvtepu8_epi16(_mm512_castsi512_si256(place)), high);
    found[1] = _mm512_permutex2var_epi16(low, _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(place, 1)), high);
}

/* The coefficients of more bits, as bfloat16; up to AT_ONCE - 1 numbers behind them are written. */
static inline void read_wide(const struct plan *plan, const uint8_t *row, const uint8_t *end, uint16_t *out) {
    int64_t i = 0;
    for (; i < plan->uncoded; i++) out[i] = to_bfloat16(read_one(plan, row, end, i));
    for (int64_t block = 0; i < plan->wide; block++, i += AT_ONCE)
        _mm256_storeu_si256((__m256i *)(out + i), (__m256i)_mm512_cvtneps_pbh(levels_of_block(plan, row, end, block)));
}

/* The same as floats. */
static inline void read_wide_floats(const struct plan *plan, const uint8_t *row, const uint8_t *end, float *out) {
    int64_t i = 0;
    for (; i < plan->uncoded; i++) out[i] = from_bfloat16(to_bfloat16(read_one(plan, row, end, i)));
    for (int64_t block = 0; i < plan->wide; block++, i += AT_ONCE) {
        const __m256i narrow = (__m256i)_mm512_cvtneps_pbh(levels_of_block(plan, row, end, block));
        _mm512_storeu_si512(out + i, _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
    }
}

/* A row's first `rank` coefficients as bfloat16, divided by its scale, and a zero beside an odd one's last; up to
 * narrow_stride(rank) numbers are written. */
static void read_narrow(const struct plan *plan, const uint8_t *row, int64_t row_bytes, int64_t rank, uint16_t *out) {
    const uint8_t *end = row + row_bytes;
    read_wide(plan, row, end, out);
    int64_t i = plan->wide;
    for (int64_t block = 0; i < rank; block++, i += AT_ONCE_NARROW) {
        __m512i found[2];
        read_narrow_block(plan, row, end, block, found);
        _mm512_storeu_si512(out + i, found[0]);
        _mm512_storeu_si512(out + i + 32, found[1]);
    }
    if (rank % 2) out[rank] = 0;
}

/* The same as floats, and zeros up to padded(rank). */
static void read_narrow_floats(const struct plan *plan, const uint8_t *row, int64_t row_bytes, int64_t rank, float *out) {
    const uint8_t *end = row + row_bytes;
    read_wide_floats(plan, row, end, out);
    int64_t i = plan->wide;
    for (int64_t block = 0; i < rank; block++, i += AT_ONCE_NARROW) {
        __m512i found[2];
        read_narrow_block(plan, row, end, block, found);
        for (int half = 0; half < 2; half++) {
            const __m512i first = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(found[half]));
            const __m512i second = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(found[half], 1));
            _mm512_storeu_si512(out + i + half * 32, _mm512_slli_epi32(first, 16));
            _mm512_storeu_si512(out + i + half * 32 + 16, _mm512_slli_epi32(second, 16));
        }
    }
    for (i = rank; i < padded(rank); i++) out[i] = 0;
}
#endif

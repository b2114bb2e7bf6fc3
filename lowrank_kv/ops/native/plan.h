/* Rows of coefficients at widths of their own: see lowrank_kv/stores/bit_plan.py. */
#pragma once
#include <math.h>
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
};

static inline float scale_of(uint8_t code) { return exp2f((code - 128) / 8.0f); }

static inline float read_one(const struct plan *plan, const uint8_t *row, const uint8_t *end, int64_t i) {
    const uint8_t *at = row + plan->byte[i];
    const int word = at[0] | (at + 1 < end ? at[1] << 8 : 0);
    return i < plan->uncoded ? from_bfloat16(word) : plan->table[plan->level[i] + (word >> plan->shift[i] & plan->mask[i])];
}

/* A row's first `rank` coefficients. */
static void read_row(const struct plan *plan, const uint8_t *row, int64_t row_bytes, int64_t rank, float *out) {
    const uint8_t *end = row + row_bytes;
    const float scale = scale_of(row[0]);
    int64_t i = 0;
#if defined(__AVX512VBMI__)
    for (; i < rank && i < plan->uncoded; i++) out[i] = read_one(plan, row, end, i) * scale;
    const __m512 tables[] = {_mm512_loadu_ps(plan->table), _mm512_loadu_ps(plan->table + 16), _mm512_loadu_ps(plan->table + 32),
                             _mm512_loadu_ps(plan->table + 48)};
    const __m512 factor = _mm512_set1_ps(scale);
    for (int64_t block = 0; i < rank; block++, i += AT_ONCE) {
        const uint8_t *at = row + plan->first[block];
        const int64_t bytes = end - at;
        const __mmask64 inside = bytes < 64 ? ((__mmask64)1 << bytes) - 1 : ~(__mmask64)0;
        const __m512i window = _mm512_loadu_si512(plan->window + block * 64);
        const __m512i words = _mm512_maskz_permutexvar_epi8(0x3333333333333333, window, _mm512_maskz_loadu_epi8(inside, at));
        const __m512i shift = _mm512_loadu_si512(plan->shift + i), mask = _mm512_loadu_si512(plan->mask + i);
        const __m512i code = _mm512_and_si512(_mm512_srlv_epi32(words, shift), mask);
        const __m512i place = _mm512_add_epi32(code, _mm512_loadu_si512(plan->level + i));
        __m512 level;
        switch (plan->lookup[block]) { /* a register's lookup reads the low bits of a place */
        case IN_TWO_REGISTERS: level = _mm512_permutex2var_ps(tables[0], place, tables[1]); break;
        case IN_NEXT_TWO_REGISTERS: level = _mm512_permutex2var_ps(tables[2], place, tables[3]); break;
        default: level = _mm512_i32gather_ps(place, plan->table, 4);
        }
        const int64_t left = rank - i;
        _mm512_mask_storeu_ps(out + i, left < AT_ONCE ? (1 << left) - 1 : 0xffff, _mm512_mul_ps(level, factor));
    }
#else
    for (; i < rank; i++) out[i] = read_one(plan, row, end, i) * scale;
#endif
}

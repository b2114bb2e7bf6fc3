/* Rows of coefficients at widths of their own: see lowrank_kv/stores/bit_plan.py. */
#pragma once
#include <stdint.h>
#include <string.h>

#include "common.h"

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
    /* For readers of bfloat16, of each IN_BLOCK coefficients, the uncoded ones among them: */
    int64_t blocks;
    const int32_t *block_first; /* the first byte of the coded ones; */
    const uint8_t *block_kind;  /* see `enum kind_of_block`; */
    const uint8_t *block_lanes; /* (2, blocks, 5, 64), in each `enum order`: for each lane a byte of the row, counted from
                                 * there, so that the codes of four lanes are in four bytes; the bit of eight lanes where its
                                 * code begins; its mask; the place of its code 0; and 255 where a code has 8 bits */
    const uint8_t *block_levels; /* (2, 128) low and then high bytes of all levels of up to 6 bits, (2, 256) of those of 8 */
};

enum { IN_BLOCK = 64 }; /* coefficients */
enum kind_of_block { UP_TO_5_BITS, UP_TO_6_BITS, UP_TO_8_BITS };
/* Of the coefficients of a block: so that the numbers of one row, or of two rows side by side, are in order. */
enum order { ONE_ROW, TWO_ROWS };

static inline int64_t in_blocks(int64_t rank) { return (rank + IN_BLOCK - 1) / IN_BLOCK * IN_BLOCK; }

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

#if defined(__AVX2__) && !defined(__AVX512VBMI__)
enum { IN_HALF = AT_ONCE / 2 };

/* The levels at these places of the 32 from `table` on, whose number a place has in its lowest bits. */
static inline __attribute__((always_inline)) __m256 levels_in_registers(const float *table, __m256i place) {
    __m256 of_eight[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) of_eight[i] = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8 * i), place);
    const __m256 is_odd = _mm256_castsi256_ps(_mm256_slli_epi32(place, 28)); /* its sign: the bit of 8 */
    const __m256 low = _mm256_blendv_ps(of_eight[0], of_eight[1], is_odd);
    const __m256 high = _mm256_blendv_ps(of_eight[2], of_eight[3], is_odd);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(place, 27)));
}

/* What is read of a plan for half of a block, of which one coefficient is there at least, in rows of 16 bytes or more. */
struct half_reader {
    int64_t at; /* 16 bytes of a row from here on contain the 9 in which the codes are */
    __m256i window, shift, mask, level;
    const float *table;
    int is_in_registers; /* whether `table` has the 32 levels that they may have */
};

static inline __attribute__((always_inline)) struct half_reader half_reader_of(
    const struct plan *plan, int64_t row_bytes, int64_t half) {
    const int64_t block = half / 2, i = plan->uncoded + half * IN_HALF, last = row_bytes - 16;
    const __m256i window = _mm256_loadu_si256((const __m256i *)(plan->window + half * IN_HALF * 4));
    const int64_t wanted = plan->first[block] + plan->window[half * IN_HALF * 4];
    struct half_reader reader = {.at = wanted < last ? wanted : last};
    reader.window = _mm256_add_epi8(window, _mm256_set1_epi8((char)(plan->first[block] - reader.at)));
    reader.shift = _mm256_loadu_si256((const __m256i *)(plan->shift + i));
    reader.mask = _mm256_loadu_si256((const __m256i *)(plan->mask + i));
    reader.level = _mm256_loadu_si256((const __m256i *)(plan->level + i));
    reader.is_in_registers = plan->lookup[block] != ONE_BY_ONE;
    reader.table = plan->table + (plan->lookup[block] == IN_NEXT_TWO_REGISTERS ? 32 : 0);
    return reader;
}

/* The levels of these coefficients in a row. */
static inline __attribute__((always_inline)) __m256 levels_of_half(
    const struct half_reader *reader, const int is_in_registers, const uint8_t *row) {
    const __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(row + reader->at)));
    const __m256i words = _mm256_shuffle_epi8(bytes, reader->window);
    const __m256i code = _mm256_and_si256(_mm256_srlv_epi32(words, reader->shift), reader->mask);
    const __m256i place = _mm256_add_epi32(code, reader->level);
    return is_in_registers ? levels_in_registers(reader->table, place) : _mm256_i32gather_ps(reader->table, place, 4);
}
#endif

/* A row's first `rank` coefficients over its scale, times `scale`. */
static void read_row(const struct plan *plan, const uint8_t *row, int64_t row_bytes, int64_t rank, float scale, float *out) {
    const uint8_t *end = row + row_bytes;
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
#if defined(__AVX2__)
    for (; i < rank && i < plan->uncoded; i++) out[i] = read_one(plan, row, end, i) * scale;
    const __m256 factor = _mm256_set1_ps(scale);
    for (int64_t half = 0; row_bytes >= 16 && i + IN_HALF <= rank; half++, i += IN_HALF) {
        const struct half_reader reader = half_reader_of(plan, row_bytes, half);
        _mm256_storeu_ps(out + i, _mm256_mul_ps(levels_of_half(&reader, reader.is_in_registers, row), factor));
    }
#endif
    for (; i < rank; i++) out[i] = read_one(plan, row, end, i) * scale;
#endif
}

/* The coefficients of rows of one plan, divided by their scales, (count, padded(rank)), zero beyond the rank. */
static void read_alike(const struct plan *plan, const uint8_t *const *rows, int64_t count, int64_t row_bytes, int64_t rank,
                       float *out) {
    const int64_t width = padded(rank);
#if defined(__AVX2__) && !defined(__AVX512VBMI__)
    if (row_bytes >= 16) { /* what is read of the plan is read once for all rows */
        int64_t i = plan->uncoded;
        for (int64_t half = 0; i < rank && i + IN_HALF <= width; half++, i += IN_HALF) {
            const struct half_reader reader = half_reader_of(plan, row_bytes, half);
            float *own = out + i;
            for (int64_t t = 0; t < count && reader.is_in_registers; t++, own += width)
                _mm256_storeu_ps(own, levels_of_half(&reader, 1, rows[t]));
            for (int64_t t = 0; t < count && !reader.is_in_registers; t++, own += width)
                _mm256_storeu_ps(own, levels_of_half(&reader, 0, rows[t]));
        }
        for (int64_t t = 0; t < count; t++) {
            for (int64_t r = 0; r < plan->uncoded && r < rank; r++) out[t * width + r] = read_one(plan, rows[t], rows[t] + row_bytes, r);
            for (int64_t r = i; r < rank; r++) out[t * width + r] = read_one(plan, rows[t], rows[t] + row_bytes, r);
            for (int64_t r = rank; r < width; r++) out[t * width + r] = 0;
        }
        return;
    }
#endif
    for (int64_t t = 0; t < count; t++) {
        read_row(plan, rows[t], row_bytes, rank, 1, out + t * width);
        for (int64_t r = rank; r < width; r++) out[t * width + r] = 0;
    }
}

#if HAS_PAIRS
/* What is read of a plan for one block. */
struct block_reader {
    __m512i window, begin, mask, place, low[2], high[2];
    __mmask64 has_8_bits, inside; /* inside: of the bytes from `first` on, those of the row */
    const uint8_t *levels_of_8_bits;
    int64_t first;
};

static inline __attribute__((always_inline)) struct block_reader block_reader_of(
    const struct plan *plan, enum order order, int64_t block, int64_t row_bytes) {
    const int64_t bytes = row_bytes - plan->block_first[block];
    const uint8_t *lanes = plan->block_lanes + (order * plan->blocks + block) * 5 * 64, *levels = plan->block_levels;
    struct block_reader reader = {.first = plan->block_first[block], .levels_of_8_bits = levels + 256};
    reader.window = _mm512_loadu_si512(lanes);
    reader.begin = _mm512_loadu_si512(lanes + 64);
    reader.mask = _mm512_loadu_si512(lanes + 128);
    reader.place = _mm512_loadu_si512(lanes + 192);
    reader.has_8_bits = _mm512_movepi8_mask(_mm512_loadu_si512(lanes + 256));
    reader.inside = bytes >= 64 ? ~(__mmask64)0 : bytes > 0 ? ((__mmask64)1 << bytes) - 1 : 0;
    for (int half = 0; half < 2; half++) {
        reader.low[half] = _mm512_loadu_si512(levels + half * 64);
        reader.high[half] = _mm512_loadu_si512(levels + 128 + half * 64);
    }
    return reader;
}

/* Of 256 bytes the ones at these places. */
static inline __attribute__((always_inline)) __m512i bytes_at(const uint8_t *bytes, __m512i place) {
    const __m512i first = _mm512_permutex2var_epi8(_mm512_loadu_si512(bytes), place, _mm512_loadu_si512(bytes + 64));
    const __m512i second = _mm512_permutex2var_epi8(_mm512_loadu_si512(bytes + 128), place, _mm512_loadu_si512(bytes + 192));
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(place), first, second);
}

/* The levels of a block's coefficients in bfloat16: those of the even eights, or fours, of lanes, and of the odd ones. */
static inline __attribute__((always_inline)) void read_levels(
    const struct block_reader *reader, const enum kind_of_block kind, const uint8_t *row, __m512i found[2]) {
    const __m512i bytes = _mm512_maskz_loadu_epi8(reader->inside, row + reader->first);
    const __m512i words = _mm512_permutexvar_epi8(reader->window, bytes);
    const __m512i code = _mm512_and_si512(_mm512_multishift_epi64_epi8(reader->begin, words), reader->mask);
    const __m512i place = _mm512_add_epi8(code, reader->place);
    __m512i low, high;
    if (kind == UP_TO_5_BITS) {
        low = _mm512_permutexvar_epi8(place, reader->low[0]);
        high = _mm512_permutexvar_epi8(place, reader->high[0]);
    } else {
        low = _mm512_permutex2var_epi8(reader->low[0], place, reader->low[1]);
        high = _mm512_permutex2var_epi8(reader->high[0], place, reader->high[1]);
    }
    if (kind == UP_TO_8_BITS) {
        low = _mm512_mask_blend_epi8(reader->has_8_bits, low, bytes_at(reader->levels_of_8_bits, place));
        high = _mm512_mask_blend_epi8(reader->has_8_bits, high, bytes_at(reader->levels_of_8_bits + 256, place));
    }
    found[0] = _mm512_unpacklo_epi8(low, high);
    found[1] = _mm512_unpackhi_epi8(low, high);
}

#define EACH_KIND(C) C(UP_TO_5_BITS) C(UP_TO_6_BITS) C(UP_TO_8_BITS)

/* The coefficients of rows of one plan as bfloat16, divided by their scales, (count, in_blocks(rank)), zero beyond the
 * rank. */
static void read_rows(const struct plan *plan, const uint8_t *const *rows, int64_t count, int64_t row_bytes, int64_t rank,
                      uint16_t *out) {
    const int64_t stride = in_blocks(rank);
    for (int64_t block = 0; block * IN_BLOCK < rank; block++) {
        const struct block_reader reader = block_reader_of(plan, ONE_ROW, block, row_bytes);
        switch (plan->block_kind[block]) {
#define READ(KIND)                                                              \
    case KIND:                                                                  \
        for (int64_t t = 0; t < count; t++) {                                   \
            __m512i found[2];                                                   \
            read_levels(&reader, KIND, rows[t], found);                         \
            _mm512_storeu_si512(out + t * stride + block * IN_BLOCK, found[0]); \
            _mm512_storeu_si512(out + t * stride + block * IN_BLOCK + 32, found[1]); \
        }                                                                       \
        break;
            EACH_KIND(READ)
#undef READ
        }
    }
    const int64_t uncoded = plan->uncoded < rank ? plan->uncoded : rank;
    for (int64_t t = 0; t < count; t++) memcpy(out + t * stride, rows[t] + 1, uncoded * sizeof(uint16_t));
    for (int64_t t = 0; rank % 2 && t < count; t++) out[t * stride + rank] = 0;
}

/* The same of two rows side by side, of which the second one's are zero behind the last of an odd number,
 * (⌈count / 2⌉, in_blocks(rank), 2). */
static void read_rows_in_twos(const struct plan *plan, const uint8_t *const *rows, int64_t count, int64_t row_bytes,
                              int64_t rank, uint16_t *out) {
    const int64_t stride = 2 * in_blocks(rank);
    for (int64_t block = 0; block * IN_BLOCK < rank; block++) {
        const struct block_reader reader = block_reader_of(plan, TWO_ROWS, block, row_bytes);
        switch (plan->block_kind[block]) {
#define READ(KIND)                                                                          \
    case KIND:                                                                              \
        for (int64_t t = 0; t < count; t += 2) {                                            \
            uint16_t *own = out + t / 2 * stride + 2 * block * IN_BLOCK;                    \
            __m512i first[2], second[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()}; \
            read_levels(&reader, KIND, rows[t], first);                                     \
            if (t + 1 < count) read_levels(&reader, KIND, rows[t + 1], second);             \
            for (int half = 0; half < 2; half++) {                                          \
                _mm512_storeu_si512(own + half * 64, _mm512_unpacklo_epi16(first[half], second[half])); \
                _mm512_storeu_si512(own + half * 64 + 32, _mm512_unpackhi_epi16(first[half], second[half])); \
            }                                                                               \
        }                                                                                   \
        break;
            EACH_KIND(READ)
#undef READ
        }
    }
    const int64_t uncoded = plan->uncoded < rank ? plan->uncoded : rank;
    for (int64_t t = 0; t < count; t++)
        for (int64_t i = 0; i < uncoded; i++)
            memcpy(out + t / 2 * stride + 2 * i + t % 2, rows[t] + 1 + 2 * i, sizeof(uint16_t));
}
#endif

/* Products of small matrices, and other functions that the kernels share. */
#pragma once
#include <stdint.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

/* Sums of a tile of a matrix product stay in registers, beside a row of the right matrix and a number of the left one:
 * NARROW rows of one vector, or ROWS rows of up to VECTORS. Even parts of 64 dims leave no narrower tile over. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define HAS_32_REGISTERS
enum { ROWS = 6, VECTORS = 4, NARROW = 16 };
#else
enum { ROWS = 6, VECTORS = 2, NARROW = 12 };
#endif
enum { TILE = ROWS * VECTORS > NARROW ? ROWS * VECTORS : NARROW }; /* sums in registers */

/* Arrays of floats are read and written by vector registers. */
typedef float vector __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
enum { LANES = VECTOR_BYTES / sizeof(float) };

/* C(1) … C(LANES): cases of a switch, in each of which a number is a constant. */
#if VECTOR_BYTES == 64
#define EACH_LANE(C) C(1) C(2) C(3) C(4) C(5) C(6) C(7) C(8) C(9) C(10) C(11) C(12) C(13) C(14) C(15) C(16)
#elif VECTOR_BYTES == 32
#define EACH_LANE(C) C(1) C(2) C(3) C(4) C(5) C(6) C(7) C(8)
#else
#define EACH_LANE(C) C(1) C(2) C(3) C(4)
#endif

/* Whether numbers are multiplied as bfloat16, two at a time: two neighbours then take the place of one float. */
#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

static inline int64_t padded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

typedef int32_t int_vector __attribute__((vector_size(VECTOR_BYTES)));

/* Each lane of a where the mask is −1, of b where it is 0. */
static inline vector where(const int_vector mask, const vector a, const vector b) {
    return (vector)(((int_vector)a & mask) | ((int_vector)b & ~mask));
}

/* e^x for x <= 0, to 2e-7 of its value; 0 below e^-87, NaN of NaN. */
static inline vector exponential(const vector given) {
    const float round = 12582912.0f; /* 1.5 · 2^23: a sum with it has no fraction */
    const int_vector is_tiny = given < -87.0f;
    const vector x = where(is_tiny, (vector){0}, given);
    const vector n = x * 1.44269504f + round - round;
    const vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vector p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const vector power = (vector)((__builtin_convertvector(n, int_vector) + 127) << 23);
    return (vector)((int_vector)(p * power) & ~is_tiny);
}

#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (int_vector){__VA_ARGS__})
#endif

/* Lane i of every other `size` lanes, counted through a and then b; the compiler must see that they are constants. */
#define LANE(i, size, odd) ((i) / (size) * 2 * (size) + (i) % (size) + (odd) * (size))
#define LANES4(i, size, odd) LANE(i, size, odd), LANE(i + 1, size, odd), LANE(i + 2, size, odd), LANE(i + 3, size, odd)
#if VECTOR_BYTES == 64
#define ALL_LANES(size, odd) LANES4(0, size, odd), LANES4(4, size, odd), LANES4(8, size, odd), LANES4(12, size, odd)
#elif VECTOR_BYTES == 32
#define ALL_LANES(size, odd) LANES4(0, size, odd), LANES4(4, size, odd)
#else
#define ALL_LANES(size, odd) LANES4(0, size, odd)
#endif
#define FOLDED(size) (PICK(a, b, ALL_LANES(size, 0)) + PICK(a, b, ALL_LANES(size, 1)))

/* The sums of neighbouring blocks of `size` lanes, a's before b's; `size` is a constant. */
static inline __attribute__((always_inline)) vector folded(const vector a, const vector b, const int size) {
    switch (size) {
#if VECTOR_BYTES >= 64
    case 8: return FOLDED(8);
#endif
#if VECTOR_BYTES >= 32
    case 4: return FOLDED(4);
#endif
    case 2: return FOLDED(2);
    default: return FOLDED(1);
    }
}

/* The sums of the lanes of `count` vectors, a lane for each; `count` is a constant of at most LANES. */
static inline __attribute__((always_inline)) vector totals(const int count, vector *sums) {
    int left = count;
#pragma GCC unroll 4
    for (int size = LANES / 2; size; size /= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < (left + 1) / 2; i++)
            sums[i] = folded(sums[2 * i], 2 * i + 1 < left ? sums[2 * i + 1] : (vector){0}, size);
        left = (left + 1) / 2;
    }
    return sums[0];
}

#if HAS_PAIRS
/* Floats as the first and the second numbers of pairs. */
static inline vector side_by_side(vector first, vector second) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)first));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)second));
    return (vector)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}
#endif

/* sum += left · right, of floats or of pairs; `paired` is a constant. */
static inline __attribute__((always_inline)) vector multiply_add(const int paired, vector sum, float left, vector right) {
#if HAS_PAIRS
    if (paired) return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(left), (__m512bh)right);
#endif
    return sum + left * right;
}

/* sum (rows, vectors) += a · b in registers, with a (rows, depth) of any strides, where the second half of b's vectors lies
 * `far` floats behind the first. With `paired`, both hold pairs. `rows`, `vectors` and `paired` are constants here. */
static inline __attribute__((always_inline)) void accumulate(
    const int rows, const int vectors, const int paired, int64_t depth, const float *a, int64_t a_row, int64_t a_column,
    const float *b, int64_t b_row, int64_t far, vector *sum) {
    const int half = vectors / 2;
    for (int64_t k = 0; k < depth; k++) {
        vector right[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            right[j] = *(const vector *)(b + k * b_row + (j < half ? j * LANES : far + (j - half) * LANES));
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            const float left = a[i * a_row + k * a_column];
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) {
                vector *own = sum + i * vectors + j;
                *own = multiply_add(paired, *own, left, right[j]);
            }
        }
    }
}

/* c (rows, vectors · LANES) = or += a · b. */
static inline __attribute__((always_inline)) void tile_product(
    const int rows, const int vectors, const int paired, int64_t depth, const float *a, int64_t a_row, int64_t a_column,
    const float *b, int64_t b_row, float *c, int64_t c_row, const int adds) {
    vector sum[TILE];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++)
            sum[i * vectors + j] = adds ? *(const vector *)(c + i * c_row + j * LANES) : (vector){0};
    accumulate(rows, vectors, paired, depth, a, a_row, a_column, b, b_row, vectors / 2 * LANES, sum);
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) *(vector *)(c + i * c_row + j * LANES) = sum[i * vectors + j];
}

#define CASE(R, V)                                                                          \
    case (R) * 8 + (V):                                                                     \
        tile_product(R, V, paired, depth, a, a_row, a_column, b, b_row, c, c_row, adds);            \
        break;
#define ALL_ROWS(V) CASE(1, V) CASE(2, V) CASE(3, V) CASE(4, V) CASE(5, V) CASE(6, V)

/* c (rows, columns) = or += a · b, where `columns` is a multiple of LANES; with `paired`, of pairs. */
static inline __attribute__((always_inline)) void product_of(
    const int paired, int64_t all_rows, int64_t columns, int64_t depth, const float *all_a, int64_t a_row, int64_t a_column,
    const float *all_b, int64_t b_row, float *all_c, int64_t c_row, const int adds) {
    for (int64_t column = 0; column < columns; column += VECTORS * LANES) {
        const int64_t left = (columns - column) / LANES, vectors = left < VECTORS ? left : VECTORS;
        const int64_t most = vectors == 1 ? NARROW : ROWS;
        const int64_t tiles = (all_rows + most - 1) / most; /* of about equal size: of 9 rows 5 and 4 */
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t first = all_rows * tile / tiles, rows = all_rows * (tile + 1) / tiles - first;
            const float *a = all_a + first * a_row, *b = all_b + column;
            float *c = all_c + first * c_row + column;
            switch (rows * 8 + vectors) {
                ALL_ROWS(1) ALL_ROWS(2)
                CASE(7, 1) CASE(8, 1) CASE(9, 1) CASE(10, 1) CASE(11, 1) CASE(12, 1)
#ifdef HAS_32_REGISTERS
                ALL_ROWS(3) ALL_ROWS(4)
                CASE(13, 1) CASE(14, 1) CASE(15, 1) CASE(16, 1)
#endif
            }
        }
    }
}

static inline __attribute__((always_inline)) void product(
    int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row, int64_t a_column, const float *b,
    int64_t b_row, float *c, int64_t c_row, const int adds) {
    product_of(0, rows, columns, depth, a, a_row, a_column, b, b_row, c, c_row, adds);
}

static inline float from_bfloat16(uint16_t bits) {
    union { uint32_t bits; float value; } u = {(uint32_t)bits << 16};
    return u.value;
}

/* Rounds to nearest, ties to even, as torch does. */
static inline uint16_t to_bfloat16(float value) {
    union { float value; uint32_t bits; } u = {value};
    if (value != value) return 0x7fc0;
    return (u.bits + 0x7fff + (u.bits >> 16 & 1)) >> 16;
}

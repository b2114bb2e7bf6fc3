/* Matrix products of small matrices, and what else the kernels share. */
#pragma once
#include <math.h>
#include <stdint.h>

/* Sums of a tile of a matrix product stay in registers: NARROW rows of one vector, or ROWS rows of up to VECTORS. */
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
enum { ROWS = 8, VECTORS = 3, NARROW = 16 }; /* of 32 registers */
#elif defined(__aarch64__)
#define VECTOR_BYTES 16
enum { ROWS = 8, VECTORS = 3, NARROW = 16 };
#elif defined(__AVX__)
#define VECTOR_BYTES 32
enum { ROWS = 4, VECTORS = 3, NARROW = 8 }; /* of 16 registers */
#else
#define VECTOR_BYTES 16
enum { ROWS = 4, VECTORS = 3, NARROW = 8 };
#endif

typedef float vector __attribute__((vector_size(VECTOR_BYTES), aligned(4)));
enum { LANES = VECTOR_BYTES / sizeof(float) };

static inline int64_t padded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

/* e^x for x <= 0, to 2e-7 of its value; 0 below e^-87. Written out so that a compiler can vectorise loops over it. */
static inline float exponential(float x) {
    x = x < -87.0f ? -88.0f : x;
    float n = floorf(x * 1.44269504f + 0.5f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    union { int32_t bits; float value; } power = {((int32_t)n + 127) << 23};
    return x == -88.0f ? 0.0f : p * power.value;
}

typedef float quad __attribute__((vector_size(16)));

/* The sum of a vector's lanes. */
static inline __attribute__((always_inline)) float total(vector sum) {
    union { vector whole; quad part[LANES / 4]; } u = {sum};
    quad four = u.part[0];
#pragma GCC unroll 4
    for (int i = 1; i < LANES / 4; i++) four += u.part[i];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

static inline __attribute__((always_inline)) float dot(const float *a, const float *b, int64_t size) {
    vector sum = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sum += *(const vector *)(a + i) * *(const vector *)(b + i);
    float rest = 0;
    for (; i < size; i++) rest += a[i] * b[i];
    return total(sum) + rest;
}

/* c (rows, vectors · LANES) = or += a · b, with a (rows, depth) of any strides; `rows` and `vectors` are constants here. */
static inline __attribute__((always_inline)) void tile_product(
    const int rows, const int vectors, int64_t depth, const float *a, int64_t a_row, int64_t a_column, const float *b,
    int64_t b_row, float *c, int64_t c_row, const int adds) {
    vector sum[NARROW][VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
        for (int j = 0; j < vectors; j++)
            sum[i][j] = adds ? *(const vector *)(c + i * c_row + j * LANES) : (vector){0};
    for (int64_t k = 0; k < depth; k++) {
        vector right[VECTORS];
#pragma GCC unroll 3
        for (int j = 0; j < vectors; j++) right[j] = *(const vector *)(b + k * b_row + j * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            const float left = a[i * a_row + k * a_column];
#pragma GCC unroll 3
            for (int j = 0; j < vectors; j++) sum[i][j] += left * right[j];
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 3
        for (int j = 0; j < vectors; j++) *(vector *)(c + i * c_row + j * LANES) = sum[i][j];
}

#define CASE(R, V)                                                                          \
    case (R) * 4 + (V):                                                                     \
        tile_product(R, V, depth, a, a_row, a_column, b, b_row, c, c_row, adds);            \
        break;
#define CASES(R) CASE(R, 1) CASE(R, 2) CASE(R, 3)

/* c (rows, columns) = or += a · b, where `columns` is a multiple of LANES. */
static inline __attribute__((always_inline)) void product(
    int64_t all_rows, int64_t columns, int64_t depth, const float *all_a, int64_t a_row, int64_t a_column,
    const float *all_b, int64_t b_row, float *all_c, int64_t c_row, const int adds) {
    for (int64_t column = 0; column < columns; column += VECTORS * LANES) {
        const int64_t left = (columns - column) / LANES, vectors = left < VECTORS ? left : VECTORS;
        const int64_t most = vectors == 1 ? NARROW : ROWS;
        const int64_t tiles = (all_rows + most - 1) / most; /* of about equal size: of 9 rows 5 and 4 */
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t first = all_rows * tile / tiles, rows = all_rows * (tile + 1) / tiles - first;
            const float *a = all_a + first * a_row, *b = all_b + column;
            float *c = all_c + first * c_row + column;
            switch (rows * 4 + vectors) {
                CASES(1) CASES(2) CASES(3) CASES(4)
                CASE(5, 1) CASE(6, 1) CASE(7, 1) CASE(8, 1)
#if defined(__AVX512F__) || defined(__aarch64__)
                CASE(5, 2) CASE(6, 2) CASE(7, 2) CASE(8, 2)
                CASE(5, 3) CASE(6, 3) CASE(7, 3) CASE(8, 3)
                CASE(9, 1) CASE(10, 1) CASE(11, 1) CASE(12, 1) CASE(13, 1) CASE(14, 1) CASE(15, 1) CASE(16, 1)
#endif
            }
        }
    }
}

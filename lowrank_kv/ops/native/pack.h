/* Packing rows by plans of bits, and telling which class a row is in: see lowrank_kv/stores/bit_plan.py, token_plans.py. */
#pragma once
#include <float.h>
#include <math.h>
#include <stdint.h>

#include "plan.h"
#include "store.h"

/* How rows are packed by one plan. Neighbours of one width are a run. */
struct coder {
    int64_t rank, row_bytes, runs;
    const int32_t *width, *end;     /* of each run: bits, and the first coefficient behind it */
    const float *const *threshold; /* of each run: the middles between neighbouring levels; NULL where it is bfloat16 */
};

/* See lowrank_kv/stores/importance_gate.py. */
struct importance {
    const float *linear, *square, *rest; /* (width), (width), (3) */
    const float *bound;                  /* (classes - 1), rising */
    int64_t width, leading, classes;
};

enum { COUNTED_BITS = 5 }; /* so many thresholds are counted in a register; more are searched */

/* The number of thresholds below each of LANES values. */
static inline int_vector count_below(const float *threshold, int64_t thresholds, vector value) {
    int_vector found = {0};
    for (int64_t k = 0; k < thresholds; k++) found -= ~(value <= threshold[k]); /* what holds is −1 */
    return found;
}

/* The same of one value and one less than a power of two thresholds, which each step halves without a branch. */
static inline int32_t search_below(const float *threshold, int64_t thresholds, float value) {
    int64_t found = 0;
    for (int64_t half = (thresholds + 1) / 2; half; half /= 2) found += half & -(int64_t)!(value <= threshold[found + half - 1]);
    return found;
}

/* Σ of squares. */
static double energy_of(const float *coef, int64_t count) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t r = 0; r < count; r++) sum += (double)coef[r] * coef[r];
    return sum;
}

/* The code of the scale nearest to the root mean square of a row. */
static uint8_t scale_code(const float *coef, int64_t rank) {
    const double sum = energy_of(coef, rank);
    const float least = 1.52587890625e-5f, size = sqrtf(sum / rank); /* 2^-16 */
    const float step = nearbyintf(log2f(size > least ? size : least) * 8);
    return (step < -128 ? -128 : step > 127 ? 127 : step) + 128;
}

/* Numbers of one row of at most `rank` coefficients, read and written in whole registers from any of them on. */
static inline int64_t row_room(int64_t rank) { return padded(rank) + LANES; }

/* Floats that `pack_row` needs: for a row's numbers, and for their codes. */
static inline int64_t packing_room(int64_t rank) { return 2 * row_room(rank); }

/* Writes one row. */
static void pack_row(const struct coder *coder, const float *coef, float *room, uint8_t *row) {
    const uint8_t scale = scale_code(coef, coder->rank);
    const float divisor = scale_of(scale);
    float *unit = room;
    int32_t *code = (int32_t *)(room + row_room(coder->rank));
    for (int64_t r = 0; r < coder->rank; r++) unit[r] = coef[r] / divisor;
    for (int64_t r = coder->rank; r < row_room(coder->rank); r++) unit[r] = 0; /* their codes are not kept */
    uint64_t bits = scale;
    int held = 8;
    int64_t r = 0;
    for (int64_t run = 0; run < coder->runs; run++) {
        const int32_t width = coder->width[run];
        const int64_t end = coder->end[run], thresholds = ((int64_t)1 << width) - 1;
        const float *threshold = coder->threshold[run];
        if (!threshold)
            for (int64_t i = r; i < end; i++) code[i] = to_bfloat16(unit[i]);
        else if (width > COUNTED_BITS)
            for (int64_t i = r; i < end; i++) code[i] = search_below(threshold, thresholds, unit[i]);
        else
            for (int64_t i = r; i < end; i += LANES) { /* codes of the next run are written over */
                const int_vector found = count_below(threshold, thresholds, *(const vector *)(unit + i));
                memcpy(code + i, &found, sizeof found);
            }
        for (; r < end; r++) {
            bits |= (uint64_t)(uint32_t)code[r] << held;
            for (held += width; held >= 32; held -= 32, bits >>= 32, row += 4) memcpy(row, &(uint32_t){bits}, 4);
        }
    }
    for (; held > 0; held -= 8, bits >>= 8) *row++ = bits;
}

/* Writes one row of floats, or of scales and then integers: see lowrank_kv/stores/ranked_rows.py. */
static void pack_ranked(int64_t kind, int64_t group_size, const float *coef, int64_t rank, uint8_t *row) {
    if (kind == FLOAT32) {
        memcpy(row, coef, rank * sizeof(float));
        return;
    }
    if (kind == BFLOAT16) {
        for (int64_t r = 0; r < rank; r++) ((uint16_t *)row)[r] = to_bfloat16(coef[r]);
        return;
    }
    const int64_t size = group_size ? group_size : rank, groups = (rank + size - 1) / size, half = (rank + 1) / 2;
    uint16_t *scale = (uint16_t *)row;
    uint8_t *code = row + 4 * groups;
    const int64_t codes = kind == INT8 ? rank : half;
    const float most = kind == INT8 ? 255 : 15, rounding = 0.00390625f; /* 2^-8 */
    memset(code, 0, codes + codes % 2);
    for (int64_t k = 0; k < groups; k++) {
        const int64_t end = (k + 1) * size < rank ? (k + 1) * size : rank;
        float low = coef[k * size], high = low;
        for (int64_t r = k * size + 1; r < end; r++) {
            const int is_nan = coef[r] != coef[r]; /* then so are both, as in torch */
            low = coef[r] < low || is_nan ? coef[r] : low;
            high = coef[r] > high || is_nan ? coef[r] : high;
        }
        scale[groups + k] = to_bfloat16(low - fabsf(low) * rounding);
        low = from_bfloat16(scale[groups + k]);
        scale[k] = to_bfloat16((high - low) * (1 + rounding) / most);
        const float step = from_bfloat16(scale[k]), divisor = step > FLT_MIN ? step : FLT_MIN;
        for (int64_t r = k * size; r < end; r++) {
            const float level = nearbyintf((coef[r] - low) / divisor);
            const uint8_t found = !(level > 0) ? 0 : level > most ? most : level;
            if (kind == INT8)
                code[r] = found;
            else
                code[r < half ? r : r - half] |= r < half ? found : found << 4;
        }
    }
}

/* The class of a row of all coefficients. */
static int class_of_row(const struct importance *gate, const float *coef) {
    double energy = energy_of(coef, gate->leading) / gate->leading, score = 0;
    const double least = 2.3283064365386963e-10; /* 2^-32 */
    if (!(energy > least)) energy = least;
    const float scale = sqrt(energy);
#pragma omp simd reduction(+ : score)
    for (int64_t r = 0; r < gate->width; r++) {
        const float unit = coef[r] / scale, square = unit * unit < 9 ? unit * unit : 9;
        score += (double)unit * gate->linear[r] + (double)square * gate->square[r];
    }
    const double size = log(energy);
    score += gate->rest[0] * size + gate->rest[1] * size * size + gate->rest[2];
    int found = 0;
    while (found < gate->classes - 1 && !((float)score <= gate->bound[found])) found++;
    return found;
}

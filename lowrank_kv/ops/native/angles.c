/* The rotations of many tokens at once. */
#include <math.h>
#include <stdint.h>

#include "common.h"

/* cos and sin of place · frequency, each times `scaling`, (count, pairs) each. The product is rounded to a float, as models
 * round it, and below 2^31 quarter turns; reducing it to a quarter turn in double leaves no further error of its size.
 * `rounds`: to bfloat16, as models in it round both. */
void angles(const int32_t *place, int64_t count, const float *frequency, int64_t pairs, float scaling, int64_t rounds,
            int64_t threads, float *cos, float *sin) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < count; t++) {
        const float at = (float)place[t];
        float *restrict cos_row = cos + t * pairs, *restrict sin_row = sin + t * pairs;
#pragma omp simd
        for (int64_t f = 0; f < pairs; f++) {
            const float angle = at * frequency[f];
            const double quarters = rint(angle * 0.63661977236758134);
            const float x = (float)(angle - quarters * 1.5707963267948966), square = x * x;
            const float sine = x + x * square * (-1.6666654611e-1f + square * (8.3321608736e-3f + square * -1.9515295891e-4f));
            const float cosine = 1 - 0.5f * square +
                                 square * square * (4.166664568298827e-2f + square * (-1.388731625493765e-3f + square * 2.443315711809948e-5f));
            const int32_t quarter = (int32_t)quarters;
            const float first = quarter & 1 ? sine : cosine, second = quarter & 1 ? cosine : sine;
            cos_row[f] = ((quarter + 1) & 2 ? -first : first) * scaling;
            sin_row[f] = (quarter & 2 ? -second : second) * scaling;
        }
        for (int64_t f = 0; rounds && f < pairs; f++) {
            cos_row[f] = from_bfloat16(to_bfloat16(cos_row[f]));
            sin_row[f] = from_bfloat16(to_bfloat16(sin_row[f]));
        }
    }
}

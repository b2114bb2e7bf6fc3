/* Rows of a store as floats, many at once: for whoever multiplies all of them with a decoder. */
#include <stdint.h>

#include "common.h"
#include "store.h"

enum { AT_A_TIME = 64 }; /* rows of a bucket, whose first one is looked for */

/* Rows `first` to `end` of a store's only bucket, (parts, end − first, padded(rank)), zero beyond the rank. */
void read_rows_of(const struct store *store, int64_t parts, int64_t first, int64_t end, int64_t threads, float *out) {
    const struct bucket *bucket = store->buckets;
    const int64_t count = end - first, width = padded(bucket->rank), blocks = (count + AT_A_TIME - 1) / AT_A_TIME;
#pragma omp parallel for num_threads(threads) schedule(static) if (blocks > 1)
    for (int64_t i = 0; i < parts * blocks; i++) {
        const int64_t part = i / blocks, start = i % blocks * AT_A_TIME, left = count - start;
        read_block(store, bucket, part, first + start, left < AT_A_TIME ? left : AT_A_TIME, out + (part * count + start) * width);
    }
}

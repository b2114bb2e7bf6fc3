/* Appends a token's coefficients to a store. */
#include <string.h>

#include "store.h"

static struct bucket *bucket_of(const struct store *store, int64_t rank) {
    struct bucket *bucket = store->buckets, *end = bucket + store->num_buckets;
    while (bucket < end && bucket->rank < rank) bucket++;
    return bucket < end && bucket->rank == rank ? bucket : NULL;
}

int has_room(const struct store *store, const int64_t *ranks, int64_t tokens) {
    if (store->slot_bytes == 2 && *store->length + tokens > INT16_MAX) return 0;
    for (int64_t t = 0; t < tokens; t++) {
        const struct bucket *bucket = bucket_of(store, ranks[t]);
        int64_t needed = 1;
        for (int64_t before = 0; before < t; before++) needed += ranks[before] == ranks[t];
        if (!bucket || *bucket->length + needed > bucket->capacity) return 0;
    }
    return 1;
}

int append(struct store *store, const float *coef, int64_t rank) {
    if (!has_room(store, &rank, 1)) return 0;
    struct bucket *bucket = bucket_of(store, rank);
    const int64_t slot = *store->length, place = *bucket->length;
    uint8_t *row = bucket->rows + place * bucket->row_bytes;
    if (store->kind != FLOAT32)
        for (int64_t r = 0; r < rank; r++) ((uint16_t *)row)[r] = to_bfloat16(coef[r]);
    else if (rank) /* a bucket of rank 0 has no rows to copy to */
        memcpy(row, coef, rank * sizeof(float));
    switch (store->slot_bytes) {
    case 2: ((int16_t *)bucket->slot)[place] = slot; break;
    case 4: ((int32_t *)bucket->slot)[place] = slot; break;
    default: ((int64_t *)bucket->slot)[place] = slot;
    }
    ++*bucket->length;
    ++*store->length;
    return 1;
}

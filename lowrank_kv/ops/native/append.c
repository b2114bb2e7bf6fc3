/* A token's coefficients on their way into a store. */
#include <string.h>

#include "store.h"

static struct piece *piece_of(const struct store *store, int64_t rank) {
    struct piece *piece = store->pieces, *end = piece + store->count;
    while (piece < end && piece->rank < rank) piece++;
    return piece < end && piece->rank == rank ? piece : NULL;
}

int has_room(const struct store *store, const int64_t *ranks, int64_t tokens) {
    if (store->slot_bytes == 2 && *store->length + tokens > INT16_MAX) return 0;
    for (int64_t t = 0; t < tokens; t++) {
        const struct piece *piece = piece_of(store, ranks[t]);
        int64_t needed = 1;
        for (int64_t before = 0; before < t; before++) needed += ranks[before] == ranks[t];
        if (!piece || *piece->length + needed > piece->capacity) return 0;
    }
    return 1;
}

int append(struct store *store, const float *coef, int64_t rank) {
    if (!has_room(store, &rank, 1)) return 0;
    struct piece *piece = piece_of(store, rank);
    const int64_t slot = *store->length, place = *piece->length;
    uint8_t *row = piece->rows + place * piece->row_bytes;
    if (store->kind == FLOAT32)
        memcpy(row, coef, rank * sizeof(float));
    else
        for (int64_t r = 0; r < rank; r++) ((uint16_t *)row)[r] = to_bfloat16(coef[r]);
    switch (store->slot_bytes) {
    case 2: ((int16_t *)piece->slot)[place] = slot; break;
    case 4: ((int32_t *)piece->slot)[place] = slot; break;
    default: ((int64_t *)piece->slot)[place] = slot;
    }
    ++*piece->length;
    ++*store->length;
    return 1;
}

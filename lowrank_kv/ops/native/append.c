/* A token's coefficients on their way into a store. */
#include <string.h>

#include "store.h"

int append(struct store *store, const float *coef, int64_t rank, int64_t slot) {
    if (store->slot_bytes == 2 && slot >= INT16_MAX) return 0;
    struct piece *piece = store->pieces, *end = piece + store->count;
    while (piece < end && piece->rank < rank) piece++;
    if (piece == end || piece->rank != rank || piece->count == piece->capacity) return 0;
    uint8_t *row = piece->rows + piece->count * piece->row_bytes;
    if (store->kind == FLOAT32)
        memcpy(row, coef, rank * sizeof(float));
    else
        for (int64_t r = 0; r < rank; r++) ((uint16_t *)row)[r] = to_bfloat16(coef[r]);
    switch (store->slot_bytes) {
    case 2: ((int16_t *)piece->slot)[piece->count] = slot; break;
    case 4: ((int32_t *)piece->slot)[piece->count] = slot; break;
    default: ((int64_t *)piece->slot)[piece->count] = slot;
    }
    piece->count++;
    return 1;
}

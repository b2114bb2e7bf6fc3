/* Appends tokens at full rank: keys, values, and the positions of both. */
#include <string.h>

#include "states.h"
#include "store.h"

struct positions {
    int32_t *rows;
    int64_t *length; /* Python reads the same number */
    int64_t capacity;
};

struct appending {
    const struct store *stores[2]; /* keys', values': one bucket each, with a part for each head */
    struct states states[2];
    const struct positions *positions;
    int64_t tokens, heads, first_position;
};

/* Writes tokens behind those of both stores; returns 1, or 0 if there is no room for them all: then nothing is written. */
int append_full_rank(const struct appending *task) {
    const struct positions *positions = task->positions;
    const int64_t tokens = task->tokens, first = *positions->length;
    if (first + tokens > positions->capacity) return 0;
    for (int which = 0; which < 2; which++) {
        const struct bucket *bucket = task->stores[which]->buckets;
        if (*bucket->length + tokens > bucket->capacity) return 0;
    }
    for (int which = 0; which < 2; which++) {
        const struct bucket *bucket = task->stores[which]->buckets;
        const struct states *states = task->states + which;
        for (int64_t g = 0; g < task->heads; g++)
            for (int64_t t = 0; t < tokens; t++)
                memcpy(bucket->rows + g * bucket->part_bytes + (*bucket->length + t) * bucket->row_bytes,
                       states->start + t * states->token_stride + g * states->head_stride, bucket->row_bytes);
    }
    for (int64_t t = 0; t < tokens; t++) positions->rows[first + t] = task->first_position + t;
    for (int which = 0; which < 2; which++) *task->stores[which]->buckets->length += tokens;
    *positions->length += tokens;
    return 1;
}

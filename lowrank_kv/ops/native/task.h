/* What decode attention is asked to do. */
#pragma once
#include <stdint.h>

#include "store.h"

/* The tokens of one softmax that are stored in one way. Full-rank ones have no decoders, and one part for each KV head. */
struct task {
    const struct store *keys, *values;
    int64_t slots, depth;
    const float *query;     /* (heads, depth): over the dims of a head, or over coefficients when there is no decoder */
    const int64_t *place;   /* of each slot, in `cos` and `sin`; NULL: slot + first_place */
    int64_t first_place;
    const uint8_t *mask;    /* (queries, mask_stride), slots columns: zero where a query may not see a token; NULL when it sees all */
    int64_t mask_stride;
    float *output;          /* (queries, heads / queries, head_dim), out; the same in all tasks of a softmax */
    const float *cos, *sin; /* (places, pairs): rotate rebuilt keys; NULL when they are not rotated */
    int64_t pairs;
    int64_t slow; /* the first of the pairs from which on all turn by at most 1/300 from a place to the next; `pairs`: none */
    const float *decoder;       /* (parts, keys.rank, decoder_stride): rebuilds a part's keys; NULL when they are not. Where it
                                 * is of pairs, (keys.rank / 2, decoder_stride) of two neighbours in bfloat16 */
    const float *decoder_columns; /* where the decoder is of pairs: (num_kv_heads, pairs, padded keys.rank), the two dims of a
                                   * pair side by side in bfloat16 */
    const float *value_decoder; /* (parts, values.rank, value_width): gives values from coefficients; NULL when they are values */
    int64_t decoder_stride, value_width, parts;
    int64_t paired; /* whether planned coefficients of one part are multiplied as bfloat16, two at a time */
    /* The same in all tasks of a call: */
    int64_t num_kv_heads;
    int64_t heads, lanes; /* rows of queries, the new tokens fastest; the same, padded */
    int64_t head_dim;
    int64_t queries, threads;
    const float *sink; /* (heads / queries): one more score of each head's softmax, of a token without a value; NULL: none */
    float scaling, softcap; /* of scores; 0: none */
};

/* One softmax over the tokens of all tasks. Returns 0, or 1 when there is no memory. */
int attend(const struct task *tasks, int count);

/* Whether keys of so many dims, turned in so many pairs, may be rebuilt from pairs. */
int multiplies_pairs(int64_t depth, int64_t pairs);

/* What is done with new tokens of a layer, one call each; serve.c makes one of all. */
#pragma once
#include <stdint.h>

#include "states.h"

struct pages; /* pages.c */

struct projecting {
    struct states states[2];   /* keys, values */
    const float *vectors[2];   /* (num_kv_heads · head_dim, stride) */
    float *coef[2];            /* (tokens, stride), out */
    int64_t stride[2];         /* padded */
    const int64_t *position;   /* of each token, in `cos` and `sin` */
    const float *cos, *sin;    /* (places, pairs): turn keys back */
    int64_t pairs, tokens, num_kv_heads, head_dim, kind, threads; /* kind: FLOAT32 or BFLOAT16 */
};

struct writing {
    struct states states[2];
    const float *coef[2];
    int64_t coef_stride[2];       /* floats */
    const int64_t *rank[2];       /* of each token, where rows have ranks of their own */
    const int64_t *position, *slot; /* of each token; slot: page · block + place within the page, negative where it has none */
    int64_t tokens, threads;
};

struct querying {
    const float *query;      /* (tokens, heads, head_dim) */
    float *output;           /* the same */
    struct states states[2]; /* of the new tokens, which are those of the queries */
    const int32_t *first;    /* of each sequence its first token, and behind the last their number */
    const int32_t *length;   /* of each sequence, the new tokens included */
    const int32_t *table;    /* (sequences, table_stride): its pages */
    int64_t table_stride;
    const int64_t *served;   /* (count): the sequences to serve */
    int64_t count;
    const float *cos, *sin;  /* (places, pairs) */
    int64_t pairs, slow;     /* see task.h */
    const float *decoder, *decoder_pairs, *decoder_columns; /* of keys; the latter two NULL where coefficients are not rounded */
    int64_t decoder_stride, pairs_stride;
    const float *value_decoder;
    int64_t value_width, heads;
    int64_t sees_itself; /* whether a token sees itself exactly; else its row, and sequences have one new token each */
    int64_t threads;
    float scaling, softcap;
};

/* Coefficients of tokens' keys and values. Returns 0, or 1 when there is no memory. */
int project_states(const struct projecting *task);

/* Writes tokens, of which those of one page come in their order. Returns how many rows were cut, -1 when there is no memory. */
int64_t write_pages(const struct pages *pages, const struct writing *task);

/* Attention of some sequences' queries over their pages and, each up to its own, over the new tokens. Returns 0, or 1 when there
 * is no memory. */
int attend_pages(const struct pages *pages, const struct querying *all);

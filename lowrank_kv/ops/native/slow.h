/* Scores of pairs of dims that turn slowly, without rebuilding them.
 *
 * In a chunk of places such a pair turns so little that its part of a token's score is nearly a parabola in the token's place.
 * So the queries are turned back to three places of a chunk, its nodes, and multiplied with the slow columns of the decoder,
 * once for all tokens. A token's coefficients are then multiplied with one vector for each node and query instead of all slow
 * columns of all heads, and its score is interpolated between the nodes.
 *
 * A pair that turns by 1/300 a place is interpolated to (CHUNK / 2 / 300)^3 / 24 = 0.003 of its length, and those behind it,
 * which turn more slowly, far better. bfloat16, in which coefficients, decoder and angles are, rounds each by up to 0.002.
 */
#pragma once
#include <stdint.h>
#include <string.h>

#include "common.h"
#include "scores.h"
#include "task.h"
#include "tiles.h"

enum { NODES = 3, CHUNK = 256 }; /* CHUNK: places */

/* A chunk's nodes. */
struct nodes {
    float at[NODES]; /* slots */
    float *turned;   /* (NODES · queries of a KV head, slow pairs): queries turned back, a pair's dims side by side */
    float *vectors;  /* (KV heads, NODES, queries of each, vector_stride): their products with the decoder */
    float *columns;  /* (padded rank / 2, columns): the same in pairs of neighbouring coefficients, node by node */
    float *found;    /* (tokens, found_stride): products of a block's coefficients with them */
};

static inline int64_t vector_stride(const struct task *task) {
    return (task->keys->rank + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
}

/* One for each node and row of queries. */
static inline int64_t columns_of_nodes(const struct task *task) { return padded(NODES * task->heads); }

/* Numbers from one row of `found` to the next: `lanes` of them can be read from each node's first one on. */
static inline int64_t found_stride(const struct task *task) {
    const int64_t read = (NODES - 1) * task->heads + task->lanes;
    return padded(read > NODES * task->heads ? read : NODES * task->heads);
}

/* The pairs that are rebuilt, the first ones; the others are interpolated, if that takes a third fewer products at least. */
static inline int64_t rebuilt_pairs(const struct task *task) {
    const int64_t rebuilt = task->slow > LANES ? padded(task->slow) : LANES;
    const int64_t saved = 2 * (task->pairs - rebuilt) * task->num_kv_heads;
    const int rebuilds_some = fits_registers(task->depth, task->heads / task->num_kv_heads);
    const int interpolates =
        HAS_PAIRS && task->paired && rebuilds_some && !task->place && 2 * saved >= 3 * columns_of_nodes(task);
    return interpolates ? rebuilt : task->pairs;
}

/* Floats of each array of `struct nodes`, for blocks of so many tokens. */
struct node_sizes { int64_t turned, vectors, columns, found; };

static inline struct node_sizes node_sizes_of(const struct task *task, int64_t tokens) {
    const int64_t slow = task->pairs - rebuilt_pairs(task);
    if (!slow) return (struct node_sizes){0};
    return (struct node_sizes){NODES * (task->heads / task->num_kv_heads) * slow, NODES * task->heads * vector_stride(task),
                               padded(task->keys->rank) / 2 * columns_of_nodes(task), tokens * found_stride(task)};
}

static inline int64_t size_of_nodes(const struct task *task, int64_t tokens) {
    const struct node_sizes sizes = node_sizes_of(task, tokens);
    return sizes.turned + sizes.vectors + sizes.columns + sizes.found;
}

#if HAS_PAIRS
/* Divides memory of `size_of_nodes`, which is zero at first: numbers that are never written are read, and have to be finite. */
static struct nodes nodes_in(float *memory, const struct task *task) {
    const struct node_sizes sizes = node_sizes_of(task, 0);
    struct nodes nodes = {.turned = memory, .vectors = memory + sizes.turned};
    nodes.columns = nodes.vectors + sizes.vectors;
    nodes.found = nodes.columns + sizes.columns;
    return nodes;
}

/* Turns the slow pairs of a query back from a place. */
static void turn_back(const struct task *task, const float *query, int64_t place, float *out) {
    const float *first = query, *second = query + task->pairs;
    const float *cosine = task->cos + place * task->pairs, *sine = task->sin + place * task->pairs;
    for (int64_t f = rebuilt_pairs(task); f < task->pairs; f += LANES, out += LANES) {
        const vector x = *(const vector *)(first + f), y = *(const vector *)(second + f);
        const vector cos = *(const vector *)(cosine + f), sin = *(const vector *)(sine + f);
        *(vector *)out = side_by_side(x * cos + y * sin, y * cos - x * sin);
    }
}

/* Turns LANES vectors of LANES numbers into their columns: each round moves the lowest bit of a lane's number to the front of
 * its vector's. */
static inline void transpose(vector *rows) {
    for (int size = 1; size < LANES; size *= 2) {
        vector found[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            const vector a = rows[2 * i], b = rows[2 * i + 1];
            found[i] = PICK(a, b, ALL_LANES(1, 0));
            found[i + LANES / 2] = PICK(a, b, ALL_LANES(1, 1));
        }
        memcpy(rows, found, sizeof found);
    }
}

/* Writes the columns, at first `rank` coefficients, of the vectors of all KV heads. */
static void write_columns(const struct task *task, int64_t rank, struct nodes *nodes) {
    const int64_t heads = task->heads, sharing = heads / task->num_kv_heads, stride = vector_stride(task);
    const int64_t all = NODES * heads, column_stride = columns_of_nodes(task);
    for (int64_t first = 0; first < all; first += LANES)
        for (int64_t r = 0; r < rank; r += 2 * LANES) {
            vector pairs[LANES] = {{0}};
            for (int64_t i = 0; i < LANES && first + i < all; i++) {
                const int64_t k = (first + i) / heads, head = (first + i) % heads;
                const float *own = nodes->vectors + ((head / sharing * NODES + k) * sharing + head % sharing) * stride + r;
                pairs[i] = (vector)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(own + LANES), _mm512_loadu_ps(own));
            }
            transpose(pairs);
            for (int64_t i = 0; i < LANES && r + 2 * i < rank; i++)
                *(vector *)(nodes->columns + (r / 2 + i) * column_stride + first) = pairs[i];
        }
}

/* The slot of a node of `count` slots: Chebyshev's places, (1 − cos(π (2k + 1) / 6)) / 2 of them. */
static inline int64_t slot_of_node(int k, int64_t first, int64_t count) {
    static const float part[NODES] = {0.0669873f, 0.5f, 0.9330127f};
    return first + (int64_t)(part[k] * (count - 1) + 0.5f);
}

/* Prefetches the rotations that `set_nodes` reads. */
static void prefetch_nodes(const struct task *task, int64_t first, int64_t count) {
    for (int k = 0; k < NODES; k++)
        for (int64_t f = rebuilt_pairs(task); f < task->pairs; f += LANES) {
            const int64_t place = (slot_of_node(k, first, count) + task->first_place) * task->pairs;
            __builtin_prefetch(task->cos + place + f);
            __builtin_prefetch(task->sin + place + f);
        }
}

/* Works out the nodes of `count` slots for tokens of at most so many coefficients. */
static void set_nodes(const struct task *task, int64_t first, int64_t count, int64_t rank, struct nodes *nodes) {
    const int64_t sharing = task->heads / task->num_kv_heads, rows = NODES * sharing, width = padded(task->keys->rank);
    const int64_t rebuilt = rebuilt_pairs(task), slow = task->pairs - rebuilt, stride = vector_stride(task);
    for (int k = 0; k < NODES; k++) nodes->at[k] = slot_of_node(k, first, count);
    for (int64_t kv_head = 0; kv_head < task->num_kv_heads; kv_head++) {
        const float *query = task->query + kv_head * sharing * task->depth;
        for (int64_t i = 0; i < rows; i++)
            turn_back(task, query + i % sharing * task->depth, (int64_t)nodes->at[i / sharing] + task->first_place,
                      nodes->turned + i * slow);
        product_of(1, rows, padded(rank), slow, nodes->turned, slow, 1,
                   task->decoder_columns + (kv_head * task->pairs + rebuilt) * width, width,
                   nodes->vectors + kv_head * rows * stride, stride, 0);
    }
    write_columns(task, rank, nodes);
}

/* Adds the slow pairs' part to the scores, (count, lanes), of tokens that have coefficients in pairs, (count, stride). */
static void add_slow_scores(const struct task *task, const int32_t *slot, int64_t count, const float *coef, int64_t stride,
                            int64_t rank, const struct nodes *nodes, struct tiling *tiling, float *score) {
    const int64_t lanes = task->lanes, columns = columns_of_nodes(task), row = found_stride(task);
    const float a = nodes->at[0], b = nodes->at[1], c = nodes->at[2];
    product_of_pairs(count, columns, (rank + 1) / 2, coef, stride, nodes->columns, columns, nodes->found, row, tiling);
    for (int64_t t = 0; t < count; t++) {
        const float from_a = slot[t] - a, from_b = slot[t] - b, from_c = slot[t] - c, *found = nodes->found + t * row;
        const float of_a = from_b * from_c / ((a - b) * (a - c)), of_b = from_a * from_c / ((b - a) * (b - c));
        const float of_c = from_a * from_b / ((c - a) * (c - b));
        for (int64_t m = 0; m < lanes; m += LANES, found += LANES)
            *(vector *)(score + t * lanes + m) += *(const vector *)found * of_a + *(const vector *)(found + task->heads) * of_b +
                                                  *(const vector *)(found + 2 * task->heads) * of_c;
    }
}
#endif

/* Planned coefficients of one part, multiplied as bfloat16, two at a time: class by class in a stretch, or in a chunk of it where
 * some pairs are interpolated.
 */
#pragma once
#include <stdint.h>

#include "classes.h"
#include "plan.h"
#include "scores.h"
#include "scratch.h"
#include "slow.h"

#if HAS_PAIRS
/* Scores of at most BLOCK tokens; slow pairs are interpolated between `nodes`, if not NULL. */
static void score_pairs(const struct task *task, const struct alike *tokens, const struct nodes *nodes, struct scratch *scratch) {
    const int64_t sharing = task->heads / task->num_kv_heads, rank = tokens->rank, lanes = task->lanes;
    const int64_t stride = in_blocks(rank) / 2, pairs = nodes ? rebuilt_pairs(task) : task->pairs;
    const uint8_t *const *next = tokens->row + tokens->count;
    for (int64_t t = 0; t < tokens->count; t++) {
        scratch->place[t] = rotation_of(task, tokens->slot[t], pairs);
        if (t >= tokens->left) continue;
        __builtin_prefetch(next[t]);
        __builtin_prefetch(next[t] + tokens->row_bytes - 1);
    }
    read_rows(tokens->plan, tokens->row, tokens->count, tokens->row_bytes, rank, (uint16_t *)scratch->coef);
    for (int64_t kv_head = 0; kv_head < task->num_kv_heads; kv_head++) {
        const float *decoder = task->decoder + kv_head * task->depth, *query = task->query + kv_head * sharing * task->depth;
        float *found = scratch->score + kv_head * sharing;
        const struct rebuilt keys = {scratch->coef, decoder, task->cos, task->sin, scratch->place, stride, task->decoder_stride,
                                     (rank + 1) / 2, task->depth, pairs, 1, uses_tiles ? scratch->of_tiles : NULL, &scratch->tiling};
        if (fits_registers(task->depth, sharing))
            rebuilt_scores(&keys, tokens->count, sharing, query, scratch->key, found, lanes, &scratch->ahead);
        else
            stored_scores(&keys, tokens->count, sharing, query, scratch->key, found, lanes);
    }
    if (nodes)
        add_slow_scores(task, tokens->slot, tokens->count, scratch->coef, stride, rank, nodes, &scratch->tiling, scratch->score);
    keep_scaled(task, tokens, scratch);
}

#if HAS_TILES
_Static_assert(BLOCK <= MOST_ROWS && BLOCK <= PAIRS_AT_ONCE, "a block's tokens, or pairs of them, are one product");

/* Adds the coefficients of pairs of tokens, weighted by `score`, to `latent`: the weights of one query have to be in a row. */
static void add_in_tiles(const struct task *task, int64_t pairs, int64_t rank, struct scratch *scratch) {
    const int64_t lanes = task->lanes, stride = padded(task->values->rank);
    for (int64_t m = 0; m < lanes; m += LANES)
        for (int64_t first = 0; first < pairs; first += LANES) {
            vector weights[LANES] = {{0}};
            for (int64_t i = 0; i < LANES && first + i < pairs; i++)
                weights[i] = *(const vector *)(scratch->score + (first + i) * lanes + m);
            transpose(weights);
            for (int64_t i = 0; i < LANES; i++) *(vector *)(scratch->of_tiles + (m + i) * PAIRS_AT_ONCE + first) = weights[i];
        }
    for (int64_t head = 0; head < task->heads; head += MOST_ROWS) {
        const int64_t left = task->heads - head, rows = left < MOST_ROWS ? left : MOST_ROWS;
        product_in_tiles(rows, padded(rank), pairs, scratch->of_tiles + head * PAIRS_AT_ONCE, PAIRS_AT_ONCE, scratch->coef,
                         in_blocks(rank), scratch->latent + head * stride, stride, 1, &scratch->tiling);
    }
}
#endif

/* Adds the weights of at most 2 · BLOCK tokens to `sum`, and their weighted coefficients to `latent`. */
static void weigh_pairs(const struct task *task, const struct alike *tokens, struct scratch *scratch) {
    const int64_t lanes = task->lanes, rank = tokens->rank, count = tokens->count;
    for (int64_t t = 0; t < count; t += 2) {
        const int are_two = t + 1 < count;
        const float scale = scale_of(tokens->row[t][0]), scale_of_next = are_two ? scale_of(tokens->row[t + 1][0]) : 0;
        for (int64_t m = 0; m < lanes; m += LANES) {
            vector first = weight_of(task, tokens->slot[t], m, scratch) * scale, second = {0};
            if (are_two) second = weight_of(task, tokens->slot[t + 1], m, scratch) * scale_of_next;
            *(vector *)(scratch->score + t / 2 * lanes + m) = side_by_side(first, second);
        }
    }
    read_rows_in_twos(tokens->plan, tokens->row, count, tokens->row_bytes, rank, (uint16_t *)scratch->coef);
#if HAS_TILES
    if (uses_tiles) {
        add_in_tiles(task, (count + 1) / 2, rank, scratch);
        return;
    }
#endif
    product_of(1, task->heads, padded(rank), (count + 1) / 2, scratch->score, 1, lanes, scratch->coef, in_blocks(rank),
               scratch->latent, padded(task->values->rank), 1);
}

/* How many of the tokens from `first` on have slots before this one. */
static int64_t count_before(const struct alike *tokens, int64_t first, int64_t slot) {
    int64_t end = first;
    while (end < tokens->count && tokens->slot[end] < slot) end++;
    return end - first;
}

/* The largest rank for which nodes pay: tokens of a class, `count` of each, spare two products for each coefficient, which
 * costs as many for each node and head. */
static int64_t rank_of_nodes(const struct task *task, const struct alike *classes, const int64_t *count) {
    int64_t rank = 0;
    for (int k = 0; k < CLASSES; k++)
        if (classes[k].rank > rank && count[k] * classes[k].rank > NODES * task->heads * (classes[k].rank - rank))
            rank = classes[k].rank;
    return rank;
}

static void score_stretch(const struct task *task, struct scratch *scratch) {
    const int64_t start = scratch->start, slots = scratch->end - start;
    const int interpolates = rebuilt_pairs(task) < task->pairs && slots >= CHUNK / 2; /* fewer do not pay for their nodes */
    const int64_t chunks = interpolates ? (slots + CHUNK - 1) / CHUNK : 1;
    struct nodes nodes = {0};
    struct alike classes[CLASSES];
    int64_t next[CLASSES] = {0}, count[CLASSES];
    if (interpolates) nodes = nodes_in(scratch->memory_of_nodes, task);
    arrange(task->keys, scratch->keys, &scratch->arranged);
    for (int k = 0; k < CLASSES; k++) classes[k] = tokens_of_class(task->keys, &scratch->arranged, k);
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        const int64_t first = start + slots * chunk / chunks, end = start + slots * (chunk + 1) / chunks;
        for (int k = 0; k < CLASSES; k++) count[k] = count_before(classes + k, next[k], end);
        const int64_t rank = interpolates ? rank_of_nodes(task, classes, count) : 0;
        if (rank) set_nodes(task, first, end - first, rank, &nodes);
        if (interpolates && chunk + 1 < chunks) prefetch_nodes(task, end, start + slots * (chunk + 2) / chunks - end);
        for (int k = 0; k < CLASSES; next[k] += count[k], k++) {
            const int64_t blocks = (count[k] + BLOCK - 1) / BLOCK; /* of about equal size */
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t from = count[k] * block / blocks, to = count[k] * (block + 1) / blocks;
                const struct alike tokens = next_tokens(classes + k, next[k] + from, to - from);
                score_pairs(task, &tokens, tokens.rank <= rank ? &nodes : NULL, scratch);
            }
        }
    }
}

static void weigh_stretch(const struct task *task, struct scratch *scratch) {
    arrange(task->values, scratch->values, &scratch->arranged);
    for (int k = 0; k < CLASSES; k++) {
        const struct alike all = tokens_of_class(task->values, &scratch->arranged, k);
        for (int64_t t = 0; t < all.count; t += 2 * BLOCK) {
            const struct alike tokens = next_tokens(&all, t, 2 * BLOCK);
            prefetch_next(scratch);
            weigh_pairs(task, &tokens, scratch);
        }
    }
}
#endif

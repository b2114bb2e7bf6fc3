/* Decode attention over compressed tokens, and full-rank ones beside them, on a CPU.
 *
 * Each thread serves its share of the slots, a stretch of them at a time, in two passes. Pass 1, a block of tokens at a time:
 * keys are rebuilt (coefficients · decoder), rotated and multiplied with the queries while they are in the core's cache, and
 * only the scores are written. Pass 2 weighs the values' coefficients, which pass 1 has prefetched, by the scores. Values are
 * not rebuilt.
 *
 * The sums of a stretch are scaled by the largest score so far, and scaled again when a later stretch has a larger one.
 * The threads' sums are added in order, so that equal inputs give equal bits.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "classes.h"
#include "common.h"
#include "pairs.h"
#include "scores.h"
#include "scratch.h"
#include "store.h"
#include "task.h"
#include "tiles.h"

#if HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Whether keys are rebuilt in registers. */
static inline int rebuilds_in_registers(const struct task *task) {
    return task->decoder && task->cos && 2 * task->pairs == task->depth &&
           fits_registers(task->depth, task->heads / task->num_kv_heads);
}

/* -- pass 1: scores ---------------------------------------------------------------------------------------------- */

/* Scores of a block's tokens by one part of their coefficients, which are of this rank. */
static void score_part(const struct task *task, int64_t part, struct rows rows, int64_t rank, int64_t count,
                       struct scratch *scratch) {
    const int64_t part_heads = task->heads / task->parts, part_kv_heads = task->num_kv_heads / task->parts;
    const int64_t lanes = task->lanes, depth = task->depth, stride = task->decoder_stride, sharing = part_heads / part_kv_heads;
    /* Heads rebuilt at once: one, whose keys stay in the first cache until they are scored, if it fills vectors. */
    const int64_t together = depth % LANES ? part_kv_heads : 1, columns = depth % LANES ? stride : depth;
    const int64_t *place = scratch->place;
    float *score = scratch->score + part * part_heads;
    const float *query = task->query + part * part_heads * depth;
    if (!task->decoder) {
        score_rows(part_heads, count, rank, query, depth, rows.start, rows.stride, score, lanes);
        return;
    }
    const float *decoder = task->decoder + part * task->keys->rank * stride;
    for (int64_t kv_head = 0; kv_head < part_kv_heads; kv_head++) {
        const float *own = query + kv_head * sharing * depth;
        float *key = scratch->key + kv_head % together * depth, *found = score + kv_head * sharing;
        if (rebuilds_in_registers(task)) {
            const struct rebuilt keys = {rows.start, decoder + kv_head * depth, task->cos, task->sin, place,
                                         rows.stride, stride, rank, depth, task->pairs, 0, NULL, NULL};
            rebuilt_scores(&keys, count, sharing, own, scratch->key, found, lanes, &scratch->ahead);
            continue;
        }
        if (kv_head % together == 0)
            product(count, columns, rank, rows.start, rows.stride, 1, decoder + kv_head * depth, stride, key, columns, 0);
        for (int64_t t = 0; task->cos && t < count; t++)
            rotate(task->pairs, task->cos + place[t], task->sin + place[t], key + t * columns);
        score_rows(sharing, count, depth, own, depth, key, columns, found, lanes);
    }
}

/* Scores of one block's tokens; `largest` rises to the largest of each head's. */
static void score_block(const struct task *task, const struct bucket *bucket, int64_t first, int64_t count,
                        struct scratch *scratch) {
    const struct store *store = task->keys;
    for (int64_t t = 0; t < count; t++) {
        scratch->slot[t] = slot_of(store, bucket, first + t);
        if (task->cos) scratch->place[t] = rotation_of(task, scratch->slot[t], task->pairs);
    }
    const int64_t rank = largest_rank(store, bucket, first, count);
    for (int64_t part = 0; part < task->parts; part++)
        score_part(task, part, rows_of(store, bucket, part, first, count, scratch->coef), rank, count, scratch);
    for (int64_t t = 0; t < count; t++) keep_scores(task, scratch->slot[t], scratch->score + t * task->lanes, scratch);
}

/* The same of tokens of one plan. */
static void score_alike(const struct task *task, const struct alike *tokens, struct scratch *scratch) {
    for (int64_t t = 0; task->cos && t < tokens->count; t++)
        scratch->place[t] = rotation_of(task, tokens->slot[t], task->pairs);
    score_part(task, 0, rows_of_class(tokens, scratch->coef), tokens->rank, tokens->count, scratch);
    keep_scaled(task, tokens, scratch);
}

/* -- pass 2: values ---------------------------------------------------------------------------------------------- */

/* The weights of a block's token t, times `scale`; they are added to `sum` without it. */
static inline void weigh_one(const struct task *task, int64_t t, int64_t slot, float scale, struct scratch *scratch) {
    for (int64_t m = 0; m < task->lanes; m += LANES)
        *(vector *)(scratch->score + t * task->lanes + m) = weight_of(task, slot, m, scratch) * scale;
}

/* Adds one block's weights to `sum` and its weighted coefficients to `latent`. */
static void value_block(const struct task *task, const struct bucket *bucket, int64_t first, int64_t count,
                        struct scratch *scratch) {
    const struct store *store = task->values;
    const int64_t lanes = task->lanes, part_heads = task->heads / task->parts;
    const int64_t stride = padded(store->rank);
    prefetch_next(scratch);
    for (int64_t t = 0; t < count; t++) weigh_one(task, t, slot_of(store, bucket, first + t), 1, scratch);
    for (int64_t part = 0; part < task->parts; part++) {
        const struct rows rows = rows_of(store, bucket, part, first, count, scratch->coef);
        const float *weight = scratch->score + part * part_heads;
        float *latent = scratch->latent + part * part_heads * stride;
        const int64_t rank = largest_rank(store, bucket, first, count);
        const int64_t full_vectors = store->kind == FLOAT32 && !store->ranked ? rank / LANES * LANES : padded(rank);
        product(part_heads, full_vectors, count, weight, 1, lanes, rows.start, rows.stride, latent, stride, 1);
        if (full_vectors >= rank) continue;
        for (int64_t t = 0; t < count; t++) { /* the rest, which does not fill a vector, and zeros */
            float *rest = scratch->coef + t * LANES;
            *(vector *)rest = (vector){0};
            for (int64_t r = full_vectors; r < rank; r++) rest[r - full_vectors] = rows.start[t * rows.stride + r];
        }
        product(part_heads, LANES, count, weight, 1, lanes, scratch->coef, LANES, latent + full_vectors, stride, 1);
    }
}

/* The same of tokens of one plan. */
static void value_alike(const struct task *task, const struct alike *tokens, struct scratch *scratch) {
    prefetch_next(scratch);
    for (int64_t t = 0; t < tokens->count; t++) weigh_one(task, t, tokens->slot[t], scale_of(tokens->row[t][0]), scratch);
    const struct rows rows = rows_of_class(tokens, scratch->coef);
    product(task->heads, rows.stride, tokens->count, scratch->score, 1, task->lanes, rows.start, rows.stride, scratch->latent,
            padded(task->values->rank), 1);
}

/* Whether a store's rows are read plan by plan. With AVX-512 VBMI floats are multiplied in the order in which they lie: rows are
 * read there as fast by themselves, and nobody has timed the other order. */
static inline int is_by_class(const struct store *store, int64_t parts) {
#if defined(__AVX512VBMI__)
    return 0;
#else
    return store->kind == PLANNED && parts == 1;
#endif
}

/* Serves a stretch's tokens of a store class by class, at most BLOCK at once. */
static inline void by_class(const struct store *store, const struct share *shares, const struct task *task,
                            void (*serve)(const struct task *, const struct alike *, struct scratch *), struct scratch *scratch) {
    arrange(store, shares, &scratch->arranged);
    for (int k = 0; k < CLASSES; k++) {
        const struct alike all = tokens_of_class(store, &scratch->arranged, k);
        const int64_t blocks = (all.count + BLOCK - 1) / BLOCK; /* of about equal size */
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t first = all.count * block / blocks, end = all.count * (block + 1) / blocks;
            const struct alike tokens = next_tokens(&all, first, end - first);
            serve(task, &tokens, scratch);
        }
    }
}

int64_t lanes(void) { return LANES; }

int uses_tiles = 0;

/* From now on multiplies pairs in tile registers, if that is wanted and the system gives them; whether it does. */
int use_tiles(int wanted) {
#if HAS_TILES
    const long ask = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    uses_tiles = wanted && !syscall(SYS_arch_prctl, ask, tile_data);
#else
    (void)wanted;
#endif
    return uses_tiles;
}

/* Whether keys of so many dims, turned in so many pairs, may be rebuilt from pairs. */
int multiplies_pairs(int64_t depth, int64_t pairs) { return HAS_PAIRS && 2 * pairs == depth && depth % (2 * STEP) == 0; }

/* -- all tokens ---------------------------------------------------------------------------------------------------- */

static inline int64_t latents_of(const struct task *task) { return task->heads * padded(task->values->rank); }

/* Rescales the sums if the largest scores have risen. */
static void rescale(const struct task *tasks, int count, struct scratch *scratch) {
    const int64_t lanes = tasks->lanes;
    float *factor = scratch->scaled, *latent = scratch->latents;
    if (!memcmp(factor, scratch->largest, lanes * sizeof(float))) return;
    for (int64_t m = 0; m < lanes; m += LANES) {
        *(vector *)(factor + m) = exponential(*(vector *)(factor + m) - *(vector *)(scratch->largest + m));
        *(vector *)(scratch->sum + m) *= *(vector *)(factor + m);
    }
    for (const struct task *task = tasks; task < tasks + count; task++) {
        const int64_t rank = padded(task->values->rank);
        for (int64_t head = 0; head < task->heads; head++)
            for (int64_t r = 0; r < rank; r++) *latent++ *= factor[head];
    }
    memcpy(scratch->scaled, scratch->largest, lanes * sizeof(float));
}

/* Slots served at once. */
static int64_t stretch_of(const struct task *task) {
    int64_t bytes = 0;
    const struct bucket *buckets = task->values->buckets, *end = buckets + task->values->num_buckets;
    for (const struct bucket *bucket = buckets; bucket < end; bucket++)
        bytes += *bucket->length * bucket->row_bytes * task->parts;
    const int64_t fit = task->slots * STRETCH_BYTES / (bytes + 1);
    return fit < 4 * BLOCK ? 4 * BLOCK : fit < STRETCH ? fit : STRETCH;
}

/* Serves the slots from `first` to `end` of one task. */
static void serve(const struct task *tasks, int count, const struct task *task, int64_t first, int64_t end,
                  struct scratch *scratch) {
    const struct store *keys = task->keys, *values = task->values;
    const int64_t stretch = stretch_of(task), stretches = (end - first + stretch - 1) / stretch; /* of about equal size */
    memset(scratch->keys, 0, keys->num_buckets * sizeof(struct share));
    memset(scratch->values, 0, values->num_buckets * sizeof(struct share));
    move_shares(keys, first, scratch->keys);
    move_shares(values, first, scratch->values);
    for (int64_t i = 0; i < stretches; i++) {
        const int64_t last = first + (end - first) * (i + 1) / stretches;
        scratch->start = first + (end - first) * i / stretches, scratch->end = last;
        move_shares(keys, last, scratch->keys);
        move_shares(values, last, scratch->values);
        const int64_t tokens = last - scratch->start;
        const int64_t calls = rebuilds_in_registers(task) ? prefetch_calls(tokens, task->num_kv_heads, rebuilt_pairs(task)) : 0;
        scratch->ahead = ahead_of(values, scratch->values, task->parts, calls);
#if HAS_PAIRS
        if (task->paired) {
            score_stretch(task, scratch);
            rescale(tasks, count, scratch);
            weigh_stretch(task, scratch);
            continue;
        }
#endif
        const int keys_by_class = is_by_class(keys, task->parts), values_by_class = is_by_class(values, task->parts);
        if (keys_by_class) by_class(keys, scratch->keys, task, score_alike, scratch);
        for (int64_t p = 0; !keys_by_class && p < keys->num_buckets; p++)
            for (int64_t t = scratch->keys[p].first, left; (left = scratch->keys[p].end - t) > 0; t += BLOCK)
                score_block(task, keys->buckets + p, t, left < BLOCK ? left : BLOCK, scratch);
        rescale(tasks, count, scratch);
        if (values_by_class) by_class(values, scratch->values, task, value_alike, scratch);
        for (int64_t p = 0; !values_by_class && p < values->num_buckets; p++)
            for (int64_t t = scratch->values[p].first, left; (left = scratch->values[p].end - t) > 0; t += BLOCK)
                value_block(task, values->buckets + p, t, left < BLOCK ? left : BLOCK, scratch);
    }
}

/* Has a thread's share of the next task prefetched in `calls` calls. */
static void prefetch_share(const struct task *task, int64_t thread, int64_t calls, struct scratch *scratch) {
    const struct store *stores[] = {task->keys, task->values};
    struct share *shares[] = {scratch->next_keys, scratch->next_values};
    for (int which = 0; which < 2; which++) {
        memset(shares[which], 0, stores[which]->num_buckets * sizeof(struct share));
        move_shares(stores[which], task->slots * thread / task->threads, shares[which]);
        move_shares(stores[which], task->slots * (thread + 1) / task->threads, shares[which]);
        scratch->next[which] = ahead_of(stores[which], shares[which], task->parts, calls);
    }
}

/* Serves all tasks, each thread its share of their slots. */
static void run(const struct task *tasks, int count, struct scratch *all) {
    const int64_t threads = tasks->threads;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t thread = 0; thread < threads; thread++) {
        struct scratch *scratch = all + thread;
        scratch->latent = scratch->latents;
        for (const struct task *task = tasks; task < tasks + count; scratch->latent += latents_of(task), task++) {
            const int64_t first = task->slots * thread / threads, end = task->slots * (thread + 1) / threads;
            memset(scratch->next, 0, sizeof scratch->next);
            if (task + 1 < tasks + count) prefetch_share(task + 1, thread, (end - first) / (2 * BLOCK) + 1, scratch);
            serve(tasks, count, task, first, end, scratch);
        }
        release_tiles(&scratch->tiling);
    }
}

/* Adds the values of weighted coefficients, (heads, padded rank), to `out` (heads, head_dim). The decoder comes from memory,
 * and twice as fast when read in order, row after row, for all heads. */
static void decode_values(const struct task *task, const float *latent, float *out) {
    const int64_t rank = task->values->rank, stride = padded(rank), head_dim = task->head_dim;
    if (!task->value_decoder) {
        for (int64_t head = 0; head < task->heads; head++, latent += stride, out += head_dim)
            for (int64_t d = 0; d < head_dim; d++) out[d] += latent[d];
        return;
    }
    const int64_t part_heads = task->heads / task->parts, sharing = task->heads / task->num_kv_heads;
    const float *row = task->value_decoder;
    for (int64_t part = 0; part < task->parts; part++, latent += part_heads * stride, out += part_heads * head_dim)
        for (int64_t r = 0; r < rank; r++, row += task->value_width)
            for (int64_t head = 0; head < part_heads; head += sharing)
                for (int64_t h = head; h < head + sharing; h++) {
                    const float weight = latent[h * stride + r], *restrict dims = row + head / sharing * head_dim;
                    float *restrict own = out + h * head_dim;
#pragma omp simd
                    for (int64_t d = 0; d < head_dim; d++) own[d] += weight * dims[d];
                }
}

/* One softmax over the tokens of all tasks. Returns 0, or 1 when there is no memory. */
int attend(const struct task *tasks, int count) {
    const int64_t threads = tasks->threads, heads = tasks->heads, lanes = tasks->lanes, head_dim = tasks->head_dim;
    int64_t rank = 0, width = 0, latents = 0, buckets = 0, nodes = 0;
    for (const struct task *task = tasks; task < tasks + count; task++) {
        const int64_t larger = task->keys->rank > task->values->rank ? task->keys->rank : task->values->rank;
        const int64_t most = task->paired ? in_blocks(larger) : padded(larger);
        if (most > rank) rank = most;
        if (task->decoder_stride > width) width = task->decoder_stride;
        latents += latents_of(task);
        if (size_of_nodes(task, BLOCK) > nodes) nodes = size_of_nodes(task, BLOCK);
        if (task->keys->num_buckets > buckets) buckets = task->keys->num_buckets;
        if (task->values->num_buckets > buckets) buckets = task->values->num_buckets;
    }
    const int64_t partial = partial_size(BLOCK, head_dim, heads / tasks->num_kv_heads);
    const int64_t key = BLOCK * width > partial ? BLOCK * width : partial;
    const int64_t in_tiles = lanes * PAIRS_AT_ONCE > BLOCK * head_dim ? lanes * PAIRS_AT_ONCE : BLOCK * head_dim;
    const int64_t of_tiles = uses_tiles ? in_tiles : 0;
    const int64_t size = padded(BLOCK * (rank + lanes) + key + of_tiles + latents + (3 + STRETCH) * lanes + nodes);
    float *memory = aligned_alloc(64, ((threads * size + heads * head_dim) * sizeof(float) + 63) / 64 * 64);
    struct scratch *all = malloc(threads * sizeof(struct scratch));
    struct share *shares = malloc((threads * 4 * buckets + 1) * sizeof(struct share));
    if (!memory || !all || !shares) {
        free(memory);
        free(all);
        free(shares);
        return 1;
    }
    for (int64_t thread = 0; thread < threads; thread++) {
        struct scratch *scratch = all + thread;
        scratch->coef = memory + thread * size;
        scratch->key = scratch->coef + BLOCK * rank;
        scratch->of_tiles = scratch->key + key;
        scratch->score = scratch->of_tiles + of_tiles;
        scratch->tiling = (struct tiling){0};
        scratch->largest = scratch->score + BLOCK * lanes;
        scratch->scaled = scratch->largest + lanes;
        scratch->sum = scratch->scaled + lanes;
        scratch->latents = scratch->sum + lanes;
        scratch->scores = scratch->latents + latents;
        scratch->memory_of_nodes = scratch->scores + STRETCH * lanes;
        scratch->keys = shares + thread * 4 * buckets;
        scratch->values = scratch->keys + buckets;
        scratch->next_keys = scratch->values + buckets;
        scratch->next_values = scratch->next_keys + buckets;
        for (int64_t m = 0; m < 2 * lanes; m++) scratch->largest[m] = -FLT_MAX; /* and `scaled` */
        memset(scratch->score, 0, BLOCK * lanes * sizeof(float)); /* the padding stays finite */
        memset(scratch->sum, 0, (lanes + latents) * sizeof(float));
        memset(scratch->memory_of_nodes, 0, nodes * sizeof(float)); /* the padding stays finite */
    }
    float *decoded = memory + threads * size, *output = tasks->output, *largest = all[0].largest;
    memset(decoded, 0, heads * head_dim * sizeof(float));
    run(tasks, count, all);
    for (int64_t thread = 1; thread < threads; thread++)
        for (int64_t m = 0; m < lanes; m++) largest[m] = fmaxf(largest[m], all[thread].largest[m]);
    for (int64_t thread = 0; thread < threads; thread++) {
        if (thread) memcpy(all[thread].largest, largest, lanes * sizeof(float));
        rescale(tasks, count, all + thread);
    }
    for (int64_t head = 0; head < heads; head++) {
        float sum = 0;
        for (int64_t thread = 0; thread < threads; thread++) sum += all[thread].sum[head];
        /* A query that may see nothing has weighed all tokens alike; a sum that is NaN comes from tokens it saw. */
        const int sees = largest[head] != -FLT_MAX || sum != sum;
        if (tasks->sink) sum += expf(tasks->sink[head / tasks->queries] - largest[head]); /* at infinity nothing else counts */
        int64_t before = 0;
        for (const struct task *task = tasks; task < tasks + count; before += latents_of(task), task++) {
            const int64_t rank = padded(task->values->rank), place = before + head * rank;
            float *restrict latent = all[0].latents + place;
            for (int64_t thread = 1; thread < threads; thread++)
                for (int64_t r = 0; r < rank; r++) latent[r] += all[thread].latents[place + r];
            for (int64_t r = 0; r < rank; r++) latent[r] = sees ? latent[r] / sum : 0;
        }
    }
    const float *latent = all[0].latents;
    for (const struct task *task = tasks; task < tasks + count; latent += latents_of(task), task++)
        decode_values(task, latent, decoded);
    /* The heads of a token together, as a model's layer reads them. */
    for (int64_t query = 0; query < tasks->queries; query++)
        for (int64_t head = query; head < heads; head += tasks->queries, output += head_dim)
            memcpy(output, decoded + head * head_dim, head_dim * sizeof(float));
    free(shares);
    free(all);
    free(memory);
    return 0;
}

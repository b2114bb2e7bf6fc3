/* One layer's part of a step in which all tokens decode: they are projected, written to their pages, and attended, in one call. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"
#include "new_tokens.h"
#include "store.h"

/* What all steps of a layer have in common; members that come with a step are empty. */
struct served_layer {
    const struct pages *pages;
    struct projecting projecting;
    struct querying querying;
};

/* What all layers of a step have in common; members as those of the same names in new_tokens.h. */
struct served_step {
    const int64_t *position, *slot;
    int64_t tokens;
    const int32_t *first, *length, *table;
    int64_t table_stride;
    const int64_t *served;
    int64_t count, threads;
};

/* A tensor of three dims: tokens, heads, and the dims of a head; strides in numbers. */
struct tensor { uint8_t *start; int64_t stride[3]; };

/* What is a layer's and a step's own; all in the dtype of exact states. */
struct served_states { struct tensor query, output, states[2]; };

enum { NO_MEMORY = -1, LIES_OTHERWISE = -2 };

static int heads_lie_side_by_side(const struct tensor *tensor, int64_t head_dim) {
    return tensor->stride[1] == head_dim && tensor->stride[2] == 1;
}

/* The heads of one token, as fp32. */
static void copy_in(float *to, const struct tensor *from, int64_t token, int64_t width, int is_half) {
    if (is_half) {
        const uint16_t *half = (const uint16_t *)from->start + token * from->stride[0];
        for (int64_t i = 0; i < width; i++) to[i] = from_bfloat16(half[i]);
    } else {
        memcpy(to, (const float *)from->start + token * from->stride[0], width * sizeof(float));
    }
}

static void copy_out(const struct tensor *to, int64_t token, const float *from, int64_t width, int is_half) {
    if (is_half) {
        uint16_t *half = (uint16_t *)to->start + token * to->stride[0];
        for (int64_t i = 0; i < width; i++) half[i] = to_bfloat16(from[i]);
    } else {
        memcpy((float *)to->start + token * to->stride[0], from, width * sizeof(float));
    }
}

/* Returns how many rows are of a cheaper level than asked for; NO_MEMORY; or LIES_OTHERWISE, and does nothing, where queries or
 * outputs do not lie as the code needs it. */
int64_t serve_pages(const struct served_layer *layer, const struct served_step *step, const struct served_states *given) {
    struct projecting projecting = layer->projecting;
    struct querying querying = layer->querying;
    const int64_t tokens = step->tokens, width = querying.heads * projecting.head_dim, is_half = projecting.kind == BFLOAT16;
    const struct tensor *query = &given->query, *output = &given->output;
    if (!heads_lie_side_by_side(query, projecting.head_dim) || !heads_lie_side_by_side(output, projecting.head_dim))
        return LIES_OTHERWISE;
    /* A product that gives queries, keys and values at once leaves queries apart from one another. */
    const int64_t lie_apart = tokens > 1 && (query->stride[0] != width || output->stride[0] != width), copies = is_half || lie_apart;
    const int64_t floats = projecting.stride[0] + projecting.stride[1] + 2 * width * copies; /* of a token */
    float *const memory = malloc(tokens * floats * sizeof(float)), *next = memory;
    if (!memory) return NO_MEMORY;
    struct writing writing = {.position = step->position, .slot = step->slot, .tokens = tokens, .threads = step->threads};
    for (int which = 0; which < 2; which++) {
        const struct tensor *from = given->states + which;
        const int64_t bytes = is_half ? sizeof(uint16_t) : sizeof(float);
        const struct states states = {from->start, from->stride[0] * bytes, from->stride[1] * bytes};
        projecting.states[which] = writing.states[which] = querying.states[which] = states;
        projecting.coef[which] = next;
        writing.coef[which] = next;
        writing.coef_stride[which] = projecting.stride[which];
        next += tokens * projecting.stride[which];
    }
    projecting.position = step->position, projecting.tokens = tokens, projecting.threads = step->threads;
    querying.first = step->first, querying.length = step->length, querying.table = step->table;
    querying.table_stride = step->table_stride, querying.served = step->served, querying.count = step->count;
    querying.threads = step->threads;
    querying.query = (const float *)query->start, querying.output = (float *)output->start;
    if (copies) {
        for (int64_t t = 0; t < tokens; t++) copy_in(next + t * width, query, t, width, is_half);
        querying.query = next, querying.output = next + tokens * width;
    }
    int64_t cut = project_states(&projecting) ? NO_MEMORY : write_pages(layer->pages, &writing);
    if (cut >= 0 && attend_pages(layer->pages, &querying)) cut = NO_MEMORY;
    if (cut >= 0 && copies)
        for (int64_t t = 0; t < tokens; t++) copy_out(output, t, querying.output + t * width, width, is_half);
    free(memory);
    return cut;
}

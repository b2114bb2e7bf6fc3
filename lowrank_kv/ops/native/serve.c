/* One layer's part of a step in which all tokens decode: they are projected, written to their pages, and attended, in one call. */
#include <stdint.h>

#include "common.h"

struct pages;
struct projecting;
struct writing;
struct querying;

int project_states(const struct projecting *task);                               /* project.c */
int64_t write_pages(const struct pages *pages, const struct writing *task);      /* pages.c */
int attend_pages(const struct pages *pages, const struct querying *all);         /* pages.c */

/* Queries and outputs of bfloat16, and the floats that attention reads and writes in their place. */
struct converting {
    const uint16_t *query;
    uint16_t *output;
    int64_t query_stride, output_stride; /* numbers from one token to the next */
    float *floats_in, *floats_out;       /* (tokens, width) */
    int64_t tokens, width;               /* heads · head_dim */
};

/* Returns how many rows are of a cheaper level than asked for, or −1 when there is no memory; `converting` is NULL where queries
 * and outputs are floats. */
int64_t serve_pages(const struct pages *pages, const struct projecting *projecting, const struct writing *writing,
                    const struct querying *querying, const struct converting *converting) {
    if (converting)
        for (int64_t t = 0; t < converting->tokens; t++)
            for (int64_t i = 0; i < converting->width; i++)
                converting->floats_in[t * converting->width + i] = from_bfloat16(converting->query[t * converting->query_stride + i]);
    if (project_states(projecting)) return -1;
    const int64_t cut = write_pages(pages, writing);
    if (cut < 0 || attend_pages(pages, querying)) return -1;
    if (converting)
        for (int64_t t = 0; t < converting->tokens; t++)
            for (int64_t i = 0; i < converting->width; i++)
                converting->output[t * converting->output_stride + i] = to_bfloat16(converting->floats_out[t * converting->width + i]);
    return cut;
}

/* Products of pairs in tile registers (AMX): of 16 rows of 16 pairs with 16 pairs of 16 columns by one instruction. In the same
 * time vectors multiply a sixteenth of that.
 *
 * A pair takes the place of one float, so that rows of pairs are what a tile of the left matrix holds, and pairs of rows, column
 * beside column, what one of the right matrix does.
 */
#pragma once
#include <stdint.h>

#include "common.h"

#if HAS_PAIRS && defined(__AMX_BF16__) && defined(__linux__)
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

/* Whether they are used: see `use_tiles`. */
extern int uses_tiles;

/* Rows and pairs that a thread's tile registers are set up for; 0: none. */
struct tiling { int64_t rows, depth; };

#if HAS_TILES
enum { IN_TILE = 16, MOST_ROWS = 2 * IN_TILE };
/* What the registers hold of products, of left and of right matrices. REST: what is left of the pairs. */
#define SUM 0
#define SUM_BELOW 1
#define LEFT 2
#define LEFT_BELOW 3
#define RIGHT 4
#define REST_LEFT 5
#define REST_LEFT_BELOW 6
#define REST_RIGHT 7

static void set_tiles(int64_t rows, int64_t depth, struct tiling *set) {
    if (set->rows == rows && set->depth == depth) return;
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16]; /* of a row */
        uint8_t rows[16];
    } __attribute__((aligned(64))) shapes = {.palette = 1};
    const int64_t above = rows < IN_TILE ? rows : IN_TILE, below = rows - above, rest = depth % IN_TILE;
    const int64_t height[] = {above, below, above, below, IN_TILE, above, below, rest};
    for (int tile = SUM; tile <= REST_RIGHT; tile++) {
        const int64_t width = tile == REST_LEFT || tile == REST_LEFT_BELOW ? rest : IN_TILE;
        shapes.rows[tile] = width ? height[tile] : 0;
        shapes.bytes[tile] = height[tile] ? width * sizeof(float) : 0;
    }
    __asm__ volatile("" ::"r"(&shapes) : "memory"); /* gcc believes that only its first bytes are read */
    _tile_loadconfig(&shapes);
    *set = (struct tiling){rows, depth};
}

/* c (rows, columns) = or += a · b of pairs: at most MOST_ROWS rows, and a multiple of IN_TILE columns. */
static void product_in_tiles(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row, const float *b,
                             int64_t b_row, float *c, int64_t c_row, int adds, struct tiling *tiling) {
    const int64_t whole = depth / IN_TILE * IN_TILE, a_bytes = a_row * sizeof(float), b_bytes = b_row * sizeof(float);
    const int64_t c_bytes = c_row * sizeof(float), below = IN_TILE * c_row;
    const float *a_below = a + IN_TILE * a_row;
    const int has_below = rows > IN_TILE;
    set_tiles(rows, depth, tiling);
    __asm__ volatile("" ::: "memory"); /* the compiler knows of no memory that tiles are read from */
    for (int64_t column = 0; column < columns; column += IN_TILE, b += IN_TILE, c += IN_TILE) {
        if (adds) {
            _tile_loadd(SUM, c, c_bytes);
            if (has_below) _tile_loadd(SUM_BELOW, c + below, c_bytes);
        } else {
            _tile_zero(SUM);
            if (has_below) _tile_zero(SUM_BELOW);
        }
        for (int64_t k = 0; k < whole; k += IN_TILE) {
            _tile_loadd(RIGHT, b + k * b_row, b_bytes);
            _tile_loadd(LEFT, a + k, a_bytes);
            _tile_dpbf16ps(SUM, LEFT, RIGHT);
            if (!has_below) continue;
            _tile_loadd(LEFT_BELOW, a_below + k, a_bytes);
            _tile_dpbf16ps(SUM_BELOW, LEFT_BELOW, RIGHT);
        }
        if (whole < depth) {
            _tile_loadd(REST_RIGHT, b + whole * b_row, b_bytes);
            _tile_loadd(REST_LEFT, a + whole, a_bytes);
            _tile_dpbf16ps(SUM, REST_LEFT, REST_RIGHT);
            if (has_below) {
                _tile_loadd(REST_LEFT_BELOW, a_below + whole, a_bytes);
                _tile_dpbf16ps(SUM_BELOW, REST_LEFT_BELOW, REST_RIGHT);
            }
        }
        _tile_stored(SUM, c, c_bytes);
        if (has_below) _tile_stored(SUM_BELOW, c + below, c_bytes);
    }
    __asm__ volatile("" ::: "memory");
}
#endif

/* Tiles of the next thread, or of torch, are other ones; and those in use cost time when threads take turns. */
static inline void release_tiles(struct tiling *set) {
#if HAS_TILES
    if (set->rows) _tile_release();
#endif
    *set = (struct tiling){0};
}

/* c (rows, columns) = a · b of pairs, of few rows, and a multiple of LANES columns. */
static void product_of_pairs(int64_t rows, int64_t columns, int64_t depth, const float *a, int64_t a_row, const float *b,
                             int64_t b_row, float *c, int64_t c_row, struct tiling *tiling) {
#if HAS_TILES
    if (uses_tiles) {
        product_in_tiles(rows, columns, depth, a, a_row, b, b_row, c, c_row, 0, tiling);
        return;
    }
#endif
    (void)tiling;
    product_of(1, rows, columns, depth, a, a_row, 1, b, b_row, c, c_row, 0);
}

/* Products in bfloat16: per lane and instruction two activations times two weights, summed in float. */
#ifndef SERVE_APP_BF16_TILE_H
#define SERVE_APP_BF16_TILE_H

#include "weights.h"

/* Rows of a tile: as many as the registers hold, two vectors each. */
#define BF16_ROWS 12

enum { BF16_DEPTH = 24 * GROUP }; /* inputs of a panel that are multiplied with all rows before the next ones */

#if defined(BUILD_BF16)
/* Some inputs of one panel: sums[rows][PANEL] += W x. The next panel, `panel_bytes` on, is fetched meanwhile, as long as
 * there is work to do: with one row, all is waiting for memory anyway. */
SPECIALIZED void bf16_tile(const int rows, const uint16_t *x, int64_t x_stride, const uint8_t *w, int64_t panel_bytes,
                           int depth, float *sums) {
    vec total[BF16_ROWS][2];
    UNROLL
    for (int r = 0; r < rows; r++) {
        total[r][0] = load(sums + r * PANEL);
        total[r][1] = load(sums + r * PANEL + LANES);
    }
    for (int k = 0; k < depth; k += 2, w += 4 * PANEL) {
        const ivec w0 = load_int(w), w1 = load_int(w + 4 * LANES);
        if (rows > 1) {
            __builtin_prefetch(w + panel_bytes, 0, 2);
            __builtin_prefetch(w + panel_bytes + 4 * LANES, 0, 2);
        }
        UNROLL
        for (int r = 0; r < rows; r++) {
            const ivec pair = splat_bytes(x + r * x_stride + k);
            total[r][0] = dot2(total[r][0], w0, pair);
            total[r][1] = dot2(total[r][1], w1, pair);
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        store(sums + r * PANEL, total[r][0]);
        store(sums + r * PANEL + LANES, total[r][1]);
    }
}

static void bf16_rows(int rows, const uint16_t *x, int64_t x_stride, const uint8_t *w, int64_t panel_bytes, int depth,
                      float *sums) {
    switch (rows) {
#define TILE(n) case n: bf16_tile(n, x, x_stride, w, panel_bytes, depth, sums); break;
        TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#undef TILE
    }
}
#endif

#endif

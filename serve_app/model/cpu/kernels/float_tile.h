/* Products in float arithmetic. Weights are unpacked to floats for some inputs of a panel at a
 * time. */
#ifndef SERVE_APP_FLOAT_TILE_H
#define SERVE_APP_FLOAT_TILE_H

#include "weights.h"

/* Rows of a tile: as many as the registers hold, two vectors each. */
#if defined(BUILD_AVX512)
#define FLOAT_ROWS 12
#elif defined(BUILD_AVX2)
#define FLOAT_ROWS 6
#else
#define FLOAT_ROWS 4
#endif

enum { DEPTH = 2048 / PANEL }; /* inputs whose weights are unpacked to floats at a time: 8 KiB of the L1 cache */

/* Widen group `g` of a panel of bytes to floats [GROUP][PANEL]. */
SPECIALIZED void widen_group(const int format, const uint8_t *panel, int64_t g, float *to) {
    const uint8_t *values = panel + group_at(format, g) + scale_bytes(format);
    const int steps = STEPS / group_parts(format);
    for (int half = 0; half < PANEL; half += LANES) {
        for (int part = 0; part < group_parts(format); part++) {
            const vec d = group_step(format, panel, g, part, half), m = group_minimum(format, panel, g, part, half);
            UNROLL
            for (int step = part * steps; step < (part + 1) * steps; step++) {
                const ivec bytes = step_values(format, values, step, half);
                UNROLL
                for (int k = 0; k < 4; k++)
                    store(to + (4 * step + k) * PANEL + half, fma_(d, to_float((bytes >> (8 * k)) & 255), m));
            }
        }
    }
}

/* Unpack up to DEPTH inputs of a panel, from input `first`, to floats [depth][PANEL]. Not inlined:
 * GCC would keep the pointers of the following tiles in memory, and these would take 1.5 times as
 * long. */
static __attribute__((noinline)) const float *unpack(const struct panel *panel, int first, int depth, float *to) {
    const int format = (int)panel->format;
    if (format == F32) return (const float *)panel->data + (int64_t)first * PANEL;
    if (format == BF16) {
        for (int k = 0; k < depth; k += 2) {
            for (int half = 0; half < PANEL; half += LANES) {
                const ivec pairs = load_int(panel->data + bf16_at(first + k, half));
                store(to + k * PANEL + half, (vec)(pairs << 16));
                store(to + (k + 1) * PANEL + half, (vec)(pairs & (int32_t)0xffff0000));
            }
        }
        return to;
    }
    for (int g = first / GROUP; g < (first + depth) / GROUP; g++) {
        float *out = to + (g * GROUP - first) * PANEL;
        switch (format) {
            case Q8: widen_group(Q8, panel->data, g, out); break;
            case Q4: widen_group(Q4, panel->data, g, out); break;
            case Q4S: widen_group(Q4S, panel->data, g, out); break;
            case MX4: widen_group(MX4, panel->data, g, out); break;
            case Q4K: widen_group(Q4K, panel->data, g, out); break;
            default: widen_group(Q6K, panel->data, g, out);
        }
    }
    return to;
}

/* Multiply some inputs of one panel: sums[rows][PANEL] += W x. */
SPECIALIZED void float_tile(const int rows, const float *x, int64_t x_stride, const float *w, int depth, float *sums) {
    vec total[FLOAT_ROWS][2];
    UNROLL
    for (int r = 0; r < rows; r++) {
        total[r][0] = load(sums + r * PANEL);
        total[r][1] = load(sums + r * PANEL + LANES);
    }
    for (int k = 0; k < depth; k++, w += PANEL) {
        const vec w0 = load(w), w1 = load(w + LANES);
        UNROLL
        for (int r = 0; r < rows; r++) {
            const vec value = splat(x[r * x_stride + k]);
            total[r][0] = fma_(value, w0, total[r][0]);
            total[r][1] = fma_(value, w1, total[r][1]);
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        store(sums + r * PANEL, total[r][0]);
        store(sums + r * PANEL + LANES, total[r][1]);
    }
}

static void float_rows(int rows, const float *x, int64_t x_stride, const float *w, int depth, float *sums) {
    switch (rows) {
#define TILE(n) case n: float_tile(n, x, x_stride, w, depth, sums); break;
        TILE(1) TILE(2) TILE(3) TILE(4)
#if FLOAT_ROWS > 4
        TILE(5) TILE(6)
#endif
#if FLOAT_ROWS > 6
        TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#endif
#undef TILE
    }
}

#endif

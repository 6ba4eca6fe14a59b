/* Products of fixed-point activations with weights of 4 bits in tiles. They use the integers of
 * fixed_tile.h and the same order of float sums, so that a row has the same bits in both. */
#ifndef SERVE_APP_AMX_FIXED_TILE_H
#define SERVE_APP_AMX_FIXED_TILE_H

#include "fixed_tile.h"

#if defined(BUILD_AMX)
enum { TILE_DEPTH = 6 }; /* groups of a panel that are multiplied with all rows before the next groups */

/* Some groups of a panel. A tile has a group's q and then 16 q, for the two digits of a half: four
 * inputs per row. */
struct four_bit_tiles {
    uint8_t q[TILE_DEPTH][2][2 * STEPS][TILE_BYTES] __attribute__((aligned(64)));
    vec step[TILE_DEPTH][2], minimum[TILE_DEPTH][2];
};

SPECIALIZED void unpack_four_bits(const int format, const uint8_t *panel, int64_t panel_bytes, int first, int groups,
                                  struct four_bit_tiles *to) {
    for (int g = 0; g < groups; g++) {
        const uint8_t *group = panel + group_at(format, first + g);
        fetch_group(group + panel_bytes, format);
        UNROLL
        for (int half = 0; half < 2; half++) {
            to->step[g][half] = group_step(format, panel, first + g, 0, half * LANES);
            to->minimum[g][half] = group_minimum(format, panel, first + g, 0, half * LANES);
            UNROLL
            for (int step = 0; step < STEPS; step++) {
                const ivec q = step_values(format, group + scale_bytes(format), step, half * LANES), q16 = q << 4;
                memcpy(to->q[g][half][step], &q, sizeof q);
                memcpy(to->q[g][half][STEPS + step], &q16, sizeof q16);
            }
        }
    }
}

/* Factors of a group's sums, sum q a: 16 rows and 16 outputs. */
struct factors {
    const struct digit_tile *x;
    const uint8_t (*q)[TILE_BYTES];
};

/* A group's sums for the two halves of each a. */
struct half_sums {
    int32_t of[2][TILE_ROWS][LANES] __attribute__((aligned(64)));
};

/* Sums of one group, and of the next one, which are computed while the first are used. */
struct dots {
    struct half_sums *now, *next;
};

static inline void dot_halves(struct factors factors, struct half_sums *to) {
    TILE_LOAD(6, factors.q, TILE_BYTES);
    TILE_LOAD(4, factors.x->digits[0], TILE_BYTES);
    TILE_LOAD(5, factors.x->digits[1], TILE_BYTES);
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_DOT_BYTES(0, 4, 6);
    TILE_DOT_BYTES(1, 5, 6);
    TILE_STORE(0, to->of[0], TILE_BYTES);
    TILE_STORE(1, to->of[1], TILE_BYTES);
}

/* to = from + W x: 16 rows, some groups of half a panel's outputs. `dots` has the first group's
 * sums at the start, and those of `next` at the end. */
SPECIALIZED void fixed_tile_rows(const int format, const struct digit_tile *x, const struct four_bit_tiles *weights,
                                 int half, int groups, struct factors next, struct dots *dots, struct sums from,
                                 struct sums to) {
    vec total[TILE_ROWS];
    UNROLL
    for (int r = 0; r < TILE_ROWS; r++) total[r] = load(row_of(from, r));
    for (int g = 0; g < groups; g++, x++) {
        const vec d = weights->step[g][half], m = weights->minimum[g][half];
        dot_halves(g + 1 < groups ? (struct factors){x + 1, weights->q[g + 1][half]} : next, dots->next);
        UNROLL
        for (int r = 0; r < TILE_ROWS; r++) {
            ivec dot = (load_int(dots->now->of[0][r]) << 12) + load_int(dots->now->of[1][r]);
            if (format == Q4S) dot = dot + splat_bytes(x->less_8 + r);
            total[r] = fma_(splat(x->scale[r]) * d, to_float(dot), total[r]);
            if (format != Q4S) total[r] = fma_(splat(x->sum[r]), m, total[r]);
        }
        *dots = (struct dots){dots->next, dots->now};
    }
    UNROLL
    for (int r = 0; r < TILE_ROWS; r++) store(row_of(to, r), total[r]);
}

/* out[rows][out_stride] = bias + W x, for one panel. sums: [rows, in whole tiles][PANEL]. */
SPECIALIZED void fixed_tile_panel(const int format, int rows, const struct digit_tile *x, int inputs,
                                  const uint8_t *panel, const float *bias, float *sums, float *out,
                                  int64_t out_stride) {
    struct four_bit_tiles weights;
    struct half_sums memory[2];
    struct dots dots = {memory, memory + 1};
    const int groups = inputs / GROUP;
    for (int first = 0; first < groups; first += TILE_DEPTH) {
        const int count = groups - first < TILE_DEPTH ? groups - first : TILE_DEPTH;
        unpack_four_bits(format, panel, weight_panel_bytes(format, inputs), first, count, &weights);
        dot_halves((struct factors){x + first, weights.q[0][0]}, dots.now);
        for (int row = 0; row < rows; row += TILE_ROWS) {
            const struct digit_tile *tile = x + row / TILE_ROWS * groups + first;
            const int ends = row + TILE_ROWS >= rows;
            for (int half = 0; half < 2; half++) {
                const struct factors next = {half && !ends ? tile + groups : tile, weights.q[0][!half]};
                const struct sums begun = {(float *)bias + half * LANES, 0};
                const struct sums here = {sums + row * PANEL + half * LANES, 4 * PANEL};
                const struct sums there = {out + row * out_stride + half * LANES, 4 * out_stride};
                fixed_tile_rows(format, tile, &weights, half, count, next, &dots, first ? here : begun,
                                first + count == groups && row + TILE_ROWS <= rows ? there : here);
            }
        }
    }
    for (int r = rows / TILE_ROWS * TILE_ROWS; r < rows; r++)
        memcpy(out + r * out_stride, sums + r * PANEL, sizeof(float) * PANEL);
}

static void fixed_tile_product(int format, int rows, const struct digit_tile *x, int inputs, const uint8_t *panel,
                               const float *bias, float *sums, float *out, int64_t out_stride) {
    if (format == Q4)
        fixed_tile_panel(Q4, rows, x, inputs, panel, bias, sums, out, out_stride);
    else if (format == Q4S)
        fixed_tile_panel(Q4S, rows, x, inputs, panel, bias, sums, out, out_stride);
    else
        fixed_tile_panel(Q4K, rows, x, inputs, panel, bias, sums, out, out_stride);
}
#endif

#endif

/* Products in bfloat16, summed in float: two activations times two weights per lane and
 * instruction, or in tiles. */
#ifndef SERVE_APP_BF16_TILE_H
#define SERVE_APP_BF16_TILE_H

#include "amx_tile.h"
#include "weights.h"

/* Rows multiplied at once without AMX: as many as the registers hold, two vectors each. */
#define BF16_ROWS 12

#if defined(BUILD_AMX)
enum {
    DEPTH_GROUPS = 9, /* of a panel are multiplied with all rows before the next ones; half of the first cache */
    UNPACKED_AT_ONCE = 3, /* a tile cannot be loaded for long after its numbers were stored */
    FETCH_EVERY = 1024, /* bytes of bfloat16: one line makes the processor fetch on, all would stop the products */
};

/* Cutting off the lower half of a float makes it smaller by up to one unit of bfloat16, half a
 * unit on average. This factor compensates: numbers that are cut afterwards are rounded, with an
 * error of at most 0.7 units. */
#define BEFORE_CUTTING (1.0f + 0.69f * 0x1p-8f)

/* Unpack group `g` of a panel of bytes to uint16 [GROUP / 2][PANEL][2] of bfloat16. */
SPECIALIZED void unpack_group(const int format, const uint8_t *panel, int64_t g, uint8_t *to) {
    const uint8_t *values = panel + group_at(format, g) + scale_bytes(format);
    const int four = format == Q4 || format == Q4S || format == Q4K, parts = group_parts(format);
    UNROLL
    for (int half = 0; half < PANEL; half += LANES) {
        UNROLL
        for (int part = 0; part < parts; part++) {
            const vec d = group_step(format, panel, g, part, half) * splat(BEFORE_CUTTING);
            vec m = group_minimum(format, panel, g, part, half) * splat(BEFORE_CUTTING);
            if (format == Q8) m = fma_(splat(-BYTE_ZERO), d, m);
            UNROLL
            for (int k = part * GROUP / parts; k < (part + 1) * GROUP / parts; k += 2) {
                const int step = k / 4, shift = step < STEPS / 2 ? 0 : 4;
                const ivec bytes = four ? load_int(values + step_line(format, step) + 4 * half) >> shift
                                        : step_values(format, values, step, half);
                vec value[2];
                UNROLL
                for (int i = 0; i < 2; i++) {
                    const int byte = k % 4 + i;
                    const vec number = four ? four_bits(bytes >> 8 * byte) : byte_number(bytes, byte);
                    /* A weight of 0 must stay 0. An m of 32 d plus the 256 d of BYTE_ZERO would be
                     * rounded. */
                    const float zero = BYTE_ZERO + (format == MX4 ? MX4_ZERO : 32);
                    value[i] = format >= MX4 && !four ? d * (number - splat(zero)) : fma_(d, number, m);
                }
                const ivec pairs = upper_halves(value[0], value[1]);
                memcpy(to + 4 * (k / 2 * PANEL + half), &pairs, sizeof pairs);
            }
        }
    }
}

/* Unpack up to UNPACKED_AT_ONCE groups, and prefetch those of the next panel, `panel_bytes` ahead,
 * into the L2 cache. */
SPECIALIZED void unpack_groups(const int format, const uint8_t *panel, int64_t panel_bytes, int first, int end,
                               uint8_t *to) {
    for (int g = first; g < end; g++, to += 2 * GROUP * PANEL) {
        const uint8_t *group = panel + group_at(format, g);
        UNROLL
        for (int at = 0; at < group_at(format, 1) - group_at(format, 0); at += 64)
            __builtin_prefetch(group + panel_bytes + at, 0, 2);
        unpack_group(format, panel, g, to);
    }
}

/* Multiply one or two tiles of rows by some groups of one panel: C += W x. w: uint16 [inputs /
 * 2][PANEL][2]. */
SPECIALIZED void multiply_tiles(const int tiles, const uint8_t *x, int64_t x_bytes, const uint8_t *w, int groups) {
    const uint8_t *below = x + TILE_ROWS * x_bytes;
    for (const uint8_t *end = w + groups * 2 * GROUP * PANEL; w < end; w += 2 * GROUP * PANEL) {
        TILE_LOAD(4, x, x_bytes);
        TILE_LOAD(6, w, 4 * PANEL);
        TILE_DOT(0, 4, 6);
        if (tiles == 2) {
            TILE_LOAD(5, below, x_bytes);
            TILE_DOT(2, 5, 6);
        }
        TILE_LOAD(7, w + TILE_BYTES, 4 * PANEL);
        TILE_DOT(1, 4, 7);
        if (tiles == 2) TILE_DOT(3, 5, 7);
        x += TILE_BYTES;
        below += TILE_BYTES;
    }
}

/* Multiply one or two tiles of rows by groups `first` to `end` - 1 of one panel: to[rows][PANEL] =
 * from + W x. `unpacked`: those groups of a panel of bytes, which this function unpacks if
 * `fresh`. */
SPECIALIZED void tile_rows(const int tiles, const int format, const int fresh, const uint16_t *x, int inputs,
                           const uint8_t *panel, int first, int end, uint8_t *unpacked, struct sums from,
                           struct sums to) {
    const int64_t x_bytes = 2 * inputs, panel_bytes = weight_panel_bytes(format, inputs);
    TILE_LOAD(0, from.at, from.line);
    TILE_LOAD(1, from.at + LANES, from.line);
    if (tiles == 2) {
        TILE_LOAD(2, row_of(from, TILE_ROWS), from.line);
        TILE_LOAD(3, row_of(from, TILE_ROWS) + LANES, from.line);
    }
    const int at_once = fresh ? UNPACKED_AT_ONCE : DEPTH_GROUPS;
    for (int g = first, next; g < end; g = next) {
        next = g + at_once < end ? g + at_once : end;
        const uint8_t *w = unpacked + (g - first) * 2 * GROUP * PANEL;
        if (fresh && format != BF16)
            unpack_groups(format, panel, panel_bytes, g, next, (uint8_t *)w);
        if (format == BF16) w = panel + bf16_at(g * GROUP, 0);
        if (fresh && format == BF16)
            for (int at = 0; at < (next - g) * 2 * GROUP * PANEL; at += FETCH_EVERY)
                __builtin_prefetch(w + panel_bytes + at, 0, 2);
        multiply_tiles(tiles, (const uint8_t *)(x + g * GROUP), x_bytes, w, next - g);
    }
    TILE_STORE(0, to.at, to.line);
    TILE_STORE(1, to.at + LANES, to.line);
    if (tiles == 2) {
        TILE_STORE(2, row_of(to, TILE_ROWS), to.line);
        TILE_STORE(3, row_of(to, TILE_ROWS) + LANES, to.line);
    }
}

/* out[rows][out_stride] = bias + W x, for one panel. sums: [rows, in whole tiles][PANEL]. */
SPECIALIZED void tile_panel(const int format, int rows, const uint16_t *x, int inputs, const uint8_t *panel,
                            const float *bias, float *sums, float *out, int64_t out_stride) {
    uint8_t unpacked[2 * DEPTH_GROUPS * GROUP * PANEL] __attribute__((aligned(64)));
    const int groups = inputs / GROUP, in_whole_tiles = rows / TILE_ROWS * TILE_ROWS;
    for (int first = 0; first < groups; first += DEPTH_GROUPS) {
        const int end = first + DEPTH_GROUPS < groups ? first + DEPTH_GROUPS : groups;
#define ROWS_FROM(row, tiles, fresh) do { \
            const struct sums here = {sums + (row) * PANEL, 4 * PANEL}; \
            const struct sums there = {out + (row) * out_stride, 4 * out_stride}; \
            tile_rows(tiles, format, fresh, x + (int64_t)(row) * inputs, inputs, panel, first, end, unpacked, \
                      first ? here : (struct sums){(float *)bias, 0}, \
                      end == groups && (row) + (tiles) * TILE_ROWS <= rows ? there : here); \
        } while (0)
        if (rows <= TILE_ROWS) ROWS_FROM(0, 1, 1);
        else ROWS_FROM(0, 2, 1);
        for (int row = 2 * TILE_ROWS; row < rows; row += 2 * TILE_ROWS)
            if (rows - row <= TILE_ROWS) ROWS_FROM(row, 1, 0);
            else ROWS_FROM(row, 2, 0);
#undef ROWS_FROM
    }
    const int copied = rows % (2 * TILE_ROWS) > TILE_ROWS ? in_whole_tiles - TILE_ROWS : in_whole_tiles;
    for (int r = copied; r < rows; r++) memcpy(out + r * out_stride, sums + r * PANEL, sizeof(float) * PANEL);
}

static void bf16_product(int format, int rows, const uint16_t *x, int inputs, const uint8_t *panel, const float *bias,
                         float *sums, float *out, int64_t out_stride) {
    switch (format) {
        case Q4: tile_panel(Q4, rows, x, inputs, panel, bias, sums, out, out_stride); break;
        case MX4: tile_panel(MX4, rows, x, inputs, panel, bias, sums, out, out_stride); break;
        case Q4S: tile_panel(Q4S, rows, x, inputs, panel, bias, sums, out, out_stride); break;
        case Q4K: tile_panel(Q4K, rows, x, inputs, panel, bias, sums, out, out_stride); break;
        case Q6K: tile_panel(Q6K, rows, x, inputs, panel, bias, sums, out, out_stride); break;
        case Q8: tile_panel(Q8, rows, x, inputs, panel, bias, sums, out, out_stride); break;
        default: tile_panel(BF16, rows, x, inputs, panel, bias, sums, out, out_stride);
    }
}
#elif defined(BUILD_BF16)
enum { BF16_DEPTH = 24 * GROUP }; /* inputs of a panel that are multiplied with all rows before the next ones */

/* Multiply some inputs of one panel: sums[rows][PANEL] += W x. Prefetches the next panel,
 * `panel_bytes` ahead, unless there is only one row: then memory is the bottleneck anyway. */
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

/* out[rows][out_stride] = bias + W x, for one panel. All tiles have about the same number of rows,
 * see fixed_panel. sums: [rows][PANEL]. */
static void bf16_product(int format, int rows, const uint16_t *x, int inputs, const uint8_t *panel, const float *bias,
                         float *sums, float *out, int64_t out_stride) {
    (void)format;
    const int tiles = (rows + BF16_ROWS - 1) / BF16_ROWS;
    for (int r = 0; r < rows; r++) memcpy(sums + r * PANEL, bias, sizeof(float) * PANEL);
    for (int first = 0; first < inputs; first += BF16_DEPTH) {
        const int depth = inputs - first < BF16_DEPTH ? inputs - first : BF16_DEPTH;
        for (int tile = 0, r = 0, next; tile < tiles; tile++, r = next) {
            next = rows * (tile + 1) / tiles;
            bf16_rows(next - r, x + (int64_t)r * inputs + first, inputs, panel + bf16_at(first, 0),
                      weight_panel_bytes(BF16, inputs), depth, sums + r * PANEL);
        }
    }
    for (int r = 0; r < rows; r++) memcpy(out + r * out_stride, sums + r * PANEL, sizeof(float) * PANEL);
}
#endif

#endif

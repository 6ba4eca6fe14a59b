/* Products of fixed-point activations with weights of 8, 6 and 4 bits, in integers within a group.
 *
 * A tile is some rows of activations times one panel. Its sums of integers fill the registers while it goes through a
 * group; its sums of floats lie in memory meanwhile, in the first cache. The code is written for what the compiler
 * makes of it: one pointer per row and constant distances from it, or else GCC keeps a counter for each load and has
 * to put most of them into memory.
 */
#ifndef SERVE_APP_FIXED_TILE_H
#define SERVE_APP_FIXED_TILE_H

#include "activations.h"

/* Rows of a tile: at most as many as the registers hold, two vectors each. MANY_ROWS: of one tile among several. With
 * fewer sums, more of the next group's products start before this one's last sums are there. */
#if defined(BUILD_AVX512)
#define FIXED_ROWS 8
#define MANY_ROWS 6
#elif defined(BUILD_NARROW_DOTS)
#define FIXED_ROWS 4
#elif defined(BUILD_AVX2)
#define FIXED_ROWS 6
#else
#define FIXED_ROWS 2
#endif
#if !defined(MANY_ROWS)
#define MANY_ROWS FIXED_ROWS
#endif

#define SIGN_BITS ((int32_t)0x80808080)

#if defined(BUILD_NARROW_DOTS)
/* Of weights of 4 or 6 bits, whose sums over 8 or 2 steps fit 16 bits. */
SPECIALIZED void narrow_dots(const int rows, const int format, const int part, const uint8_t *values,
                             const uint8_t *const *row, ivec dot[][2]) {
    const int steps = STEPS / group_parts(format), narrow = format == Q6K ? 2 : STEPS;
    UNROLL
    for (int first = part * steps; first < (part + 1) * steps; first += narrow) {
        ivec sums[FIXED_ROWS][2];
        UNROLL
        for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = (ivec){0};
        UNROLL
        for (int step = first; step < first + narrow; step++) {
            const ivec w0 = step_values(format, values, step, 0), w1 = step_values(format, values, step, LANES);
            UNROLL
            for (int r = 0; r < rows; r++) {
                const ivec a = splat_bytes(row[r] + 4 * step);
                sums[r][0] = narrow_dot(sums[r][0], w0, a);
                sums[r][1] = narrow_dot(sums[r][1], w1, a);
            }
        }
        UNROLL
        for (int r = 0; r < rows; r++) {
            UNROLL
            for (int v = 0; v < 2; v++) {
                const ivec sum = add_halves(sums[r][v]);
                dot[r][v] = first == part * steps ? sum : dot[r][v] + sum;
            }
        }
    }
}

/* Of weights of 8 bits, less 128. */
SPECIALIZED void signed_dots(const int rows, const uint8_t *values, const uint8_t *const *row, ivec dot[][2]) {
    UNROLL
    for (int r = 0; r < rows; r++) dot[r][0] = dot[r][1] = (ivec){0};
    UNROLL
    for (int step = 0; step < STEPS; step++) {
        const ivec w0 = step_values(Q8, values, step, 0) ^ SIGN_BITS, size0 = byte_sizes(w0);
        const ivec w1 = step_values(Q8, values, step, LANES) ^ SIGN_BITS, size1 = byte_sizes(w1);
        UNROLL
        for (int r = 0; r < rows; r++) {
            const ivec a = splat_bytes(row[r] + 4 * step);
            dot[r][0] = signed_dot(dot[r][0], w0, size0, a);
            dot[r][1] = signed_dot(dot[r][1], w1, size1, a);
        }
    }
}

/* dot[row] = (sum over a part of a group of q a), or of (q - 128) a where `sums_are_signed`. Activations have one
 * byte. */
SPECIALIZED void dot_part(const int rows, const int format, const int part, const int first, const int end,
                          const uint8_t *values, const uint8_t *const *row, ivec dot[][2]) {
    (void)first, (void)end;
    if (format == Q8)
        signed_dots(rows, values, row, dot);
    else
        narrow_dots(rows, format, part, values, row, dot);
}

SPECIALIZED int sums_are_signed(const int format) { return format == Q8; }
#else
/* dot[row] = (sum over a part of a group of q a), for the bytes from `first` to `end` of the activations. */
SPECIALIZED void dot_part(const int rows, const int format, const int part, const int first, const int end,
                          const uint8_t *values, const uint8_t *const *row, ivec dot[][2]) {
    const int steps = STEPS / group_parts(format);
    UNROLL
    for (int byte = first; byte < end; byte++) {
        UNROLL
        for (int r = 0; r < rows; r++) {
            dot[r][0] = byte == first ? (ivec){0} : dot[r][0] << 8;
            dot[r][1] = byte == first ? (ivec){0} : dot[r][1] << 8;
        }
        UNROLL
        for (int step = part * steps; step < (part + 1) * steps; step++) {
            const ivec w0 = step_values(format, values, step, 0), w1 = step_values(format, values, step, LANES);
            UNROLL
            for (int r = 0; r < rows; r++) {
                const ivec a = splat_bytes(row[r] + byte * GROUP + 4 * step);
                dot[r][0] = dot4(dot[r][0], w0, a);
                dot[r][1] = dot4(dot[r][1], w1, a);
            }
        }
    }
}

SPECIALIZED int sums_are_signed(const int format) { return (void)format, 0; }
#endif

/* What a tile fetches while it computes. Bytes leave little to do meanwhile: they are fetched a panel ahead, and with
 * one row all is waiting for memory anyway. */
enum { AHEAD = 8192 };

/* Into the second cache. */
SPECIALIZED void fetch_group(const uint8_t *group, const int format) {
    UNROLL
    for (int line = 0; line < group_at(format, 1) - group_at(format, 0); line += 64)
        __builtin_prefetch(group + line, 0, 2);
}

/* Hides from the compiler where a pointer comes from. */
#define OPAQUE(pointer) __asm__("" : "+r"(pointer))

/* All inputs of one panel. What comes next is fetched meanwhile, group by group. */
SPECIALIZED void fixed_tile(const int rows, const int format, const int bytes, const uint8_t *x, int inputs,
                            const uint8_t *panel, int64_t panel_bytes, const float *bias, float *out,
                            int64_t out_stride) {
    /* A group's sum in one piece or in two: six bits have a scale for each half, and the sums of three bytes times 8
     * bits need more than 32, so that the last byte of the activations goes apart. */
    const int halves = format == Q6K, last_apart = bytes == 3 && format == Q8;
    /* Of weights around 32 or 128, that is taken off in integers: the two large sums would leave their roundings. */
    const int centred = halves || last_apart;
    const int groups = inputs / GROUP;
    float sums[FIXED_ROWS * PANEL] __attribute__((aligned(64)));
    const uint8_t *row[FIXED_ROWS];
    UNROLL
    for (int r = 0; r < rows; r++) {
        row[r] = x + r * groups * activation_group_bytes(bytes);
        store(sums + r * PANEL, load(bias));
        store(sums + r * PANEL + LANES, load(bias + LANES));
    }
    for (int g = 0; g < groups; g++) {
        const uint8_t *group = panel + group_at(format, g);
        float *total = sums;
        ivec dot[FIXED_ROWS][2];
        OPAQUE(total);
        UNROLL
        for (int r = 0; r < rows; r++) OPAQUE(row[r]);
        if (rows > 1 || format != Q8) fetch_group(group + (format == Q8 ? panel_bytes : AHEAD), format);
        UNROLL
        for (int piece = 0; piece < 1 + centred; piece++) {
            const int first = last_apart * piece * 2, end = last_apart && !piece ? 2 : bytes;
            const int with_minimum = end == bytes && !halves;
            dot_part(rows, format, halves * piece, first, end, group + scale_bytes(format), row, dot);
            UNROLL
            for (int v = 0; v < 2; v++) {
                const vec d = group_step(format, panel, g, halves * piece, v * LANES) * splat(end < bytes ? 256 : 1);
                vec m = splat(0.0f);
                if (with_minimum) m = group_minimum(format, panel, g, 0, v * LANES);
                if (with_minimum && (centred || sums_are_signed(format))) m = m + splat(128.0f) * d;
                UNROLL
                for (int r = 0; r < rows; r++) {
                    const struct group_terms *terms = (const void *)(row[r] + bytes * GROUP);
                    vec sum = load(total + r * PANEL + v * LANES);
                    if (centred) dot[r][v] = dot[r][v] - (halves ? terms->halves : terms->bytes)[piece];
                    sum = fma_(splat(terms->scale) * d, to_float(dot[r][v]), sum);
                    if (with_minimum) sum = fma_(splat(terms->sum), m, sum);
                    store(total + r * PANEL + v * LANES, sum);
                }
            }
        }
        UNROLL
        for (int r = 0; r < rows; r++) row[r] += activation_group_bytes(bytes);
    }
    UNROLL
    for (int r = 0; r < rows; r++) memcpy(out + r * out_stride, sums + r * PANEL, sizeof(float) * PANEL);
}

static void fixed_rows(int rows, int format, int bytes, const uint8_t *x, int inputs, const uint8_t *panel,
                       const float *bias, float *out, int64_t stride) {
    const int64_t panel_bytes = weight_panel_bytes(format, inputs);
#define BYTES(n, b) \
        if (format == Q4) fixed_tile(n, Q4, b, x, inputs, panel, panel_bytes, bias, out, stride); \
        else if (format == Q4K) fixed_tile(n, Q4K, b, x, inputs, panel, panel_bytes, bias, out, stride); \
        else if (format == Q6K) fixed_tile(n, Q6K, b, x, inputs, panel, panel_bytes, bias, out, stride); \
        else fixed_tile(n, Q8, b, x, inputs, panel, panel_bytes, bias, out, stride);
#define TILE(n) \
    case n: \
        if (EXACT_BYTES && bytes == EXACT_BYTES) { BYTES(n, EXACT_BYTES) } \
        else { BYTES(n, 1) } \
        break;
    switch (rows) {
        TILE(1) TILE(2)
#if FIXED_ROWS > 2
        TILE(3)
#endif
#if FIXED_ROWS > 3
        TILE(4)
#endif
#if FIXED_ROWS > 4
        TILE(5) TILE(6)
#endif
#if FIXED_ROWS > 6
        TILE(7) TILE(8)
#endif
    }
#undef TILE
#undef BYTES
}

#endif

/* Products of fixed-point activations with weights of 8, 6 and 4 bits. Sums within a group are
 * integers.
 *
 * A tile is some rows of activations times one panel. Its integer sums use all registers during a
 * group; its float sums are in memory meanwhile, in the L1 cache. The code is arranged for the
 * compiler: one pointer per row and constant offsets from it. Otherwise GCC keeps a counter for
 * each load and spills most of them. */
#ifndef SERVE_APP_FIXED_TILE_H
#define SERVE_APP_FIXED_TILE_H

#include "activations.h"

/* Maximum number of rows of a tile: as many as the registers hold, two vectors each. MANY_ROWS:
 * rows of a tile if there are several. With fewer sums, more products of the next group start
 * before this group's last sums are ready. */
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

/* The number of pieces of a group's sum, one or two. Six bits have a scale for each half. The sums
 * of three bytes times 8 bits need more than 32 bits, so the last byte of the activations is
 * summed separately. */
SPECIALIZED int num_pieces(const int format, const int bytes) {
    return format == Q6K || (format == Q8 && bytes == 3) ? 2 : 1;
}

/* The first byte of the activations in a piece, and the byte after its last. */
SPECIALIZED int first_byte(const int format, const int piece) { return format == Q8 ? 2 * piece : 0; }
SPECIALIZED int end_byte(const int format, const int bytes, const int piece) {
    return format == Q8 && bytes == 3 && piece == 0 ? 2 : bytes;
}

/* Weights around zero lose their offset in integers; in floats this would be the difference of two
 * large sums. This turns a piece's sum of q a into a sum of (q - 8) a, (q - 12) a, (q - 32) a or
 * (q - 128) a. */
SPECIALIZED int is_centred(const int format, const int bytes) {
    return format == Q4S || format == MX4 || num_pieces(format, bytes) == 2;
}

SPECIALIZED ivec centre(const int format, const int bytes, const int piece, const uint8_t *row) {
    const struct group_terms *terms = (const void *)(row + bytes * GROUP);
    if (!is_centred(format, bytes)) return (ivec){0};
    if (format == MX4) return splat_bytes(&terms->less_8) + (splat_bytes(&terms->less_8) >> 1);
    return splat_bytes(format == Q4S ? &terms->less_8 : (format == Q6K ? terms->less_32 : terms->less_128) + piece);
}

#if defined(BUILD_NARROW_DOTS)
/* Sums for weights of 4, 5 or 6 bits: their sums over 8, 4 or 2 steps fit 16 bits. */
SPECIALIZED void narrow_dots(const int rows, const int format, const int part, const uint8_t *values,
                             const uint8_t *const *row, ivec dot[][2]) {
    const int steps = STEPS / group_parts(format), narrow = format == Q6K ? 2 : format == MX4 ? 4 : STEPS;
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
                const ivec before = first == part * steps ? centre(format, 1, part, row[r]) : dot[r][v];
                dot[r][v] = before + add_halves(sums[r][v]);
            }
        }
    }
}

/* Sums for weights of 8 bits, minus 128. */
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

/* dot[row] = (sum of q a over a piece of a group) plus its centering term, or the sum of (q - 128)
 * a if `dots_are_signed`. Activations have one byte. */
SPECIALIZED void dot_piece(const int rows, const int format, const int bytes, const int piece, const uint8_t *values,
                           const uint8_t *const *row, ivec dot[][2]) {
    (void)bytes;
    if (format == Q8)
        signed_dots(rows, values, row, dot);
    else
        narrow_dots(rows, format, piece, values, row, dot);
}

SPECIALIZED int dots_are_signed(const int format) { return format == Q8; }
#else
/* dot[row] = (sum of q a over a piece of a group) plus its centering term. */
SPECIALIZED void dot_piece(const int rows, const int format, const int bytes, const int piece, const uint8_t *values,
                           const uint8_t *const *row, ivec dot[][2]) {
    const int steps = STEPS / group_parts(format), part = format == Q6K ? piece : 0;
    const int first = first_byte(format, piece), end = end_byte(format, bytes, piece);
    UNROLL
    for (int byte = first; byte < end; byte++) {
        UNROLL
        for (int r = 0; r < rows; r++) {
            UNROLL
            for (int v = 0; v < 2; v++) {
                dot[r][v] = byte == first ? (ivec){0} : dot[r][v] << 8;
                if (byte == end - 1) dot[r][v] = dot[r][v] + centre(format, bytes, piece, row[r]);
            }
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

SPECIALIZED int dots_are_signed(const int format) { return (void)format, 0; }
#endif

/* Prefetch distance in bytes, except for Q8. Q8 has little work per byte, so it prefetches a whole
 * panel ahead, and nothing with one row: then memory is the bottleneck anyway. */
enum { AHEAD = 8192 };

/* Prefetch into the L2 cache. */
SPECIALIZED void fetch_group(const uint8_t *group, const int format) {
    UNROLL
    for (int line = 0; line < group_at(format, 1) - group_at(format, 0); line += 64)
        __builtin_prefetch(group + line, 0, 2);
}

/* Hides the origin of a pointer from the compiler. */
#define OPAQUE(pointer) __asm__("" : "+r"(pointer))

/* Multiply all inputs of one panel. Prefetches the next data group by group. */
SPECIALIZED void fixed_tile(const int rows, const int format, const int bytes, const uint8_t *x, int inputs,
                            const uint8_t *panel, int64_t panel_bytes, const float *bias, float *out,
                            int64_t out_stride) {
    const int groups = inputs / GROUP;
    float sums[FIXED_ROWS * PANEL] __attribute__((aligned(64)));
    const uint8_t *row[FIXED_ROWS];
    UNROLL
    for (int r = 0; r < rows; r++) {
        row[r] = x + r * rounded_bytes(inputs, (enum form)bytes);
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
        for (int piece = 0; piece < num_pieces(format, bytes); piece++) {
            const int end = end_byte(format, bytes, piece), has_minimum = format == Q8 || format == Q4 || format == Q4K;
            const int with_minimum = has_minimum && end == bytes;
            const int is_signed = is_centred(format, bytes) || dots_are_signed(format);
            dot_piece(rows, format, bytes, piece, group + scale_bytes(format), row, dot);
            UNROLL
            for (int v = 0; v < 2; v++) {
                const int part = format == Q6K ? piece : 0;
                const vec d = group_step(format, panel, g, part, v * LANES) * splat(end < bytes ? 256 : 1);
                vec m = splat(0.0f);
                if (with_minimum) m = group_minimum(format, panel, g, 0, v * LANES);
                if (with_minimum && is_signed) m = m + splat(128.0f) * d;
                UNROLL
                for (int r = 0; r < rows; r++) {
                    const struct group_terms *terms = (const void *)(row[r] + bytes * GROUP);
                    vec sum = load(total + r * PANEL + v * LANES);
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

/* One function per format: in a common one GCC keeps the pointers of some tiles in memory. */
#define FIXED_ROWS_OF(format) \
    static __attribute__((noinline)) void fixed_rows_##format(int rows, int bytes, const uint8_t *x, int inputs, \
                                                              const uint8_t *panel, const float *bias, float *out, \
                                                              int64_t stride) { \
        const int64_t panel_bytes = weight_panel_bytes(format, inputs); \
        switch (rows) { TILES_OF(format) } \
    }
#define TILE(format, n) \
    case n: \
        if (EXACT_BYTES && bytes == EXACT_BYTES) \
            fixed_tile(n, format, EXACT_BYTES, x, inputs, panel, panel_bytes, bias, out, stride); \
        else \
            fixed_tile(n, format, 1, x, inputs, panel, panel_bytes, bias, out, stride); \
        break;
#if FIXED_ROWS == 8
#define TILES_OF(f) TILE(f, 1) TILE(f, 2) TILE(f, 3) TILE(f, 4) TILE(f, 5) TILE(f, 6) TILE(f, 7) TILE(f, 8)
#elif FIXED_ROWS == 6
#define TILES_OF(f) TILE(f, 1) TILE(f, 2) TILE(f, 3) TILE(f, 4) TILE(f, 5) TILE(f, 6)
#elif FIXED_ROWS == 4
#define TILES_OF(f) TILE(f, 1) TILE(f, 2) TILE(f, 3) TILE(f, 4)
#else
#define TILES_OF(f) TILE(f, 1) TILE(f, 2)
#endif
FIXED_ROWS_OF(Q8)
FIXED_ROWS_OF(Q4)
FIXED_ROWS_OF(Q4S)
FIXED_ROWS_OF(MX4)
FIXED_ROWS_OF(Q4K)
FIXED_ROWS_OF(Q6K)
#undef TILES_OF
#undef TILE
#undef FIXED_ROWS_OF

/* Read the weights of one input, for all outputs of a panel. */
SPECIALIZED void weights_of(const int format, const uint8_t *panel, unsigned input, vec weight[2]) {
    const unsigned g = input / GROUP, k = input % GROUP, part = k * (unsigned)group_parts(format) / GROUP;
    const uint8_t *values = panel + group_at(format, g) + scale_bytes(format);
    UNROLL
    for (int v = 0; v < 2; v++) {
        const ivec q = step_values(format, values, (int)k / 4, v * LANES) >> (int)(k % 4 * 8) & 0xff;
        const vec d = group_step(format, panel, g, (int)part, v * LANES);
        weight[v] = fma_(d, to_float(q), group_minimum(format, panel, g, (int)part, v * LANES));
    }
}

static inline void weights_of_input(int format, const uint8_t *panel, unsigned input, vec weight[2]) {
    switch (format) {
        case Q8: weights_of(Q8, panel, input, weight); break;
        case Q4: weights_of(Q4, panel, input, weight); break;
        case Q4S: weights_of(Q4S, panel, input, weight); break;
        case MX4: weights_of(MX4, panel, input, weight); break;
        case Q4K: weights_of(Q4K, panel, input, weight); break;
        default: weights_of(Q6K, panel, input, weight);
    }
}

/* Add the products of the rows' outliers. Not in fixed_rows, where it would cost the tiles
 * registers. */
static __attribute__((noinline)) void add_outliers(int rows, int format, const uint8_t *x, int inputs,
                                                   const uint8_t *panel, float *out, int64_t stride) {
    const int64_t row_bytes = rounded_bytes(inputs, AS_BYTES);
    struct outlier outlier;
    int known = -1; /* often the next row has the same input */
    vec weight[2] = {{0}};
    for (x += row_bytes - (int64_t)sizeof outlier; rows > 0; rows--, x += row_bytes, out += stride) {
        memcpy(&outlier, x, sizeof outlier);
        if (outlier.input != known) {
            known = outlier.input;
            weights_of_input(format, panel, (unsigned)known, weight);
        }
        store(out, fma_(splat(outlier.value), weight[0], load(out)));
        store(out + LANES, fma_(splat(outlier.value), weight[1], load(out + LANES)));
    }
}

static void fixed_rows(int rows, int format, int bytes, const uint8_t *x, int inputs, const uint8_t *panel,
                       const float *bias, float *out, int64_t stride) {
    switch (format) {
        case Q8: fixed_rows_Q8(rows, bytes, x, inputs, panel, bias, out, stride); break;
        case Q4: fixed_rows_Q4(rows, bytes, x, inputs, panel, bias, out, stride); break;
        case MX4: fixed_rows_MX4(rows, bytes, x, inputs, panel, bias, out, stride); break;
        case Q4S: fixed_rows_Q4S(rows, bytes, x, inputs, panel, bias, out, stride); break;
        case Q4K: fixed_rows_Q4K(rows, bytes, x, inputs, panel, bias, out, stride); break;
        default: fixed_rows_Q6K(rows, bytes, x, inputs, panel, bias, out, stride);
    }
}

#endif

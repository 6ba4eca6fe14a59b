/* How weight matrices are stored, and their packing.
 *
 * y = W x + b with W [outputs, inputs]. Outputs are cut into panels of PANEL = 2 LANES rows of W (the last one is
 * padded with zeros); a panel lies in memory in the order in which a product reads it: input by input, the panel's
 * outputs side by side, so that they fill vector registers.
 *
 *   format  a panel is                                              bytes per weight    represents
 *   F32     float[inputs][PANEL]                                    4                   anything
 *   BF16    uint16[inputs / 2][PANEL][2], the upper halves of       2                   weights in bfloat16
 *           floats, two inputs side by side
 *   Q8      inputs / GROUP groups of                                1.125               d q + m, q in 0..255
 *             half d[PANEL], half m[PANEL],
 *             uint8 q[GROUP / 4][PANEL][4]
 *   Q4      the same with two steps of 4 inputs in one byte:        0.625               d q + m, q in 0..15
 *             uint8 q[GROUP / 8][PANEL][4], low half = step s, high half = step s + 4
 *   Q4S     the same without m, symmetric around zero               0.5625              d (q - 8), q in 0..15
 *   MX4     the same with uint8 e[PANEL] in place of d              0.531               2^(e - 127) v, v twice one of
 *                                                                                       0, 1/2, 1, 3/2, 2, 3, 4, 6 or
 *                                                                                       minus that, by its number q;
 *                                                                                       0 if e is 0
 *   Q4K     inputs / (GROUP SUPER) blocks of                        0.578               (d s) q - (e t), q in 0..15
 *             half d[PANEL], half e[PANEL], and SUPER groups of
 *               uint8 s[PANEL], uint8 t[PANEL], q as in Q4
 *   Q6K     inputs / (GROUP SUPER) blocks of                        0.820               (d s) (q - 32), q in 0..63
 *             half d[PANEL], and SUPER groups of
 *               uint8 128 + s[2][PANEL] for 16 inputs each,
 *               the lower 4 bits of q as in Q4, and
 *               uint8 u[2][PANEL][4]: the upper 2 bits of step s are the pair s / 2 of u[s % 2]
 *
 * A matrix that came from an 8- or 4-bit file in groups of 32 fits Q8 or Q4 exactly: d and m are the file's own
 * numbers, found again from the floats, and every weight is checked. Q4S, MX4, Q4K and Q6K take the file's numbers
 * as they are. So the formats of bytes also serve the exact mode, and BF16 does for files in bfloat16.
 * Panels of one matrix may differ in format: its parts may differ in the file.
 */
#ifndef SERVE_APP_WEIGHTS_H
#define SERVE_APP_WEIGHTS_H

#include "vec.h"

enum { PANEL = 2 * LANES, GROUP = 32, STEPS = GROUP / 4, SUPER = 8 };
enum format { F32, BF16, Q8, Q4, Q4S, MX4, Q4K, Q6K };

/* MX4's weights are v + MX4_ZERO, by their numbers, minus MX4_ZERO. */
enum { MX4_ZERO = 12 };
static const uint8_t MX4_VALUES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

struct panel {
    const uint8_t *data;
    int64_t format;
};

struct weight {
    const struct panel *panels;
    const float *bias; /* [padded outputs] or NULL */
    int32_t outputs;   /* padded to whole panels */
    int32_t inputs;
    int32_t fixed; /* most bits of a weight if activations may be fixed-point (all panels have bytes), else 0 */
};

int64_t weight_panel(void) { return PANEL; }

/* The inputs of a matrix must be a multiple of this. */
int64_t weight_block(int64_t format) {
    return format >= Q4K ? SUPER * GROUP : format >= Q8 ? GROUP : format == BF16 ? 2 : 1;
}

/* Bytes of a group's scales. */
static inline int64_t scale_bytes(int format) { return PANEL * (format == MX4 ? 1 : format >= Q4S ? 2 : 4); }

/* Bytes per output before a block's groups, and in each group. */
static inline int64_t block_head(int format) { return format == Q4K ? 4 : format == Q6K ? 2 : 0; }
static inline int64_t group_bytes(int format) {
    return scale_bytes(format) / PANEL + (format == Q8 ? GROUP : format == Q6K ? GROUP * 3 / 4 : GROUP / 2);
}

/* Where the block of group `g` begins in a panel. group_at: where the group begins, with its
 * scales followed by its values. */
static inline int64_t block_at(int format, int64_t g) {
    return PANEL * (g / SUPER) * (block_head(format) + SUPER * group_bytes(format));
}
static inline int64_t group_at(int format, int64_t g) {
    return block_at(format, g) + PANEL * (block_head(format) + g % SUPER * group_bytes(format));
}

/* Position of one weight in a panel of bfloat16. */
static inline int64_t bf16_at(int64_t input, int lane) { return 2 * (input / 2 * 2 * PANEL + 2 * lane + input % 2); }

/* Number of equal parts of a group's inputs with separate scales. */
static inline int group_parts(int format) { return format == Q6K ? 2 : 1; }

/* Bytes of one panel. */
int64_t weight_panel_bytes(int64_t format, int64_t inputs) {
    if (format == F32) return 4 * inputs * PANEL;
    if (format == BF16) return 2 * inputs * PANEL;
    return group_at((int)format, inputs / GROUP) - PANEL * block_head((int)format);
}

/* d and m of one output's group, and its GROUP values of q. Q4S does not use m, nor does MX4, whose d is e. */
struct group {
    uint16_t scale, minimum;
    uint8_t q[GROUP];
};

static float rounded_quotient(float weight, float scale, float minimum, float limit) {
    if (scale == 0.0f) return 0.0f;
    const float q = rintf((weight - minimum) / scale);
    return q < 0.0f ? 0.0f : q > limit ? limit : q;
}

/* Fill `group` for these d and m. Returns whether it reproduces every weight exactly. */
static int quantize_group(const float *weights, uint16_t scale, uint16_t minimum, int limit, struct group *group) {
    const float d = half_to_float(scale), m = half_to_float(minimum);
    int exact = 1;
    group->scale = scale;
    group->minimum = minimum;
    for (int k = 0; k < GROUP; k++) {
        const float q = rounded_quotient(weights[k], d, m, (float)limit);
        group->q[k] = (uint8_t)q;
        exact &= d * q + m == weights[k]; /* d q is exact (11 bits times 8), so this rounds once, as the files do */
    }
    return exact;
}

/* Reconstruct the group exactly as in the file, if the file had this format: four bits spread from
 * the smallest weight to the largest, or eight bits around zero with 127 as the largest absolute
 * value. */
static int exact_group(const float *weights, int format, struct group *group) {
    float low = weights[0], high = weights[0];
    for (int k = 1; k < GROUP; k++) {
        low = weights[k] < low ? weights[k] : low;
        high = weights[k] > high ? weights[k] : high;
    }
    const float size = high > -low ? high : -low;
    const uint16_t guess = float_to_half(format == Q4 ? (high - low) / 15.0f : size / 127.0f);
    /* The file's d was rounded before its weights were computed, so the guess may be off by one. */
    for (int offset = 0; offset <= 2; offset++) {
        const uint16_t scale = (uint16_t)(guess + (offset == 2 ? -1 : offset));
        if (guess == 0 && offset == 2) break;
        const uint16_t minimum = float_to_half(format == Q4 ? low : -128.0f * half_to_float(scale));
        if (quantize_group(weights, scale, minimum, format == Q4 ? 15 : 255, group)) return 1;
    }
    return 0;
}

/* Find the Q8 group nearest to any weights. */
static void nearest_group(const float *weights, struct group *group) {
    float low = weights[0], high = weights[0];
    for (int k = 1; k < GROUP; k++) {
        low = weights[k] < low ? weights[k] : low;
        high = weights[k] > high ? weights[k] : high;
    }
    const uint16_t minimum = float_to_half(low);
    quantize_group(weights, float_to_half((high - half_to_float(minimum)) / 255.0f), minimum, 255, group);
}

/* Position of a step's values within a group's: the bytes or the lower four bits. upper_line:
 * Q6K's upper two bits. */
static inline int step_line(int format, int step) { return 4 * PANEL * (format == Q8 ? step : step % (STEPS / 2)); }
static inline int upper_line(int step) { return 4 * PANEL * (STEPS / 2 + step % 2); }

/* Store the bits of four bytes. `there`: keep the bits that `to` already has. */
static inline void put_bits(uint8_t *to, uint32_t bits, int there) {
    uint32_t word = 0;
    if (there) memcpy(&word, to, 4);
    word |= bits;
    memcpy(to, &word, 4);
}

/* Replaces any earlier content of the lane: a row that did not fit is packed again. */
static void put_values(uint8_t *to, int format, int lane, const uint8_t *q) {
    for (int step = 0; step < STEPS; step++) {
        uint32_t word;
        memcpy(&word, q + 4 * step, 4);
        const uint32_t low = format == Q8 ? word : (word & 0x0f0f0f0f) << (step < STEPS / 2 ? 0 : 4);
        put_bits(to + step_line(format, step) + 4 * lane, low, format != Q8 && step >= STEPS / 2);
        const uint32_t upper = (word >> 4 & 0x03030303) << step / 2 * 2;
        if (format == Q6K) put_bits(to + upper_line(step) + 4 * lane, upper, step >= 2);
    }
}

/* The value of input `k` of a group. */
static int get_value(const uint8_t *values, int format, int lane, int k) {
    const int step = k / 4, byte = 4 * lane + k % 4, low = values[step_line(format, step) + byte];
    if (format == Q8) return low;
    const int upper = format == Q6K ? values[upper_line(step) + byte] >> step / 2 * 2 & 3 : 0;
    return (low >> (step < STEPS / 2 ? 0 : 4) & 15) | upper << 4;
}

static void put_group(uint8_t *to, int format, int lane, const struct group *group) {
    if (format == MX4)
        to[lane] = (uint8_t)group->scale;
    else
        memcpy(to + 2 * lane, &group->scale, 2);
    if (format < Q4S) memcpy(to + 2 * PANEL + 2 * lane, &group->minimum, 2);
    put_values(to + scale_bytes(format), format, lane, group->q);
}

/* Pack the inputs of one output from `first`. `count` and, for bytes, `first` must be whole
 * groups. */
static int pack_values(const float *weights, int64_t first, int count, int format, int exactly, int lane,
                       uint8_t *panel) {
    if (format == F32) {
        for (int k = 0; k < count; k++) memcpy(panel + 4 * ((first + k) * PANEL + lane), weights + k, 4);
        return 1;
    }
    if (format == BF16) {
        for (int k = 0; k < count; k++) {
            const uint16_t upper = float_to_bf16(weights[k]);
            if (exactly && !(bf16_to_float(upper) == weights[k])) return 0;
            memcpy(panel + bf16_at(first + k, lane), &upper, 2);
        }
        return 1;
    }
    for (int g = 0; g < count / GROUP; g++) {
        struct group group;
        if (!exactly)
            nearest_group(weights + g * GROUP, &group);
        else if (!exact_group(weights + g * GROUP, format, &group))
            return 0;
        put_group(panel + group_at(format, first / GROUP + g), format, lane, &group);
    }
    return 1;
}

/* d of a group of MX4. */
static float power_of(uint8_t e) {
    const uint32_t bits = (uint32_t)e << 23;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Read one row of a matrix as floats. */
static void weight_row(const struct weight *weight, int64_t row, float *out) {
    const struct panel *panel = weight->panels + row / PANEL;
    const int lane = (int)(row % PANEL), format = (int)panel->format, inputs = weight->inputs;
    if (format == F32) {
        for (int64_t k = 0; k < inputs; k++) memcpy(out + k, panel->data + 4 * (k * PANEL + lane), 4);
        return;
    }
    if (format == BF16) {
        for (int64_t k = 0; k < inputs; k++) {
            uint16_t upper;
            memcpy(&upper, panel->data + bf16_at(k, lane), 2);
            out[k] = bf16_to_float(upper);
        }
        return;
    }
    for (int64_t g = 0; g < inputs / GROUP; g++) {
        const uint8_t *group = panel->data + group_at(format, g);
        const uint8_t *block = format >= Q4K ? panel->data + block_at(format, g) : group;
        if (format == MX4) {
            const float d = power_of(group[lane]);
            for (int k = 0; k < GROUP; k++)
                out[g * GROUP + k] =
                    d * (float)(MX4_VALUES[get_value(group + scale_bytes(MX4), MX4, lane, k)] - MX4_ZERO);
            continue;
        }
        uint16_t halves[2];
        memcpy(&halves[0], block + 2 * lane, 2);
        memcpy(&halves[1], block + 2 * PANEL + 2 * lane, 2);
        const int parts = group_parts(format);
        for (int part = 0; part < parts; part++) {
            float d = half_to_float(halves[0]), m = half_to_float(halves[1]);
            if (format == Q4S) m = -8.0f * d;
            if (format == Q4K) d *= group[lane], m *= -(float)group[PANEL + lane];
            if (format == Q6K) d *= (float)(group[part * PANEL + lane] - 128), m = -32.0f * d;
            for (int k = part * GROUP / parts; k < (part + 1) * GROUP / parts; k++) {
                /* The product is exact, so this rounds once, as the products do. */
                out[g * GROUP + k] = d * (float)get_value(group + scale_bytes(format), format, lane, k) + m;
            }
        }
    }
}

/* d and m of a part of a group, for half a panel's outputs. Its weights are d q + m. */
SPECIALIZED vec group_step(const int format, const uint8_t *panel, int64_t g, const int part, const int half) {
    const uint8_t *group = panel + group_at(format, g);
    if (format == MX4) return (vec)(load_byte_numbers(group + half) << 23);
    if (format <= Q4S) return load_half((const uint16_t *)group + half);
    const vec d = load_half((const uint16_t *)(panel + block_at(format, g)) + half);
    return d * (load_bytes(group + part * PANEL + half) - splat(format == Q6K ? 128.0f : 0.0f));
}

SPECIALIZED vec group_minimum(const int format, const uint8_t *panel, int64_t g, const int part, const int half) {
    const uint8_t *group = panel + group_at(format, g);
    if (format < Q4S) return load_half((const uint16_t *)group + PANEL + half);
    if (format == MX4) return splat(-MX4_ZERO) * group_step(format, panel, g, part, half);
    if (format == Q4S) return splat(-8.0f) * group_step(format, panel, g, part, half);
    if (format == Q6K) return splat(-32.0f) * group_step(format, panel, g, part, half);
    const uint16_t *block = (const uint16_t *)(panel + block_at(format, g));
    return -(load_half(block + PANEL + half) * load_bytes(group + PANEL + half));
}

/* The values of one step of a group, for one vector of outputs: four bytes per lane. */
SPECIALIZED ivec step_values(const int format, const uint8_t *values, const int step, const int half) {
    const ivec line = load_int(values + step_line(format, step) + 4 * half);
    if (format == Q8) return line;
    const ivec low = (line >> 4 * (step / (STEPS / 2))) & 0x0f0f0f0f;
    if (format == MX4) return look_up(MX4_VALUES, low);
    if (format != Q6K) return low;
    const ivec upper = load_int(values + upper_line(step) + 4 * half);
    return low | ((step < 4 ? upper << (4 - step / 2 * 2) : upper >> (step / 2 * 2 - 4)) & 0x30303030);
}

#endif

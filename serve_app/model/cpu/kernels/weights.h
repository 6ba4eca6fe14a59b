/* How weight matrices are stored, and their packing.
 *
 * y = W x + b with W [outputs, inputs]. Outputs are cut into panels of PANEL = 2 LANES rows of W (the last one is
 * padded with zeros); a panel lies in memory in the order in which a product reads it: input by input, the panel's
 * outputs side by side, so that they fill vector registers.
 *
 *   format  a panel is                                              bytes per weight    stands for
 *   F32     float[inputs][PANEL]                                    4                   anything
 *   BF16    uint16[inputs][PANEL], the upper halves of floats       2                   weights that are bfloat16
 *   Q8      inputs / GROUP groups of                                1.125               d q + m, q in 0..255
 *             half d[PANEL], half m[PANEL],
 *             uint8 q[GROUP / 4][PANEL][4]
 *   Q4      the same with two steps of 4 inputs in one byte:        0.625               d q + m, q in 0..15
 *             uint8 q[GROUP / 8][PANEL][4], low half = step s, high half = step s + 4
 *
 * A matrix that came from an 8- or 4-bit file in groups of 32 fits Q8 or Q4 exactly: d and m are the file's own
 * numbers, found again from the floats, and every weight is checked. So Q4 and Q8 also serve the exact mode.
 */
#ifndef SERVE_APP_WEIGHTS_H
#define SERVE_APP_WEIGHTS_H

#include "vec.h"

enum { PANEL = 2 * LANES, GROUP = 32, STEPS = GROUP / 4 };
enum format { F32, BF16, Q8, Q4 };

struct weight {
    const uint8_t *data;
    const float *bias; /* [padded outputs] or NULL */
    int32_t format;
    int32_t outputs; /* padded to whole panels */
    int32_t inputs;
};

int64_t weight_panel(void) { return PANEL; }

static int64_t group_bytes(int format) { return PANEL * (format == Q8 ? 4 + GROUP : 4 + GROUP / 2); }

/* Bytes of one panel. */
int64_t weight_panel_bytes(int64_t format, int64_t inputs) {
    if (format == F32) return 4 * inputs * PANEL;
    if (format == BF16) return 2 * inputs * PANEL;
    return inputs / GROUP * group_bytes((int)format);
}

/* d and m of one output's group, and its GROUP values of q. */
struct group {
    uint16_t scale, minimum;
    uint8_t q[GROUP];
};

static float rounded_quotient(float weight, float scale, float minimum, float limit) {
    if (scale == 0.0f) return 0.0f;
    const float q = rintf((weight - minimum) / scale);
    return q < 0.0f ? 0.0f : q > limit ? limit : q;
}

/* Fill `group` with these d and m. Returns whether it gives back every weight exactly. */
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

/* The group exactly as its file had it, if it had it in this format: four bits spread from the smallest weight to
 * the largest, or eight bits around zero with the largest size at 127. */
static int exact_group(const float *weights, int format, struct group *group) {
    float low = weights[0], high = weights[0];
    for (int k = 1; k < GROUP; k++) {
        low = weights[k] < low ? weights[k] : low;
        high = weights[k] > high ? weights[k] : high;
    }
    const float size = high > -low ? high : -low;
    const uint16_t guess = float_to_half(format == Q4 ? (high - low) / 15.0f : size / 127.0f);
    /* The file's d was rounded before it made the weights, so the guess may be off by one. */
    for (int offset = 0; offset <= 2; offset++) {
        const uint16_t scale = (uint16_t)(guess + (offset == 2 ? -1 : offset));
        if (guess == 0 && offset == 2) break;
        const uint16_t minimum = float_to_half(format == Q4 ? low : -128.0f * half_to_float(scale));
        if (quantize_group(weights, scale, minimum, format == Q4 ? 15 : 255, group)) return 1;
    }
    return 0;
}

/* The nearest Q8 group to any weights. */
static void nearest_group(const float *weights, struct group *group) {
    float low = weights[0], high = weights[0];
    for (int k = 1; k < GROUP; k++) {
        low = weights[k] < low ? weights[k] : low;
        high = weights[k] > high ? weights[k] : high;
    }
    const uint16_t minimum = float_to_half(low);
    quantize_group(weights, float_to_half((high - half_to_float(minimum)) / 255.0f), minimum, 255, group);
}

static void put_group(uint8_t *to, int format, int lane, const struct group *group) {
    memcpy(to + 2 * lane, &group->scale, 2);
    memcpy(to + 2 * PANEL + 2 * lane, &group->minimum, 2);
    uint8_t *q = to + 4 * PANEL;
    for (int k = 0; k < GROUP; k++) {
        const int step = k / 4, byte = 4 * lane + k % 4;
        if (format == Q8)
            q[step * 4 * PANEL + byte] = group->q[k];
        else
            q[step % (STEPS / 2) * 4 * PANEL + byte] |= (uint8_t)(group->q[k] << (step < STEPS / 2 ? 0 : 4));
    }
}

static int pack_output(const float *weights, int64_t inputs, int format, int exactly, int lane, uint8_t *panel) {
    if (format == F32) {
        for (int64_t k = 0; k < inputs; k++) memcpy(panel + 4 * (k * PANEL + lane), weights + k, 4);
        return 1;
    }
    if (format == BF16) {
        for (int64_t k = 0; k < inputs; k++) {
            uint32_t bits;
            memcpy(&bits, weights + k, 4);
            if (bits & 0xffff) return 0;
            const uint16_t upper = (uint16_t)(bits >> 16);
            memcpy(panel + 2 * (k * PANEL + lane), &upper, 2);
        }
        return 1;
    }
    for (int64_t g = 0; g < inputs / GROUP; g++) {
        struct group group;
        if (!exactly)
            nearest_group(weights + g * GROUP, &group);
        else if (!exact_group(weights + g * GROUP, format, &group))
            return 0;
        put_group(panel + g * group_bytes(format), format, lane, &group);
    }
    return 1;
}

/* Pack float weights [outputs, inputs] into `to` (zeroed, weight_panel_bytes for each panel). With `exactly`, returns
 * 0 as soon as a weight does not fit the format; without, Q8 takes the nearest values. Q8 and Q4 need `inputs` to be
 * a multiple of GROUP. */
int64_t weight_pack(const float *weights, int64_t outputs, int64_t inputs, int64_t format, int64_t exactly,
                    uint8_t *to) {
    if (format >= Q8 && inputs % GROUP) return 0;
    for (int64_t n = 0; n < outputs; n++) {
        uint8_t *panel = to + n / PANEL * weight_panel_bytes(format, inputs);
        if (!pack_output(weights + n * inputs, inputs, (int)format, (int)exactly, (int)(n % PANEL), panel)) return 0;
    }
    return 1;
}

#endif

/* Blocks of weights as GGUF and safetensors files have them, and their packing into panels.
 *
 * A row of a matrix is a sequence of blocks. Numbers that our format can hold are copied unchanged;
 * all others are converted through floats. Layouts of the blocks: the GGUF specification and ggml's
 * `block_*` structs; all little-endian.
 *
 *   type           a block of                                                        represents
 *   Q4_0, Q5_0     32: half d, (uint32 fifth bits,) 16 bytes of two low halves        d (q - 8), d (q - 16)
 *   Q4_1, Q5_1     32: half d, half m, the same                                       d q + m
 *   Q8_0           32: half d, 32 signed bytes                                        d q
 *   MXFP4          32: byte e, 16 bytes of two low halves                             2^(e - 128) v, see MX4
 *   Q4_K, Q5_K     256: half d, half e, 12 bytes of 8 pairs s, t of 6 bits,           (d s) q - (e t)
 *                  (32 bytes of fifth bits,) 128 bytes of two low halves
 *   Q6_K           256: 128 bytes of low halves, 64 bytes of two upper bits,          (d s) (q - 32)
 *                  16 signed bytes s, half d
 */
#ifndef SERVE_APP_BLOCKS_H
#define SERVE_APP_BLOCKS_H

#include "weights.h"

/* The numbers of GGUF files. */
enum file_type {
    FILE_F32 = 0, FILE_F16 = 1, FILE_Q4_0 = 2, FILE_Q4_1 = 3, FILE_Q5_0 = 6, FILE_Q5_1 = 7, FILE_Q8_0 = 8,
    FILE_Q4_K = 12, FILE_Q5_K = 13, FILE_Q6_K = 14, FILE_BF16 = 30, FILE_MXFP4 = 39,
};

enum { BLOCK = SUPER * GROUP };

/* Weights per block, and bytes per block. A float is a block of its own. */
static int block_weights(int type) {
    if (type == FILE_F32 || type == FILE_F16 || type == FILE_BF16) return 1;
    return type >= FILE_Q4_K && type != FILE_MXFP4 ? BLOCK : GROUP;
}

static int block_bytes(int type) {
    switch (type) {
        case FILE_F32: return 4;
        case FILE_F16: case FILE_BF16: return 2;
        case FILE_Q4_0: return 2 + GROUP / 2;
        case FILE_Q4_1: return 4 + GROUP / 2;
        case FILE_Q5_0: return 6 + GROUP / 2;
        case FILE_Q5_1: return 8 + GROUP / 2;
        case FILE_Q8_0: return 2 + GROUP;
        case FILE_MXFP4: return 1 + GROUP / 2;
        case FILE_Q4_K: return 16 + BLOCK / 2;
        case FILE_Q5_K: return 16 + BLOCK / 8 + BLOCK / 2;
        case FILE_Q6_K: return BLOCK / 2 + BLOCK / 4 + BLOCK / 16 + 2;
        default: return 0;
    }
}

/* Bytes of a row of `inputs` weights. 0 for an unknown type, or if the weights are not whole
 * blocks. */
int64_t file_row_bytes(int64_t type, int64_t inputs) {
    const int bytes = block_bytes((int)type);
    return bytes && inputs % block_weights((int)type) == 0 ? inputs / block_weights((int)type) * bytes : 0;
}

static uint16_t read_half(const uint8_t *from) {
    uint16_t bits;
    memcpy(&bits, from, 2);
    return bits;
}

/* Read a block of 32: its values q, and d and m such that the weights are d q + m. Returns whether
 * half precision can represent m. */
static int read_group(int type, const uint8_t *block, struct group *group) {
    const int has_minimum = type == FILE_Q4_1 || type == FILE_Q5_1, five = type == FILE_Q5_0 || type == FILE_Q5_1;
    group->scale = read_half(block);
    const uint8_t *from = block + (has_minimum ? 4 : 2);
    if (type == FILE_Q8_0) {
        for (int k = 0; k < GROUP; k++) group->q[k] = (uint8_t)(from[k] ^ 0x80);
    } else {
        uint32_t fifth = 0;
        if (five) memcpy(&fifth, from, 4);
        if (five) from += 4;
        for (int k = 0; k < GROUP / 2; k++) {
            group->q[k] = (uint8_t)((from[k] & 15) | (fifth >> k & 1) << 4);
            group->q[k + GROUP / 2] = (uint8_t)(from[k] >> 4 | (fifth >> (k + GROUP / 2) & 1) << 4);
        }
    }
    if (has_minimum) {
        group->minimum = read_half(block + 2);
        return 1;
    }
    const float minimum = half_to_float(group->scale) * (type == FILE_Q8_0 ? -128.0f : five ? -16.0f : -8.0f);
    group->minimum = float_to_half(minimum);
    return half_to_float(group->minimum) == minimum;
}

/* Read the numbers of a block of MXFP4, with MX4's e as the scale. Returns whether MX4 holds its
 * weights: e is from 2 to 254, or all weights are 0. */
static int read_mxfp4(const uint8_t *block, struct group *group) {
    int zero = 1;
    for (int k = 0; k < GROUP / 2; k++) {
        group->q[k] = block[1 + k] & 15;
        group->q[k + GROUP / 2] = block[1 + k] >> 4;
        zero &= (block[1 + k] & 0x77) == 0;
    }
    group->scale = block[0] < 2 ? 0 : block[0] - 1;
    return block[0] != 255 && (zero || block[0] >= 2);
}

/* Read the 6-bit s and t of each of a block's groups. */
static void read_scales(const uint8_t *packed, uint8_t *s, uint8_t *t) {
    for (int g = 0; g < 4; g++) {
        s[g] = packed[g] & 63;
        t[g] = packed[g + 4] & 63;
        s[g + 4] = (uint8_t)((packed[g + 8] & 15) | packed[g] >> 6 << 4);
        t[g + 4] = (uint8_t)(packed[g + 8] >> 4 | packed[g + 4] >> 6 << 4);
    }
}

/* Read the values of group `g` of a block of Q4_K or Q5_K. */
static void read_super_group(int type, const uint8_t *block, int g, uint8_t *q) {
    const uint8_t *fifth = block + 16, *from = fifth + (type == FILE_Q5_K ? BLOCK / 8 : 0) + g / 2 * GROUP;
    for (int k = 0; k < GROUP; k++) {
        q[k] = g % 2 ? from[k] >> 4 : from[k] & 15;
        if (type == FILE_Q5_K) q[k] |= (uint8_t)((fifth[k] >> g & 1) << 4);
    }
}

static void super_block_floats(int type, const uint8_t *block, float *out) {
    const float d = half_to_float(read_half(block)), e = half_to_float(read_half(block + 2));
    uint8_t s[SUPER], t[SUPER], q[GROUP];
    read_scales(block + 4, s, t);
    for (int g = 0; g < SUPER; g++) {
        const float scale = d * s[g], minimum = e * t[g];
        read_super_group(type, block, g, q);
        for (int k = 0; k < GROUP; k++) out[g * GROUP + k] = scale * q[k] - minimum;
    }
}

/* A block of Q6_K. */
struct six_bits {
    uint16_t scale;
    int8_t s[BLOCK / 16];
    uint8_t q[BLOCK];
};

static void read_six_bits(const uint8_t *block, struct six_bits *to) {
    const uint8_t *low = block, *upper = block + BLOCK / 2, *s = upper + BLOCK / 4;
    for (int k = 0; k < BLOCK; k++) {
        const int half = k / 128, quarter = k % 128 / 32, lane = k % 32;
        const int four = low[64 * half + 32 * (quarter % 2) + lane] >> (quarter < 2 ? 0 : 4) & 15;
        const int two = upper[32 * half + lane] >> (2 * quarter) & 3;
        to->q[k] = (uint8_t)(four | two << 4);
    }
    memcpy(to->s, s, sizeof to->s);
    to->scale = read_half(s + sizeof to->s);
}

static void six_bit_floats(const uint8_t *block, float *out) {
    struct six_bits six;
    read_six_bits(block, &six);
    const float d = half_to_float(six.scale);
    for (int k = 0; k < BLOCK; k++) out[k] = d * six.s[k / 16] * (float)(six.q[k] - 32);
}

/* Read `count` weights as floats. `count` must be whole blocks. */
static void read_floats(int type, const uint8_t *from, int count, float *out) {
    const int weights = block_weights(type), bytes = block_bytes(type);
    for (int done = 0; done < count; done += weights, from += bytes, out += weights) {
        struct group group;
        switch (type) {
            case FILE_F32: memcpy(out, from, 4); break;
            case FILE_F16: *out = half_to_float(read_half(from)); break;
            case FILE_BF16: *out = bf16_to_float(read_half(from)); break;
            case FILE_Q4_K: case FILE_Q5_K: super_block_floats(type, from, out); break;
            case FILE_Q6_K: six_bit_floats(from, out); break;
            case FILE_MXFP4:
                read_mxfp4(from, &group);
                for (int k = 0; k < GROUP; k++)
                    out[k] = (from[0] < 2 ? 0x1p-128f * (float)(1 + from[0]) : power_of(from[0] - 1)) *
                             (float)(MX4_VALUES[group.q[k]] - MX4_ZERO);
                break;
            default: {
                read_group(type, from, &group);
                const float d = half_to_float(group.scale);
                const int zero = type == FILE_Q8_0 ? 128 : type == FILE_Q4_0 ? 8 : type == FILE_Q5_0 ? 16 : 0;
                const float m = zero ? 0.0f : half_to_float(group.minimum);
                for (int k = 0; k < GROUP; k++) out[k] = d * (float)(group.q[k] - zero) + m;
            }
        }
    }
}

/* Whether a format holds this type's numbers unchanged. */
static int holds(int format, int type) {
    if (format == Q4) return type == FILE_Q4_0 || type == FILE_Q4_1;
    if (format == Q4S) return type == FILE_Q4_0;
    if (format == Q8) return type == FILE_Q5_0 || type == FILE_Q5_1 || type == FILE_Q8_0;
    if (format == MX4) return type == FILE_MXFP4;
    return (format == Q4K && type == FILE_Q4_K) || (format == Q6K && type == FILE_Q6_K);
}

/* Pack the block of Q4_K at `from` into lane `lane` of the block at `to`. */
static void pack_four_bits(const uint8_t *from, int lane, uint8_t *to) {
    uint8_t s[SUPER], t[SUPER], q[GROUP];
    memcpy(to + 2 * lane, from, 2);
    memcpy(to + 2 * PANEL + 2 * lane, from + 2, 2);
    read_scales(from + 4, s, t);
    for (int g = 0; g < SUPER; g++) {
        uint8_t *group = to + group_at(Q4K, g);
        group[lane] = s[g];
        group[PANEL + lane] = t[g];
        read_super_group(FILE_Q4_K, from, g, q);
        put_values(group + scale_bytes(Q4K), Q4K, lane, q);
    }
}

/* Pack the block of Q6_K at `from` into lane `lane` of the block at `to`. */
static void pack_six_bits(const uint8_t *from, int lane, uint8_t *to) {
    struct six_bits six;
    read_six_bits(from, &six);
    memcpy(to + 2 * lane, &six.scale, 2);
    for (int g = 0; g < SUPER; g++) {
        uint8_t *group = to + group_at(Q6K, g);
        for (int part = 0; part < 2; part++) group[part * PANEL + lane] = (uint8_t)(six.s[2 * g + part] + 128);
        put_values(group + scale_bytes(Q6K), Q6K, lane, six.q + g * GROUP);
    }
}

static int pack_numbers(int type, const uint8_t *row, int64_t inputs, int format, int lane, uint8_t *panel) {
    for (int64_t g = 0; g < inputs / GROUP; g += block_weights(type) / GROUP, row += block_bytes(type)) {
        struct group group;
        if (format == Q4K) {
            pack_four_bits(row, lane, panel + block_at(Q4K, g));
        } else if (format == Q6K) {
            pack_six_bits(row, lane, panel + block_at(Q6K, g));
        } else if (format == MX4) {
            if (!read_mxfp4(row, &group)) return 0;
            put_group(panel + group_at(MX4, g), MX4, lane, &group);
        } else {
            if (!read_group(type, row, &group) && format != Q4S) return 0;
            put_group(panel + group_at(format, g), format, lane, &group);
        }
    }
    return 1;
}

static int pack_row(int type, const uint8_t *row, int64_t inputs, int format, int exactly, int lane, uint8_t *panel) {
    if (holds(format, type) && pack_numbers(type, row, inputs, format, lane, panel)) return 1;
    if (format >= Q4S) return 0;
    const int weights = block_weights(type);
    float values[BLOCK];
    for (int64_t first = 0; first < inputs; first += BLOCK) {
        const int count = inputs - first < BLOCK ? (int)(inputs - first) : BLOCK;
        read_floats(type, row + first / weights * block_bytes(type), count, values);
        if (!pack_values(values, first, count, format, exactly, lane, panel)) return 0;
    }
    return 1;
}

/* Pack the rows of a matrix in a file into `to` (zeroed, weight_panel_bytes per panel), with row n
 * as output offset + n. `order`: the file's row for each row n; NULL: the file's order. With
 * `exactly`, returns 0 as soon as a weight does not fit the format. Without it, BF16 and Q8 use
 * the nearest values. `inputs` must be a multiple of weight_block(format) and of the type's
 * blocks. */
int64_t weight_pack(const uint8_t *rows, int64_t type, const int64_t *order, int64_t num_rows, int64_t inputs,
                    int64_t format, int64_t exactly, int64_t offset, uint8_t *to) {
    const int64_t row_bytes = file_row_bytes(type, inputs);
    if (!row_bytes || inputs % weight_block(format)) return 0;
    for (int64_t n = 0; n < num_rows; n++) {
        uint8_t *panel = to + (offset + n) / PANEL * weight_panel_bytes(format, inputs);
        const uint8_t *row = rows + (order ? order[n] : n) * row_bytes;
        if (!pack_row((int)type, row, inputs, (int)format, (int)exactly, (int)((offset + n) % PANEL), panel)) return 0;
    }
    return 1;
}

#endif

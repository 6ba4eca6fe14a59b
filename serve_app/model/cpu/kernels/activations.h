/* Activations as products take them. */
#ifndef SERVE_APP_ACTIVATIONS_H
#define SERVE_APP_ACTIVATIONS_H

#include "amx_tile.h"
#include "weights.h"

/* How the products of a model compute; see matmul.h. */
enum arithmetic { EXACT, INT8, BFLOAT16 };

/* Bytes of an activation in exact mode, for weights of 8 and 4 bits; 0: floats are faster on such a machine. */
#if defined(BUILD_AVX512)
#define EXACT_BYTES 3
#else
#define EXACT_BYTES 0
#endif

/* The forms of a row of activations. */
enum form {
    AS_FLOATS = 0,
    AS_BYTES = 1,       /* fixed-point numbers of so many bytes: [inputs / GROUP] of int8 [1][GROUP], and group_terms */
    AS_BF16 = 2,        /* uint16 [inputs] */
    AS_THREE_BYTES = 3, /* the same of three, the highest byte of all numbers first */
};

/* What belongs to a group of fixed-point activations; it stands behind their bytes. */
struct group_terms {
    float scale;       /* s */
    float sum;         /* s times the sum of the group's numbers */
    int32_t centre[2]; /* with three bytes: 128 times the sums of the first two and of the third */
};

/* Activations of some rows. For `float` products only `x`, for the others only `rounded`. */
struct input {
    const float *x;         /* [rows][inputs] */
    const uint8_t *rounded; /* [rows] in their form */
};

/* Bytes of a group of fixed-point activations. */
static inline int activation_group_bytes(int bytes) { return bytes * GROUP + (int)sizeof(struct group_terms); }

/* Bytes of a row of rounded activations. */
static inline int64_t rounded_bytes(int64_t inputs, enum form form) {
    switch (form) {
        case AS_FLOATS: return 0;
        case AS_BF16: return 2 * inputs;
        default: return inputs / GROUP * activation_group_bytes(form);
    }
}

/* The most bytes that a row of so many inputs takes in any form. */
static inline int64_t most_rounded_bytes(int64_t inputs) {
    const int64_t bytes = rounded_bytes(inputs + GROUP - 1, EXACT_BYTES ? AS_THREE_BYTES : AS_BYTES);
    return bytes > 2 * inputs ? bytes : 2 * inputs;
}

/* How activations meet this weight. */
static enum form form_for(const struct weight *weight, int arithmetic) {
    if (arithmetic == BFLOAT16) return AS_BF16;
    if (!weight->fixed) return AS_FLOATS;
    if (arithmetic == INT8) return TILES ? AS_BF16 : AS_BYTES;
    return EXACT_BYTES;
}

/* One row as fixed-point numbers of 1 or 3 bytes: in each group x ~ scale a, the largest |a| being 127 or 2^22 - 1.
 * `count` is a multiple of GROUP. The `sum` of a group with an infinity or a NaN is NaN, so
 * that no output hides it. */
SPECIALIZED void quantize_groups(const int bytes, const float *x, int count, uint8_t *to) {
    const float limit = bytes == 1 ? 127.0f : 0x3fffff;
    const vec magic = splat(0x1.8p23f); /* adding it rounds to the nearest integer, ties to even */
    for (int g = 0; g < count / GROUP; g++, x += GROUP, to += activation_group_bytes(bytes)) {
        struct group_terms *terms = (void *)(to + bytes * GROUP);
        vec largest = splat(0.0f), finite = splat(0.0f);
        UNROLL
        for (int k = 0; k < GROUP; k += LANES) {
            largest = maximum(absolute(load(x + k)), largest);
            finite = finite + (load(x + k) - load(x + k)); /* zero, or NaN for an infinity or a NaN */
        }
        /* What is so small that the quotient would be infinite counts as zero. */
        const float size = reduce_max(largest), inverse = size > limit * 0x1p-126f ? limit / size : 0.0f;
        ivec total = {0}, last = {0};
        UNROLL
        for (int k = 0; k < GROUP; k += LANES) {
            ivec rounded = (ivec)(load(x + k) * splat(inverse) + magic) - (ivec)magic;
            total += rounded;
            last += (rounded << 24) >> 24;
            UNROLL
            for (int byte = bytes - 1; byte >= 0; byte--) {
                store_bytes((int8_t *)to + byte * GROUP + k, rounded);
                rounded = (rounded - ((rounded << 24) >> 24)) >> 8; /* the next byte, given that this one has a sign */
            }
        }
        terms->scale = size / limit;
        terms->sum = terms->scale * reduce_add(to_float(total) + finite);
        if (bytes == 3) {
            terms->centre[0] = 128 * (int32_t)reduce_add(to_float((total - last) >> 8));
            terms->centre[1] = 128 * (int32_t)reduce_add(to_float(last));
        }
    }
}

static void round_row(const float *x, int count, uint16_t *out) {
#if defined(BUILD_BF16)
    for (int k = 0; k < count; k += LANES) store_bf16(out + k, load(x + k));
#else
    (void)x, (void)count, (void)out; /* nobody asks for it */
#endif
}

static void round_activations(const float *x, int count, enum form form, uint8_t *to) {
    switch (form) {
        case AS_FLOATS: break;
        case AS_BYTES: quantize_groups(1, x, count, to); break;
        case AS_BF16: round_row(x, count, (uint16_t *)to); break;
        case AS_THREE_BYTES: quantize_groups(3, x, count, to); break;
    }
}

#endif

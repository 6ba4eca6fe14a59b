/* Activations as products take them: floats, fixed-point numbers, or bfloat16. */
#ifndef SERVE_APP_ACTIVATIONS_H
#define SERVE_APP_ACTIVATIONS_H

#include "weights.h"

/* How the products of a model compute; see matmul.h. */
enum arithmetic { EXACT, INT8, BFLOAT16 };

/* Bytes of an activation in exact mode, for weights of 8 and 4 bits; 0: floats are faster on such a machine. */
#if defined(BUILD_AVX512)
#define EXACT_BYTES 3
#else
#define EXACT_BYTES 0
#endif

enum { MOST_BYTES = EXACT_BYTES ? EXACT_BYTES : 1 };

/* Activations of some rows. For `float` products only `x`, for `bfloat16` ones only `q`. */
struct input {
    const float *x;       /* [rows][inputs] */
    const int8_t *q;      /* [rows][inputs / GROUP][bytes][GROUP], the highest byte of the numbers first;
                             or uint16 [rows][inputs] */
    const float *scale;   /* [rows][inputs / GROUP]: s */
    const float *sum;     /* [rows][inputs / GROUP]: s times the sum of the group's numbers */
    const int32_t *centre; /* [rows][inputs / GROUP][2]: 128 times the sums of the first two bytes and of the third */
};

/* How activations meet this weight: as fixed-point numbers of 1 or 3 bytes, in the 2 of bfloat16, or 0 for floats. */
static int activation_bytes(const struct weight *weight, int arithmetic) {
    if (arithmetic == BFLOAT16) return 2;
    if (!weight->fixed) return 0;
    return arithmetic == INT8 ? 1 : EXACT_BYTES;
}

/* One row as fixed-point numbers of 1 or 3 bytes: in each group x ~ scale a, the largest |a| being 127 or 2^22 - 1.
 * `count` is a multiple of GROUP. The `sum` of a group with an infinity or a NaN is NaN, so
 * that no output hides it. */
SPECIALIZED void quantize_groups(const int bytes, const float *x, int count, int8_t *q, float *scale, float *sum,
                                int32_t *centre) {
    const float limit = bytes == 1 ? 127.0f : 0x3fffff;
    const vec magic = splat(0x1.8p23f); /* adding it rounds to the nearest integer, ties to even */
    for (int g = 0; g < count / GROUP; g++, x += GROUP, q += bytes * GROUP) {
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
                store_bytes(q + byte * GROUP + k, rounded);
                rounded = (rounded - ((rounded << 24) >> 24)) >> 8; /* the next byte, given that this one has a sign */
            }
        }
        scale[g] = size / limit;
        sum[g] = scale[g] * reduce_add(to_float(total) + finite);
        if (bytes == 3) {
            centre[2 * g] = 128 * (int32_t)reduce_add(to_float((total - last) >> 8));
            centre[2 * g + 1] = 128 * (int32_t)reduce_add(to_float(last));
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

static void quantize_row(const float *x, int count, int bytes, int8_t *q, float *scale, float *sum, int32_t *centre) {
    if (bytes == 2)
        round_row(x, count, (uint16_t *)q);
    else if (bytes == 1)
        quantize_groups(1, x, count, q, scale, sum, centre);
    else
        quantize_groups(3, x, count, q, scale, sum, centre);
}

#endif

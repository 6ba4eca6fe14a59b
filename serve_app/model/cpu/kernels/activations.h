/* Activations in the forms that products take. */
#ifndef SERVE_APP_ACTIVATIONS_H
#define SERVE_APP_ACTIVATIONS_H

#include "amx_tile.h"
#include "weights.h"

/* How the products of a model compute; see matmul.h. */
enum arithmetic { EXACT, INT8, BFLOAT16 };

/* Bytes of an activation in exact mode, for weights of 8, 6 and 4 bits. 0: floats are faster on
 * this build. */
#if defined(BUILD_AVX512)
#define EXACT_BYTES 3
#else
#define EXACT_BYTES 0
#endif
#define MOST_OF_THREE_BYTES 0x3fffffp0f

/* The forms of activations. */
enum form {
    AS_FLOATS = 0,
    AS_BYTES = 1,       /* fixed-point, 1 byte: [inputs / GROUP] of int8 [1][GROUP] and group_terms,
                           then the row's outlier */
    AS_BF16 = 2,        /* uint16 [inputs] */
    AS_THREE_BYTES = 3, /* fixed-point, 3 bytes: the highest byte of all numbers first; no outlier */
    AS_DIGITS = 4,      /* the numbers of AS_THREE_BYTES for tiles: digit_tile [rows / 16][inputs / GROUP] */
};

/* Fixed-point numbers of 16 rows and one group: (16 a + b) 2^12 + 16 c + d, with b and d from 0 to
 * 15. */
struct digit_tile {
    int8_t digits[2][TILE_ROWS][2 * GROUP]; /* b, a; d, c */
    float scale[TILE_ROWS], sum[TILE_ROWS]; /* see group_terms */
    int32_t less_8[TILE_ROWS];
};

/* Terms of a group of fixed-point activations, stored after its bytes. */
struct group_terms {
    float scale;       /* s */
    float sum;         /* s times the sum of the group's numbers */
    /* These terms center weights around zero: */
    int32_t less_32[2];  /* -32 times the sums of the first half and of the second */
    int32_t less_8;      /* -8 times the sum of all numbers */
    int32_t less_128[2]; /* only with three bytes: -128 times the sums of the first two bytes and of the third */
};

/* The largest activation of a row in bytes. Its number in its group is 0, and it is multiplied as
 * a float. Otherwise it would set the step of its group, whose other numbers are often a tenth as
 * large. */
struct outlier {
    int32_t input;
    float value;
};

/* Activations of some rows. `float` products use only `x`, the others only `rounded`. */
struct input {
    const float *x;         /* [rows][inputs] */
    const uint8_t *rounded; /* [rows] in their form */
};

/* Bytes of a group of fixed-point activations. */
static inline int activation_group_bytes(int bytes) {
    return bytes * GROUP + (int)(bytes == 3 ? sizeof(struct group_terms) : offsetof(struct group_terms, less_128));
}

/* Return group 0 of the tile that has this row. */
static inline struct digit_tile *tile_of(const uint8_t *rounded, int64_t row, int inputs) {
    return (struct digit_tile *)rounded + row / TILE_ROWS * (inputs / GROUP);
}

/* Bytes of a row of rounded activations. AS_DIGITS has only whole tiles of rows: a row's share of
 * a tile. */
static inline int64_t rounded_bytes(int64_t inputs, enum form form) {
    switch (form) {
        case AS_FLOATS: return 0;
        case AS_BF16: return 2 * inputs;
        case AS_DIGITS: return inputs / GROUP * (int64_t)sizeof(struct digit_tile) / TILE_ROWS;
        case AS_BYTES: return inputs / GROUP * activation_group_bytes(1) + (int64_t)sizeof(struct outlier);
        default: return inputs / GROUP * activation_group_bytes(form);
    }
}

/* The maximum bytes of a row of `inputs` activations, over all forms. */
static inline int64_t most_rounded_bytes(int64_t inputs) {
    const enum form widest = TILES ? AS_DIGITS : EXACT_BYTES ? AS_THREE_BYTES : AS_BYTES;
    const int64_t bytes = rounded_bytes(inputs + GROUP - 1, widest);
    return bytes > 2 * inputs ? bytes : 2 * inputs;
}

/* Minimum number of rows for which tiles are faster in exact mode. */
enum { LEAST_DIGIT_ROWS = 12 };

/* The form of activations for a product of `rows` rows with this weight. */
static enum form form_for(const struct weight *weight, int arithmetic, int rows) {
    if (arithmetic == BFLOAT16) return AS_BF16;
    if (!weight->fixed) return AS_FLOATS;
    if (arithmetic == INT8) return TILES ? AS_BF16 : AS_BYTES;
    return TILES && weight->fixed == 4 && rows >= LEAST_DIGIT_ROWS ? AS_DIGITS : EXACT_BYTES;
}

/* A group as fixed-point numbers: x ~ scale a, with `limit` as the largest |a|. If the group has
 * an infinity or a NaN, its scale is NaN, so that it shows in every output. */
struct fixed_group {
    ivec a[GROUP / LANES];
    struct lane_sums halves;
    float scale, sum;
};

SPECIALIZED struct fixed_group round_group(const float *x, const float limit) {
    struct fixed_group group;
    vec largest = splat(0.0f), odd = splat(0.0f);
    ivec half[2] = {{0}, {0}};
    UNROLL
    for (int k = 0; k < GROUP; k += LANES) {
        largest = maximum(absolute(load(x + k)), largest);
        odd = odd + (load(x + k) - load(x + k)); /* zero, or NaN for an infinity or a NaN */
    }
    /* Groups so small that the quotient would be infinite count as zero. */
    const float size = reduce_max(largest), inverse = size > limit * 0x1p-126f ? limit / size : 0.0f;
    UNROLL
    for (int k = 0; k < GROUP; k += LANES) {
        group.a[k / LANES] = nearest(load(x + k) * splat(inverse));
        half[k >= GROUP / 2] += group.a[k / LANES];
    }
    group.halves = add_lanes(half[0], half[1]);
    group.scale = any_nan(odd) ? NAN : size / limit;
    group.sum = group.scale * (float)(group.halves.first + group.halves.second);
    return group;
}

/* The last `bits` bits of each lane as a signed number. */
static inline ivec low_bits(ivec value, int bits) { return (value << (32 - bits)) >> (32 - bits); }

/* Round one row to fixed-point numbers of 1 or 3 bytes, with 127 or 2^22 - 1 as the largest |a|.
 * `count` must be a multiple of GROUP. */
SPECIALIZED void quantize_groups(const int bytes, const float *x, int count, uint8_t *to) {
    for (int g = 0; g < count / GROUP; g++, x += GROUP, to += activation_group_bytes(bytes)) {
        const struct fixed_group group = round_group(x, bytes == 1 ? 127.0f : MOST_OF_THREE_BYTES);
        struct group_terms *terms = (void *)(to + bytes * GROUP);
        ivec last = {0}, others = {0};
        UNROLL
        for (int k = 0; k < GROUP; k += LANES) {
            ivec rounded = group.a[k / LANES];
            last += low_bits(rounded, 8);
            others += (rounded - low_bits(rounded, 8)) >> 8;
            UNROLL
            for (int byte = bytes - 1; byte >= 0; byte--) {
                store_bytes((int8_t *)to + byte * GROUP + k, rounded);
                rounded = (rounded - low_bits(rounded, 8)) >> 8; /* the next byte, given that this one is signed */
            }
        }
        terms->scale = group.scale;
        terms->sum = group.sum;
        terms->less_32[0] = -32 * group.halves.first;
        terms->less_32[1] = -32 * group.halves.second;
        terms->less_8 = -8 * (group.halves.first + group.halves.second);
        if (bytes == 3) {
            const struct lane_sums sums = add_lanes(others, last);
            terms->less_128[0] = -128 * sums.first;
            terms->less_128[1] = -128 * sums.second;
        }
    }
}

#if defined(BUILD_AVX512)
/* The maximum (or the sum) of each block of four lanes, in all lanes of the block. */
static inline __m512i largest_in_blocks(__m512i value) {
    value = _mm512_max_epi32(value, _mm512_shuffle_epi32(value, 0x4e));
    return _mm512_max_epi32(value, _mm512_shuffle_epi32(value, 0xb1));
}

static inline __m512i sum_in_blocks(__m512i value) {
    value = _mm512_add_epi32(value, _mm512_shuffle_epi32(value, 0x4e));
    return _mm512_add_epi32(value, _mm512_shuffle_epi32(value, 0xb1));
}

/* The largest absolute values of four groups, one block per group, as integers: infinity and NaN
 * are the largest. */
static inline __m512i sizes_of_four(const float *x) {
    __m512i size[4], halves[2];
    UNROLL
    for (int g = 0; g < 4; g++) {
        const vec first = absolute(load(x + g * GROUP)), second = absolute(load(x + g * GROUP + LANES));
        size[g] = _mm512_max_epi32((__m512i)first, (__m512i)second);
    }
    UNROLL
    for (int i = 0; i < 2; i++)
        halves[i] = _mm512_max_epi32(_mm512_shuffle_i32x4(size[2 * i], size[2 * i + 1], 0x44),
                                     _mm512_shuffle_i32x4(size[2 * i], size[2 * i + 1], 0xee));
    return largest_in_blocks(_mm512_max_epi32(_mm512_shuffle_i32x4(halves[0], halves[1], 0x88),
                                              _mm512_shuffle_i32x4(halves[0], halves[1], 0xdd)));
}

/* Store two groups in bytes. Half k is multiplied by `times[k]`. Returns the sums of the halves,
 * in blocks. */
static inline __m512i store_two_groups(const float *x, const __m512 times[4], uint8_t *first, uint8_t *second) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i a[4];
    UNROLL
    for (int k = 0; k < 4; k++) a[k] = _mm512_cvtps_epi32(_mm512_mul_ps((__m512)load(x + k * LANES), times[k]));
    const __m512i mixed = _mm512_packs_epi16(_mm512_packs_epi32(a[0], a[1]), _mm512_packs_epi32(a[2], a[3]));
    const __m512i bytes = _mm512_permutexvar_epi32(order, mixed);
    _mm256_storeu_si256((__m256i *)first, _mm512_castsi512_si256(bytes));
    _mm256_storeu_si256((__m256i *)second, _mm512_extracti64x4_epi64(bytes, 1));
    return sum_in_blocks((__m512i)dot4((ivec){0}, splat_bytes("\1\1\1\1"), (ivec)bytes));
}

/* Store the terms of four groups in bytes: a block of `first` has a group's first four terms, a
 * block of `fifth` the last. */
static inline void store_terms(__m512i first, __m512i fifth, uint8_t *const group[4]) {
    __m128i blocks[4], last[4];
    memcpy(blocks, &first, sizeof blocks);
    memcpy(last, &fifth, sizeof last);
    UNROLL
    for (int g = 0; g < 4; g++) {
        _mm_storeu_si128((__m128i *)(group[g] + GROUP), blocks[g]);
        memcpy(group[g] + GROUP + offsetof(struct group_terms, less_8), last + g, 4);
    }
}

/* quantize_groups for four groups in bytes, except for the numbers of groups whose scale is NaN.
 * All reductions and divisions run at once, so that they do not wait for each other. */
static void quantize_four_groups(const float *x, uint8_t *to) {
    const __m512 limit = (__m512)splat(127.0f);
    const __m512i sizes = sizes_of_four(x);
    const __m512 size = (__m512)sizes;
    const __mmask16 some = _mm512_cmp_ps_mask(size, (__m512)splat(127.0f * 0x1p-126f), _CMP_GT_OQ);
    const __mmask16 odd = _mm512_cmpge_epi32_mask(sizes, _mm512_set1_epi32(0x7f800000));
    const __m512 inverse = _mm512_maskz_div_ps(some, limit, size);
    const __m512 scale = _mm512_mask_mov_ps(_mm512_div_ps(size, limit), odd, (__m512)splat(NAN));
    const __m512 times[4] = {
        _mm512_shuffle_f32x4(inverse, inverse, 0x00), _mm512_shuffle_f32x4(inverse, inverse, 0x55),
        _mm512_shuffle_f32x4(inverse, inverse, 0xaa), _mm512_shuffle_f32x4(inverse, inverse, 0xff),
    };
    uint8_t *group[4];
    for (int g = 0; g < 4; g++) group[g] = to + g * activation_group_bytes(1);
    const __m512i low = store_two_groups(x, (__m512[4]){times[0], times[0], times[1], times[1]}, group[0], group[1]);
    const __m512i high =
        store_two_groups(x + 2 * GROUP, (__m512[4]){times[2], times[2], times[3], times[3]}, group[2], group[3]);
    const __m512i first = _mm512_shuffle_i32x4(low, high, 0x88), second = _mm512_shuffle_i32x4(low, high, 0xdd);
    const __m512i both = _mm512_add_epi32(first, second);
    const __m512 sum = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(both));
    /* Lane i of a block: number i of the group's terms. */
    __m512i terms = _mm512_mask_mov_epi32((__m512i)scale, 0x2222, (__m512i)sum);
    terms = _mm512_mask_mullo_epi32(terms, 0x4444, first, _mm512_set1_epi32(-32));
    terms = _mm512_mask_mullo_epi32(terms, 0x8888, second, _mm512_set1_epi32(-32));
    store_terms(terms, _mm512_mullo_epi32(both, _mm512_set1_epi32(-8)), group);
}

#elif defined(BUILD_AVX2)
/* The largest absolute values of four groups, as integers: infinity and NaN are the largest. */
static inline __m128i sizes_of_four(const float *x) {
    __m256i size[4], pairs[2];
    UNROLL
    for (int g = 0; g < 4; g++) {
        size[g] = (__m256i)absolute(load(x + g * GROUP));
        UNROLL
        for (int k = LANES; k < GROUP; k += LANES)
            size[g] = _mm256_max_epi32((__m256i)absolute(load(x + g * GROUP + k)), size[g]);
    }
    UNROLL
    for (int i = 0; i < 2; i++)
        pairs[i] = _mm256_max_epi32(_mm256_unpacklo_epi32(size[2 * i], size[2 * i + 1]),
                                    _mm256_unpackhi_epi32(size[2 * i], size[2 * i + 1]));
    const __m256i four =
        _mm256_max_epi32(_mm256_unpacklo_epi64(pairs[0], pairs[1]), _mm256_unpackhi_epi64(pairs[0], pairs[1]));
    return _mm_max_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
}

/* Store a group in bytes, multiplied by `times`. Returns the sum of each four numbers. */
static inline __m256i store_group(const float *x, __m256 times, uint8_t *to) {
    __m256i a[4];
    UNROLL
    for (int k = 0; k < 4; k++) a[k] = _mm256_cvtps_epi32(_mm256_mul_ps((__m256)load(x + k * LANES), times));
    const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(a[0], a[1]), _mm256_packs_epi32(a[2], a[3]));
    const __m256i bytes = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)to, bytes);
    const __m256i halves = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    return _mm256_madd_epi16(halves, _mm256_set1_epi16(1));
}

/* quantize_groups for four groups in bytes, except for the numbers of groups whose scale is NaN. */
static void quantize_four_groups(const float *x, uint8_t *to) {
    const __m128 limit = _mm_set1_ps(127.0f);
    const __m128i sizes = sizes_of_four(x);
    const __m128 size = _mm_castsi128_ps(sizes);
    const __m128 some = _mm_cmpgt_ps(size, _mm_set1_ps(127.0f * 0x1p-126f));
    const __m128 odd = _mm_castsi128_ps(_mm_cmpgt_epi32(sizes, _mm_set1_epi32(0x7f7fffff)));
    const __m128 inverse = _mm_and_ps(_mm_div_ps(limit, size), some);
    __m128 scale = _mm_blendv_ps(_mm_div_ps(size, limit), _mm_set1_ps(NAN), odd);
    __m256i sums[4];
    uint8_t *group[4];
    UNROLL
    for (int g = 0; g < 4; g++) {
        group[g] = to + g * activation_group_bytes(1);
        const __m128 times = _mm_permutevar_ps(inverse, _mm_set1_epi32(g));
        sums[g] = store_group(x + g * GROUP, _mm256_broadcastss_ps(times), group[g]);
    }
    const __m256i halves = _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3]));
    const __m128i first = _mm256_castsi256_si128(halves), second = _mm256_extracti128_si256(halves, 1);
    const __m128i both = _mm_add_epi32(first, second);
    __m128 sum = _mm_mul_ps(scale, _mm_cvtepi32_ps(both));
    __m128 first_term = _mm_castsi128_ps(_mm_mullo_epi32(first, _mm_set1_epi32(-32)));
    __m128 second_term = _mm_castsi128_ps(_mm_mullo_epi32(second, _mm_set1_epi32(-32)));
    int32_t less_8[4];
    _mm_storeu_si128((__m128i *)less_8, _mm_mullo_epi32(both, _mm_set1_epi32(-8)));
    _MM_TRANSPOSE4_PS(scale, sum, first_term, second_term);
    const __m128 terms[4] = {scale, sum, first_term, second_term};
    UNROLL
    for (int g = 0; g < 4; g++) {
        _mm_storeu_ps((float *)(group[g] + GROUP), terms[g]);
        memcpy(group[g] + GROUP + offsetof(struct group_terms, less_8), less_8 + g, 4);
    }
}
#endif

#if defined(BUILD_AVX512) || defined(BUILD_AVX2)
/* quantize_groups in bytes. If the number of groups is not a multiple of four, some are rounded
 * twice. */
static void quantize_byte_groups(const float *x, int count, uint8_t *to) {
    const int groups = count / GROUP;
    if (groups < 4) {
        quantize_groups(1, x, count, to);
        return;
    }
    for (int g = 0; g < groups; g += 4) {
        const int first = g < groups - 4 ? g : groups - 4;
        quantize_four_groups(x + first * GROUP, to + first * activation_group_bytes(1));
    }
}
#else
static void quantize_byte_groups(const float *x, int count, uint8_t *to) { quantize_groups(1, x, count, to); }
#endif

/* The index of the largest number of a group, the first of equal ones. */
static int largest_of_group(const float *x) {
    int largest = 0;
    for (int k = 1; k < GROUP; k++) largest = fabsf(x[k]) > fabsf(x[largest]) ? k : largest;
    return largest;
}

/* Round one row to bytes. The group with the outlier is rounded again without it. Groups with an
 * infinity or a NaN have no outlier. */
static void quantize_bytes(const float *x, int count, uint8_t *to) {
    const int groups = count / GROUP, size = activation_group_bytes(1);
    int group = 0;
    float scale = 0.0f, others[GROUP];
    quantize_byte_groups(x, count, to);
    for (int g = 0; g < groups; g++) {
        const struct group_terms *terms = (const void *)(to + g * size + GROUP);
        if (terms->scale > scale) group = g, scale = terms->scale;
    }
    struct outlier outlier = {0, 0.0f};
    if (scale > 0.0f) {
        const int largest = largest_of_group(x + group * GROUP);
        outlier = (struct outlier){group * GROUP + largest, x[group * GROUP + largest]};
        memcpy(others, x + group * GROUP, sizeof others);
        others[largest] = 0.0f;
        quantize_groups(1, others, GROUP, to + group * size);
    }
    memcpy(to + groups * size, &outlier, sizeof outlier);
}

/* Round a row to the numbers of AS_THREE_BYTES, as digits. Rows after the last one, up to a whole
 * tile, get scales of zero. Otherwise whatever floats are in memory would be multiplied, which is
 * slow if they are denormal. */
static void digit_groups(const float *x, int count, int row, int rows, uint8_t *memory) {
    struct digit_tile *to = tile_of(memory, row, count);
    const int end = row == rows - 1 ? TILE_ROWS : row % TILE_ROWS + 1;
    for (int g = 0; g < count / GROUP; g++, x += GROUP, to++) {
        const struct fixed_group group = round_group(x, MOST_OF_THREE_BYTES);
        int r = row % TILE_ROWS;
        UNROLL
        for (int k = 0; k < GROUP; k += LANES) {
            const ivec low = low_bits(group.a[k / LANES], 12), high = (group.a[k / LANES] - low) >> 12;
            store_bytes(to->digits[0][r] + k, high & 15);
            store_bytes(to->digits[0][r] + GROUP + k, high >> 4);
            store_bytes(to->digits[1][r] + k, low & 15);
            store_bytes(to->digits[1][r] + GROUP + k, low >> 4);
        }
        to->scale[r] = group.scale;
        to->sum[r] = group.sum;
        to->less_8[r] = -8 * (group.halves.first + group.halves.second);
        while (++r < end) to->scale[r] = to->sum[r] = 0.0f;
    }
}

static void round_row(const float *x, int count, uint16_t *out) {
#if defined(BUILD_BF16)
    for (int k = 0; k < count; k += LANES) store_bf16(out + k, load(x + k));
#else
    (void)x, (void)count, (void)out; /* never called in this build */
#endif
}

/* Round row `row` of `rows` into the memory of all of them. */
static void round_activations(const float *x, int count, enum form form, int row, int rows, uint8_t *memory) {
    uint8_t *to = memory + row * rounded_bytes(count, form);
    switch (form) {
        case AS_FLOATS: break;
        case AS_BYTES: quantize_bytes(x, count, to); break;
        case AS_BF16: round_row(x, count, (uint16_t *)to); break;
        case AS_THREE_BYTES: quantize_groups(3, x, count, to); break;
        case AS_DIGITS: digit_groups(x, count, row, rows, memory); break;
    }
}

#endif

/* Vectors of floats, as wide as the build's instruction set allows.
 *
 *   build       LANES   needs
 *   amx         16      everything of avx512bf16, and AMX with BF16 and INT8: products in tiles
 *   avx512bf16  16      everything of avx512, and AVX-512 BF16
 *   avx512      16      AVX-512 F, BW, DQ, VL and VNNI
 *   avxvnni      8      everything of avx2, and AVX-VNNI
 *   avx2         8      AVX2, FMA, F16C
 *   portable     4      nothing: the compiler's own vectors
 *
 * Almost all differences between the builds are in this file. Vector expressions use GCC's vector
 * extensions. Products and sums are fused only in `fma_` (the file is compiled with
 * -ffp-contract=off), so a result's bits never depend on the compiler's arrangement of a loop. */
#ifndef SERVE_APP_VEC_H
#define SERVE_APP_VEC_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define BUILD_AVX512 1
#define LANES 16
#if defined(__AVX512BF16__)
#define BUILD_BF16 1
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define BUILD_AMX 1
#endif
#endif
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define BUILD_AVX2 1
#define LANES 8
#if !defined(__AVXVNNI__)
#define BUILD_NARROW_DOTS 1 /* sums of byte products are fastest in 16 bits, if they fit */
#endif
#else
#define LANES 4
#endif

#if defined(BUILD_AVX512) || defined(BUILD_AVX2)
#include <immintrin.h>
#endif

#if defined(BUILD_AVX512) || defined(BUILD_AVX2)
#define BUILD_BYTE_CACHE 1 /* keys and values may be kept in bytes; see byte_attention.h */
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES)));
typedef uint8_t ubytes __attribute__((vector_size(LANES)));

/* For functions with constant loop counts: each caller gets its own copy with unrolled loops. */
#define SPECIALIZED static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

static inline vec load(const float *from) {
    vec value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline void store(float *to, vec value) { memcpy(to, &value, sizeof value); }

static inline ivec load_int(const void *from) {
    ivec value;
    memcpy(&value, from, sizeof value);
    return value;
}

/* Store the lowest byte of each lane. GCC 12 splits AVX2's builtin into scalars. */
static inline void store_bytes(int8_t *to, ivec value) {
#if defined(BUILD_AVX2)
    const __m256i every_fourth = _mm256_set1_epi32(0x0c080400);
    const __m256i words = _mm256_shuffle_epi8((__m256i)value, every_fourth);
    _mm_storel_epi64((__m128i *)to,
                     _mm_unpacklo_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
    const bytes narrow = __builtin_convertvector(value, bytes);
    memcpy(to, &narrow, sizeof narrow);
#endif
}

static inline vec splat(float value) { return value - (vec){0}; }

/* Load the same four bytes into every lane. */
static inline ivec splat_bytes(const void *from) {
    int32_t word;
    memcpy(&word, from, 4);
    return word - (ivec){0};
}

/* Keep a value in a register: otherwise the compiler may load it again for each use. */
static inline vec pinned(vec value) {
#if defined(BUILD_AVX512)
    __asm__("" : "+v"(value));
#elif defined(BUILD_AVX2)
    __asm__("" : "+x"(value));
#endif
    return value;
}

static inline vec choose(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

/* The larger one; b if either is NaN. */
static inline vec maximum(vec a, vec b) {
#if defined(BUILD_AVX512)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(BUILD_AVX2)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

/* Whether any lane is above `limit`. */
static inline int any_above(vec value, float limit) {
#if defined(BUILD_AVX512)
    return _mm512_cmp_ps_mask((__m512)value, (__m512)splat(limit), _CMP_GT_OQ) != 0;
#elif defined(BUILD_AVX2)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)value, (__m256)splat(limit), _CMP_GT_OQ)) != 0;
#else
    for (int i = 0; i < LANES; i++)
        if (value[i] > limit) return 1;
    return 0;
#endif
}

static inline int any_nan(vec value) {
#if defined(BUILD_AVX512)
    return _mm512_cmp_ps_mask((__m512)value, (__m512)value, _CMP_UNORD_Q) != 0;
#elif defined(BUILD_AVX2)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)value, (__m256)value, _CMP_UNORD_Q)) != 0;
#else
    for (int i = 0; i < LANES; i++)
        if (value[i] != value[i]) return 1;
    return 0;
#endif
}

static inline vec absolute(vec a) { return (vec)((ivec)a & 0x7fffffff); }

static inline vec to_float(ivec value) { return __builtin_convertvector(value, vec); }

/* Round to the nearest integers, ties to even. Numbers must be below 2^22. */
static inline ivec nearest(vec value) {
    const vec magic = splat(0x1.8p23f);
    return (ivec)(value + magic) - (ivec)magic;
}

/* a * b + c, rounded once if the machine can. */
static inline vec fma_(vec a, vec b, vec c) {
#if defined(BUILD_AVX512)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(BUILD_AVX2)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* Returns `sum`, and forces GCC to compute it here: otherwise it adds many products at the end,
 * from memory. */
static inline ivec summed(ivec sum) {
#if defined(BUILD_AVX2)
    __asm__("" : "+x"(sum));
#endif
    return sum;
}

#if !defined(BUILD_NARROW_DOTS)
/* Per lane: sum + w[0] a[0] + ... + w[3] a[3], with w unsigned and a signed bytes. */
static inline ivec dot4(ivec sum, ivec w, ivec a) {
#if defined(BUILD_AVX512)
    /* In assembly, because GCC 12 moves the accumulators of the intrinsic through other registers and spills. */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(a));
    return sum;
#elif defined(BUILD_AVX2)
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(a));
    return sum;
#else
    for (int shift = 0; shift < 32; shift += 8)
        sum += ((w >> shift) & 0xff) * ((a << (24 - shift)) >> 24);
    return sum;
#endif
}

#else
/* Per half of a lane: sum + w[0] a[0] + w[1] a[1]. Exact for 8 sums with w of 4
 * bits, or for 2 with w of 6 bits: 16 * 15 * 128 and 4 * 63 * 128 fit 16 bits. */
static inline ivec narrow_dot(ivec sum, ivec w, ivec a) {
    return summed((ivec)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)w, (__m256i)a)));
}

/* Per lane: the sum of its two halves. */
static inline ivec add_halves(ivec sums) { return (ivec)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)); }

/* Per lane: sum + w[0] a[0] + ... + w[3] a[3], with signed bytes. `size` is |w|. No a is -128, so that the sum of two
 * products fits 16 bits (2 * 128 * 127). */
static inline ivec signed_dot(ivec sum, ivec w, ivec size, ivec a) {
    const __m256i turned = _mm256_sign_epi8((__m256i)a, (__m256i)w);
    return summed(sum + add_halves((ivec)_mm256_maddubs_epi16((__m256i)size, turned)));
}

static inline ivec byte_sizes(ivec value) { return (ivec)_mm256_abs_epi8((__m256i)value); }
#endif

#if defined(BUILD_BF16)
/* Per lane: sum + a[0] b[0] + a[1] b[1], of pairs of bfloat16. */
static inline vec dot2(vec sum, ivec a, ivec b) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

/* Store rounded to bfloat16, to nearest even. Returns the stored values as floats. */
static inline vec store_bf16(uint16_t *to, vec value) {
    const __m256i narrow = (__m256i)_mm512_cvtneps_pbh((__m512)value);
    _mm256_storeu_si256((__m256i *)to, narrow);
    return (vec)(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

/* Store both vectors rounded to bfloat16, interleaved in pairs. Returns total + the two stored
 * vectors. */
static inline vec store_pairs(uint16_t *to, vec first, vec second, vec total) {
    const __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    _mm512_storeu_si512(to, (__m512i)pairs);
    return dot2(total, (ivec)pairs, (ivec)_mm512_set1_epi32(0x3f803f80)); /* times 1 */
}

/* Store rounded into the first or second of each pair. The others are not touched: another thread
 * may be writing them. */
static inline void store_every_second_bf16(uint16_t *pairs, int second, vec value) {
    const __m512i wide = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)value));
    if (second)
        _mm512_mask_storeu_epi16(pairs, 0xaaaaaaaa, _mm512_slli_epi32(wide, 16));
    else
        _mm512_mask_storeu_epi16(pairs, 0x55555555, wide);
}

/* Pairs of the upper halves of `first` and `second`. */
static inline ivec upper_halves(vec first, vec second) {
    return (ivec)_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32((__m512i)first, 16), (__m512i)second);
}

/* Convert the lowest four bits of each lane. Or convert byte `index` of each lane to 256 + byte,
 * by placing it in the upper bits of the fraction. */
#define BYTE_ZERO 256.0f
static inline vec four_bits(ivec value) {
    const vec numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (vec)_mm512_permutexvar_ps((__m512i)value, (__m512)numbers); /* permutexvar ignores the other bits */
}

static inline vec byte_number(ivec bytes, int index) {
    const int shift = 15 - 8 * index;
    return (vec)(((shift > 0 ? bytes << shift : bytes >> -shift) & 0x7f8000) | 0x43800000);
}
#endif

#if defined(BUILD_AVX2)
static inline __m128 lower_four(vec value) { return _mm256_castps256_ps128((__m256)value); }
static inline __m128 upper_four(vec value) { return _mm256_extractf128_ps((__m256)value, 1); }
#endif

/* Reductions in one fixed order: add halves until one lane is left. */
static inline float reduce_add(vec value) {
#if defined(BUILD_AVX512)
    return _mm512_reduce_add_ps((__m512)value);
#elif defined(BUILD_AVX2)
    const __m128 four = _mm_add_ps(lower_four(value), upper_four(value));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float lane[LANES];
    store(lane, value);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
#endif
}

/* The sums of the lanes of two vectors. */
struct lane_sums {
    int32_t first, second;
};

static inline struct lane_sums add_lanes(ivec first, ivec second) {
#if defined(BUILD_AVX512)
    /* Both at once: each half of a register reduces one of the vectors. */
    const __m512i a = (__m512i)first, b = (__m512i)second;
    __m512i sums = _mm512_add_epi32(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xee));
    sums = _mm512_add_epi32(sums, _mm512_shuffle_i64x2(sums, sums, 0xb1));
    sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, 0x4e));
    sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, 0xb1));
    return (struct lane_sums){((ivec)sums)[0], ((ivec)sums)[LANES / 2]};
#elif defined(BUILD_AVX2)
    const __m256i pairs = _mm256_hadd_epi32((__m256i)first, (__m256i)second);
    const __m128i halves = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    const __m128i sums = _mm_hadd_epi32(halves, halves);
    return (struct lane_sums){_mm_cvtsi128_si32(sums), _mm_extract_epi32(sums, 1)};
#else
    struct lane_sums sums = {0, 0};
    for (int i = 0; i < LANES; i++) {
        sums.first += first[i];
        sums.second += second[i];
    }
    return sums;
#endif
}

static inline float reduce_max(vec value) {
#if defined(BUILD_AVX512)
    return _mm512_reduce_max_ps((__m512)value);
#elif defined(BUILD_AVX2)
    const __m128 four = _mm_max_ps(lower_four(value), upper_four(value));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
    float lane[LANES];
    store(lane, value);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
    return lane[0];
#endif
}

/* e^x with an error of about one unit in the last place; exactly 1 at 0 and exactly 0 below -87.3 (-inf included).
 * x = n ln 2 + r with |r| <= ln 2 / 2: the Taylor polynomial of e^r, times 2^n put into the exponent bits. */
static inline vec exponential(vec x) {
    const vec magic = splat(0x1.8p23f); /* adding it rounds to an integer, which is then in the low bits */
    const vec clamped = -maximum(splat(-88.3f), -x);
    const vec shifted = fma_(clamped, splat(0x1.715476p0f), magic), n = shifted - magic;
    const vec r = fma_(n, splat(2.12194440e-4f), fma_(n, splat(-0.693359375f), clamped)); /* ln 2 in two parts */
    vec p = splat(1.0f / 5040);
    p = fma_(p, r, splat(1.0f / 720));
    p = fma_(p, r, splat(1.0f / 120));
    p = fma_(p, r, splat(1.0f / 24));
    p = fma_(p, r, splat(1.0f / 6));
    p = fma_(p, r, splat(0.5f));
    p = fma_(p, r, splat(1.0f));
    p = fma_(p, r, splat(1.0f));
    const vec power = (vec)(((ivec)shifted << 23) + 0x3f800000); /* multiplied, so that a NaN stays a NaN */
    return choose(x < splat(-87.3f), splat(0.0f), p * power);
}

#if defined(BUILD_BYTE_CACHE)
/* 2^x with an error of 2^-17; exactly 0 below -126 (including -inf), because Intel's processors
 * need 60 ns for a subnormal result. x = n + r with |r| <= 1/2: a polynomial of 2^r (Chebyshev's),
 * times 2^n. */
static inline vec rough_exponential2(vec x) {
#if defined(BUILD_AVX512)
    const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(-126.0f), _CMP_NLT_UQ); /* NaN stays NaN */
    const vec n = (vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vec r = (vec)_mm512_maskz_sub_ps(normal, (__m512)x, (__m512)n);
#else
    const vec shifted = x + splat(0x1.8p23f), r = x - (shifted - splat(0x1.8p23f)); /* the integer in its lowest bits */
#endif
    vec p = splat(0.009582843f);
    p = fma_(p, r, splat(0.055906428f));
    p = fma_(p, r, splat(0.240240989f));
    p = fma_(p, r, splat(0.693124193f));
    p = fma_(p, r, splat(1.0f));
#if defined(BUILD_AVX512)
    return (vec)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)n);
#else
    const vec power = (vec)(((ivec)shifted << 23) + 0x3f800000); /* multiplied, so that a NaN stays a NaN */
    return choose(x < splat(-126.0f), splat(0.0f), p * power);
#endif
}

/* Lane `from[i]` of `value` in lane i. */
static inline vec permuted(vec value, ivec from) {
#if defined(BUILD_AVX512)
    return (vec)_mm512_permutexvar_ps((__m512i)from, (__m512)value);
#else
    return (vec)_mm256_permutevar8x32_ps((__m256)value, (__m256i)from);
#endif
}

/* The largest lane. */
static inline int32_t reduce_max_int(ivec value) {
#if defined(BUILD_AVX512)
    return _mm512_reduce_max_epi32((__m512i)value);
#else
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128((__m256i)value), _mm256_extracti128_si256((__m256i)value, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
#endif
}

static inline ivec maximum_int(ivec a, ivec b) {
#if defined(BUILD_AVX512)
    return (ivec)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
    return (ivec)_mm256_max_epi32((__m256i)a, (__m256i)b);
#endif
}
#endif

#if defined(BUILD_AVX512)
/* Store the lanes of a * b, which are 0 to 255, rounded to the nearest integers. */
static inline void store_nearest(uint8_t *to, vec a, vec b) {
    const vec shifted = fma_(a, b, splat(0x1.8p23f)); /* the integer in its lowest bits */
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)shifted));
}

/* Store the lanes' lowest bytes into every fourth byte from `first`. The other bytes are not
 * touched: another thread may be writing them. */
static inline void store_every_fourth(uint8_t *to, int first, ivec value) {
    _mm512_mask_storeu_epi8(to, 0x1111111111111111ull << first, _mm512_slli_epi32((__m512i)value, 8 * (unsigned)first));
}
#elif defined(BUILD_AVX2)
/* Load signed bytes as 16-bit numbers, two per lane. */
static inline ivec load_pairs(const void *from) {
    return (ivec)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
}

/* Per lane: sum + a[0] b[0] + a[1] b[1], of pairs of 16-bit numbers. In assembly, because GCC 12
 * adds in the product's register and moves the result back. */
static inline ivec pair_dot(ivec sum, ivec a, ivec b) {
    const __m256i product = _mm256_madd_epi16((__m256i)a, (__m256i)b);
    __asm__("vpaddd %1, %0, %0" : "+x"(sum) : "x"(product));
    return sum;
}

/* Store the lanes, which fit 16 bits. */
static inline void store_short(int16_t *to, ivec value) {
    const __m256i halves = _mm256_packs_epi32((__m256i)value, (__m256i)value);
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0x08)));
}

/* Store the lanes of a * b, which are 0 to 32767, rounded to the nearest integers. */
static inline void store_nearest(int16_t *to, vec a, vec b) {
    store_short(to, (ivec)_mm256_cvtps_epi32((__m256)(a * b)));
}
#endif

/* Half precision, for scales and the KV cache. */
static inline float half_to_float(uint16_t half) {
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float value;
    memcpy(&value, &bits, 4);
    value = (half & 0x7fff) > 0x7c00 ? NAN : value * 0x1p112f;
    return half & 0x8000 ? -value : value;
}

/* Round to nearest even. Numbers out of range become the largest number, not infinity. */
static inline uint16_t float_to_half(float value) {
    uint32_t bits;
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    float size = fabsf(value);
    if (isnan(size)) return 0x7e00;
    if (size > 65504.0f) size = 65504.0f;
    if (size < 0x1p-14f) { /* subnormal: the unit of 0.5f equals the unit of these numbers */
        size += 0.5f;
        memcpy(&bits, &size, 4);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    memcpy(&bits, &size, 4);
    bits += 0xfff + ((bits >> 13) & 1);
    return sign | (uint16_t)((bits >> 13) - (112 << 10));
}

/* Rounds to nearest even. */
static inline uint16_t float_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (isnan(value)) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float bf16_to_float(uint16_t upper) {
    const uint32_t bits = (uint32_t)upper << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline vec load_half(const uint16_t *from) {
#if defined(BUILD_AVX512)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(BUILD_AVX2)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    float lane[LANES];
    for (int i = 0; i < LANES; i++) lane[i] = half_to_float(from[i]);
    return load(lane);
#endif
}

/* Load unsigned bytes into the lanes. GCC 12 splits the builtin into scalars. */
static inline ivec load_byte_numbers(const uint8_t *from) {
#if defined(BUILD_AVX512)
    return (ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(BUILD_AVX2)
    return (ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    ubytes value;
    memcpy(&value, from, sizeof value);
    return __builtin_convertvector(value, ivec);
#endif
}

static inline vec load_bytes(const uint8_t *from) { return to_float(load_byte_numbers(from)); }

/* table[b] for every byte b of `numbers`, which are 0 to 15. */
static inline ivec look_up(const uint8_t table[16], ivec numbers) {
#if defined(BUILD_AVX512)
    const __m512i tables = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
    return (ivec)_mm512_shuffle_epi8(tables, (__m512i)numbers);
#elif defined(BUILD_AVX2)
    const __m256i tables = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return (ivec)_mm256_shuffle_epi8(tables, (__m256i)numbers);
#else
    uint8_t values[4 * LANES];
    memcpy(values, &numbers, sizeof values);
    for (int i = 0; i < 4 * LANES; i++) values[i] = table[values[i]];
    return load_int(values);
#endif
}

static inline void store_half(uint16_t *to, vec value) {
    const vec limit = splat(65504.0f), bounded = choose(value > limit, limit, choose(value < -limit, -limit, value));
#if defined(BUILD_AVX512)
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)bounded, _MM_FROUND_TO_NEAREST_INT));
#elif defined(BUILD_AVX2)
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)bounded, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < LANES; i++) to[i] = float_to_half(bounded[i]);
#endif
}

#endif

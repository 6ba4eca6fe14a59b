/* Operations on single rows (tokens) between products: norms, rotary positions, the gated
 * activation.
 *
 * Each function processes one row and reads no other. Counts are multiples of LANES. */
#ifndef SERVE_APP_ELEMENTWISE_H
#define SERVE_APP_ELEMENTWISE_H

#include "vec.h"

enum activation { SILU, GELU_TANH, CLAMPED };

/* out = x / sqrt(mean(x^2) + eps) * weight. May run in place. */
static void rms_norm(const float *x, const float *weight, float eps, int count, float *out) {
    vec squares = splat(0.0f);
    for (int i = 0; i < count; i += LANES) squares = fma_(load(x + i), load(x + i), squares);
    const vec inverse = splat(1.0f / sqrtf(reduce_add(squares) / (float)count + eps));
    for (int i = 0; i < count; i += LANES) store(out + i, load(x + i) * inverse * load(weight + i));
}

static void add(float *x, const float *more, int count) {
    for (int i = 0; i < count; i += LANES) store(x + i, load(x + i) + load(more + i));
}

static void scale(float *x, float factor, int count) {
    for (int i = 0; i < count; i += LANES) store(x + i, load(x + i) * splat(factor));
}

/* Rotary position embedding of one head: rotate the pairs (i, i + half) of its first 2 half
 * numbers by the position's angles, given as cos and sin [half]. */
static void rotate(float *head, const float *cos, const float *sin, int half) {
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        const vec a = load(head + i), b = load(head + i + half);
        store(head + i, a * load(cos + i) - b * load(sin + i));
        store(head + i + half, b * load(cos + i) + a * load(sin + i));
    }
    for (; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cos[i] - b * sin[i];
        head[i + half] = b * cos[i] + a * sin[i];
    }
}

#if defined(BUILD_BYTE_CACHE)
/* Multiply one head by Hadamard matrices of up to 64 numbers, divided by the root of their size.
 * Products of two heads do not change, but no number is much larger than the others, so bytes with
 * one scale lose less precision (Ashkboos et al., QuaRot, 2024). */
static void spread(float *head, int head_dim) {
    const int size = head_dim % 64 == 0 ? 64 : head_dim % 32 == 0 ? 32 : 16, width = size / LANES;
    const vec root = splat(size == 64 ? 0.125f : size == 32 ? 0.17677669f : 0.25f);
    ivec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (float *x = head; x < head + head_dim; x += size) {
        vec part[64 / LANES];
        for (int v = 0; v < width; v++) {
            part[v] = load(x + v * LANES) * root;
            UNROLL
            for (int apart = 1; apart < LANES; apart *= 2) {
                const vec sign = choose((lane & apart) == 0, splat(1.0f), splat(-1.0f));
                part[v] = fma_(part[v], sign, permuted(part[v], lane ^ apart));
            }
        }
        for (int apart = 1; apart < width; apart *= 2)
            for (int v = 0; v < width; v++) {
                if (v & apart) continue;
                const vec a = part[v], b = part[v + apart];
                part[v] = a + b;
                part[v + apart] = a - b;
            }
        for (int v = 0; v < width; v++) store(x + v * LANES, part[v]);
    }
}
#endif

/* out = (up + 1) * gate / (1 + e^(-alpha gate)), with gate at most `limit` and up from -limit to
 * limit. May run in place. */
static void clamped(const float *gate, const float *up, float alpha, float limit, int count, float *out) {
    const vec most = splat(limit);
    for (int i = 0; i < count; i += LANES) {
        const vec x = -maximum(-most, -load(gate + i)), u = maximum(-most, -maximum(-most, -load(up + i)));
        store(out + i, (u + splat(1.0f)) * (x / (splat(1.0f) + exponential(splat(-alpha) * x))));
    }
}

/* out = act(gate) * up. SiLU is x / (1 + e^-x). GELU in its tanh form is x / (1 + e^-2u) with u =
 * sqrt(2 / pi) (x + 0.044715 x^3). */
static void gated(const float *gate, const float *up, int activation, int count, float *out) {
    for (int i = 0; i < count; i += LANES) {
        const vec x = load(gate + i);
        const vec u = activation == SILU ? x : splat(1.5957691216f) * (x + splat(0.044715f) * x * x * x);
        store(out + i, x / (splat(1.0f) + exponential(-u)) * load(up + i));
    }
}

#endif

/* Products of activations with packed weights: out[row] += W x[row], for many rows at once.
 *
 * Two kinds. `float`: the weights as floats, float arithmetic (exact mode). `int8`: activations rounded to 8 bits in
 * groups of 32 (see quantize_row); per group, with x ~ s a and w = d q + m,
 *     sum w x  ~  s d (sum q a)  +  m (s sum a),
 * where sum q a is exact in integers: 4 products per lane and instruction.
 *
 * Work is shared out as chunks of (rows, panels). Whatever the tile that an output falls into, its sum runs over the
 * inputs (or groups) in order, in one accumulator: a row's result has the same bits alone and in any batch.
 */
#ifndef SERVE_APP_MATMUL_H
#define SERVE_APP_MATMUL_H

#include "threads.h"
#include "weights.h"

/* Rows of a tile: as many as the registers hold, two vectors each. */
#if defined(BUILD_AVX512)
#define FLOAT_ROWS 12
#define INT8_ROWS 6
#elif defined(BUILD_AVX2)
#define FLOAT_ROWS 6
#define INT8_ROWS 3
#else
#define FLOAT_ROWS 4
#define INT8_ROWS 2
#endif

enum {
    DEPTH = 2 * GROUP, /* inputs whose weights are unpacked to floats at a time; they stay in the first cache */
    ROW_BLOCK = 96,    /* rows of a chunk; their activations stay in the second cache. A multiple of both tiles */
};

/* Activations of `num_rows` rows. For `float` products only `x`, for `int8` products the rest. */
struct input {
    const float *x;       /* [rows][inputs] */
    const int8_t *q;      /* [rows][inputs] */
    const float *scale;   /* [rows][inputs / GROUP]: s */
    const float *sum;     /* [rows][inputs / GROUP]: s times the group's sum of q */
};

struct matmul {
    const struct weight *weight;
    struct input input;
    int int8;
    int num_rows;
    float *out; /* [rows][out_stride]; overwritten */
    int64_t out_stride;
    int panels_per_chunk, panel_chunks;
};

/* One row as 8-bit numbers: in each group x ~ scale q with q in -127..127. `count` is a multiple of GROUP. */
static void quantize_row(const float *x, int count, int8_t *q, float *scale, float *sum) {
    for (int g = 0; g < count / GROUP; g++, x += GROUP, q += GROUP) {
        vec largest = splat(0.0f);
        for (int k = 0; k < GROUP; k += LANES) largest = maximum(absolute(load(x + k)), largest);
        const float size = reduce_max(largest), inverse = size > 0.0f ? 127.0f / size : 0.0f;
        const vec magic = splat(0x1.8p23f); /* adding it rounds to the nearest integer, ties to even */
        ivec total = {0};
        for (int k = 0; k < GROUP; k += LANES) {
            const ivec rounded = (ivec)(load(x + k) * splat(inverse) + magic) - (ivec)magic;
            total += rounded;
            store_bytes(q + k, rounded);
        }
        scale[g] = size / 127.0f;
        sum[g] = scale[g] * reduce_add(to_float(total));
    }
}

/* DEPTH or fewer inputs of a panel as floats [depth][PANEL], from input `first` on. */
static const float *unpack(const struct weight *weight, const uint8_t *panel, int first, int depth, float *to) {
    if (weight->format == F32) return (const float *)panel + (int64_t)first * PANEL;
    if (weight->format == BF16) {
        const uint16_t *from = (const uint16_t *)panel + (int64_t)first * PANEL;
        for (int i = 0; i < depth * PANEL; i++) {
            const uint32_t bits = (uint32_t)from[i] << 16;
            memcpy(to + i, &bits, 4);
        }
        return to;
    }
    const int four = weight->format == Q4;
    for (int g = first / GROUP; g < (first + depth) / GROUP; g++) {
        const uint8_t *group = panel + g * group_bytes(weight->format);
        for (int half = 0; half < PANEL; half += LANES) {
            const vec d = load_half((const uint16_t *)group + half), m = load_half((const uint16_t *)group + PANEL + half);
            for (int step = 0; step < STEPS; step++) {
                const int line = four ? step % (STEPS / 2) : step, shift = four && step >= STEPS / 2 ? 4 : 0;
                const ivec bytes = load_int(group + 4 * PANEL + 4 * (line * PANEL + half)) >> shift;
                float *out = to + ((g * GROUP - first) + 4 * step) * PANEL + half;
                UNROLL
                for (int k = 0; k < 4; k++)
                    store(out + k * PANEL, fma_(d, to_float((bytes >> (8 * k)) & (four ? 15 : 255)), m));
            }
        }
    }
    return to;
}

/* Some inputs of one panel: sums[rows][PANEL] += W x. */
SPECIALIZED void float_tile(const int rows, const float *x, int64_t x_stride, const float *w, int depth, float *sums) {
    vec total[FLOAT_ROWS][2];
    UNROLL
    for (int r = 0; r < rows; r++) {
        total[r][0] = load(sums + r * PANEL);
        total[r][1] = load(sums + r * PANEL + LANES);
    }
    for (int k = 0; k < depth; k++, w += PANEL) {
        const vec w0 = load(w), w1 = load(w + LANES);
        UNROLL
        for (int r = 0; r < rows; r++) {
            const vec value = splat(x[r * x_stride + k]);
            total[r][0] = fma_(value, w0, total[r][0]);
            total[r][1] = fma_(value, w1, total[r][1]);
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        store(sums + r * PANEL, total[r][0]);
        store(sums + r * PANEL + LANES, total[r][1]);
    }
}

/* All inputs of one panel. */
SPECIALIZED void int8_tile(const int rows, const int format, const struct input *input, int inputs,
                           const uint8_t *panel, const float *bias, float *out, int64_t out_stride) {
    const int groups = inputs / GROUP;
    vec total[INT8_ROWS][2];
    UNROLL
    for (int r = 0; r < rows; r++) {
        total[r][0] = load(bias);
        total[r][1] = load(bias + LANES);
    }
    for (int g = 0; g < groups; g++, panel += group_bytes(format)) {
        const uint8_t *bytes = panel + 4 * PANEL;
        ivec dot[INT8_ROWS][2] = {0};
        UNROLL
        for (int step = 0; step < STEPS; step++) {
            const uint8_t *line = bytes + 4 * PANEL * (format == Q4 ? step % (STEPS / 2) : step);
            ivec w0 = load_int(line), w1 = load_int(line + 4 * LANES);
            if (format == Q4) {
                const int shift = step < STEPS / 2 ? 0 : 4;
                w0 = (w0 >> shift) & 0x0f0f0f0f;
                w1 = (w1 >> shift) & 0x0f0f0f0f;
            }
            UNROLL
            for (int r = 0; r < rows; r++) {
                const ivec a = splat_bytes(input->q + (int64_t)r * inputs + g * GROUP + 4 * step);
                dot[r][0] = dot4(dot[r][0], w0, a);
                dot[r][1] = dot4(dot[r][1], w1, a);
            }
        }
        UNROLL
        for (int v = 0; v < 2; v++) {
            const vec d = load_half((const uint16_t *)panel + v * LANES);
            const vec m = load_half((const uint16_t *)panel + PANEL + v * LANES);
            UNROLL
            for (int r = 0; r < rows; r++) {
                const vec scale = splat(input->scale[r * groups + g]), sum = splat(input->sum[r * groups + g]);
                total[r][v] = fma_(scale * d, to_float(dot[r][v]), total[r][v]);
                total[r][v] = fma_(sum, m, total[r][v]);
            }
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        store(out + r * out_stride, total[r][0]);
        store(out + r * out_stride + LANES, total[r][1]);
    }
}

static void float_rows(int rows, const float *x, int64_t x_stride, const float *w, int depth, float *sums) {
    switch (rows) {
#define TILE(n) case n: float_tile(n, x, x_stride, w, depth, sums); break;
        TILE(1) TILE(2) TILE(3) TILE(4)
#if FLOAT_ROWS > 4
        TILE(5) TILE(6)
#endif
#if FLOAT_ROWS > 6
        TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#endif
#undef TILE
    }
}

static void int8_rows(int rows, int format, const struct input *input, int inputs, const uint8_t *panel,
                      const float *bias, float *out, int64_t stride) {
#define TILE(n) \
    case n: \
        if (format == Q4) int8_tile(n, Q4, input, inputs, panel, bias, out, stride); \
        else int8_tile(n, Q8, input, inputs, panel, bias, out, stride); \
        break;
    switch (rows) {
        TILE(1) TILE(2)
#if INT8_ROWS > 2
        TILE(3)
#endif
#if INT8_ROWS > 3
        TILE(4) TILE(5) TILE(6)
#endif
    }
#undef TILE
}

static struct input input_from(const struct input *input, int row, int inputs) {
    const int64_t groups = inputs / GROUP;
    return (struct input){
        .x = input->x + (int64_t)row * inputs,
        .q = input->q + (int64_t)row * inputs,
        .scale = input->scale + row * groups,
        .sum = input->sum + row * groups,
    };
}

/* The sums are collected in one place and copied at the end: `out` has a stride that may map all of its rows onto few
 * lines of the cache. */
static void float_panel(const struct matmul *job, int row, int end, const uint8_t *panel, const float *bias,
                        float *out) {
    const struct weight *weight = job->weight;
    float unpacked[DEPTH * PANEL], sums[ROW_BLOCK * PANEL];
    for (int r = 0; r < end - row; r++) memcpy(sums + r * PANEL, bias, sizeof(float) * PANEL);
    for (int first = 0; first < weight->inputs; first += DEPTH) {
        const int depth = weight->inputs - first < DEPTH ? weight->inputs - first : DEPTH;
        const float *w = unpack(weight, panel, first, depth, unpacked);
        for (int r = row; r < end; r += FLOAT_ROWS)
            float_rows(end - r < FLOAT_ROWS ? end - r : FLOAT_ROWS, job->input.x + (int64_t)r * weight->inputs + first,
                       weight->inputs, w, depth, sums + (r - row) * PANEL);
    }
    for (int r = row; r < end; r++)
        memcpy(out + r * job->out_stride, sums + (r - row) * PANEL, sizeof(float) * PANEL);
}

static void int8_panel(const struct matmul *job, int row, int end, const uint8_t *panel, const float *bias,
                       float *out) {
    const struct weight *weight = job->weight;
    for (int r = row; r < end; r += INT8_ROWS) {
        const struct input input = input_from(&job->input, r, weight->inputs);
        int8_rows(end - r < INT8_ROWS ? end - r : INT8_ROWS, weight->format, &input, weight->inputs, panel, bias,
                  out + r * job->out_stride, job->out_stride);
    }
}

static void matmul_chunk(const void *argument, int chunk, int thread) {
    (void)thread;
    static const float no_bias[PANEL];
    const struct matmul *job = argument;
    const struct weight *weight = job->weight;
    const int row = chunk / job->panel_chunks * ROW_BLOCK;
    const int end = job->num_rows < row + ROW_BLOCK ? job->num_rows : row + ROW_BLOCK;
    const int first = chunk % job->panel_chunks * job->panels_per_chunk;
    for (int n = first; n < first + job->panels_per_chunk && n < weight->outputs / PANEL; n++) {
        const uint8_t *panel = weight->data + n * weight_panel_bytes(weight->format, weight->inputs);
        const float *bias = weight->bias ? weight->bias + n * PANEL : no_bias;
        if (job->int8)
            int8_panel(job, row, end, panel, bias, job->out + n * PANEL);
        else
            float_panel(job, row, end, panel, bias, job->out + n * PANEL);
    }
}

/* out[rows][weight->outputs] = W x + b. */
static void matmul(struct pool *pool, const struct weight *weight, int int8, const struct input *input, int num_rows,
                   float *out) {
    enum { CHUNKS_PER_THREAD = 4 }; /* few, so that a chunk is one long stream of weights; enough to even out */
    const int panels = weight->outputs / PANEL;
    struct matmul job = {weight, *input, int8, num_rows, out, weight->outputs, 1, 0};
    if (panels > CHUNKS_PER_THREAD * pool->num_threads)
        job.panels_per_chunk = panels / (CHUNKS_PER_THREAD * pool->num_threads);
    job.panel_chunks = (panels + job.panels_per_chunk - 1) / job.panels_per_chunk;
    parallel(pool, (num_rows + ROW_BLOCK - 1) / ROW_BLOCK * job.panel_chunks, matmul_chunk, &job);
}

struct quantization {
    const float *x;
    int8_t *q;
    float *scale, *sum;
    int width;
};

static void quantize_chunk(const void *argument, int row, int thread) {
    (void)thread;
    const struct quantization *job = argument;
    const int64_t groups = job->width / GROUP;
    quantize_row(job->x + (int64_t)row * job->width, job->width, job->q + (int64_t)row * job->width,
                 job->scale + row * groups, job->sum + row * groups);
}

int64_t linear_workspace(const struct weight *weight, int64_t rows) {
    return rows * weight->inputs + 2 * 4 * rows * (weight->inputs / GROUP);
}

/* out[rows][padded outputs] = W x + b, from float activations [rows][inputs] in both modes. `memory`:
 * linear_workspace bytes. */
void linear(struct pool *pool, const struct weight *weight, int64_t int8, const float *x, int64_t rows, char *memory,
            float *out) {
    const int64_t groups = rows * (weight->inputs / GROUP);
    float *scale = (float *)memory, *sum = scale + groups;
    const struct quantization job = {x, (int8_t *)(sum + groups), scale, sum, weight->inputs};
    if (int8) parallel(pool, (int)rows, quantize_chunk, &job);
    const struct input input = {x, job.q, scale, sum};
    matmul(pool, weight, (int)int8, &input, (int)rows, out);
}

#endif

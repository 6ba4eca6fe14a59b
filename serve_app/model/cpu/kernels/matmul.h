/* Products of activations with packed weights: out[row] = W x[row] + b, for many rows at once.
 *
 * Two kinds. `float`: the weights as floats, float arithmetic. `fixed`: activations as fixed-point numbers with one
 * scale for each group of 32 (see quantize_row); per group, with x ~ s a and w = d q + m,
 *     sum w x  ~  s d (sum q a)  +  m (s sum a),
 * where sum q a is exact in integers: 4 products of bytes per lane and instruction. In int8 mode a has one byte. In
 * exact mode it has three, of which 23 bits are used: as many as a float has beside its exponent, so that a sum is as
 * near to the truth as in float arithmetic; and three byte products cost less than unpacking and multiplying floats.
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
#define FIXED_ROWS 6
#elif defined(BUILD_AVX2)
#define FLOAT_ROWS 6
#if defined(BUILD_NARROW_DOTS)
#define FIXED_ROWS 4
#else
#define FIXED_ROWS 6
#endif
#else
#define FLOAT_ROWS 4
#define FIXED_ROWS 2
#endif

/* Bytes of an activation in exact mode, for weights of 8 and 4 bits; 0: floats are faster on such a machine. */
#if defined(BUILD_AVX512)
#define EXACT_BYTES 3
#else
#define EXACT_BYTES 0
#endif

enum {
    MOST_BYTES = EXACT_BYTES ? EXACT_BYTES : 1,
    DEPTH = 2 * GROUP, /* inputs whose weights are unpacked to floats at a time; they stay in the first cache */
    ROW_BLOCK = 96,    /* rows of a chunk; their activations stay in the second cache. A multiple of both tiles */
};

/* Activations of some rows. For `float` products only `x`, for `fixed` products the rest. */
struct input {
    const float *x;       /* [rows][inputs] */
    const int8_t *q;      /* [rows][inputs / GROUP][bytes][GROUP], the highest byte of the numbers first */
    const float *scale;   /* [rows][inputs / GROUP]: s */
    const float *sum;     /* [rows][inputs / GROUP]: s times the sum of the group's numbers */
    const int32_t *centre; /* [rows][inputs / GROUP][2]: 128 times the sums of the first two bytes and of the third */
};

struct matmul {
    const struct weight *weight;
    struct input input;
    int bytes; /* of an activation; 0: a float */
    int num_rows;
    float *out; /* [rows][out_stride]; overwritten */
    int64_t out_stride;
    int panels_per_chunk, panel_chunks;
};

/* How activations meet this weight: as numbers of so many bytes, or 0 for floats. */
static int activation_bytes(const struct weight *weight, int int8) {
    if (!weight->fixed) return 0;
    return int8 ? 1 : EXACT_BYTES;
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

static void quantize_row(const float *x, int count, int bytes, int8_t *q, float *scale, float *sum, int32_t *centre) {
    if (bytes == 1)
        quantize_groups(1, x, count, q, scale, sum, centre);
    else
        quantize_groups(3, x, count, q, scale, sum, centre);
}

/* Of half a panel's outputs, a group's d and m: its weights are d q + m. */
SPECIALIZED vec group_step(const int format, const uint8_t *panel, int64_t g, const int half) {
    const uint8_t *group = panel + group_at(format, g);
    if (format != Q4K) return load_half((const uint16_t *)group + half);
    const uint16_t *block = (const uint16_t *)(panel + group_at(Q4K, g / SUPER * SUPER) - 4 * PANEL);
    return load_half(block + half) * load_bytes(group + half);
}

SPECIALIZED vec group_minimum(const int format, const uint8_t *panel, int64_t g, const int half) {
    const uint8_t *group = panel + group_at(format, g);
    if (format != Q4K) return load_half((const uint16_t *)group + PANEL + half);
    const uint16_t *block = (const uint16_t *)(panel + group_at(Q4K, g / SUPER * SUPER) - 4 * PANEL);
    return -(load_half(block + PANEL + half) * load_bytes(group + PANEL + half));
}

/* DEPTH or fewer inputs of a panel as floats [depth][PANEL], from input `first` on. */
static const float *unpack(const struct panel *panel, int first, int depth, float *to) {
    const int format = (int)panel->format;
    if (format == F32) return (const float *)panel->data + (int64_t)first * PANEL;
    if (format == BF16) {
        const uint16_t *from = (const uint16_t *)panel->data + (int64_t)first * PANEL;
        for (int i = 0; i < depth * PANEL; i++) {
            const uint32_t bits = (uint32_t)from[i] << 16;
            memcpy(to + i, &bits, 4);
        }
        return to;
    }
    const int four = format != Q8;
    for (int g = first / GROUP; g < (first + depth) / GROUP; g++) {
        const uint8_t *values = panel->data + group_at(format, g) + scale_bytes(format);
        for (int half = 0; half < PANEL; half += LANES) {
            const vec d = group_step(format, panel->data, g, half), m = group_minimum(format, panel->data, g, half);
            for (int step = 0; step < STEPS; step++) {
                const int line = four ? step % (STEPS / 2) : step, shift = four && step >= STEPS / 2 ? 4 : 0;
                const ivec bytes = load_int(values + 4 * (line * PANEL + half)) >> shift;
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

/* The weights of one step of a group, for one vector of outputs: four bytes a lane. */
SPECIALIZED ivec step_weights(const int format, const uint8_t *weights, const int step, const int half) {
    const uint8_t *line = weights + 4 * (PANEL * (format == Q8 ? step : step % (STEPS / 2)) + half);
    return format == Q8 ? load_int(line) : (load_int(line) >> 4 * (step / (STEPS / 2))) & 0x0f0f0f0f;
}

#if defined(BUILD_NARROW_DOTS)
/* dot_group for weights of 4 bits, whose sums over a group fit 16 bits; activations have one byte. */
SPECIALIZED void narrow_dot_group(const int rows, const int format, const uint8_t *weights, const int8_t *q,
                                  int64_t q_stride, ivec dot[][2]) {
    UNROLL
    for (int r = 0; r < rows; r++) dot[r][0] = dot[r][1] = (ivec){0};
    UNROLL
    for (int step = 0; step < STEPS; step++) {
        const ivec w0 = step_weights(format, weights, step, 0), w1 = step_weights(format, weights, step, LANES);
        UNROLL
        for (int r = 0; r < rows; r++) {
            const ivec a = splat_bytes(q + r * q_stride + 4 * step);
            dot[r][0] = narrow_dot(dot[r][0], w0, a);
            dot[r][1] = narrow_dot(dot[r][1], w1, a);
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
        dot[r][0] = add_halves(dot[r][0]);
        dot[r][1] = add_halves(dot[r][1]);
    }
}
#endif

/* dot[row] = (sum over the group of q a), for the bytes from `first` to `end` of the activations. */
SPECIALIZED void dot_group(const int rows, const int format, const int first, const int end, const uint8_t *weights,
                           const int8_t *q, int64_t q_stride, ivec dot[][2]) {
#if defined(BUILD_NARROW_DOTS)
    if (format != Q8) {
        narrow_dot_group(rows, format, weights, q, q_stride, dot);
        return;
    }
#endif
    for (int byte = first; byte < end; byte++) {
        UNROLL
        for (int r = 0; r < rows; r++) {
            dot[r][0] = byte == first ? (ivec){0} : dot[r][0] << 8;
            dot[r][1] = byte == first ? (ivec){0} : dot[r][1] << 8;
        }
        UNROLL
        for (int step = 0; step < STEPS; step++) {
            const ivec w0 = step_weights(format, weights, step, 0), w1 = step_weights(format, weights, step, LANES);
            UNROLL
            for (int r = 0; r < rows; r++) {
                const ivec a = splat_bytes(q + r * q_stride + byte * GROUP + 4 * step);
                dot[r][0] = dot4(dot[r][0], w0, a);
                dot[r][1] = dot4(dot[r][1], w1, a);
            }
        }
    }
}

/* Into the second cache, as long as there is work to do meanwhile: with one row, all is waiting for memory anyway. */
SPECIALIZED void fetch_group(const uint8_t *group, const int format) {
    UNROLL
    for (int line = 0; line < group_at(format, 1) - group_at(format, 0); line += 64)
        __builtin_prefetch(group + line, 0, 2);
}

/* All inputs of one panel. The next panel is fetched meanwhile, group by group. */
SPECIALIZED void fixed_tile(const int rows, const int format, const int bytes, const struct input *input, int inputs,
                            const uint8_t *panel, const float *bias, float *out, int64_t out_stride) {
    /* Sums of three bytes times 8 bits need more than 32: the last byte of the activations apart. */
    const int middle = bytes == 3 && format == Q8 ? 2 : bytes;
    const int groups = inputs / GROUP;
    /* Eight bits stand around 128: taken off in integers, where the two large sums would leave their roundings. */
    const int centred = bytes == 3 && format == Q8;
    vec total[FIXED_ROWS][2];
    UNROLL
    for (int r = 0; r < rows; r++) {
        total[r][0] = load(bias);
        total[r][1] = load(bias + LANES);
    }
    for (int g = 0; g < groups; g++) {
        const uint8_t *group = panel + group_at(format, g);
        const int8_t *q = input->q + (int64_t)g * bytes * GROUP;
        const float *scale = input->scale + g, *sum = input->sum + g;
        ivec dot[FIXED_ROWS][2];
        if (rows > 1) fetch_group(group + weight_panel_bytes(format, inputs), format);
        UNROLL
        for (int first = 0, end = middle; first < bytes; first = end, end = bytes) {
            dot_group(rows, format, first, end, group + scale_bytes(format), q, (int64_t)inputs * bytes, dot);
            UNROLL
            for (int v = 0; v < 2; v++) {
                const vec d = group_step(format, panel, g, v * LANES) * splat(end < bytes ? 256.0f : 1.0f);
                UNROLL
                for (int r = 0; r < rows; r++) {
                    if (centred) dot[r][v] = dot[r][v] - input->centre[2 * (r * groups + g) + (end == bytes)];
                    total[r][v] = fma_(splat(scale[r * groups]) * d, to_float(dot[r][v]), total[r][v]);
                }
            }
        }
        UNROLL
        for (int v = 0; v < 2; v++) {
            vec m = group_minimum(format, panel, g, v * LANES);
            if (centred) m = m + splat(128.0f) * group_step(format, panel, g, v * LANES);
            UNROLL
            for (int r = 0; r < rows; r++) total[r][v] = fma_(splat(sum[r * groups]), m, total[r][v]);
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

static void fixed_rows(int rows, int format, int bytes, const struct input *input, int inputs, const uint8_t *panel,
                       const float *bias, float *out, int64_t stride) {
#define BYTES(n, b) \
        if (format == Q4) fixed_tile(n, Q4, b, input, inputs, panel, bias, out, stride); \
        else if (format == Q4K) fixed_tile(n, Q4K, b, input, inputs, panel, bias, out, stride); \
        else fixed_tile(n, Q8, b, input, inputs, panel, bias, out, stride);
#define TILE(n) \
    case n: \
        if (EXACT_BYTES && bytes == EXACT_BYTES) { BYTES(n, EXACT_BYTES) } \
        else { BYTES(n, 1) } \
        break;
    switch (rows) {
        TILE(1) TILE(2)
#if FIXED_ROWS > 2
        TILE(3)
#endif
#if FIXED_ROWS > 3
        TILE(4)
#endif
#if FIXED_ROWS > 4
        TILE(5) TILE(6)
#endif
    }
#undef TILE
#undef BYTES
}

static struct input input_from(const struct input *input, int row, int inputs, int bytes) {
    const int64_t groups = inputs / GROUP;
    return (struct input){
        .q = input->q + (int64_t)row * inputs * bytes,
        .scale = input->scale + row * groups,
        .sum = input->sum + row * groups,
        .centre = input->centre + 2 * row * groups,
    };
}

/* The sums are collected in one place and copied at the end: `out` has a stride that may map all of its rows onto few
 * lines of the cache. */
static void float_panel(const struct matmul *job, int row, int end, const struct panel *panel, const float *bias,
                        float *out) {
    const struct weight *weight = job->weight;
    float unpacked[DEPTH * PANEL], sums[ROW_BLOCK * PANEL];
    for (int r = 0; r < end - row; r++) memcpy(sums + r * PANEL, bias, sizeof(float) * PANEL);
    for (int first = 0; first < weight->inputs; first += DEPTH) {
        const int depth = weight->inputs - first < DEPTH ? weight->inputs - first : DEPTH;
        const float *w = unpack(panel, first, depth, unpacked);
        for (int r = row; r < end; r += FLOAT_ROWS)
            float_rows(end - r < FLOAT_ROWS ? end - r : FLOAT_ROWS, job->input.x + (int64_t)r * weight->inputs + first,
                       weight->inputs, w, depth, sums + (r - row) * PANEL);
    }
    for (int r = row; r < end; r++)
        memcpy(out + r * job->out_stride, sums + (r - row) * PANEL, sizeof(float) * PANEL);
}

static void fixed_panel(const struct matmul *job, int row, int end, const struct panel *panel, const float *bias,
                        float *out) {
    const struct weight *weight = job->weight;
    /* As few tiles as possible, and all about as high: 8 rows are two tiles of 4, not one of 6 and one of 2. */
    const int tiles = (end - row + FIXED_ROWS - 1) / FIXED_ROWS;
    for (int tile = 0, r = row, next; tile < tiles; tile++, r = next) {
        next = row + (end - row) * (tile + 1) / tiles;
        const struct input input = input_from(&job->input, r, weight->inputs, job->bytes);
        fixed_rows(next - r, (int)panel->format, job->bytes, &input, weight->inputs, panel->data, bias,
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
        const struct panel *panel = weight->panels + n;
        const float *bias = weight->bias ? weight->bias + n * PANEL : no_bias;
        if (job->bytes)
            fixed_panel(job, row, end, panel, bias, job->out + n * PANEL);
        else
            float_panel(job, row, end, panel, bias, job->out + n * PANEL);
    }
}

/* out[rows][weight->outputs] = W x + b. */
static void matmul(struct pool *pool, const struct weight *weight, int int8, const struct input *input, int num_rows,
                   float *out) {
    /* Few chunks, so that each is one long stream of weights, but enough to even out, and none that takes long. */
    enum { CHUNKS_PER_THREAD = 4, MOST_PANELS = 32 };
    const int panels = weight->outputs / PANEL;
    struct matmul job = {weight, *input, activation_bytes(weight, int8), num_rows, out, weight->outputs, 1, 0};
    if (panels > CHUNKS_PER_THREAD * pool->num_threads)
        job.panels_per_chunk = panels / (CHUNKS_PER_THREAD * pool->num_threads);
    if (job.panels_per_chunk > MOST_PANELS) job.panels_per_chunk = MOST_PANELS;
    job.panel_chunks = (panels + job.panels_per_chunk - 1) / job.panels_per_chunk;
    parallel(pool, (num_rows + ROW_BLOCK - 1) / ROW_BLOCK * job.panel_chunks, matmul_chunk, &job);
}

struct quantization {
    const float *x;
    int8_t *q;
    float *scale, *sum;
    int32_t *centre;
    int width, bytes;
};

static void quantize_chunk(const void *argument, int row, int thread) {
    (void)thread;
    const struct quantization *job = argument;
    const int64_t groups = job->width / GROUP, first = (int64_t)row * job->width;
    quantize_row(job->x + first, job->width, job->bytes, job->q + first * job->bytes, job->scale + row * groups,
                 job->sum + row * groups, job->centre + 2 * row * groups);
}

int64_t linear_workspace(const struct weight *weight, int64_t rows) {
    return MOST_BYTES * rows * weight->inputs + 4 * 4 * rows * (weight->inputs / GROUP);
}

/* out[rows][padded outputs] = W x + b, from float activations [rows][inputs] in both modes. `memory`:
 * linear_workspace bytes. */
void linear(struct pool *pool, const struct weight *weight, int64_t int8, const float *x, int64_t rows, char *memory,
            float *out) {
    const int64_t groups = rows * (weight->inputs / GROUP);
    const int bytes = activation_bytes(weight, (int)int8);
    float *scale = (float *)memory, *sum = scale + groups;
    int32_t *centre = (int32_t *)(sum + groups);
    const struct quantization job = {x, (int8_t *)(centre + 2 * groups), scale, sum, centre, weight->inputs, bytes};
    if (bytes) parallel(pool, (int)rows, quantize_chunk, &job);
    const struct input input = {x, job.q, scale, sum, centre};
    matmul(pool, weight, (int)int8, &input, (int)rows, out);
}

#endif

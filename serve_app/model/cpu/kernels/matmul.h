/* Products of activations with packed weights: out[row] = W x[row] + b, for many rows at once.
 *
 * There are three kinds. `float`: the weights as floats, float arithmetic. `bfloat16`: both sides
 * in bfloat16, sums in float. `fixed`: activations as fixed-point numbers with one scale for each
 * group of 32 (see quantize_groups); per group, with x ~ s a and w = d q + m,
 *     sum w x  ~  s d (sum q a)  +  m (s sum a),
 * where sum q a is exact in integers: 4 products of bytes per lane and instruction. (If m is -8 d,
 * in Q4S, or -32 d, for the two d of a group of Q6K, it is subtracted in integers.) In int8 mode a
 * has one byte. In exact mode it has three, of which 23 bits are used: as many as a float has
 * besides its exponent, so that a sum is as accurate as in float arithmetic. Three byte products
 * cost less than unpacking and multiplying floats.
 * With one byte, the row's largest x stays a float and is 0 among the a; its products are added
 * last (see add_outliers). With AMX, many rows and weights of 4 bits, the same numbers have four
 * digits instead (see digit_tile), and the same sums.
 *
 * Work is divided into chunks of (rows, panels). In every tile, an output's sum runs over the
 * inputs (or groups) in order, in one accumulator, and the outlier comes last. So a row's result
 * has the same bits alone and in any batch. */
#ifndef SERVE_APP_MATMUL_H
#define SERVE_APP_MATMUL_H

#include "amx_fixed_tile.h"
#include "bf16_tile.h"
#include "float_tile.h"
#include "threads.h"

/* Rows of a chunk; their activations stay in the L2 cache. A multiple of all tiles. */
#if defined(BUILD_AMX)
enum { ROW_BLOCK = 256 };
#else
enum { ROW_BLOCK = 96 };
#endif

struct matmul {
    const struct weight *weight;
    struct input input;
    enum form form; /* of the input */
    int num_rows;
    float *out; /* [rows][out_stride]; overwritten */
    int64_t out_stride;
    int panels_per_chunk, panel_chunks;
};

/* Sums are collected in `sums` and copied at the end: the stride of `out` may map all of its rows
 * to few cache lines. */
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
        memcpy(out + (r - row) * job->out_stride, sums + (r - row) * PANEL, sizeof(float) * PANEL);
}

/* float_panel with activations in bfloat16. */
static void bf16_panel(const struct matmul *job, int row, int end, const struct panel *panel, const float *bias,
                       float *out) {
#if defined(BUILD_BF16)
    const int inputs = job->weight->inputs;
    float sums[ROW_BLOCK * PANEL] __attribute__((aligned(64)));
    bf16_product((int)panel->format, end - row, (const uint16_t *)job->input.rounded + (int64_t)row * inputs, inputs,
                 panel->data, bias, sums, out, job->out_stride);
#else
    (void)job, (void)row, (void)end, (void)panel, (void)bias, (void)out; /* never called in this build */
#endif
}

static void digits_panel(const struct matmul *job, int row, int end, const struct panel *panel, const float *bias,
                         float *out) {
#if defined(BUILD_AMX)
    const int inputs = job->weight->inputs;
    float sums[ROW_BLOCK * PANEL] __attribute__((aligned(64)));
    fixed_tile_product((int)panel->format, end - row, tile_of(job->input.rounded, row, inputs), inputs, panel->data,
                       bias, sums, out, job->out_stride);
#else
    (void)job, (void)row, (void)end, (void)panel, (void)bias, (void)out; /* never called in this build */
#endif
}

static void fixed_panel(const struct matmul *job, int row, int end, const struct panel *panel, const float *bias,
                        float *out) {
    const struct weight *weight = job->weight;
    const int64_t row_bytes = rounded_bytes(weight->inputs, job->form);
    /* All tiles have about the same height: 8 rows are two tiles of 4, not of 6 and 2. */
    const int tiles = end - row <= FIXED_ROWS ? 1 : (end - row + MANY_ROWS - 1) / MANY_ROWS;
    for (int tile = 0, r = row, next; tile < tiles; tile++, r = next) {
        next = row + (end - row) * (tile + 1) / tiles;
        const uint8_t *x = job->input.rounded + r * row_bytes;
        float *to = out + (r - row) * job->out_stride;
        fixed_rows(next - r, (int)panel->format, (int)job->form, x, weight->inputs, panel->data, bias, to,
                   job->out_stride);
        if (job->form == AS_BYTES)
            add_outliers(next - r, (int)panel->format, x, weight->inputs, panel->data, to, job->out_stride);
    }
}

/* Compute out[rows from `row` to `end` - 1][out_stride]: the outputs of panel `n`. */
static void one_panel(const struct matmul *job, int row, int end, int n, float *out) {
    static const float no_bias[PANEL];
    const struct panel *panel = job->weight->panels + n;
    const float *bias = job->weight->bias ? job->weight->bias + n * PANEL : no_bias;
    switch (job->form) {
        case AS_FLOATS: float_panel(job, row, end, panel, bias, out); break;
        case AS_BYTES: case AS_THREE_BYTES: fixed_panel(job, row, end, panel, bias, out); break;
        case AS_DIGITS: digits_panel(job, row, end, panel, bias, out); break;
        case AS_BF16: bf16_panel(job, row, end, panel, bias, out);
    }
}

/* A chunk: some rows and some panels. */
struct part {
    int row, end, first, last;
};

static struct part part_of(const struct matmul *job, int chunk) {
    const int row = chunk / job->panel_chunks * ROW_BLOCK, panels = job->weight->outputs / PANEL;
    const int first = chunk % job->panel_chunks * job->panels_per_chunk, last = first + job->panels_per_chunk;
    return (struct part){row, job->num_rows < row + ROW_BLOCK ? job->num_rows : row + ROW_BLOCK,
                         first, last < panels ? last : panels};
}

static void matmul_chunk(const void *argument, int chunk, int thread) {
    (void)thread;
    const struct matmul *job = argument;
    const struct part part = part_of(job, chunk);
    float *out = job->out + part.row * job->out_stride;
    begin_tiles();
    for (int n = part.first; n < part.last; n++) one_panel(job, part.row, part.end, n, out + n * PANEL);
    end_tiles();
}

/* Prepare a product, and return its number of chunks in `num_chunks`. */
static struct matmul plan_product(const struct pool *pool, const struct weight *weight, int arithmetic,
                                  const struct input *input, int num_rows, int *num_chunks) {
    /* Few chunks, so that each is one long stream of weights, but enough to balance the threads,
     * and none too long. */
    enum { CHUNKS_PER_THREAD = 4, MOST_PANELS = 32 };
    const int panels = weight->outputs / PANEL;
    struct matmul job = {weight, *input, form_for(weight, arithmetic, num_rows), num_rows, NULL, 0, 1, 0};
    if (panels > CHUNKS_PER_THREAD * pool->num_threads)
        job.panels_per_chunk = panels / (CHUNKS_PER_THREAD * pool->num_threads);
    if (job.panels_per_chunk > MOST_PANELS) job.panels_per_chunk = MOST_PANELS;
    job.panel_chunks = (panels + job.panels_per_chunk - 1) / job.panels_per_chunk;
    *num_chunks = (num_rows + ROW_BLOCK - 1) / ROW_BLOCK * job.panel_chunks;
    return job;
}

/* out[rows][weight->outputs] = W x + b. */
static void matmul(struct pool *pool, const struct weight *weight, int arithmetic, const struct input *input,
                   int num_rows, float *out) {
    int num_chunks;
    struct matmul job = plan_product(pool, weight, arithmetic, input, num_rows, &num_chunks);
    job.out = out;
    job.out_stride = weight->outputs;
    parallel(pool, num_chunks, matmul_chunk, &job);
}

struct rounding {
    const float *x;
    uint8_t *to;
    int inputs, rows;
    enum form form;
};

static void round_chunk(const void *argument, int row, int thread) {
    (void)thread;
    const struct rounding *job = argument;
    round_activations(job->x + (int64_t)row * job->inputs, job->inputs, job->form, row, job->rows, job->to);
}

static struct input round_rows(struct pool *pool, const struct weight *weight, int64_t arithmetic, const float *x,
                               int64_t rows, char *memory) {
    const enum form form = form_for(weight, (int)arithmetic, (int)rows);
    const struct rounding job = {x, (uint8_t *)memory, weight->inputs, (int)rows, form};
    if (form != AS_FLOATS) parallel_rows(pool, (int)rows, round_chunk, &job);
    return (struct input){x, job.to};
}

int64_t linear_workspace(const struct weight *weight, int64_t rows) {
    return (rows + ROWS_BEYOND) * most_rounded_bytes(weight->inputs);
}

/* out[rows][padded outputs] = W x + b, from float activations [rows][inputs] in every mode.
 * `memory`: linear_workspace bytes. */
void linear(struct pool *pool, const struct weight *weight, int64_t arithmetic, const float *x, int64_t rows,
            char *memory, float *out) {
    const struct input input = round_rows(pool, weight, arithmetic, x, rows, memory);
    matmul(pool, weight, (int)arithmetic, &input, (int)rows, out);
}

struct largest {
    struct matmul product;
    int64_t count;          /* number of outputs; outputs after it pad the last panel */
    _Atomic uint64_t *keys; /* [rows]; see key_of */
};

/* The larger of two outputs has the larger key. Of equal outputs, the first has the larger key. */
static uint64_t key_of(float value, int64_t index) {
    uint32_t bits;
    value += 0.0f; /* turns -0 into 0 */
    memcpy(&bits, &value, sizeof bits);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (0xffffffffu - (uint32_t)index);
}

/* Key of a row with an infinity or a NaN. */
static const uint64_t NOT_FINITE = UINT64_MAX;

/* A row's largest output so far in a chunk. */
struct best {
    float value;
    uint64_t key;
};

/* Update `best` from one panel's first `left` outputs, which begin at output `first`. */
static void take_larger(const float *row, int64_t first, int64_t left, struct best *best) {
    for (int i = 0; i < PANEL && i < left; i++) {
        if (!(row[i] > best->value)) continue;
        best->value = row[i];
        if (best->key != NOT_FINITE) best->key = key_of(row[i], first + i);
    }
}

/* Zero if all lanes are finite, else NaN. */
static inline vec oddness(const float *row) {
    const vec a = load(row), b = load(row + LANES);
    return (a - a) + (b - b);
}

static void largest_chunk(const void *argument, int chunk, int thread) {
    (void)thread;
    const struct largest *job = argument;
    const struct part part = part_of(&job->product, chunk);
    const int rows = part.end - part.row;
    float out[ROW_BLOCK * PANEL] __attribute__((aligned(64)));
    struct best best[ROW_BLOCK];
    for (int r = 0; r < rows; r++) best[r] = (struct best){-INFINITY, 0};
    begin_tiles();
    for (int n = part.first; n < part.last; n++) {
        const int64_t first = (int64_t)n * PANEL;
        vec odd = splat(0.0f);
        one_panel(&job->product, part.row, part.end, n, out);
        for (int r = 0; r < rows; r++) {
            const float *row = out + r * PANEL;
            odd = odd + oddness(row);
            /* Few panels contain a new largest output. */
            if (any_above(maximum(load(row), load(row + LANES)), best[r].value))
                take_larger(row, first, job->count - first, best + r);
        }
        if (reduce_add(odd) == 0) continue;
        for (int r = 0; r < rows; r++)
            if (reduce_add(oddness(out + r * PANEL)) != 0) best[r].key = NOT_FINITE;
    }
    end_tiles();
    for (int r = 0; r < rows; r++) {
        uint64_t known = atomic_load(&job->keys[part.row + r]);
        while (known < best[r].key &&
               !atomic_compare_exchange_weak(&job->keys[part.row + r], &known, best[r].key))
            ;
    }
}

/* Find the largest of each row's `count` outputs: the first of equal ones, -1 if any is not
 * finite. Like `linear`, without storing the outputs. */
void likeliest(struct pool *pool, const struct weight *weight, int64_t arithmetic, const float *x, int64_t rows,
               int64_t count, char *memory, int64_t *ids) {
    const struct input input = round_rows(pool, weight, arithmetic, x, rows, memory);
    int num_chunks;
    struct largest job = {plan_product(pool, weight, (int)arithmetic, &input, (int)rows, &num_chunks), count,
                          (_Atomic uint64_t *)ids};
    job.product.out_stride = PANEL;
    memset(ids, 0, sizeof *ids * (size_t)rows);
    parallel(pool, num_chunks, largest_chunk, &job);
    for (int64_t r = 0; r < rows; r++) {
        const uint64_t key = atomic_load(&job.keys[r]);
        ids[r] = key == NOT_FINITE ? -1 : 0xffffffff - (int64_t)(key & 0xffffffff);
    }
}

#endif

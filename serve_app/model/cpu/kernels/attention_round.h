/* One round of attention: some keys and values of one kv head, for some rows (queries times query
 * heads), in vectors.
 *
 * A round computes scores, then the softmax's running maximum and sum (as in FlashAttention), then
 * the values. attention.h describes the layout of the cache, and why a row has the same bits in
 * every batch. */
#ifndef SERVE_APP_ATTENTION_ROUND_H
#define SERVE_APP_ATTENTION_ROUND_H

#include "amx_tile.h"
#include "vec.h"

/* Size of a tile in both products: ROWS rows times WIDTH vectors. AVX-512 has 32 registers, the
 * others 16. */
#define ROWS 6
#if defined(BUILD_AVX512)
#define WIDTH 4
#else
#define WIDTH 2
#endif

enum {
    PAGE = 16,
    ROUND = 64,       /* keys */
    BYTE_ROUND = 128, /* keys in a byte cache, where a round has more work besides its products */
    PAGES = ROUND / PAGE,
    MOST_PAGES = BYTE_ROUND / PAGE,
    SLACK = 8,      /* weights may grow to e^SLACK before a row's sums are rescaled to a new maximum */
    TASK_ROWS = TILES ? 192 : 96, /* rows of a task, unless a single query has more */
};

enum cache_format { CACHE_FLOAT, CACHE_HALF, CACHE_BF16, CACHE_BYTES };

#if defined(BUILD_BF16)
#define CACHE_NARROW CACHE_BF16
#else
#define CACHE_NARROW CACHE_HALF
#endif

#if defined(BUILD_BYTE_CACHE) && !defined(BUILD_AMX)
#define CACHE_SMALLEST CACHE_BYTES
#else
#define CACHE_SMALLEST CACHE_NARROW /* faster in tiles; the portable build has no products of bytes */
#endif

/* The KV cache format of this build besides floats. */
int64_t narrow_cache(void) { return CACHE_NARROW; }
/* The KV cache format of this build if queries, keys and values may be rounded to bytes. */
int64_t smallest_cache(void) { return CACHE_SMALLEST; }

struct attention {
    int num_heads, num_kv_heads, head_dim;
    int window; /* keys that a query sees, including its own; 0 = all */
    int cache;  /* its format */
    float scale; /* of the scores */
    const float *sinks; /* [num_heads] or NULL: scores of one more key each, whose value is zero */
};

/* Rows of one task in progress, in a thread's scratch memory. */
struct rows {
    float *query;   /* [tiles][head_dim][ROWS], scaled; in bfloat16 [tiles][head_dim / 2][ROWS] of pairs; in AMX's tiles
                       uint16 [tiles][head_dim / 32][TILE_ROWS][32]; in bytes see query_terms */
    float *out;     /* [rows][head_dim]: sum of weights times values so far */
    float *score;   /* [ROWS][keys of a round]: scores, then weights; in bfloat16 the first half of a row, in bytes
                       see online_softmax_bytes. Of AMX's tiles two. */
    float *sum;     /* [rows][LANES]: sum of weights so far, by lane */
    float *values; /* [ROUND / 2][head_dim] of pairs; only for tiles */
    float *running_max; /* [rows]: subtracted from scores; at most SLACK below the largest score so far */
    int32_t *position; /* [rows]: position of the query, which sees no later key */
};

/* The pages of one round, and the pages to prefetch during it. */
struct round {
    const void *keys[MOST_PAGES], *values[MOST_PAGES];
    const void *next_keys[MOST_PAGES], *next_values[MOST_PAGES];
    int fetch; /* whether the prefetch is still to be done */
};

/* Number of keys per round. */
static int round_of(const struct attention *layer) { return layer->cache == CACHE_BYTES ? BYTE_ROUND : ROUND; }

static int task_queries(const struct attention *layer) {
    const int group = layer->num_heads / layer->num_kv_heads;
    return group < TASK_ROWS ? TASK_ROWS / group : 1;
}

/* Whether both products run in AMX's tiles. */
static int in_tiles(const struct attention *layer) {
    return TILES && layer->cache == CACHE_BF16 && layer->head_dim % 32 == 0;
}

/* Round up to rows of whole tiles of any kind. */
static int64_t tiled(int64_t rows) {
    enum { WHOLE = TILES ? ROWS * TILE_ROWS / 2 : ROWS };
    return (rows + WHOLE - 1) / WHOLE * WHOLE;
}

enum { SCORES = TILES ? 2 * TILE_ROWS * ROUND : ROWS * BYTE_ROUND, VALUE_ROWS = TILES ? ROUND / 2 : 0 };

/* Floats of scratch memory per thread, rounded up to whole cache lines. */
static int64_t attention_scratch(const struct attention *layer) {
    const int64_t rows = tiled(task_queries(layer) * (layer->num_heads / layer->num_kv_heads));
    return (rows * (2 * layer->head_dim + LANES + 2) + SCORES + VALUE_ROWS * layer->head_dim + 15) / 16 * 16;
}

static struct rows rows_in(float *scratch, int num_rows, int head_dim) {
    const int64_t whole = tiled(num_rows);
    struct rows rows;
    rows.query = scratch;
    rows.out = rows.query + whole * head_dim;
    rows.score = rows.out + whole * head_dim;
    rows.sum = rows.score + SCORES;
    rows.values = rows.sum + whole * LANES;
    rows.running_max = rows.values + VALUE_ROWS * head_dim;
    rows.position = (int32_t *)(rows.running_max + whole);
    return rows;
}

SPECIALIZED int number_bytes(const int format) {
    return format == CACHE_FLOAT ? 4 : format == CACHE_BYTES ? 1 : 2;
}

/* Bytes of one head's keys, or values, in a block. Byte caches include scales. */
int64_t cache_page_bytes(int64_t head_dim, int64_t format) {
    return PAGE * (head_dim * number_bytes((int)format) + (format == CACHE_BYTES ? 4 : 0));
}

/* Numbers of a row or column that are adjacent in the cache, so that one instruction multiplies
 * them. */
SPECIALIZED int interleaved(const int format) { return format == CACHE_BF16 ? 2 : 1; }

/* Load a vector of numbers, or of pairs. */
SPECIALIZED vec load_cache(const char *cache, const int format) {
    return format == CACHE_HALF ? load_half((const uint16_t *)cache) : load((const float *)cache);
}

/* Prefetch `count` bytes into the L1 cache. Returns the end of these bytes. */
SPECIALIZED const char *fetch_lines(const char *from, const int count) {
    UNROLL
    for (int at = 0; at < count; at += 64) __builtin_prefetch(from + at, 0, 3);
    return from + count;
}

/* sum + factor times the cached numbers. */
SPECIALIZED vec add_product(vec sum, const float *factor, vec cached, const int format) {
    const vec splatted = (vec)splat_bytes(factor);
#if defined(BUILD_BF16)
    if (format == CACHE_BF16) return dot2(sum, (ivec)splatted, (ivec)cached);
#endif
    (void)format;
    return fma_(splatted, cached, sum);
}

/* Compute the scores of `rows` queries with `width` vectors of keys, from key `first` of the
 * round. */
SPECIALIZED void score_keys(const int rows, const int width, const int format, const float *query, int head_dim,
                            const struct round *now, int first, float *score) {
    const int step_bytes = PAGE * interleaved(format) * number_bytes(format);
    const int page_steps = head_dim / interleaved(format) / PAGES;
    const char *keys[WIDTH];
    vec total[ROWS][WIDTH] = {0};
    UNROLL
    for (int v = 0; v < width; v++) {
        const int key = first + v * LANES;
        keys[v] = (const char *)now->keys[key / PAGE] + key % PAGE * interleaved(format) * number_bytes(format);
    }
    int64_t at = 0;
    for (int page = 0; page < PAGES; page++) {
        const char *next = now->next_keys[page];
        for (int step = 0; step < page_steps; step++, at += step_bytes, query += ROWS) {
            vec key[WIDTH];
            UNROLL
            for (int v = 0; v < width; v++) key[v] = pinned(load_cache(keys[v] + at, format));
            if (now->fetch) next = fetch_lines(next, PAGES * step_bytes);
            UNROLL
            for (int r = 0; r < rows; r++)
                UNROLL
                for (int v = 0; v < width; v++) total[r][v] = add_product(total[r][v], query + r, key[v], format);
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int v = 0; v < width; v++) store(score + r * ROUND + first + v * LANES, total[r][v]);
}

/* One step of add_values. `there`: mask of the bits of loaded words that may be used. */
SPECIALIZED void add_value(const int rows, const int width, const int format, const float *weight, const char *values,
                           const int32_t there, vec total[ROWS][WIDTH]) {
    vec value[WIDTH];
    UNROLL
    for (int v = 0; v < width; v++) {
        value[v] = pinned(load_cache(values + v * LANES * interleaved(format) * number_bytes(format), format));
        if (there != -1) value[v] = (vec)((ivec)value[v] & there);
    }
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int v = 0; v < width; v++) total[r][v] = add_product(total[r][v], weight + r * ROUND, value[v], format);
}

/* out += weights times values, for `width` vectors of dimensions from `dim` and the round's first
 * `count` keys. */
SPECIALIZED void add_values(const int rows, const int width, const int format, const float *weight, int head_dim,
                            int dim, const struct round *now, int count, float *out) {
    const int64_t line = (int64_t)head_dim * interleaved(format) * number_bytes(format);
    const int64_t first = (int64_t)dim * interleaved(format) * number_bytes(format);
    const int steps = count / interleaved(format), page_steps = PAGE / interleaved(format);
    vec total[ROWS][WIDTH];
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int v = 0; v < width; v++) total[r][v] = load(out + r * head_dim + dim + v * LANES);
    for (int page = 0; page * page_steps < steps; page++) {
        const char *values = (const char *)now->values[page] + first;
        const int64_t next = (const char *)now->next_values[page] + first - values;
        const int left = steps - page * page_steps;
        const char *end = values + (left < page_steps ? left : page_steps) * line;
        for (; values < end; values += line, weight++) {
            add_value(rows, width, format, weight, values, -1, total);
            if (now->fetch) fetch_lines(values + next, width * LANES * interleaved(format) * number_bytes(format));
        }
    }
    if (count % interleaved(format)) { /* the last pair's second value may not be written yet */
        const char *values = (const char *)now->values[steps / page_steps] + first + steps % page_steps * line;
        add_value(rows, width, format, weight, values, 0xffff, total);
    }
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int v = 0; v < width; v++) store(out + r * head_dim + dim + v * LANES, total[r][v]);
}

/* Store a vector of queries or weights in the form for products. `at` counts numbers. Returns the
 * stored values as floats. */
SPECIALIZED vec store_operand(float *row, int at, vec value, const int format) {
#if defined(BUILD_BF16)
    if (format == CACHE_BF16) return store_bf16((uint16_t *)row + at, value);
#endif
    (void)format;
    store(row + at, value);
    return value;
}

/* The factor of scores besides the layer's scale, and the function that turns them into weights.
 * Weights that are later rounded to 16 bits or fewer use a rough function. */
SPECIALIZED float exponent_unit(const int format) { return format >= CACHE_BF16 ? 1.44269504f : 1.0f; }

SPECIALIZED vec weight_of(vec score, const int format) {
#if defined(BUILD_BYTE_CACHE)
    if (format >= CACHE_BF16) return rough_exponential2(score);
#endif
    (void)format;
    return exponential(score);
}

/* Set a row's scores to -inf for keys that it does not see. `base`: the round's first key. */
static void mask_keys(const struct attention *layer, const struct rows *all, int row, float *score, int count,
                      int base) {
    const int position = all->position[row], window = layer->window;
    const int first_seen = window && position >= window ? position - window + 1 : 0;
    if (base + count <= position + 1 && base >= first_seen) return;
    ivec key;
    for (int i = 0; i < LANES; i++) key[i] = base + i;
    for (int i = 0; i < count; i += LANES, key += LANES) {
        const ivec seen = (key <= position) & (key >= first_seen);
        store(score + i, choose(seen, load(score + i), splat(-INFINITY)));
    }
}

/* Rescale a row's sums to a new maximum. */
SPECIALIZED void rescale_row(const int format, const struct attention *layer, const struct rows *all, int row,
                               float largest) {
    float *sum = all->sum + row * LANES, *out = all->out + row * layer->head_dim;
    const vec correction = weight_of(splat(all->running_max[row] - largest), format);
    for (int i = 0; i < layer->head_dim; i += LANES) store(out + i, load(out + i) * correction);
    store(sum, load(sum) * correction);
    all->running_max[row] = largest;
}

/* Turn one row's first `count` scores of the round that begins at key `base` into weights, and
 * rescale its sums if the maximum grew. */
SPECIALIZED void online_softmax(const int format, const struct attention *layer, const struct rows *all, int row,
                                float *score, int count, int base) {
    mask_keys(layer, all, row, score, count, base);
    float *sum = all->sum + row * LANES;
    vec best = load(score);
    for (int i = LANES; i < count; i += LANES) best = maximum(load(score + i), best);
    const float largest = reduce_max(best);
    if (largest > all->running_max[row] + SLACK) rescale_row(format, layer, all, row, largest);
    const vec maximum_now = splat(all->running_max[row]);
    vec total = load(sum);
    for (int i = 0; i < count; i += LANES) {
        total = total + store_operand(score, i, weight_of(load(score + i) - maximum_now, format), format);
    }
    store(sum, total);
}

/* Compute one round for up to ROWS rows. `count`: keys of the round that the last row sees. */
SPECIALIZED void attend_round(const int rows, const int format, const struct attention *layer, const struct rows *all,
                              int row, int base, int count, const struct round *now) {
    const int dim = layer->head_dim;
    const float *query = all->query + row * dim; /* row is the first of a tile */
    float *out = all->out + row * dim;
    int done = 0;
    for (; done + WIDTH * LANES <= count; done += WIDTH * LANES)
        score_keys(rows, WIDTH, format, query, dim, now, done, all->score);
    for (; done < count; done += WIDTH / 2 * LANES)
        score_keys(rows, WIDTH / 2, format, query, dim, now, done, all->score);
    for (int r = 0; r < rows; r++) online_softmax(format, layer, all, row + r, all->score + r * ROUND, done, base);
    int d = 0;
    for (; d + WIDTH * LANES <= dim; d += WIDTH * LANES)
        add_values(rows, WIDTH, format, all->score, dim, d, now, count, out);
    for (; d < dim; d += LANES) add_values(rows, 1, format, all->score, dim, d, now, count, out);
}

#endif

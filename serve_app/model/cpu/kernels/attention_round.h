/* One round of attention: some keys and values of one kv head, for some rows (queries times query heads), in vectors.
 *
 * Scores, then the softmax's running maximum and sum (as in FlashAttention), then the values. See attention.h for the
 * layout of the cache, and for what makes a row's bits the same in every batch.
 */
#ifndef SERVE_APP_ATTENTION_ROUND_H
#define SERVE_APP_ATTENTION_ROUND_H

#include "amx_tile.h"
#include "vec.h"

/* Tiles of both products: so many rows times so many vectors. AVX-512 has 32 registers, the others 16. */
#define ROWS 6
#if defined(BUILD_AVX512)
#define WIDTH 4
#else
#define WIDTH 2
#endif

enum {
    PAGE = 16,
    ROUND = 64,       /* keys */
    BYTE_ROUND = 128, /* in bytes, where a round costs more beside its products */
    PAGES = ROUND / PAGE,
    MOST_PAGES = BYTE_ROUND / PAGE,
    SLACK = 8,      /* weights may grow to e^SLACK before a row's sums are brought to a new maximum */
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
#define CACHE_SMALLEST CACHE_NARROW /* faster in tiles; the portable build has no such products */
#endif

/* This build computes with floats, this format, */
int64_t narrow_cache(void) { return CACHE_NARROW; }
/* and this one, where queries, keys and values may be rounded to bytes. */
int64_t smallest_cache(void) { return CACHE_SMALLEST; }

struct attention {
    int num_heads, num_kv_heads, head_dim;
    int window; /* keys that a query sees, its own included; 0 = all */
    int cache;  /* its format */
    float scale; /* of the scores */
};

/* Rows of one task on the way, in a thread's scratch memory. */
struct rows {
    float *query;   /* [tiles][head_dim][ROWS], scaled; in bfloat16 [tiles][head_dim / 2][ROWS] of pairs; in AMX's tiles
                       uint16 [tiles][head_dim / 32][TILE_ROWS][32]; in bytes see query_terms */
    float *out;     /* [rows][head_dim]: sum of weights times values so far */
    float *score;   /* [ROWS][keys of a round]: scores, then weights; in bfloat16 the first half of a row, in bytes
                       see online_softmax_bytes. Of AMX's tiles two. */
    float *sum;     /* [rows][LANES]: weights so far, by lane */
    float *values; /* [ROUND / 2][head_dim] of pairs; only for tiles */
    float *running_max; /* [rows]: what is taken off scores, at most SLACK below the largest one so far */
    int32_t *position; /* [rows]: the query's; it sees no later key */
};

/* The pages of one round, and those to be fetched into the cache meanwhile. */
struct round {
    const void *keys[MOST_PAGES], *values[MOST_PAGES];
    const void *next_keys[MOST_PAGES], *next_values[MOST_PAGES];
    int fetch; /* whether this is still to be done */
};

/* Keys of a round. */
static int round_of(const struct attention *layer) { return layer->cache == CACHE_BYTES ? BYTE_ROUND : ROUND; }

static int task_queries(const struct attention *layer) {
    const int group = layer->num_heads / layer->num_kv_heads;
    return group < TASK_ROWS ? TASK_ROWS / group : 1;
}

/* Whether both products run in AMX's tiles. */
static int in_tiles(const struct attention *layer) {
    return TILES && layer->cache == CACHE_BF16 && layer->head_dim % 32 == 0;
}

/* Rows of whole tiles of any kind. */
static int64_t tiled(int64_t rows) {
    enum { WHOLE = TILES ? ROWS * TILE_ROWS / 2 : ROWS };
    return (rows + WHOLE - 1) / WHOLE * WHOLE;
}

enum { SCORES = TILES ? 2 * TILE_ROWS * ROUND : ROWS * BYTE_ROUND, VALUE_ROWS = TILES ? ROUND / 2 : 0 };

/* Floats of scratch memory that a thread needs; whole lines of the cache. */
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

/* Of the keys or values of one head in a block; bytes have scales. */
int64_t cache_page_bytes(int64_t head_dim, int64_t format) {
    return PAGE * (head_dim * number_bytes((int)format) + (format == CACHE_BYTES ? 4 : 0));
}

/* Numbers of one row or column of the products that stand side by side in the cache, to be multiplied at once. */
SPECIALIZED int interleaved(const int format) { return format == CACHE_BF16 ? 2 : 1; }

/* A vector's worth of numbers, or of pairs of them. */
SPECIALIZED vec load_cache(const char *cache, const int format) {
    return format == CACHE_HALF ? load_half((const uint16_t *)cache) : load((const float *)cache);
}

/* So many bytes from memory into the first cache. Returns where they end. */
SPECIALIZED const char *fetch_lines(const char *from, const int count) {
    UNROLL
    for (int at = 0; at < count; at += 64) __builtin_prefetch(from + at, 0, 3);
    return from + count;
}

/* sum + factor times what was loaded from the cache. */
SPECIALIZED vec add_product(vec sum, const float *factor, vec cached, const int format) {
    const vec splatted = (vec)splat_bytes(factor);
#if defined(BUILD_BF16)
    if (format == CACHE_BF16) return dot2(sum, (ivec)splatted, (ivec)cached);
#endif
    (void)format;
    return fma_(splatted, cached, sum);
}

/* Scores of `rows` queries with the keys in `width` vectors, of which the first begins at key `first` of the round. */
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

/* One step of add_values. `there`: the bits of the loaded words that may be used. */
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

/* out += weights times values, for `width` vectors of dimensions from `dim` on and the round's first `count` keys. */
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
    if (count % interleaved(format)) { /* nothing may be there yet of the last pair's second value */
        const char *values = (const char *)now->values[steps / page_steps] + first + steps % page_steps * line;
        add_value(rows, width, format, weight, values, 0xffff, total);
    }
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int v = 0; v < width; v++) store(out + r * head_dim + dim + v * LANES, total[r][v]);
}

/* A vector of queries or weights as the products take them; `at` is in numbers. Returns what is stored, as floats. */
SPECIALIZED vec store_operand(float *row, int at, vec value, const int format) {
#if defined(BUILD_BF16)
    if (format == CACHE_BF16) return store_bf16((uint16_t *)row + at, value);
#endif
    (void)format;
    store(row + at, value);
    return value;
}

/* What scores are times, beside the layer's scale, and the function that makes weights of them. What is rounded
 * afterwards, to 16 bits at most, needs no more than a rough one. */
SPECIALIZED float exponent_unit(const int format) { return format >= CACHE_BF16 ? 1.44269504f : 1.0f; }

SPECIALIZED vec weight_of(vec score, const int format) {
#if defined(BUILD_BYTE_CACHE)
    if (format >= CACHE_BF16) return rough_exponential2(score);
#endif
    (void)format;
    return exponential(score);
}

/* -inf for those of a row's scores whose keys (the round's first is `base`) it does not see. */
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

/* A row's sums brought to a new maximum. */
SPECIALIZED void rescale_row(const int format, const struct attention *layer, const struct rows *all, int row,
                               float largest) {
    float *sum = all->sum + row * LANES, *out = all->out + row * layer->head_dim;
    const vec correction = weight_of(splat(all->running_max[row] - largest), format);
    for (int i = 0; i < layer->head_dim; i += LANES) store(out + i, load(out + i) * correction);
    store(sum, load(sum) * correction);
    all->running_max[row] = largest;
}

/* Turn one row's first `count` scores of the round that begins at key `base` into weights; bring its sums to the new
 * maximum. */
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

/* One round for up to ROWS rows. `count`: keys of the round that the last of them sees. */
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

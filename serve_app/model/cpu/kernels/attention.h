/* Causal attention over the paged KV cache.
 *
 * One layer's cache, for blocks of PAGE tokens, in floats or narrow: in half precision or, where the machine multiplies
 * pairs of them, in bfloat16:
 *   keys    [blocks][kv_heads][head_dim][PAGE]   transposed, so that a vector holds one dimension of many keys
 *   values  [blocks][kv_heads][PAGE][head_dim]
 * In bfloat16 two dimensions of a key and two values of a dimension stand side by side; queries and weights are rounded
 * to bfloat16 too:
 *   keys    [blocks][kv_heads][head_dim / 2][PAGE][2]
 *   values  [blocks][kv_heads][PAGE / 2][head_dim][2]
 *
 * A task is one kv head of one sequence and some consecutive queries of it; its rows are those queries times the query
 * heads that share the kv head, in this order, so every key and value loaded serves all of them. Rows are worked on
 * ROWS at a time. Keys come in rounds of ROUND, counted from position 0; per round: scores, then the softmax's
 * running maximum and sum (as in FlashAttention), then the values.
 *
 * A row's sums run over dimensions and positions in one fixed order, whatever else is in its task: a key that a row
 * does not see has weight 0 exactly. So a row has the same bits in every batch and however a prompt is cut.
 * Positions that no token of the sequence has reached are never used, whatever lies there.
 */
#ifndef SERVE_APP_ATTENTION_H
#define SERVE_APP_ATTENTION_H

#include "amx_tile.h"
#include "threads.h"
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
    ROUND = 64,
    PAGES = ROUND / PAGE,
    SLACK = 8,      /* weights may grow to e^SLACK before a row's sums are brought to a new maximum */
    TASK_ROWS = 96, /* rows of a task, unless a single query has more */
};

enum cache_format { CACHE_FLOAT, CACHE_HALF, CACHE_BF16 };

#if defined(BUILD_BF16)
#define CACHE_NARROW CACHE_BF16
#else
#define CACHE_NARROW CACHE_HALF
#endif

/* This build computes with this one and with floats. */
int64_t narrow_cache(void) { return CACHE_NARROW; }

struct attention {
    int num_heads, num_kv_heads, head_dim;
    int window; /* keys that a query sees, its own included; 0 = all */
    int cache;  /* its format */
    float scale; /* of the scores */
};

/* The ragged batch; see AttentionBatch in attention/base.py. */
struct batch {
    int32_t num_tokens, num_sequences;
    int64_t table_width;
    const int64_t *positions;    /* [tokens] */
    const int64_t *slots;        /* [tokens] */
    const int32_t *query_starts; /* [sequences + 1] */
    const int32_t *kv_lens;      /* [sequences] */
    const int32_t *blocks;       /* [sequences][table_width]: of each the first that hold its keys, then anything */
};

struct task {
    int32_t sequence, first_query, num_queries;
};

struct attend {
    const struct attention *layer;
    const struct batch *batch;
    const struct task *tasks;
    const void *keys, *values;
    const float *queries; /* [tokens][query_stride], head after head */
    int64_t query_stride;
    float *out;           /* [tokens][num_heads][head_dim] */
    float *scratch;       /* [threads][attention_scratch] */
    int num_chunks;       /* a chunk is a task of one kv head */
    int num_threads;
};

/* Rows of one task on the way, in a thread's scratch memory. */
struct rows {
    float *query;   /* [tiles][head_dim][ROWS], scaled; in bfloat16 [tiles][head_dim / 2][ROWS] of pairs; in AMX's tiles
                       uint16 [tiles][head_dim / 32][TILE_ROWS][32] */
    float *out;     /* [rows][head_dim]: sum of weights times values so far */
    float *score;   /* [ROWS][ROUND]: scores, then weights; in bfloat16 the first half of a row. Of AMX's tiles two. */
    float *sum;     /* [rows][LANES]: weights so far, by lane */
    float *values; /* [ROUND / 2][head_dim] of pairs; only for tiles */
    float *largest; /* [rows]: what is taken off scores, at most SLACK below the largest one so far */
    int32_t *position; /* [rows]: the query's; it sees no later key */
};

/* The pages of one round, and those to be fetched into the cache meanwhile. */
struct round {
    const void *keys[PAGES], *values[PAGES];
    const void *next_keys[PAGES], *next_values[PAGES];
    int fetch; /* whether this is still to be done */
};

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

enum { SCORE_ROWS = TILES ? 2 * TILE_ROWS : ROWS, VALUE_ROWS = TILES ? ROUND / 2 : 0 };

/* Floats of scratch memory that a thread needs; whole lines of the cache. */
static int64_t attention_scratch(const struct attention *layer) {
    const int64_t rows = tiled(task_queries(layer) * (layer->num_heads / layer->num_kv_heads));
    return (rows * (2 * layer->head_dim + LANES + 2) + SCORE_ROWS * ROUND + VALUE_ROWS * layer->head_dim + 15) / 16 * 16;
}

static struct rows rows_in(float *scratch, int num_rows, int head_dim) {
    const int64_t whole = tiled(num_rows);
    struct rows rows;
    rows.query = scratch;
    rows.out = rows.query + whole * head_dim;
    rows.score = rows.out + whole * head_dim;
    rows.sum = rows.score + SCORE_ROWS * ROUND;
    rows.values = rows.sum + whole * LANES;
    rows.largest = rows.values + VALUE_ROWS * head_dim;
    rows.position = (int32_t *)(rows.largest + whole);
    return rows;
}

SPECIALIZED int number_bytes(const int format) { return format == CACHE_FLOAT ? 4 : 2; }

/* Numbers of one row or column of the products that stand side by side in the cache, to be multiplied at once. */
SPECIALIZED int together(const int format) { return format == CACHE_BF16 ? 2 : 1; }

/* A vector's worth of numbers, or of pairs of them. */
SPECIALIZED vec load_cache(const char *cache, const int format) {
    return format == CACHE_HALF ? load_half((const uint16_t *)cache) : load((const float *)cache);
}

SPECIALIZED const void *page_of(const void *cache, int64_t page, int64_t size, const int format) {
    return (const char *)cache + page * size * number_bytes(format);
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
    const int step_bytes = PAGE * together(format) * number_bytes(format);
    const int page_steps = head_dim / together(format) / PAGES;
    const char *keys[WIDTH];
    vec total[ROWS][WIDTH] = {0};
    UNROLL
    for (int v = 0; v < width; v++) {
        const int key = first + v * LANES;
        keys[v] = (const char *)now->keys[key / PAGE] + key % PAGE * together(format) * number_bytes(format);
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
        value[v] = pinned(load_cache(values + v * LANES * together(format) * number_bytes(format), format));
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
    const int64_t line = (int64_t)head_dim * together(format) * number_bytes(format);
    const int64_t first = (int64_t)dim * together(format) * number_bytes(format);
    const int steps = count / together(format), page_steps = PAGE / together(format);
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
            if (now->fetch) fetch_lines(values + next, width * LANES * together(format) * number_bytes(format));
        }
    }
    if (count % together(format)) { /* nothing may be there yet of the last pair's second value */
        const char *values = (const char *)now->values[steps / page_steps] + first + steps % page_steps * line;
        add_value(rows, width, format, weight, values, 0xffff, total);
    }
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int v = 0; v < width; v++) store(out + r * head_dim + dim + v * LANES, total[r][v]);
}

/* A vector of queries or weights as the products take them; `at` is in numbers. Returns what is stored, as floats. */
SPECIALIZED vec store_factor(float *row, int at, vec value, const int format) {
#if defined(BUILD_BF16)
    if (format == CACHE_BF16) return store_bf16((uint16_t *)row + at, value);
#endif
    (void)format;
    store(row + at, value);
    return value;
}

/* What scores are times, beside the layer's scale, and the function that makes weights of them. What is rounded to
 * bfloat16 afterwards needs no more than a rough one. */
SPECIALIZED float score_unit(const int format) { return format == CACHE_BF16 ? 1.44269504f : 1.0f; }

SPECIALIZED vec weight_of(vec score, const int format) {
#if defined(BUILD_BF16)
    if (format == CACHE_BF16) return rough_exponential2(score);
#endif
    (void)format;
    return exponential(score);
}

/* -inf for the scores of keys (the round's first is `base`) that a query at `position` does not see. */
static void hide_keys(float *score, int count, int base, int position, int first_seen) {
    ivec key;
    for (int i = 0; i < LANES; i++) key[i] = base + i;
    for (int i = 0; i < count; i += LANES, key += LANES) {
        const ivec seen = (key <= position) & (key >= first_seen);
        store(score + i, choose(seen, load(score + i), splat(-INFINITY)));
    }
}

/* Turn one row's first `count` scores of the round that begins at key `base` into weights; bring its sums to the new
 * maximum. */
SPECIALIZED void soften(const int format, const struct attention *layer, const struct rows *all, int row, float *score,
                        int count, int base) {
    const int position = all->position[row], window = layer->window;
    const int first_seen = window && position >= window ? position - window + 1 : 0;
    if (base + count > position + 1 || base < first_seen) hide_keys(score, count, base, position, first_seen);
    float *sum = all->sum + row * LANES, *out = all->out + row * layer->head_dim;
    vec best = load(score);
    for (int i = LANES; i < count; i += LANES) best = maximum(load(score + i), best);
    const float largest = reduce_max(best);
    if (largest > all->largest[row] + SLACK) {
        const vec correction = weight_of(splat(all->largest[row] - largest), format);
        for (int i = 0; i < layer->head_dim; i += LANES) store(out + i, load(out + i) * correction);
        store(sum, load(sum) * correction);
        all->largest[row] = largest;
    }
    const vec maximum_now = splat(all->largest[row]);
    vec total = load(sum);
    for (int i = 0; i < count; i += LANES) {
        total = total + store_factor(score, i, weight_of(load(score + i) - maximum_now, format), format);
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
    for (int r = 0; r < rows; r++) soften(format, layer, all, row + r, all->score + r * ROUND, done, base);
    int d = 0;
    for (; d + WIDTH * LANES <= dim; d += WIDTH * LANES)
        add_values(rows, WIDTH, format, all->score, dim, d, now, count, out);
    for (; d < dim; d += LANES) add_values(rows, 1, format, all->score, dim, d, now, count, out);
}

static void attend_rows(int rows, const struct attention *layer, const struct rows *all, int row, int base, int count,
                        const struct round *now) {
#define CASE(n) \
    case n: \
        if (layer->cache == CACHE_FLOAT) attend_round(n, CACHE_FLOAT, layer, all, row, base, count, now); \
        else attend_round(n, CACHE_NARROW, layer, all, row, base, count, now); \
        break;
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
}

static int last_position(const struct attend *job, const struct task *task) {
    return (int)job->batch->positions[task->first_query + task->num_queries - 1];
}

/* The first key of the first round that the task needs. */
static int first_base(const struct attend *job, const struct task *task) {
    const int window = job->layer->window, first = (int)job->batch->positions[task->first_query];
    return window && first >= window ? (first - window + 1) / ROUND * ROUND : 0;
}

/* Where a chunk's keys and values of the round that begins at key `base` are. Past the chunk's last key that key's page
 * again: no row sees what is there. */
static void find_pages(const struct attend *job, int chunk, int base, const void **keys, const void **values) {
    const struct attention *layer = job->layer;
    const struct task *task = job->tasks + chunk / layer->num_kv_heads;
    const int32_t *blocks = job->batch->blocks + task->sequence * job->batch->table_width;
    const int head = chunk % layer->num_kv_heads, last_page = last_position(job, task) / PAGE;
    const int64_t size = (int64_t)PAGE * layer->head_dim;
    for (int page = 0; page < PAGES; page++) {
        const int wanted = base / PAGE + page, found = wanted < last_page ? wanted : last_page;
        const int64_t index = (int64_t)blocks[found] * layer->num_kv_heads + head;
        keys[page] = page_of(job->keys, index, size, layer->cache);
        values[page] = page_of(job->values, index, size, layer->cache);
    }
}

/* The pages that this thread is likely to need after the round. */
static void find_next_pages(const struct attend *job, int chunk, int base, const void **keys, const void **values) {
    const struct task *tasks = job->tasks;
    const int heads = job->layer->num_kv_heads, next = chunk + job->num_threads;
    if (base + ROUND <= last_position(job, tasks + chunk / heads))
        find_pages(job, chunk, base + ROUND, keys, values);
    else if (next < job->num_chunks)
        find_pages(job, next, first_base(job, tasks + next / heads), keys, values);
    else
        find_pages(job, chunk, base, keys, values);
}

#if defined(BUILD_AMX)
/* From memory into the second cache; straight into the first takes longer. */
SPECIALIZED void fetch_tile(const char *from) {
    UNROLL
    for (int line = 0; line < TILE_ROWS; line++) __builtin_prefetch(from + line * TILE_BYTES, 0, 2);
}

/* Tiles of TILE_ROWS rows: scores of the round's keys, in C 0 to 3 by page. */
static void score_tile(const uint16_t *query, int head_dim, const struct round *now, float *score) {
    const char *const *keys = (const char *const *)now->keys;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t at = 0; at < head_dim / 32 * 1024; at += 1024) {
        TILE_LOAD(4, (const char *)query + at, 64);
#define PAGE_SCORES(page) \
        TILE_LOAD(6, keys[page] + at, 64); \
        TILE_DOT(page, 4, 6); \
        if (now->fetch) fetch_tile((const char *)now->next_keys[page] + at);
        PAGE_SCORES(0) PAGE_SCORES(1) PAGE_SCORES(2) PAGE_SCORES(3)
#undef PAGE_SCORES
    }
    TILE_STORE(0, score, 4 * ROUND);
    TILE_STORE(1, score + PAGE, 4 * ROUND);
    TILE_STORE(2, score + 2 * PAGE, 4 * ROUND);
    TILE_STORE(3, score + 3 * PAGE, 4 * ROUND);
}

/* out += weights times values for `width` (2 or 4) tiles of dimensions from `dim` on and the round's first keys, 32 a step. */
SPECIALIZED void value_tile(const int width, const float *weight, const float *values, int head_dim, int dim, int steps,
                            float *out) {
    const int64_t line = 4 * head_dim;
    values += dim;
    out += dim;
    TILE_LOAD(0, out, line);
    TILE_LOAD(1, out + 16, line);
    if (width == 4) {
        TILE_LOAD(2, out + 32, line);
        TILE_LOAD(3, out + 48, line);
    }
    for (int step = 0; step < steps; step++, values += TILE_ROWS * head_dim) {
        TILE_LOAD(4, (const char *)weight + TILE_BYTES * step, 4 * ROUND);
        TILE_LOAD(6, values, line);
        TILE_DOT(0, 4, 6);
        TILE_LOAD(7, values + 16, line);
        TILE_DOT(1, 4, 7);
        if (width == 4) {
            TILE_LOAD(6, values + 32, line);
            TILE_DOT(2, 4, 6);
            TILE_LOAD(7, values + 48, line);
            TILE_DOT(3, 4, 7);
        }
    }
    TILE_STORE(0, out, line);
    TILE_STORE(1, out + 16, line);
    if (width == 4) {
        TILE_STORE(2, out + 32, line);
        TILE_STORE(3, out + 48, line);
    }
}

/* The weights of a tile whose scores are there, and the values. */
static void finish_tile(const struct attention *layer, const struct rows *all, int row, int end, float *score, int base) {
    const int dim = layer->head_dim, seen = all->position[end - 1] + 1 - base;
    const int steps = seen < ROUND ? (seen + 31) / 32 : ROUND / 32;
    float *out = all->out + row * dim;
    for (int r = row; r < end; r++) soften(CACHE_BF16, layer, all, r, score + (r - row) * ROUND, steps * 32, base);
    int d = 0;
    for (; d + 64 <= dim; d += 64) value_tile(4, score, all->values, dim, d, steps, out);
    for (; d < dim; d += 32) value_tile(2, score, all->values, dim, d, steps, out);
}

/* A round's values side by side, as many as are `there`, and zeros: what lies behind the sequence's last key is no number
 * that may meet even a weight of 0. The next round's are fetched meanwhile. */
static void gather_values(const struct round *now, int there, int head_dim, float *to) {
    for (int key = 0; key < ROUND; key += 2, to += head_dim) {
        const int64_t at = key % PAGE / 2 * head_dim;
        const float *from = (const float *)now->values[key / PAGE] + at, *next = (const float *)now->next_values[key / PAGE] + at;
        const ivec used = splat_bytes(&(int32_t){key + 1 < there ? -1 : key < there ? 0xffff : 0});
        for (int i = 0; i < head_dim; i += LANES) {
            store(to + i, (vec)(load_int(from + i) & used));
            __builtin_prefetch(next + i, 0, 2);
        }
    }
}

/* All rows of a chunk with the keys of one round, in tiles. While the vector units make weights of one tile's scores, the
 * next one's are computed. */
static void tiles_round(const struct attend *job, int chunk, const struct rows *rows, int num_rows, int base) {
    const struct attention *layer = job->layer;
    const int dim = layer->head_dim;
    struct round now = {.fetch = 1};
    find_pages(job, chunk, base, now.keys, now.values);
    find_next_pages(job, chunk, base, now.next_keys, now.next_values);
    gather_values(&now, rows->position[num_rows - 1] + 1 - base, dim, rows->values);
    int before = -1, before_end = 0, buffer = 0;
    for (int row = 0; row < num_rows; row += TILE_ROWS) {
        const int end = row + TILE_ROWS < num_rows ? row + TILE_ROWS : num_rows;
        if (rows->position[end - 1] < base) continue;
        if (layer->window && base + ROUND <= rows->position[row] - layer->window + 1) continue;
        score_tile((const uint16_t *)rows->query + (int64_t)row * dim, dim, &now, rows->score + buffer * TILE_ROWS * ROUND);
        buffer ^= 1;
        if (before >= 0) finish_tile(layer, rows, before, before_end, rows->score + buffer * TILE_ROWS * ROUND, base);
        now.fetch = 0;
        before = row;
        before_end = end;
    }
    buffer ^= 1;
    if (before >= 0) finish_tile(layer, rows, before, before_end, rows->score + buffer * TILE_ROWS * ROUND, base);
}
#endif

/* All rows of a chunk with the keys of one round. */
static void chunk_round(const struct attend *job, int chunk, const struct rows *rows, int num_rows, int base) {
    const struct attention *layer = job->layer;
#if defined(BUILD_AMX)
    if (in_tiles(layer)) {
        tiles_round(job, chunk, rows, num_rows, base);
        return;
    }
#endif
    struct round now = {.fetch = 1};
    find_pages(job, chunk, base, now.keys, now.values);
    find_next_pages(job, chunk, base, now.next_keys, now.next_values);
    for (int row = 0; row < num_rows; row += ROWS) {
        const int some = num_rows - row < ROWS ? num_rows - row : ROWS;
        const int seen = rows->position[row + some - 1] + 1 - base;
        if (seen <= 0) continue;
        if (layer->window && base + ROUND <= rows->position[row] - layer->window + 1) continue;
        attend_rows(some, layer, rows, row, base, seen < ROUND ? seen : ROUND, &now);
        now.fetch = 0;
    }
}

/* One query as the products with keys take it, at its place in `queries`. */
static void put_query(const struct attention *layer, const float *query, int row, float *queries) {
    const vec scale = splat(layer->scale * score_unit(layer->cache));
    if (in_tiles(layer)) {
        float *to = queries + row / TILE_ROWS * TILE_ROWS * layer->head_dim / 2 + row % TILE_ROWS * 16;
        for (int i = 0; i < layer->head_dim; i += LANES)
            store_factor(to + i / 32 * TILE_ROWS * 16, i % 32, load(query + i) * scale, layer->cache);
        return;
    }
    float lane[LANES], *to = queries + row / ROWS * ROWS * layer->head_dim + row % ROWS;
    for (int i = 0; i < layer->head_dim; i += LANES) {
        store_factor(lane, 0, load(query + i) * scale, layer->cache);
        for (int k = 0; k < LANES / together(layer->cache); k++, to += ROWS) *to = lane[k];
    }
}

static void attend_chunk(const void *argument, int chunk, int thread) {
    const struct attend *job = argument;
    const struct attention *layer = job->layer;
    const struct task *task = job->tasks + chunk / layer->num_kv_heads;
    const int head = chunk % layer->num_kv_heads, dim = layer->head_dim;
    const int group = layer->num_heads / layer->num_kv_heads, num_rows = task->num_queries * group;
    const struct rows rows = rows_in(job->scratch + thread * attention_scratch(layer), num_rows, dim);
    for (int row = 0; row < num_rows; row++) {
        const int token = task->first_query + row / group;
        const float *query = job->queries + token * job->query_stride + (head * group + row % group) * dim;
        put_query(layer, query, row, rows.query);
        for (int i = 0; i < dim; i += LANES) store(rows.out + row * dim + i, splat(0.0f));
        store(rows.sum + row * LANES, splat(0.0f));
        rows.largest[row] = -0x1.fffffep127f; /* finite: a round may hide all its keys from a row */
        rows.position[row] = (int32_t)job->batch->positions[token];
    }
    if (in_tiles(layer)) begin_tiles();
    for (int base = first_base(job, task); base <= rows.position[num_rows - 1]; base += ROUND)
        chunk_round(job, chunk, &rows, num_rows, base);
    if (in_tiles(layer)) end_tiles();
    for (int row = 0; row < num_rows; row++) {
        const int64_t token = task->first_query + row / group;
        float *out = job->out + (token * layer->num_heads + head * group + row % group) * dim;
        const vec total = splat(reduce_add(load(rows.sum + row * LANES)));
        for (int i = 0; i < dim; i += LANES) store(out + i, load(rows.out + row * dim + i) / total);
    }
}

/* Cut the batch into tasks, of a sequence the longest first, so that threads end together. Returns how many. */
static int make_tasks(const struct attention *layer, const struct batch *batch, struct task *tasks) {
    const int size = task_queries(layer);
    int count = 0;
    for (int s = 0; s < batch->num_sequences; s++) {
        const int start = batch->query_starts[s], end = batch->query_starts[s + 1];
        for (int first = start + (end - start - 1) / size * size; first >= start; first -= size)
            tasks[count++] = (struct task){s, first, end - first < size ? end - first : size};
    }
    return count;
}

/* Put one token's key and value [head_dim] of one head into its page. */
static void write_narrow(const struct attention *layer, const float *key, const float *value, int64_t offset,
                         uint16_t *keys, uint16_t *values) {
    const int dim = layer->head_dim;
    uint16_t lane[LANES];
    for (int i = 0; i < dim; i += LANES) {
#if defined(BUILD_BF16)
        store_bf16(lane, load(key + i));
        for (int j = 0; j < LANES; j += 2) memcpy(keys + 2 * ((i + j) / 2 * PAGE + offset), lane + j, 4);
        store_every_second_bf16(values + 2 * (offset / 2 * dim + i), (int)(offset % 2), load(value + i));
#else
        store_half(lane, load(key + i));
        for (int j = 0; j < LANES; j++) keys[(i + j) * PAGE + offset] = lane[j];
        store_half(values + offset * dim + i, load(value + i));
#endif
    }
}

static void write_float(const struct attention *layer, const float *key, const float *value, int64_t offset,
                        float *keys, float *values) {
    const int dim = layer->head_dim;
    for (int i = 0; i < dim; i++) keys[i * PAGE + offset] = key[i];
    memcpy(values + offset * dim, value, sizeof(float) * (size_t)dim);
}

/* Put one token's key and value [kv_heads][head_dim] into its slot. */
static void write_cache(const struct attention *layer, const float *key, const float *value, int64_t slot, void *keys,
                        void *values) {
    const int dim = layer->head_dim;
    for (int head = 0; head < layer->num_kv_heads; head++, key += dim, value += dim) {
        const int64_t page = (slot / PAGE * layer->num_kv_heads + head) * PAGE * dim, offset = slot % PAGE;
        if (layer->cache == CACHE_FLOAT)
            write_float(layer, key, value, offset, (float *)keys + page, (float *)values + page);
        else
            write_narrow(layer, key, value, offset, (uint16_t *)keys + page, (uint16_t *)values + page);
    }
}

struct cache_write {
    const struct attention *layer;
    const struct batch *batch;
    const float *new_keys, *new_values; /* [tokens][num_kv_heads][head_dim] */
    void *keys, *values;
};

static void write_chunk(const void *argument, int token, int thread) {
    (void)thread;
    const struct cache_write *job = argument;
    const int64_t at = (int64_t)token * job->layer->num_kv_heads * job->layer->head_dim;
    write_cache(job->layer, job->new_keys + at, job->new_values + at, job->batch->slots[token], job->keys, job->values);
}

static int64_t tasks_bytes(const struct attention *layer, int64_t tokens, int64_t sequences) {
    return ((int64_t)sizeof(struct task) * (sequences + tokens / task_queries(layer)) + 63) / 64 * 64;
}

int64_t attention_workspace(const struct attention *layer, int64_t tokens, int64_t sequences, int64_t threads) {
    return tasks_bytes(layer, tokens, sequences) + 4 * threads * attention_scratch(layer);
}

/* Attention of one layer by itself: write the keys and values, then out [tokens][num_heads][head_dim] of queries of
 * the same shape. `memory`: attention_workspace bytes. */
void attention(const struct attention *layer, struct pool *pool, const struct batch *batch, const float *queries,
               const float *new_keys, const float *new_values, void *keys, void *values, char *memory, float *out) {
    struct task *tasks = (struct task *)memory;
    float *scratch = (float *)(memory + tasks_bytes(layer, batch->num_tokens, batch->num_sequences));
    const struct cache_write write = {layer, batch, new_keys, new_values, keys, values};
    parallel_rows(pool, batch->num_tokens, write_chunk, &write);
    const int num_chunks = make_tasks(layer, batch, tasks) * layer->num_kv_heads;
    const struct attend attend = {
        layer, batch, tasks, keys, values, queries, (int64_t)layer->num_heads * layer->head_dim, out, scratch,
        num_chunks, pool->num_threads,
    };
    parallel(pool, num_chunks, attend_chunk, &attend);
}

#endif

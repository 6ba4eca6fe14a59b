/* The round of attention_round.h in bytes: both products in integers.
 *
 * A key or value of one head is int8 numbers times a scale. A lane multiplies DOT_SIZE of them at
 * once and sums the products: four with AVX-512, which multiplies bytes; two with AVX2, which
 * widens them to 16 bits first. A page is
 *   keys    bytes [head_dim / DOT_SIZE][PAGE][DOT_SIZE], the numbers plus KEY_ZERO_POINT, then float scale[PAGE]
 *   values  int8 [PAGE / DOT_SIZE][head_dim][DOT_SIZE], then float scale[PAGE]
 * Queries are rounded in the same way, to numbers up to QUERY_LIMIT. A round's weights are
 * multiplied by the values' scales first. Then they become integers, in units of 1/WEIGHT_LIMIT of
 * the largest weight of the round: many small weights do not vanish because another round has a
 * large one. The softmax's sum uses unrounded weights.
 *
 * A value's scale is always finite, whatever its page held before, so that a weight of 0 hides it.
 * If a token's key or value has a NaN or an infinity, its key's scale is NaN, and so is every row
 * that sees it. */
#ifndef SERVE_APP_BYTE_ATTENTION_H
#define SERVE_APP_BYTE_ATTENTION_H

#include "attention_round.h"

#if defined(BUILD_BYTE_CACHE)
#if defined(BUILD_AVX512)
enum { DOT_SIZE = 4, KEY_ZERO_POINT = 128 }; /* one side of a product must be unsigned bytes */
#define QUERY_LIMIT 127.0f
#define WEIGHT_LIMIT 255.0f
typedef int8_t query_number;
typedef uint8_t weight_number;
#else
enum { DOT_SIZE = 2, KEY_ZERO_POINT = 0 };
/* With these limits, sums over 2,048 dimensions or a round's keys fit 32 bits. */
#define QUERY_LIMIT 8191.0f
#define WEIGHT_LIMIT 32767.0f
typedef int16_t query_number;
typedef int16_t weight_number;
#endif

enum {
    PAGE_VECTORS = PAGE / LANES,          /* vectors with DOT_SIZE numbers of each of a page's keys */
    PAGES_AT_ONCE = WIDTH / PAGE_VECTORS, /* pages whose keys are scored at once */
    LEAST_PAGES = MOST_PAGES / 4,         /* a round has one to four times as many */
};

/* Load a vector of keys or values. */
SPECIALIZED ivec load_numbers(const char *from) {
#if defined(BUILD_AVX512)
    return (ivec)pinned((vec)load_int(from));
#else
    return load_pairs(from);
#endif
}

/* Per lane: sum plus the products of DOT_SIZE numbers. With AVX-512, those of `first` are
 * unsigned. */
SPECIALIZED ivec dot_numbers(ivec sum, ivec first, ivec second) {
#if defined(BUILD_AVX512)
    return dot4(sum, first, second);
#else
    return pair_dot(sum, first, second);
#endif
}

SPECIALIZED void store_query(query_number *to, ivec numbers) {
#if defined(BUILD_AVX512)
    store_bytes(to, numbers);
#else
    store_short(to, numbers);
#endif
}

/* A tile's queries are words of DOT_SIZE numbers [head_dim / DOT_SIZE][ROWS], followed by: */
struct query_terms {
    float scale[ROWS];
    int32_t start[ROWS]; /* start value of sums, which compensates for KEY_ZERO_POINT */
};

static struct query_terms *terms_of(float *tile, int head_dim) {
    return (struct query_terms *)(tile + head_dim / DOT_SIZE * ROWS);
}

/* The scale that makes `limit` the largest of `count` numbers. NaN if any number is NaN or
 * infinite. */
static float number_scale(const float *x, int count, float limit) {
    ivec largest = {0}; /* as integers: infinity and NaN are larger than all numbers */
    for (int i = 0; i < count; i += LANES) largest = maximum_int((ivec)absolute(load(x + i)), largest);
    const int32_t bits = reduce_max_int(largest);
    float size;
    memcpy(&size, &bits, 4);
    return bits >= 0x7f800000 ? NAN : size / limit;
}

/* A scale that is not a normal number counts as zero. */
static vec inverse_of(float scale) { return splat(scale > 0x1p-126f ? 1.0f / scale : 0.0f); }

/* Round one query into row `row` of its tile. */
static void put_byte_query(const struct attention *layer, const float *query, int row, float *tile) {
    struct query_terms *terms = terms_of(tile, layer->head_dim);
    const float scale = number_scale(query, layer->head_dim, QUERY_LIMIT);
    const vec inverse = inverse_of(scale);
    ivec sum = {0};
    for (int i = 0; i < layer->head_dim; i += LANES) {
        const ivec numbers = nearest(load(query + i) * inverse);
        query_number packed[LANES];
        sum += numbers;
        store_query(packed, numbers);
        for (int k = 0; k < LANES; k += DOT_SIZE) memcpy(tile + (i + k) / DOT_SIZE * ROWS + row, packed + k, 4);
    }
    terms->scale[row] = scale * layer->scale * exponent_unit(CACHE_BYTES);
    terms->start[row] = -KEY_ZERO_POINT * (int32_t)reduce_add(to_float(sum));
}

/* Store into number `offset` of every DOT_SIZE. The other numbers are not touched: another thread
 * may be writing them. */
SPECIALIZED void store_apart(uint8_t *to, int offset, ivec numbers) {
#if defined(BUILD_AVX512)
    store_every_fourth(to, offset, numbers);
#else
    int8_t packed[LANES];
    store_bytes(packed, numbers);
    for (int k = 0; k < LANES; k++) to[DOT_SIZE * k + offset] = (uint8_t)packed[k];
#endif
}

/* Write one token's key and value of one head into their pages. Other threads may write other
 * tokens to the same pages. */
static void write_bytes(int head_dim, const float *key, const float *value, int offset, uint8_t *keys,
                        uint8_t *values) {
    float key_scale = number_scale(key, head_dim, 127.0f), value_scale = number_scale(value, head_dim, 127.0f);
    const vec key_inverse = inverse_of(key_scale), value_inverse = inverse_of(value_scale);
    int8_t packed[LANES];
    uint8_t *lines = values + offset / DOT_SIZE * DOT_SIZE * head_dim;
    for (int i = 0; i < head_dim; i += LANES) {
        store_bytes(packed, nearest(load(key + i) * key_inverse) + KEY_ZERO_POINT);
        for (int k = 0; k < LANES; k += DOT_SIZE)
            memcpy(keys + (i + k) * PAGE + DOT_SIZE * offset, packed + k, DOT_SIZE);
        store_apart(lines + DOT_SIZE * i, offset % DOT_SIZE, nearest(load(value + i) * value_inverse));
    }
    if (value_scale - value_scale != 0) {
        key_scale = value_scale - value_scale;
        value_scale = 0.0f;
    }
    memcpy(keys + PAGE * head_dim + 4 * offset, &key_scale, 4);
    memcpy(values + PAGE * head_dim + 4 * offset, &value_scale, 4);
}

/* score_keys in bytes, with the keys of `pages` pages from page `first`. */
SPECIALIZED void score_byte_keys(const int rows, const int pages, int first, float *tile, int head_dim,
                                 const struct round *now, float *score) {
    const int vectors = pages * PAGE_VECTORS;
    const struct query_terms *terms = terms_of(tile, head_dim);
    const float *query = tile;
    ivec total[ROWS][WIDTH];
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int v = 0; v < vectors; v++) total[r][v] = splat_bytes(terms->start + r);
    int at = 0;
    for (; at < PAGE * head_dim; at += DOT_SIZE * PAGE, query += ROWS) {
        ivec key[WIDTH];
        UNROLL
        for (int v = 0; v < vectors; v++) {
            const char *page = now->keys[first + v / PAGE_VECTORS];
            key[v] = load_numbers(page + at + v % PAGE_VECTORS * DOT_SIZE * LANES);
        }
        if (now->fetch)
            UNROLL
            for (int p = 0; p < PAGES_AT_ONCE; p++)
                __builtin_prefetch((const char *)now->next_keys[first + p] + at, 0, 3);
        UNROLL
        for (int r = 0; r < rows; r++) {
            const ivec word = splat_bytes(query + r);
            UNROLL
            for (int v = 0; v < vectors; v++) total[r][v] = dot_numbers(total[r][v], key[v], word);
        }
    }
    UNROLL
    for (int v = 0; v < vectors; v++) {
        const int page = first + v / PAGE_VECTORS, key = v % PAGE_VECTORS * LANES;
        const vec scale = load((const float *)((const char *)now->keys[page] + at) + key);
        if (now->fetch) __builtin_prefetch((const char *)now->next_keys[page] + at, 0, 3);
        UNROLL
        for (int r = 0; r < rows; r++) {
            float *to = score + r * BYTE_ROUND + page * PAGE + key;
            store(to, to_float(total[r][v]) * (scale * splat(terms->scale[r])));
        }
    }
}

/* add_values in bytes: weights (words of DOT_SIZE numbers in rows of BYTE_ROUND words) times
 * `unit`, for `width` vectors of dimensions from `dim`. */
SPECIALIZED void add_byte_values(const int rows, const int width, const float *weight, const float *unit, int head_dim,
                                 int dim, const struct round *now, int count, float *out) {
    ivec total[ROWS][WIDTH] = {0};
    for (int page = 0; page * PAGE < count; page++) {
        const int left = count - page * PAGE, line = DOT_SIZE * head_dim;
        const char *values = (const char *)now->values[page] + DOT_SIZE * dim;
        const int64_t next = (const char *)now->next_values[page] + DOT_SIZE * dim - values;
        const char *end = values + (left < PAGE ? (left + DOT_SIZE - 1) / DOT_SIZE : PAGE / DOT_SIZE) * line;
        for (; values < end; values += line, weight++) {
            ivec value[WIDTH];
            UNROLL
            for (int v = 0; v < width; v++) value[v] = load_numbers(values + DOT_SIZE * LANES * v);
            if (now->fetch) fetch_lines(values + next, width * DOT_SIZE * LANES);
            UNROLL
            for (int r = 0; r < rows; r++) {
                const ivec word = splat_bytes(weight + r * BYTE_ROUND);
                UNROLL
                for (int v = 0; v < width; v++) total[r][v] = dot_numbers(total[r][v], word, value[v]);
            }
        }
        if (now->fetch && dim == 0)
            __builtin_prefetch((const char *)now->next_values[page] + PAGE * head_dim, 0, 3);
    }
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int v = 0; v < width; v++) {
            float *to = out + r * head_dim + dim + v * LANES;
            store(to, fma_(to_float(total[r][v]), splat(unit[r]), load(to)));
        }
}

/* online_softmax for `pages` pages. A row's weights overwrite the beginning of its scores. Returns
 * the weights' unit. */
SPECIALIZED float online_softmax_bytes(const int pages, const struct attention *layer, const struct rows *all, int row,
                                       const struct round *now, int base, float *score) {
    const int vectors = pages * PAGE_VECTORS;
    mask_keys(layer, all, row, score, pages * PAGE, base);
    vec weight[MOST_PAGES * PAGE_VECTORS], best = load(score);
    UNROLL
    for (int v = 1; v < vectors; v++) best = maximum(load(score + v * LANES), best);
    if (any_above(best, all->running_max[row] + SLACK)) rescale_row(CACHE_BYTES, layer, all, row, reduce_max(best));
    const vec maximum_now = splat(all->running_max[row]);
    vec total = load(all->sum + row * LANES), most = splat(0.0f);
    UNROLL
    for (int v = 0; v < vectors; v++) {
        const float *scales = (const float *)((const char *)now->values[v / PAGE_VECTORS] + PAGE * layer->head_dim);
        weight[v] = weight_of(load(score + v * LANES) - maximum_now, CACHE_BYTES);
        total = total + weight[v];
        weight[v] = weight[v] * load(scales + v % PAGE_VECTORS * LANES);
        most = maximum(weight[v], most);
    }
    store(all->sum + row * LANES, total);
    /* A single division, which no other operation waits for. */
    const float largest = reduce_max(most), unit = largest * (1.0f / WEIGHT_LIMIT);
    const vec inverse = splat(unit > 0x1p-126f ? WEIGHT_LIMIT / largest : 0.0f);
    UNROLL
    for (int v = 0; v < vectors; v++) store_nearest((weight_number *)score + v * LANES, weight[v], inverse);
    return unit;
}

static float online_softmax_pages(int pages, const struct attention *layer, const struct rows *all, int row,
                                  const struct round *now, int base, float *score) {
    switch (pages / LEAST_PAGES) {
        case 4: return online_softmax_bytes(4 * LEAST_PAGES, layer, all, row, now, base, score);
        case 3: return online_softmax_bytes(3 * LEAST_PAGES, layer, all, row, now, base, score);
        case 2: return online_softmax_bytes(2 * LEAST_PAGES, layer, all, row, now, base, score);
        default: return online_softmax_bytes(LEAST_PAGES, layer, all, row, now, base, score);
    }
}

/* attend_round in bytes. */
SPECIALIZED void attend_byte_round(const int rows, const struct attention *layer, const struct rows *all, int row,
                                   int base, int count, const struct round *now) {
    const int dim = layer->head_dim;
    float *tile = all->query + row * dim, *out = all->out + row * dim, unit[ROWS];
    const int pages = (count + LEAST_PAGES * PAGE - 1) / (LEAST_PAGES * PAGE) * LEAST_PAGES;
    int page = 0;
    for (; page + PAGES_AT_ONCE <= pages; page += PAGES_AT_ONCE)
        score_byte_keys(rows, PAGES_AT_ONCE, page, tile, dim, now, all->score);
    if (PAGES_AT_ONCE > LEAST_PAGES && page < pages)
        score_byte_keys(rows, LEAST_PAGES, page, tile, dim, now, all->score);
    for (int r = 0; r < rows; r++)
        unit[r] = online_softmax_pages(pages, layer, all, row + r, now, base, all->score + r * BYTE_ROUND);
    int d = 0;
    for (; d + WIDTH * LANES <= dim; d += WIDTH * LANES)
        add_byte_values(rows, WIDTH, all->score, unit, dim, d, now, count, out);
    for (; d < dim; d += LANES) add_byte_values(rows, 1, all->score, unit, dim, d, now, count, out);
}
#endif

#endif

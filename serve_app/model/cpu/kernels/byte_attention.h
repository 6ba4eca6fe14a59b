/* attention_round.h's round in bytes: both products in integers.
 *
 * A key or value of one head is int8 numbers times a scale; a page of them is
 *   keys    uint8 [head_dim / 4][PAGE][4], the numbers plus 128, then float scale[PAGE]
 *   values  int8 [PAGE / 4][head_dim][4], then float scale[PAGE]
 * Queries are rounded in the same way. A round's weights take the values' scales first, and are then bytes times a
 * 255th of the largest of them: many small ones do not vanish beside a large one of another round. The softmax's sum
 * has them unrounded.
 *
 * A value's scale is finite whatever its page held before, so that a weight of 0 hides it. If a token's key or value
 * has a NaN or an infinity, its key's scale is NaN, and so is every row that sees it.
 */
#ifndef SERVE_APP_BYTE_ATTENTION_H
#define SERVE_APP_BYTE_ATTENTION_H

#include "attention_round.h"

#if defined(BUILD_AVX512)
/* A tile's queries are words of four numbers [head_dim / 4][ROWS], and behind them: */
struct query_terms {
    float scale[ROWS];
    int32_t start[ROWS]; /* where sums begin: it takes off what the keys' 128 add */
};

static struct query_terms *terms_of(float *tile, int head_dim) {
    return (struct query_terms *)(tile + head_dim / 4 * ROWS);
}

/* The scale that makes the largest of `count` numbers 127; NaN where one is no number, or infinite. */
static float byte_scale(const float *x, int count) {
    __m512i largest = _mm512_setzero_si512(); /* as integers: what is infinite or no number is above all numbers */
    for (int i = 0; i < count; i += LANES) largest = _mm512_max_epi32((__m512i)absolute(load(x + i)), largest);
    const int32_t bits = _mm512_reduce_max_epi32(largest);
    float size;
    memcpy(&size, &bits, 4);
    return bits >= 0x7f800000 ? NAN : size / 127.0f;
}

/* A scale that is no normal number counts as zero. */
static vec inverse_of(float scale) { return splat(scale > 0x1p-126f ? 1.0f / scale : 0.0f); }

/* One query, in row `row` of its tile. */
static void put_byte_query(const struct attention *layer, const float *query, int row, float *tile) {
    struct query_terms *terms = terms_of(tile, layer->head_dim);
    const float scale = byte_scale(query, layer->head_dim);
    const vec inverse = inverse_of(scale);
    ivec sum = {0};
    int8_t packed[LANES];
    for (int i = 0; i < layer->head_dim; i += LANES) {
        const ivec numbers = nearest(load(query + i) * inverse);
        sum += numbers;
        store_bytes(packed, numbers);
        for (int k = 0; k < LANES; k += 4) memcpy(tile + (i + k) / 4 * ROWS + row, packed + k, 4);
    }
    terms->scale[row] = scale * layer->scale * score_unit(CACHE_BYTES);
    terms->start[row] = -128 * (int32_t)reduce_add(to_float(sum));
}

/* One token's key and value of one head into its place in their pages. Other threads may write other tokens' there. */
static void write_bytes(int head_dim, const float *key, const float *value, int offset, uint8_t *keys,
                        uint8_t *values) {
    float key_scale = byte_scale(key, head_dim), value_scale = byte_scale(value, head_dim);
    const vec key_inverse = inverse_of(key_scale), value_inverse = inverse_of(value_scale);
    int8_t packed[LANES];
    uint8_t *lines = values + offset / 4 * 4 * head_dim;
    for (int i = 0; i < head_dim; i += LANES) {
        store_bytes(packed, nearest(load(key + i) * key_inverse) + 128);
        for (int k = 0; k < LANES; k += 4) memcpy(keys + (i + k) * PAGE + 4 * offset, packed + k, 4);
        store_every_fourth(lines + 4 * i, offset % 4, nearest(load(value + i) * value_inverse));
    }
    if (value_scale - value_scale != 0) {
        key_scale = value_scale - value_scale;
        value_scale = 0.0f;
    }
    memcpy(keys + PAGE * head_dim + 4 * offset, &key_scale, 4);
    memcpy(values + PAGE * head_dim + 4 * offset, &value_scale, 4);
}

/* As score_keys: with the keys of `pages` pages from page `first` on. */
SPECIALIZED void score_byte_keys(const int rows, const int pages, int first, float *tile, int head_dim,
                                 const struct round *now, float *score) {
    const struct query_terms *terms = terms_of(tile, head_dim);
    const float *query = tile;
    ivec total[ROWS][WIDTH];
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int p = 0; p < pages; p++) total[r][p] = splat_bytes(terms->start + r);
    int at = 0;
    for (; at < PAGE * head_dim; at += 4 * PAGE, query += ROWS) {
        ivec key[WIDTH];
        UNROLL
        for (int p = 0; p < pages; p++)
            key[p] = (ivec)pinned((vec)load_int((const char *)now->keys[first + p] + at));
        if (now->fetch)
            UNROLL
            for (int p = 0; p < WIDTH; p++) __builtin_prefetch((const char *)now->next_keys[first + p] + at, 0, 3);
        UNROLL
        for (int r = 0; r < rows; r++) {
            const ivec word = splat_bytes(query + r);
            UNROLL
            for (int p = 0; p < pages; p++) total[r][p] = dot4(total[r][p], key[p], word);
        }
    }
    UNROLL
    for (int p = 0; p < pages; p++) {
        const vec scale = load((const float *)((const char *)now->keys[first + p] + at));
        if (now->fetch) __builtin_prefetch((const char *)now->next_keys[first + p] + at, 0, 3);
        UNROLL
        for (int r = 0; r < rows; r++) {
            float *to = score + r * BYTE_ROUND + (first + p) * PAGE;
            store(to, to_float(total[r][p]) * (scale * splat(terms->scale[r])));
        }
    }
}

/* As add_values: weights [rows][4 BYTE_ROUND] in bytes times `unit`, for `width` vectors of dimensions from `dim` on. */
SPECIALIZED void add_byte_values(const int rows, const int width, const float *weight, const float *unit, int head_dim,
                                 int dim, const struct round *now, int count, float *out) {
    ivec total[ROWS][WIDTH] = {0};
    for (int page = 0; page * PAGE < count; page++) {
        const int left = count - page * PAGE, line = 4 * head_dim;
        const char *values = (const char *)now->values[page] + 4 * dim;
        const int64_t next = (const char *)now->next_values[page] + 4 * dim - values;
        const char *end = values + (left < PAGE ? (left + 3) / 4 : PAGE / 4) * line;
        for (; values < end; values += line, weight++) {
            ivec value[WIDTH];
            UNROLL
            for (int v = 0; v < width; v++) value[v] = (ivec)pinned((vec)load_int(values + 4 * LANES * v));
            if (now->fetch) fetch_lines(values + next, width * 4 * LANES);
            UNROLL
            for (int r = 0; r < rows; r++) {
                const ivec word = splat_bytes(weight + r * BYTE_ROUND);
                UNROLL
                for (int v = 0; v < width; v++) total[r][v] = dot4(total[r][v], word, value[v]);
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

/* As soften, for `pages` pages. Returns the unit of the weights. */
SPECIALIZED float soften_bytes(const int pages, const struct attention *layer, const struct rows *all, int row,
                               const struct round *now, int base, float *score) {
    hide_keys(layer, all, row, score, pages * PAGE, base);
    vec weight[MOST_PAGES], best = load(score);
    UNROLL
    for (int p = 1; p < pages; p++) best = maximum(load(score + p * PAGE), best);
    if (any_above(best, all->largest[row] + SLACK)) raise_largest(CACHE_BYTES, layer, all, row, reduce_max(best));
    const vec maximum_now = splat(all->largest[row]);
    vec total = load(all->sum + row * LANES), most = splat(0.0f);
    UNROLL
    for (int p = 0; p < pages; p++) {
        weight[p] = weight_of(load(score + p * PAGE) - maximum_now, CACHE_BYTES);
        total = total + weight[p];
        weight[p] = weight[p] * load((const float *)((const char *)now->values[p] + PAGE * layer->head_dim));
        most = maximum(weight[p], most);
    }
    store(all->sum + row * LANES, total);
    /* One division, for which nothing else waits. */
    const float largest = reduce_max(most), unit = largest * (1.0f / 255.0f);
    const vec inverse = splat(unit > 0x1p-126f ? 255.0f / largest : 0.0f);
    UNROLL
    for (int p = 0; p < pages; p++) store_nearest((uint8_t *)score + p * PAGE, weight[p], inverse);
    return unit;
}

static float soften_pages(int pages, const struct attention *layer, const struct rows *all, int row,
                          const struct round *now, int base, float *score) {
    switch (pages) {
        case 8: return soften_bytes(8, layer, all, row, now, base, score);
        case 6: return soften_bytes(6, layer, all, row, now, base, score);
        case 4: return soften_bytes(4, layer, all, row, now, base, score);
        default: return soften_bytes(2, layer, all, row, now, base, score);
    }
}

/* As attend_round. */
SPECIALIZED void attend_byte_round(const int rows, const struct attention *layer, const struct rows *all, int row,
                                   int base, int count, const struct round *now) {
    const int dim = layer->head_dim;
    float *tile = all->query + row * dim, *out = all->out + row * dim, unit[ROWS];
    int pages = 0;
    for (; count - pages * PAGE > WIDTH / 2 * PAGE; pages += WIDTH)
        score_byte_keys(rows, WIDTH, pages, tile, dim, now, all->score);
    if (count > pages * PAGE) {
        score_byte_keys(rows, WIDTH / 2, pages, tile, dim, now, all->score);
        pages += WIDTH / 2;
    }
    for (int r = 0; r < rows; r++)
        unit[r] = soften_pages(pages, layer, all, row + r, now, base, all->score + r * BYTE_ROUND);
    int d = 0;
    for (; d + WIDTH * LANES <= dim; d += WIDTH * LANES)
        add_byte_values(rows, WIDTH, all->score, unit, dim, d, now, count, out);
    for (; d < dim; d += LANES) add_byte_values(rows, 1, all->score, unit, dim, d, now, count, out);
}
#endif

#endif

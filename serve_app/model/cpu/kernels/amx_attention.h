/* The round of attention_round.h in AMX's tiles: both products in bfloat16, 16 rows per tile. */
#ifndef SERVE_APP_AMX_ATTENTION_H
#define SERVE_APP_AMX_ATTENTION_H

#include "attention_round.h"

#if defined(BUILD_AMX)
/* Prefetch into the L2 cache: prefetching into L1 takes longer. */
SPECIALIZED void fetch_tile(const char *from) {
    UNROLL
    for (int line = 0; line < TILE_ROWS; line++) __builtin_prefetch(from + line * TILE_BYTES, 0, 2);
}

/* Compute a tile's scores of the round's keys, page by page, as the pages lie in memory. */
static void score_tile(const uint16_t *query, int head_dim, const struct round *now, float *score) {
    const int64_t page_bytes = head_dim / 32 * 1024;
#define PAGE_SCORES(page) \
    TILE_ZERO(page); \
    for (int64_t at = 0; at < page_bytes; at += 1024) { \
        TILE_LOAD(4, (const char *)query + at, 64); \
        TILE_LOAD(6, (const char *)now->keys[page] + at, 64); \
        TILE_DOT(page, 4, 6); \
        if (now->fetch) fetch_tile((const char *)now->next_keys[page] + at); \
    } \
    TILE_STORE(page, score + page * PAGE, 4 * ROUND);
    PAGE_SCORES(0) PAGE_SCORES(1) PAGE_SCORES(2) PAGE_SCORES(3)
#undef PAGE_SCORES
}

/* out += weights times values, for `width` (2 or 4) tiles of dimensions from `dim` and the round's
 * first keys, 32 keys per step. */
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

/* The scores of the tile that begins with `row`. There is room for two tiles, used alternately. */
static float *tile_scores(const struct rows *all, int row) {
    return all->score + row / TILE_ROWS % 2 * TILE_ROWS * ROUND;
}

/* online_softmax for a tile's row: two vectors of weights at a time become pairs, and a product
 * with ones sums them. */
static void online_softmax_pairs(const struct attention *layer, const struct rows *all, int row, float *score,
                                 int count, int base) {
    mask_keys(layer, all, row, score, count, base);
    vec best = maximum(load(score), load(score + LANES));
    for (int i = 2 * LANES; i < count; i += 2 * LANES)
        best = maximum(maximum(load(score + i), load(score + i + LANES)), best);
    if (any_above(best, all->running_max[row] + SLACK)) rescale_row(CACHE_BF16, layer, all, row, reduce_max(best));
    const vec largest = splat(all->running_max[row]);
    vec total = load(all->sum + row * LANES);
    for (int i = 0; i < count; i += 2 * LANES) {
        const vec first = rough_exponential2(load(score + i) - largest);
        const vec second = rough_exponential2(load(score + i + LANES) - largest);
        total = store_pairs((uint16_t *)score + i, first, second, total);
    }
    store(all->sum + row * LANES, total);
}

/* Turn a tile's scores into weights, then add the values. */
static void finish_tile(const struct attention *layer, const struct rows *all, int row, int num_rows, int base) {
    const int end = row + TILE_ROWS < num_rows ? row + TILE_ROWS : num_rows;
    const int dim = layer->head_dim, seen = all->position[end - 1] + 1 - base;
    const int steps = seen < ROUND ? (seen + 31) / 32 : ROUND / 32;
    float *score = tile_scores(all, row), *out = all->out + row * dim;
    for (int r = row; r < end; r++) online_softmax_pairs(layer, all, r, score + (r - row) * ROUND, steps * 32, base);
    int d = 0;
    for (; d + 64 <= dim; d += 64) value_tile(4, score, all->values, dim, d, steps, out);
    for (; d < dim; d += 32) value_tile(2, score, all->values, dim, d, steps, out);
}

/* Gather the first `there` values of a round, followed by zeros: memory after the sequence's last
 * key may hold NaN, which a weight of 0 does not hide. Prefetches the next round's values. */
static void gather_values(const struct round *now, int there, int head_dim, float *to) {
    for (int key = 0; key < ROUND; key += 2, to += head_dim) {
        const int64_t at = key % PAGE / 2 * head_dim;
        const float *from = (const float *)now->values[key / PAGE] + at;
        const float *next = (const float *)now->next_values[key / PAGE] + at;
        const ivec used = splat_bytes(&(int32_t){key + 1 < there ? -1 : key < there ? 0xffff : 0});
        for (int i = 0; i < head_dim; i += LANES) {
            store(to + i, (vec)(load_int(from + i) & used));
            __builtin_prefetch(next + i, 0, 2);
        }
    }
}

/* Compute all rows of a task with the keys of one round, in tiles. While the vector units turn one
 * tile's scores into weights, the tile unit computes the next tile's scores. */
static void tiles_round(const struct attention *layer, const struct rows *rows, int num_rows, int base,
                        struct round *now) {
    const int dim = layer->head_dim;
    gather_values(now, rows->position[num_rows - 1] + 1 - base, dim, rows->values);
    int before = -1;
    for (int row = 0; row < num_rows; row += TILE_ROWS) {
        const int end = row + TILE_ROWS < num_rows ? row + TILE_ROWS : num_rows;
        if (rows->position[end - 1] < base) continue;
        if (layer->window && base + ROUND <= rows->position[row] - layer->window + 1) continue;
        score_tile((const uint16_t *)rows->query + (int64_t)row * dim, dim, now, tile_scores(rows, row));
        if (before >= 0) finish_tile(layer, rows, before, num_rows, base);
        now->fetch = 0;
        before = row;
    }
    if (before >= 0) finish_tile(layer, rows, before, num_rows, base);
}
#endif

#endif

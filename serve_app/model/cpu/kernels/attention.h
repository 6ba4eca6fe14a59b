/* Causal attention over the paged KV cache.
 *
 * One layer's cache, for blocks of PAGE tokens, is in bytes (see byte_attention.h), in floats or
 * narrow: in bfloat16 if the machine multiplies pairs of it, else in half precision. In floats and
 * half precision:
 *   keys    [blocks][kv_heads][head_dim][PAGE]   transposed, so that a vector holds one dimension of many keys
 *   values  [blocks][kv_heads][PAGE][head_dim]
 * In bfloat16, two dimensions of a key and two values of a dimension are adjacent. Queries and
 * weights are rounded to bfloat16 too:
 *   keys    [blocks][kv_heads][head_dim / 2][PAGE][2]
 *   values  [blocks][kv_heads][PAGE / 2][head_dim][2]
 *
 * A task is one kv head of one sequence and some consecutive queries. Its rows are those queries
 * times the query heads that share the kv head, in this order, so every key and value loaded
 * serves all of them. ROWS rows are processed at a time. Keys are processed in rounds, counted
 * from position 0. Each round computes scores, then the softmax's running maximum and sum (as in
 * FlashAttention), then the values.
 *
 * A row's sums run over dimensions and positions in one fixed order, independent of other rows of
 * its task: a key that a row does not see has weight 0 exactly. So a row has the same bits in
 * every batch and however a prompt is cut. Positions that no token of the sequence has reached are
 * never used, whatever they contain or another thread writes there. */
#ifndef SERVE_APP_ATTENTION_H
#define SERVE_APP_ATTENTION_H

#include "amx_attention.h"
#include "byte_attention.h"
#include "threads.h"

/* The ragged batch; see AttentionBatch in attention_backend.py. */
struct batch {
    int32_t num_tokens, num_sequences;
    int64_t table_width;
    const int64_t *positions;    /* [tokens] */
    const int64_t *slots;        /* [tokens] */
    const int32_t *query_starts; /* [sequences + 1] */
    const int32_t *kv_lens;      /* [sequences] */
    const int32_t *blocks;       /* [sequences][table_width]: the blocks with the sequence's keys, then undefined */
    const uint8_t *wanted;       /* [tokens]: whether its hidden state is needed; NULL: all are */
};

struct task {
    int32_t sequence, head, first_query, num_queries; /* head: of keys and values */
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
    int num_tasks, num_threads;
};

static int last_position(const struct attend *job, const struct task *task) {
    return (int)job->batch->positions[task->first_query + task->num_queries - 1];
}

/* The first key of the first round that the task needs. */
static int first_base(const struct attend *job, const struct task *task) {
    const int window = job->layer->window, first = (int)job->batch->positions[task->first_query];
    const int round = round_of(job->layer);
    return window && first >= window ? (first - window + 1) / round * round : 0;
}

/* Find the pages of a task's keys and values for the round that begins at key `base`. Positions
 * after the task's last key use that key's page again: no row sees them. */
static void find_pages(const struct attend *job, const struct task *task, int base, const void **keys,
                       const void **values) {
    const struct attention *layer = job->layer;
    const int32_t *blocks = job->batch->blocks + task->sequence * job->batch->table_width;
    const int last_page = last_position(job, task) / PAGE;
    const int64_t size = cache_page_bytes(layer->head_dim, layer->cache);
    for (int page = 0; page < round_of(layer) / PAGE; page++) {
        const int wanted = base / PAGE + page, found = wanted < last_page ? wanted : last_page;
        const int64_t at = ((int64_t)blocks[found] * layer->num_kv_heads + task->head) * size;
        keys[page] = (const char *)job->keys + at;
        values[page] = (const char *)job->values + at;
    }
}

/* Find the pages that this thread probably needs after the round. */
static void find_next_pages(const struct attend *job, const struct task *task, int base, const void **keys,
                            const void **values) {
    const struct task *next = task + job->num_threads;
    const int following = base + round_of(job->layer);
    if (following <= last_position(job, task))
        find_pages(job, task, following, keys, values);
    else if (next < job->tasks + job->num_tasks)
        find_pages(job, next, first_base(job, next), keys, values);
    else
        find_pages(job, task, base, keys, values);
}

/* A round for `rows` rows of one format. Each is a separate function: in a common one GCC spills
 * registers. */
#define ATTEND_ROWS(name, work)                                                                                  \
    static __attribute__((noinline)) void name(int rows, const struct attention *layer, const struct rows *all, \
                                               int row, int base, int count, const struct round *now) {         \
        switch (rows) {                                                                                         \
            case 1: work(1, layer, all, row, base, count, now); break;                                          \
            case 2: work(2, layer, all, row, base, count, now); break;                                          \
            case 3: work(3, layer, all, row, base, count, now); break;                                          \
            case 4: work(4, layer, all, row, base, count, now); break;                                          \
            case 5: work(5, layer, all, row, base, count, now); break;                                          \
            case 6: work(6, layer, all, row, base, count, now); break;                                          \
        }                                                                                                       \
    }
#define FLOAT_ROUND(rows, ...) attend_round(rows, CACHE_FLOAT, __VA_ARGS__)
#define NARROW_ROUND(rows, ...) attend_round(rows, CACHE_NARROW, __VA_ARGS__)
ATTEND_ROWS(attend_float_rows, FLOAT_ROUND)
ATTEND_ROWS(attend_narrow_rows, NARROW_ROUND)
#if defined(BUILD_BYTE_CACHE)
ATTEND_ROWS(attend_byte_rows, attend_byte_round)
#endif
#undef ATTEND_ROWS
#undef FLOAT_ROUND
#undef NARROW_ROUND

static void attend_rows(int rows, const struct attention *layer, const struct rows *all, int row, int base, int count,
                        const struct round *now) {
#if defined(BUILD_BYTE_CACHE)
    if (layer->cache == CACHE_BYTES) {
        attend_byte_rows(rows, layer, all, row, base, count, now);
        return;
    }
#endif
    (layer->cache == CACHE_FLOAT ? attend_float_rows : attend_narrow_rows)(rows, layer, all, row, base, count, now);
}

/* Compute all rows of a task with the keys of one round. */
static void task_round(const struct attend *job, const struct task *task, const struct rows *rows, int num_rows,
                       int base) {
    const struct attention *layer = job->layer;
    const int round = round_of(layer);
    struct round now = {.fetch = 1};
    find_pages(job, task, base, now.keys, now.values);
    find_next_pages(job, task, base, now.next_keys, now.next_values);
#if defined(BUILD_AMX)
    if (in_tiles(layer)) {
        tiles_round(layer, rows, num_rows, base, &now);
        return;
    }
#endif
    for (int row = 0; row < num_rows; row += ROWS) {
        const int some = num_rows - row < ROWS ? num_rows - row : ROWS;
        const int seen = rows->position[row + some - 1] + 1 - base;
        if (seen <= 0) continue;
        if (layer->window && base + round <= rows->position[row] - layer->window + 1) continue;
        attend_rows(some, layer, rows, row, base, seen < round ? seen : round, &now);
        now.fetch = 0;
    }
}

/* Store one query in its place in `queries`, in the form for products with keys. */
static void put_query(const struct attention *layer, const float *query, int row, float *queries) {
#if defined(BUILD_BYTE_CACHE)
    if (layer->cache == CACHE_BYTES) {
        put_byte_query(layer, query, row % ROWS, queries + row / ROWS * ROWS * layer->head_dim);
        return;
    }
#endif
    const vec scale = splat(layer->scale * exponent_unit(layer->cache));
    if (in_tiles(layer)) {
        float *to = queries + row / TILE_ROWS * TILE_ROWS * layer->head_dim / 2 + row % TILE_ROWS * 16;
        for (int i = 0; i < layer->head_dim; i += LANES)
            store_operand(to + i / 32 * TILE_ROWS * 16, i % 32, load(query + i) * scale, layer->cache);
        return;
    }
    float lane[LANES], *to = queries + row / ROWS * ROWS * layer->head_dim + row % ROWS;
    for (int i = 0; i < layer->head_dim; i += LANES) {
        store_operand(lane, 0, load(query + i) * scale, layer->cache);
        for (int k = 0; k < LANES / interleaved(layer->cache); k++, to += ROWS) *to = lane[k];
    }
}

/* The weight of a row's sink. `head`: the first query head of the task. */
static float sink_weight(const struct attention *layer, const struct rows *rows, int head, int row) {
    if (!layer->sinks) return 0.0f;
    const float sink = layer->sinks[head + row % (layer->num_heads / layer->num_kv_heads)];
    return exponential(splat(sink - rows->running_max[row] / exponent_unit(layer->cache)))[0];
}

static void attend_task(const void *argument, int index, int thread) {
    const struct attend *job = argument;
    const struct attention *layer = job->layer;
    const struct task *task = job->tasks + index;
    const int head = task->head, dim = layer->head_dim;
    const int group = layer->num_heads / layer->num_kv_heads, num_rows = task->num_queries * group;
    const struct rows rows = rows_in(job->scratch + thread * attention_scratch(layer), num_rows, dim);
    for (int row = 0; row < num_rows; row++) {
        const int token = task->first_query + row / group;
        const float *query = job->queries + token * job->query_stride + (head * group + row % group) * dim;
        put_query(layer, query, row, rows.query);
        for (int i = 0; i < dim; i += LANES) store(rows.out + row * dim + i, splat(0.0f));
        store(rows.sum + row * LANES, splat(0.0f));
        rows.running_max[row] = -0x1.fffffep127f; /* finite: a round may hide all its keys from a row */
        rows.position[row] = (int32_t)job->batch->positions[token];
    }
    if (in_tiles(layer)) begin_tiles();
    for (int base = first_base(job, task); base <= rows.position[num_rows - 1]; base += round_of(layer))
        task_round(job, task, &rows, num_rows, base);
    if (in_tiles(layer)) end_tiles();
    for (int row = 0; row < num_rows; row++) {
        const int64_t token = task->first_query + row / group;
        float *out = job->out + (token * layer->num_heads + head * group + row % group) * dim;
        const vec total = splat(reduce_add(load(rows.sum + row * LANES)) + sink_weight(layer, &rows, head * group, row));
        for (int i = 0; i < dim; i += LANES) store(out + i, load(rows.out + row * dim + i) / total);
    }
}

/* Cut the batch into tasks; returns their number. Tasks of one sequence and head are consecutive,
 * because they share keys and values. The longest come first, so that all threads end at about the
 * same time. */
static int make_tasks(const struct attention *layer, const struct batch *batch, struct task *tasks) {
    const int size = task_queries(layer);
    int count = 0;
    for (int s = 0; s < batch->num_sequences; s++) {
        const int start = batch->query_starts[s], end = batch->query_starts[s + 1];
        if (start == end) continue;
        for (int head = 0; head < layer->num_kv_heads; head++)
            for (int first = start + (end - start - 1) / size * size; first >= start; first -= size)
                tasks[count++] = (struct task){s, head, first, end - first < size ? end - first : size};
    }
    return count;
}

/* Write one token's key and value [head_dim] of one head into its page. */
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

/* Write one token's key and value [kv_heads][head_dim] into its slot. */
static void write_cache(const struct attention *layer, const float *key, const float *value, int64_t slot, void *keys,
                        void *values) {
    const int dim = layer->head_dim;
    const int64_t size = cache_page_bytes(dim, layer->cache);
    for (int head = 0; head < layer->num_kv_heads; head++, key += dim, value += dim) {
        const int64_t page = (slot / PAGE * layer->num_kv_heads + head) * size, offset = slot % PAGE;
        void *key_page = (char *)keys + page, *value_page = (char *)values + page;
        if (layer->cache == CACHE_FLOAT)
            write_float(layer, key, value, offset, key_page, value_page);
        else if (layer->cache == CACHE_NARROW)
            write_narrow(layer, key, value, offset, key_page, value_page);
#if defined(BUILD_BYTE_CACHE)
        else
            write_bytes(dim, key, value, (int)offset, key_page, value_page);
#endif
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
    const int64_t most = (sequences + tokens / task_queries(layer)) * layer->num_kv_heads;
    return ((int64_t)sizeof(struct task) * most + 63) / 64 * 64;
}

int64_t attention_workspace(const struct attention *layer, int64_t tokens, int64_t sequences, int64_t threads) {
    return tasks_bytes(layer, tokens, sequences) + 4 * threads * attention_scratch(layer);
}

/* Attention of a single layer: write the keys and values, then out [tokens][num_heads][head_dim]
 * of queries of the same shape. `memory`: attention_workspace bytes. */
void attention(const struct attention *layer, struct pool *pool, const struct batch *batch, const float *queries,
               const float *new_keys, const float *new_values, void *keys, void *values, char *memory, float *out) {
    struct task *tasks = (struct task *)memory;
    float *scratch = (float *)(memory + tasks_bytes(layer, batch->num_tokens, batch->num_sequences));
    const struct cache_write write = {layer, batch, new_keys, new_values, keys, values};
    parallel_rows(pool, batch->num_tokens, write_chunk, &write);
    const int num_tasks = make_tasks(layer, batch, tasks);
    const struct attend attend = {
        layer, batch, tasks, keys, values, queries, (int64_t)layer->num_heads * layer->head_dim, out, scratch,
        num_tasks, pool->num_threads,
    };
    parallel(pool, num_tasks, attend_task, &attend);
}

#endif
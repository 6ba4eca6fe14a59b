/* The kernels' inner functions, to be called by themselves. */
#include "blocks.h"
#include "decoder.h"

void test_exponential(const float *x, int count, float *out) {
    for (int i = 0; i < count; i += LANES) store(out + i, exponential(load(x + i)));
}

/* Returns whether this build has it. */
int test_rough_exponential2(const float *x, int count, float *out) {
#if defined(BUILD_BYTE_CACHE)
    for (int i = 0; i < count; i += LANES) store(out + i, rough_exponential2(load(x + i)));
    return 1;
#else
    (void)x, (void)count, (void)out;
    return 0;
#endif
}

void test_rms_norm(const float *x, const float *weight, float eps, int count, float *out) {
    rms_norm(x, weight, eps, count, out);
}

void test_rotate(float *head, const float *cos, const float *sin, int half) { rotate(head, cos, sin, half); }

/* Returns whether this build has it. */
int test_spread(float *head, int head_dim) {
#if defined(BUILD_BYTE_CACHE)
    spread(head, head_dim);
    return 1;
#else
    (void)head, (void)head_dim;
    return 0;
#endif
}

void test_gated(const float *gate, const float *up, int activation, int count, float *out) {
    gated(gate, up, activation, count, out);
}

void test_round_activations(const float *x, int count, int bytes, int8_t *q, float *scale, float *sum) {
    uint8_t rounded[rounded_bytes(count, bytes)];
    round_activations(x, count, bytes, 0, 1, rounded);
    for (int g = 0; g < count / GROUP; g++) {
        const uint8_t *group = rounded + g * activation_group_bytes(bytes);
        struct group_terms terms;
        memcpy(q + g * bytes * GROUP, group, (size_t)(bytes * GROUP));
        memcpy(&terms, group + bytes * GROUP, sizeof terms);
        scale[g] = terms.scale;
        sum[g] = terms.sum;
    }
}

void test_halves(const float *x, int count, uint16_t *vectors, uint16_t *scalars, float *back, float *scalars_back) {
    for (int i = 0; i < count; i += LANES) {
        store_half(vectors + i, load(x + i));
        store(back + i, load_half(vectors + i));
    }
    for (int i = 0; i < count; i++) {
        scalars[i] = float_to_half(x[i]);
        scalars_back[i] = half_to_float(scalars[i]);
    }
}

/* A job that counts how often each chunk ran. */
static void count_chunk(const void *job, int chunk, int thread) {
    (void)thread;
    atomic_fetch_add((_Atomic int32_t *)job + chunk, 1);
}

void test_parallel(struct pool *pool, int num_chunks, int repeats, int32_t *counts) {
    for (int i = 0; i < repeats; i++) parallel(pool, num_chunks, count_chunk, counts);
}

/* Cuts a step into `count[0]` blocks of about `size` tokens. */
void test_cut(int size, int threads, int tokens, int sequences, const int *starts, int *count, int *first, int *end,
              int *needs) {
    struct pool pool = {.num_threads = threads};
    struct batch batch = {.num_tokens = tokens, .num_sequences = sequences, .query_starts = starts};
    struct block blocks[MOST_BLOCKS];
    struct in_blocks job = {.batch = &batch, .num_blocks = blocks_of(size, &pool, &batch), .blocks = blocks};
    cut(&job, &pool);
    count[0] = job.num_blocks;
    for (int i = 0; i < job.num_blocks; i++) {
        first[i] = blocks[i].first;
        end[i] = blocks[i].end;
        needs[i] = blocks[i].needs;
    }
}

/* Which block is taken next, -1 for none. */
void test_take_block(int layers, int count, const int *needs, const int *progress, int *taken) {
    struct decoder decoder = {.num_layers = layers};
    struct block blocks[MOST_BLOCKS];
    const struct in_blocks job = {.decoder = &decoder, .num_blocks = count, .blocks = blocks};
    for (int i = 0; i < count; i++) {
        blocks[i].needs = needs[i];
        atomic_init(&blocks[i].progress, progress[i]);
    }
    const struct block *block = take_block(&job);
    taken[0] = block ? (int)(block - blocks) : -1;
    if (block && atomic_load(&block->progress) != progress[taken[0]] + 1) taken[0] = -2;
}

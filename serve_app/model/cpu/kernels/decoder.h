/* One step of a decoder over the packed tokens of all sequences: from token ids to final hidden
 * states.
 *
 * There are two ways to use many threads. A row's bits are the same in both.
 * In blocks: a thread computes a block of tokens from one attention to the next. For this it needs
 * the keys of earlier blocks with tokens of the same sequence, and of no others, so a delayed
 * thread delays few others. A block's data between products stays in the thread's cache. Every
 * thread reads all weights, so a thread needs several tokens to be efficient.
 * Together, for few tokens: the threads share each loop within a layer and synchronize ten times
 * per layer. */
#ifndef SERVE_APP_DECODER_H
#define SERVE_APP_DECODER_H

#include "layer.h"

/* Bytes for the query starts of `sequences` sequences. */
static int64_t starts_bytes(int sequences) { return (4 * ((int64_t)sequences + 1) + 63) / 64 * 64; }

/* Compute all sequences of `batch` with all threads of `pool`. `memory`: together_bytes. */
static void run_together(const struct decoder *decoder, struct pool *pool, const struct batch *batch,
                         const int64_t *ids, char *memory, float *hidden) {
    struct workspace space;
    memory += lay_out_stream(decoder, batch->num_tokens, memory, &space);
    lay_out(decoder, batch->num_tokens, batch->num_sequences, pool->num_threads, memory, &space);
    struct step step = {decoder, NULL, batch, ids, &space, attention_of(decoder, decoder->layers), hidden};
    parallel_rows(pool, batch->num_tokens, embed_token, &step);
    for (int i = 0; i < decoder->num_layers; i++) {
        begin_layer(pool, &step, i);
        if (i < decoder->num_layers - 1) end_layer(pool, &step, i);
    }
    end_last_layer(pool, &step);
}

static int64_t together_bytes(const struct decoder *decoder, const struct pool *pool, const struct batch *batch) {
    struct workspace space;
    return lay_out_stream(decoder, batch->num_tokens, NULL, &space) +
           lay_out(decoder, batch->num_tokens, batch->num_sequences, pool->num_threads, NULL, &space);
}

/* A step whose tokens are divided into blocks. A block's data stays in its thread's cache. */
enum { MOST_BLOCKS = 256, TILE_TOKENS = TILES ? TILE_ROWS : MANY_ROWS };

/* The approximate number of tokens per block. Every block unpacks all weights; unpacking to AMX's
 * tiles and to floats takes longest. */
static int block_tokens(const struct decoder *decoder) {
    const enum form form = form_for(&decoder->layers[0].qkv, decoder->arithmetic, ROW_BLOCK);
    return TILES || form == AS_FLOATS ? 64 : 32;
}

/* The approximate number of tokens per block if layers have experts: each expert gets many of a
 * block's rows. */
static int mixture_block_tokens(const struct mixture *mixture) {
    enum { ROWS_PER_EXPERT = 64 };
    return ROWS_PER_EXPERT * mixture->count / mixture->used;
}

/* Minimum number of tokens for a thread that reads all weights. In tiles a few tokens cost as much
 * as many. More threads leave less memory bandwidth to each, so each needs more tokens. */
static int least_tokens_each(const struct pool *pool) {
    const int least = TILES ? 2 * TILE_ROWS : 2;
    return pool->num_threads > least ? pool->num_threads : least;
}

struct block {
    int first, end; /* its tokens */
    int needs;      /* the first block with tokens of the sequence that this block begins in */
    /* Twice the number of finished parts (see block_part), plus one while a thread computes the
     * next. */
    _Alignas(64) _Atomic int progress;
};

struct in_blocks {
    const struct decoder *decoder;
    const struct batch *batch;
    const int64_t *ids;
    float *hidden;
    struct workspace stream; /* of all tokens */
    char *memory;            /* thread_bytes for each thread */
    int64_t thread_bytes;
    int num_blocks;
    struct block *blocks;
};

/* The sequences with tokens from `first` to `end` - 1, as a batch of these tokens only. */
static struct batch part_of_batch(const struct batch *batch, int first, int end, int32_t *starts) {
    int s = 0, count = 0;
    while (batch->query_starts[s + 1] <= first) s++;
    for (int last = s; batch->query_starts[last] < end; last++, count++) {
        const int start = batch->query_starts[last];
        starts[count] = start < first ? 0 : start - first;
    }
    starts[count] = end - first;
    return (struct batch){
        end - first, count, batch->table_width, batch->positions + first, batch->slots + first, starts,
        batch->kv_lens + s, batch->blocks + s * batch->table_width, batch->wanted ? batch->wanted + first : NULL,
    };
}

/* The data that parts of a layer pass on, for the tokens from `first`. */
static struct workspace stream_from(const struct decoder *decoder, const struct workspace *stream, int first) {
    return (struct workspace){
        .x = stream->x + (int64_t)first * decoder->hidden,
        .delta = stream->delta + (int64_t)first * decoder->hidden,
        .qkv = stream->qkv + first * most_of(decoder, 0, 0).qkv,
    };
}

/* The first token of block `i`. With several blocks per thread, blocks begin at tile borders. */
static int first_of_block(const struct in_blocks *job, const struct pool *pool, int i) {
    const int tile = job->num_blocks <= pool->num_threads ? 1 : TILE_TOKENS;
    const int first = (int)((int64_t)job->batch->num_tokens * i / job->num_blocks);
    return i == job->num_blocks ? first : (first + tile / 2) / tile * tile;
}

/* Cut the step's tokens into blocks. */
static void cut(const struct in_blocks *job, const struct pool *pool) {
    const struct batch *batch = job->batch;
    for (int i = 0, s = 0, needs = 0; i < job->num_blocks; i++) {
        struct block *block = job->blocks + i;
        block->first = first_of_block(job, pool, i);
        block->end = first_of_block(job, pool, i + 1);
        while (batch->query_starts[s + 1] <= block->first) s++;
        while (job->blocks[needs].end <= batch->query_starts[s]) needs++;
        block->needs = needs;
        atomic_init(&block->progress, 0);
    }
}

/* Compute part `layer` of a block, from one attention to the next: the end of the previous layer
 * and the start of this one. */
static void block_part(const struct in_blocks *job, const struct block *block, int layer, int thread) {
    const struct decoder *decoder = job->decoder;
    struct pool alone = {.num_threads = 1};
    char *memory = job->memory + thread * job->thread_bytes;
    const struct batch part = part_of_batch(job->batch, block->first, block->end, (int32_t *)memory);
    struct workspace space = stream_from(decoder, &job->stream, block->first);
    lay_out(decoder, part.num_tokens, part.num_sequences, 1, memory + starts_bytes(part.num_sequences), &space);
    struct step step = {decoder, NULL, &part, job->ids + block->first, &space, attention_of(decoder, decoder->layers),
                        job->hidden + (int64_t)block->first * decoder->hidden};
    if (layer == 0)
        parallel_rows(&alone, part.num_tokens, embed_token, &step);
    else if (layer == decoder->num_layers)
        end_last_layer(&alone, &step);
    else
        end_layer(&alone, &step, layer - 1);
    if (layer < decoder->num_layers) begin_layer(&alone, &step, layer);
}

/* Take the block with the least progress that no thread is computing and whose tokens have all the
 * keys they see. Returns NULL if there is none, or another thread was faster. */
static struct block *take_block(const struct in_blocks *job) {
    const int done = 2 * (job->decoder->num_layers + 1);
    struct block *best = NULL;
    int least = done, before = done, behind = done; /* progress of `best`, of the previous block, of all it needs */
    for (int i = 0; i < job->num_blocks; i++) {
        struct block *block = job->blocks + i;
        const int progress = atomic_load(&block->progress);
        if (block->needs >= i - 1) behind = done;
        if (block->needs < i && before < behind) behind = before;
        if (progress % 2 == 0 && progress < least && progress <= behind) {
            best = block;
            least = progress;
        }
        before = progress;
    }
    return best && atomic_compare_exchange_strong(&best->progress, &least, least + 1) ? best : NULL;
}

/* Compute one part of a block. Every thread that waits here will get one: there are as many chunks
 * as parts. */
static void next_part(const void *argument, int chunk, int thread) {
    (void)chunk;
    const struct in_blocks *job = argument;
    struct block *block;
    for (int spins = 0; !(block = take_block(job)); spins += job->num_blocks) wait_a_moment(spins);
    block_part(job, block, atomic_load(&block->progress) / 2, thread);
    atomic_fetch_add(&block->progress, 1);
}

/* The number of blocks of about `size` tokens for a step. 0 if it has too few tokens for blocks. */
static int blocks_of(int size, const struct pool *pool, const struct batch *batch) {
    const int tokens = batch->num_tokens, threads = pool->num_threads;
    if (threads == 1 ? tokens <= size : tokens < threads * least_tokens_each(pool)) return 0;
    const int rounds = (tokens + threads * size - 1) / (threads * size);
    return rounds * threads < MOST_BLOCKS ? rounds * threads : MOST_BLOCKS;
}

/* The number of blocks of a step, or 0. */
static int num_blocks_of(const struct decoder *decoder, const struct pool *pool, const struct batch *batch) {
    if (!decoder->mixture.count) return blocks_of(block_tokens(decoder), pool, batch);
    const int size = mixture_block_tokens(&decoder->mixture);
    return batch->num_tokens < pool->num_threads * size ? 0 : blocks_of(size, pool, batch);
}

static int64_t block_bytes_of(const struct decoder *decoder, const struct batch *batch, int num_blocks) {
    struct workspace space;
    const int tokens = (batch->num_tokens + num_blocks - 1) / num_blocks + TILE_TOKENS;
    const int sequences = batch->num_sequences < tokens ? batch->num_sequences : tokens;
    return starts_bytes(sequences) + lay_out(decoder, tokens, sequences, 1, NULL, &space);
}

static int64_t blocks_bytes(const struct decoder *decoder, const struct pool *pool, const struct batch *batch,
                            int num_blocks) {
    struct workspace space;
    return lay_out_stream(decoder, batch->num_tokens, NULL, &space) +
           pool->num_threads * block_bytes_of(decoder, batch, num_blocks);
}

static void run_in_blocks(const struct decoder *decoder, struct pool *pool, const struct batch *batch,
                          const int64_t *ids, int num_blocks, char *memory, float *hidden) {
    struct block blocks[MOST_BLOCKS];
    struct in_blocks job = {decoder, batch, ids, hidden, .num_blocks = num_blocks, .blocks = blocks};
    job.memory = memory + lay_out_stream(decoder, batch->num_tokens, memory, &job.stream);
    job.thread_bytes = block_bytes_of(decoder, batch, num_blocks);
    cut(&job, pool);
    parallel(pool, num_blocks * (decoder->num_layers + 1), next_part, &job);
}

/* Bytes of working memory for decoder_step. */
int64_t decoder_workspace(const struct decoder *decoder, const struct pool *pool, const struct batch *batch) {
    const int num_blocks = num_blocks_of(decoder, pool, batch);
    return num_blocks ? blocks_bytes(decoder, pool, batch, num_blocks) : together_bytes(decoder, pool, batch);
}

/* Compute the hidden states [tokens][hidden] of `ids` after the final norm, and write keys and
 * values to the layers' caches. `memory`: decoder_workspace bytes, aligned to 64. */
void decoder_step(const struct decoder *decoder, struct pool *pool, const struct batch *batch, const int64_t *ids,
                  char *memory, float *hidden) {
    const int num_blocks = num_blocks_of(decoder, pool, batch);
    if (num_blocks)
        run_in_blocks(decoder, pool, batch, ids, num_blocks, memory, hidden);
    else
        run_together(decoder, pool, batch, ids, memory, hidden);
}

#endif

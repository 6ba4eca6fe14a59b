/* One step of a Llama-like decoder over the packed tokens of all sequences: from token ids to final hidden states.
 *
 * Three ways to use many threads; a row's bits are the same in each.
 * In blocks, for many tokens: each thread takes blocks of tokens through a layer, up to the next one's attention,
 * before which they meet. What a block has between its products stays in the thread's cache.
 * Apart: each thread takes some of the sequences through all layers, and they meet once a step; who is done first
 * takes over half of what another one still has before it (other processes use these cores too). Every thread reads
 * all weights, so it takes some tokens each to pay.
 * Together, for few tokens: the threads share out each loop within a layer and meet ten times a layer.
 */
#ifndef SERVE_APP_DECODER_H
#define SERVE_APP_DECODER_H

#include "layer.h"

/* Memory for the starts of so many sequences. */
static int64_t starts_bytes(int sequences) { return (4 * ((int64_t)sequences + 1) + 63) / 64 * 64; }

/* All sequences of `batch`, with all threads of `pool`. `memory`: together_bytes. */
static void run_together(const struct decoder *decoder, struct pool *pool, const struct batch *batch,
                         const int64_t *ids, char *memory, float *hidden) {
    struct workspace space;
    memory += lay_out_stream(decoder, batch->num_tokens, memory, &space);
    lay_out(decoder, batch->num_tokens, batch->num_sequences, pool->num_threads, memory, &space);
    struct step step = {decoder, NULL, batch, ids, &space, attention_of(decoder, NULL), hidden};
    const int num_tasks = make_tasks(&step.attention, batch, space.tasks);
    parallel_rows(pool, batch->num_tokens, embed_token, &step);
    for (int i = 0; i < decoder->num_layers; i++) {
        begin_layer(pool, &step, i);
        if (i < decoder->num_layers - 1) end_layer(pool, &step, i, num_tasks);
    }
    end_last_layer(pool, &step);
}

static int64_t together_bytes(const struct decoder *decoder, const struct pool *pool, const struct batch *batch) {
    struct workspace space;
    return lay_out_stream(decoder, batch->num_tokens, NULL, &space) +
           lay_out(decoder, batch->num_tokens, batch->num_sequences, pool->num_threads, NULL, &space);
}

/* A step whose tokens are shared out in blocks, which lie in the cache of the thread that works on them. Before
 * attention all of them wait for each other's keys. */
enum { MOST_BLOCKS = 64, BLOCK_TOKENS = 64 };

struct in_blocks {
    const struct decoder *decoder;
    const struct batch *batch;
    const int64_t *ids;
    float *hidden;
    struct workspace stream; /* of all tokens */
    char *memory;            /* thread_bytes for each thread */
    int64_t thread_bytes;
    int num_blocks;
    int layer; /* that is begun; the one before is ended */
};

static int first_of_block(const struct in_blocks *job, int block) {
    return (int)((int64_t)job->batch->num_tokens * block / job->num_blocks);
}

/* The sequences that have tokens from `first` to end - 1, as a batch of these alone. */
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

/* What outlives a part of a layer, of the tokens from `first` on. */
static struct workspace stream_from(const struct decoder *decoder, const struct workspace *stream, int first) {
    return (struct workspace){
        .x = stream->x + (int64_t)first * decoder->hidden,
        .delta = stream->delta + (int64_t)first * decoder->hidden,
        .qkv = stream->qkv + (int64_t)first * decoder->layers[0].qkv.outputs,
    };
}

static void block_layer(const void *argument, int chunk, int thread) {
    const struct in_blocks *job = argument;
    const struct decoder *decoder = job->decoder;
    struct pool alone = {.num_threads = 1};
    const int block = job->num_blocks - 1 - chunk; /* the longest first */
    const int first = first_of_block(job, block), end = first_of_block(job, block + 1);
    char *memory = job->memory + thread * job->thread_bytes;
    const struct batch part = part_of_batch(job->batch, first, end, (int32_t *)memory);
    struct workspace space = stream_from(decoder, &job->stream, first);
    lay_out(decoder, part.num_tokens, part.num_sequences, 1, memory + starts_bytes(part.num_sequences), &space);
    struct step step = {decoder, NULL, &part, job->ids + first, &space, attention_of(decoder, NULL),
                        job->hidden + (int64_t)first * decoder->hidden};
    if (job->layer == 0)
        parallel_rows(&alone, part.num_tokens, embed_token, &step);
    else if (job->layer == decoder->num_layers)
        end_last_layer(&alone, &step);
    else
        end_layer(&alone, &step, job->layer - 1, make_tasks(&step.attention, &part, space.tasks));
    if (job->layer < decoder->num_layers) begin_layer(&alone, &step, job->layer);
}

/* How many blocks a step is to be cut into; 0 if it has too few tokens for that. */
static int blocks_of(const struct pool *pool, const struct batch *batch) {
    const int tokens = batch->num_tokens, threads = pool->num_threads;
    if (threads == 1 ? tokens <= BLOCK_TOKENS : tokens < threads * BLOCK_TOKENS / 2) return 0;
    const int rounds = (tokens + threads * BLOCK_TOKENS - 1) / (threads * BLOCK_TOKENS);
    return rounds * threads < MOST_BLOCKS ? rounds * threads : MOST_BLOCKS;
}

static int64_t block_bytes_of(const struct decoder *decoder, const struct batch *batch, int num_blocks) {
    struct workspace space;
    const int tokens = (batch->num_tokens + num_blocks - 1) / num_blocks;
    const int sequences = batch->num_sequences < tokens ? batch->num_sequences : tokens;
    return starts_bytes(sequences) + lay_out(decoder, tokens, sequences, 1, NULL, &space);
}

static void run_in_blocks(const struct decoder *decoder, struct pool *pool, const struct batch *batch,
                          const int64_t *ids, int num_blocks, char *memory, float *hidden) {
    struct in_blocks job = {decoder, batch, ids, hidden, .num_blocks = num_blocks};
    job.memory = memory + lay_out_stream(decoder, batch->num_tokens, memory, &job.stream);
    job.thread_bytes = block_bytes_of(decoder, batch, num_blocks);
    for (job.layer = 0; job.layer <= decoder->num_layers; job.layer++) parallel(pool, num_blocks, block_layer, &job);
}

/* In tiles a few tokens cost as much as many. */
enum { MOST_SHARES = 64, LEAST_SHARE_TOKENS = TILES ? 2 * TILE_ROWS : 4, LEAST_SHARE_LAYERS = 3 };

/* Sequences first to end - 1, which have passed `layer` layers. */
struct share {
    int first, end, layer;
};

/* A step whose sequences are shared out. */
struct apart {
    const struct decoder *decoder;
    const struct batch *batch;
    const int64_t *ids;
    float *hidden;
    struct workspace stream; /* of all tokens, so that a share can change hands between two layers */
    char *memory;            /* thread_bytes for each thread */
    int64_t thread_bytes;
    int least_tokens; /* of a share */
    int last_giving;  /* the layer before which a share can be halved for the last time */
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    _Atomic int32_t idle;   /* threads that wait for a share */
    _Atomic int32_t givers; /* shares that can still be halved */
    _Atomic int32_t num_untaken;
    struct share untaken[MOST_SHARES];
};

/* About how long a sequence's tokens take, in products of floats of one layer. */
static double sequence_cost(const struct decoder *decoder, const struct batch *batch, int sequence) {
    const struct layer *layer = decoder->layers;
    const struct weight *weights[] = {&layer->qkv, &layer->out, &layer->gate_up, &layer->down};
    double per_token = 2.0 * decoder->num_heads * decoder->head_dim * batch->kv_lens[sequence];
    static const double cost[] = {[EXACT] = 1.0, [INT8] = 0.25, [BFLOAT16] = 0.5};
    for (int i = 0; i < 4; i++) per_token += cost[decoder->arithmetic] * weights[i]->outputs * weights[i]->inputs;
    return per_token * (batch->query_starts[sequence + 1] - batch->query_starts[sequence]);
}

/* Cut a share's sequences, in their order, into `count` shares. Whether that pays: each is at most a fifth above the
 * mean (nobody takes over a part of a sequence) and they have `least_tokens` on the mean. */
static int cut_evenly(const struct decoder *decoder, const struct batch *batch, struct share whole, int count,
                      int least_tokens, struct share *shares) {
    double total = 0, reached = 0, begun = 0;
    const int tokens = batch->query_starts[whole.end] - batch->query_starts[whole.first];
    if (count < 2 || count > MOST_SHARES || tokens < count * least_tokens) return 0;
    for (int s = whole.first; s < whole.end; s++) total += sequence_cost(decoder, batch, s);
    for (int share = 0, s = whole.first; share < count; share++, begun = reached) {
        shares[share] = (struct share){s, s, whole.layer};
        for (double cost; s < whole.end; s++, reached += cost) {
            cost = sequence_cost(decoder, batch, s);
            if (reached + cost / 2 > total * (share + 1) / count) break; /* without it nearer to what is due */
        }
        if (reached - begun > 1.2 * total / count) return 0;
        shares[share].end = s;
    }
    return 1;
}

/* The more threads read all weights, the less of the memory's bandwidth is each one's, and the more tokens it takes to
 * make up for that. */
static int least_share_tokens(const struct pool *pool) {
    return pool->num_threads > LEAST_SHARE_TOKENS ? pool->num_threads : LEAST_SHARE_TOKENS;
}

/* The first shares of a step, one for each thread, if it is to be run apart. */
static int cut_step(const struct decoder *decoder, const struct pool *pool, const struct batch *batch,
                    struct share *shares) {
    const struct share whole = {0, batch->num_sequences, 0};
    return cut_evenly(decoder, batch, whole, pool->num_threads, least_share_tokens(pool), shares);
}

/* Working memory of a thread, enough for any of `shares`: the starts of its sequences, then its workspace. */
static int64_t share_bytes(const struct decoder *decoder, const struct batch *batch, const struct share *shares,
                           int count) {
    int64_t most = 0;
    for (int i = 0; i < count; i++) {
        const int tokens = batch->query_starts[shares[i].end] - batch->query_starts[shares[i].first];
        const int sequences = shares[i].end - shares[i].first;
        struct workspace space;
        const int64_t bytes = starts_bytes(sequences) + lay_out(decoder, tokens, sequences, 1, NULL, &space);
        most = bytes > most ? bytes : most;
    }
    return most;
}

static int last_giving(const struct decoder *decoder) {
    return decoder->num_layers > LEAST_SHARE_LAYERS ? decoder->num_layers - LEAST_SHARE_LAYERS : 0;
}

/* If a thread waits for work, give it the second half of `share`, which has come to its layer. */
static int give_half(struct apart *apart, struct share *share) {
    struct share halves[2];
    if (atomic_load(&apart->idle) <= atomic_load(&apart->num_untaken)) return 0;
    if (share->layer > apart->last_giving) return 0;
    if (!cut_evenly(apart->decoder, apart->batch, *share, 2, apart->least_tokens, halves)) return 0;
    pthread_mutex_lock(&apart->mutex);
    const int wanted = atomic_load(&apart->idle) > atomic_load(&apart->num_untaken);
    if (wanted) {
        apart->untaken[atomic_fetch_add(&apart->num_untaken, 1)] = halves[1];
        atomic_fetch_add(&apart->givers, 1);
        pthread_cond_signal(&apart->changed);
        *share = halves[0];
    }
    pthread_mutex_unlock(&apart->mutex);
    return wanted;
}

/* A share has come so far that nothing of it will be given away any more. Those who wait for that may go: a step waits
 * for all its threads, also for one that was put aside while it slept. */
static void end_giving(struct apart *apart) {
    pthread_mutex_lock(&apart->mutex);
    if (atomic_fetch_sub(&apart->givers, 1) == 1) pthread_cond_broadcast(&apart->changed);
    pthread_mutex_unlock(&apart->mutex);
}

/* Take `share` through the layers that are before it, with one thread, in its `memory`. */
static void run_share(struct apart *apart, struct share share, char *memory) {
    const struct decoder *decoder = apart->decoder;
    const struct batch *batch = apart->batch;
    struct pool alone = {.num_threads = 1};
    const int token = batch->query_starts[share.first];
    int32_t *starts = (int32_t *)memory;
    struct workspace space = stream_from(decoder, &apart->stream, token);
    struct batch part = {0};
    struct step step = {decoder, NULL, &part, apart->ids + token, &space, attention_of(decoder, NULL),
                        apart->hidden + (int64_t)token * decoder->hidden};
    const int begun = share.layer;
    for (int num_tasks = 0; share.layer < decoder->num_layers; share.layer++) {
        if (give_half(apart, &share) || share.layer == begun) {
            part = part_of_batch(batch, token, batch->query_starts[share.end], starts);
            lay_out(decoder, part.num_tokens, part.num_sequences, 1, memory + starts_bytes(part.num_sequences), &space);
            num_tasks = make_tasks(&step.attention, &part, space.tasks);
        }
        if (share.layer == apart->last_giving) end_giving(apart);
        if (share.layer == 0) parallel_rows(&alone, part.num_tokens, embed_token, &step);
        begin_layer(&alone, &step, share.layer);
        if (share.layer < decoder->num_layers - 1) end_layer(&alone, &step, share.layer, num_tasks);
    }
    end_last_layer(&alone, &step);
}

/* A share that nobody works on, once there is one. 0 when there will be none. */
static int take_share(struct apart *apart, struct share *share) {
    atomic_fetch_add(&apart->idle, 1);
    for (int spin = 0; spin < SPINS && !atomic_load(&apart->num_untaken) && atomic_load(&apart->givers); spin++) relax();
    pthread_mutex_lock(&apart->mutex);
    while (!atomic_load(&apart->num_untaken) && atomic_load(&apart->givers))
        pthread_cond_wait(&apart->changed, &apart->mutex);
    const int found = atomic_load(&apart->num_untaken) > 0;
    if (found) *share = apart->untaken[atomic_fetch_sub(&apart->num_untaken, 1) - 1];
    atomic_fetch_sub(&apart->idle, 1);
    pthread_mutex_unlock(&apart->mutex);
    return found;
}

/* What each thread does: work on shares until none is left. */
static void run_shares(const void *argument, int chunk, int thread) {
    (void)thread;
    struct apart *apart = *(struct apart *const *)argument;
    for (struct share share; take_share(apart, &share);)
        run_share(apart, share, apart->memory + chunk * apart->thread_bytes);
}

/* Bytes of working memory for decoder_step. */
int64_t decoder_workspace(const struct decoder *decoder, const struct pool *pool, const struct batch *batch) {
    struct share shares[MOST_SHARES];
    struct workspace space;
    const int num_blocks = blocks_of(pool, batch);
    if (num_blocks)
        return lay_out_stream(decoder, batch->num_tokens, NULL, &space) +
               pool->num_threads * block_bytes_of(decoder, batch, num_blocks);
    if (!cut_step(decoder, pool, batch, shares)) return together_bytes(decoder, pool, batch);
    return lay_out_stream(decoder, batch->num_tokens, NULL, &space) +
           pool->num_threads * share_bytes(decoder, batch, shares, pool->num_threads);
}

/* Hidden states [tokens][hidden] of `ids` after the final norm; keys and values go to the layers' caches. `memory`:
 * decoder_workspace bytes, aligned to 64. */
void decoder_step(const struct decoder *decoder, struct pool *pool, const struct batch *batch, const int64_t *ids,
                  char *memory, float *hidden) {
    struct apart apart = {
        decoder, batch, ids, hidden,
        .least_tokens = least_share_tokens(pool),
        .last_giving = last_giving(decoder),
        .mutex = PTHREAD_MUTEX_INITIALIZER,
        .changed = PTHREAD_COND_INITIALIZER,
        .givers = pool->num_threads,
        .num_untaken = pool->num_threads,
    };
    const int num_blocks = blocks_of(pool, batch);
    if (num_blocks) {
        run_in_blocks(decoder, pool, batch, ids, num_blocks, memory, hidden);
        return;
    }
    if (!cut_step(decoder, pool, batch, apart.untaken)) {
        run_together(decoder, pool, batch, ids, memory, hidden);
        return;
    }
    apart.memory = memory + lay_out_stream(decoder, batch->num_tokens, memory, &apart.stream);
    apart.thread_bytes = share_bytes(decoder, batch, apart.untaken, pool->num_threads);
    struct apart *shared = &apart;
    parallel(pool, pool->num_threads, run_shares, &shared);
}

#endif

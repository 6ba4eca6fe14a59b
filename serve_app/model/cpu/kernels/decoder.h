/* One step of a Llama-like decoder over the packed tokens of all sequences: from token ids to final hidden states.
 *
 * Per layer: norm, q k v, rotary positions and cache write, attention, output product, norm, gated MLP.
 *
 * Two ways to use many threads. Apart: each thread takes some of the sequences through all layers, and they meet once a
 * step; every thread reads all weights, so it takes some tokens each to pay. Together: every loop below is shared out
 * over the threads, by tokens, by panels of weights, or by attention tasks, and they meet ten times a layer; for few
 * tokens, and for a prompt that outweighs the other sequences. A row's bits are the same either way.
 */
#ifndef SERVE_APP_DECODER_H
#define SERVE_APP_DECODER_H

#include "attention.h"
#include "elementwise.h"
#include "matmul.h"

struct layer {
    struct weight qkv, out, gate_up, down;
    const float *input_norm, *post_norm; /* [hidden] */
    const float *query_norm, *key_norm;  /* [head_dim] or NULL */
    void *keys, *values;
    int64_t window;
};

struct decoder {
    int32_t num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim;
    int32_t rotary_half; /* pairs of each head that are turned */
    int32_t activation;
    int32_t int8;        /* products in 8 bits, cache in half precision */
    float eps, scale;
    const float *embedding;  /* [vocabulary][hidden] */
    const float *final_norm; /* [hidden] */
    const float *cos, *sin;  /* [positions][rotary_half] */
    struct layer *layers;
};

/* Memory of a step. Sizes are in floats per token. */
struct workspace {
    float *x;       /* [hidden] the residual stream */
    float *delta;   /* [hidden] what is added to it next */
    float *normed;  /* [widest input of a product] */
    float *qkv;     /* [padded outputs of qkv] */
    float *gate_up; /* [padded outputs of gate_up] */
    struct input input; /* `normed`, also in fixed point where the next product wants it */
    struct task *tasks;
    float *scratch;
};

/* What the loops over tokens need. */
struct step {
    const struct decoder *decoder;
    const struct layer *layer;
    const struct batch *batch;
    const int64_t *ids;
    const struct workspace *space;
    struct attention attention;
    float *out;
};

static int64_t widest_input(const struct decoder *decoder) {
    const int64_t heads = (int64_t)decoder->num_heads * decoder->head_dim;
    const int64_t wide = heads > decoder->intermediate ? heads : decoder->intermediate;
    return wide > decoder->hidden ? wide : decoder->hidden;
}

static struct attention attention_of(const struct decoder *decoder, const struct layer *layer) {
    return (struct attention){decoder->num_heads, decoder->num_kv_heads, decoder->head_dim,
                              layer ? (int)layer->window : 0, decoder->int8, decoder->scale};
}

/* Lays the workspace out from `memory` on; returns its size in bytes (so NULL asks for the size). */
static int64_t lay_out(const struct decoder *decoder, int64_t tokens, int64_t sequences, int64_t threads, char *memory,
                       struct workspace *space) {
    const int64_t wide = widest_input(decoder), groups = (wide + GROUP - 1) / GROUP;
    const struct attention attention = attention_of(decoder, NULL);
    int64_t used = 0;
#define TAKE(pointer, bytes) (pointer = (void *)(memory + used), used += ((bytes) + 63) / 64 * 64)
    TAKE(space->x, 4 * tokens * decoder->hidden);
    TAKE(space->delta, 4 * tokens * decoder->layers[0].out.outputs);
    TAKE(space->normed, 4 * tokens * wide);
    TAKE(space->qkv, 4 * tokens * decoder->layers[0].qkv.outputs);
    TAKE(space->gate_up, 4 * tokens * decoder->layers[0].gate_up.outputs);
    space->input.x = space->normed;
    TAKE(space->input.q, MOST_BYTES * tokens * wide);
    TAKE(space->input.scale, 4 * tokens * groups);
    TAKE(space->input.sum, 4 * tokens * groups);
    TAKE(space->input.centre, 8 * tokens * groups);
    TAKE(space->tasks, tasks_bytes(&attention, tokens, sequences));
    TAKE(space->scratch, 4 * threads * attention_scratch(&attention));
#undef TAKE
    return used;
}

/* Token `t`'s input to the product with `next`, as that product takes it. */
static void prepare_input(const struct step *step, int t, const struct weight *next) {
    const struct input *input = &step->space->input;
    const int bytes = activation_bytes(next, step->decoder->int8);
    const int64_t first = (int64_t)t * next->inputs, groups = next->inputs / GROUP;
    if (!bytes) return;
    quantize_row(input->x + first, next->inputs, bytes, (int8_t *)input->q + first * bytes,
                 (float *)input->scale + t * groups, (float *)input->sum + t * groups,
                 (int32_t *)input->centre + 2 * t * groups);
}

static void embed_token(const void *argument, int t, int thread) {
    (void)thread;
    const struct step *step = argument;
    const int64_t hidden = step->decoder->hidden;
    memcpy(step->space->x + t * hidden, step->decoder->embedding + step->ids[t] * hidden, (size_t)hidden * 4);
}

static void input_norm_token(const void *argument, int t, int thread) {
    (void)thread;
    const struct step *step = argument;
    const int hidden = step->decoder->hidden;
    float *x = step->space->x + (int64_t)t * hidden, *normed = step->space->normed + (int64_t)t * hidden;
    if (step->layer != step->decoder->layers) add(x, step->space->delta + (int64_t)t * hidden, hidden);
    rms_norm(x, step->layer->input_norm, step->decoder->eps, hidden, normed);
    prepare_input(step, t, &step->layer->qkv);
}

static void post_norm_token(const void *argument, int t, int thread) {
    (void)thread;
    const struct step *step = argument;
    const int hidden = step->decoder->hidden;
    float *x = step->space->x + (int64_t)t * hidden, *normed = step->space->normed + (int64_t)t * hidden;
    add(x, step->space->delta + (int64_t)t * hidden, hidden);
    rms_norm(x, step->layer->post_norm, step->decoder->eps, hidden, normed);
    prepare_input(step, t, &step->layer->gate_up);
}

static void final_norm_token(const void *argument, int t, int thread) {
    (void)thread;
    const struct step *step = argument;
    const int hidden = step->decoder->hidden;
    float *x = step->space->x + (int64_t)t * hidden;
    add(x, step->space->delta + (int64_t)t * hidden, hidden);
    rms_norm(x, step->decoder->final_norm, step->decoder->eps, hidden, step->out + (int64_t)t * hidden);
}

static void position_token(const void *argument, int t, int thread) {
    (void)thread;
    const struct step *step = argument;
    const struct decoder *decoder = step->decoder;
    const struct layer *layer = step->layer;
    const int64_t at = step->batch->positions[t] * decoder->rotary_half;
    const int dim = decoder->head_dim, turned = decoder->num_heads + decoder->num_kv_heads;
    float *qkv = step->space->qkv + (int64_t)t * layer->qkv.outputs;
    for (int head = 0; head < turned; head++) {
        const float *norm = head < decoder->num_heads ? layer->query_norm : layer->key_norm;
        if (norm) rms_norm(qkv + head * dim, norm, decoder->eps, dim, qkv + head * dim);
        rotate(qkv + head * dim, decoder->cos + at, decoder->sin + at, decoder->rotary_half);
    }
    write_cache(&step->attention, qkv + decoder->num_heads * dim, qkv + turned * dim, step->batch->slots[t],
                layer->keys, layer->values);
}

static void attended_token(const void *argument, int t, int thread) {
    (void)thread;
    const struct step *step = argument;
    prepare_input(step, t, &step->layer->out);
}

static void activate_token(const void *argument, int t, int thread) {
    (void)thread;
    const struct step *step = argument;
    const int count = step->decoder->intermediate;
    const float *gate = step->space->gate_up + (int64_t)t * step->layer->gate_up.outputs;
    gated(gate, gate + count, step->decoder->activation, count, step->space->normed + (int64_t)t * count);
    prepare_input(step, t, &step->layer->down);
}

static void run_layer(struct pool *pool, struct step *step, const struct attend *attend) {
    const struct decoder *decoder = step->decoder;
    const struct layer *layer = step->layer;
    const struct workspace *space = step->space;
    const int tokens = step->batch->num_tokens;
    parallel(pool, tokens, input_norm_token, step);
    matmul(pool, &layer->qkv, decoder->int8, &space->input, tokens, space->qkv);
    parallel(pool, tokens, position_token, step);
    parallel(pool, attend->num_chunks, attend_chunk, attend);
    parallel(pool, tokens, attended_token, step);
    matmul(pool, &layer->out, decoder->int8, &space->input, tokens, space->delta);
    parallel(pool, tokens, post_norm_token, step);
    matmul(pool, &layer->gate_up, decoder->int8, &space->input, tokens, space->gate_up);
    parallel(pool, tokens, activate_token, step);
    matmul(pool, &layer->down, decoder->int8, &space->input, tokens, space->delta);
}

/* All sequences of `batch`, with all threads of `pool`. `memory`: lay_out's bytes. */
static void run_together(const struct decoder *decoder, struct pool *pool, const struct batch *batch,
                         const int64_t *ids, char *memory, float *hidden) {
    struct workspace space;
    lay_out(decoder, batch->num_tokens, batch->num_sequences, pool->num_threads, memory, &space);
    struct step step = {decoder, NULL, batch, ids, &space, attention_of(decoder, NULL), hidden};
    const int num_chunks = make_tasks(&step.attention, batch, space.tasks) * decoder->num_kv_heads;
    parallel(pool, batch->num_tokens, embed_token, &step);
    for (int i = 0; i < decoder->num_layers; i++) {
        step.layer = decoder->layers + i;
        step.attention = attention_of(decoder, step.layer);
        const struct attend attend = {
            &step.attention, batch, space.tasks, step.layer->keys, step.layer->values, space.qkv,
            step.layer->qkv.outputs, space.normed, space.scratch, num_chunks, pool->num_threads,
        };
        run_layer(pool, &step, &attend);
    }
    parallel(pool, batch->num_tokens, final_norm_token, &step);
}

enum { MOST_SHARES = 64, LEAST_SHARE_TOKENS = 4 };

/* The sequences of a step, cut into a share for each thread: share i has those from first[i] to first[i + 1]. */
struct shares {
    const struct decoder *decoder;
    const struct batch *batch;
    const int64_t *ids;
    float *hidden;
    char *memory[MOST_SHARES];
    int first[MOST_SHARES + 1];
};

/* About how long a sequence's tokens take, in products of floats of one layer. */
static double sequence_cost(const struct decoder *decoder, const struct batch *batch, int sequence) {
    const struct layer *layer = decoder->layers;
    const struct weight *weights[] = {&layer->qkv, &layer->out, &layer->gate_up, &layer->down};
    double per_token = 2.0 * decoder->num_heads * decoder->head_dim * batch->kv_lens[sequence];
    for (int i = 0; i < 4; i++) per_token += (decoder->int8 ? 0.25 : 1.0) * weights[i]->outputs * weights[i]->inputs;
    return per_token * (batch->query_starts[sequence + 1] - batch->query_starts[sequence]);
}

/* Cut the sequences, in their order, into `count` shares. Whether that pays: each is at most a fifth above the mean, for
 * nobody takes over a share that is begun, and large enough. The more threads read all weights, the less of the
 * memory's bandwidth is each one's, and the more tokens it takes to make up for that. */
static int cut_evenly(const struct decoder *decoder, const struct batch *batch, int count, int *first) {
    double total = 0, reached = 0, begun = 0;
    const int least = count > LEAST_SHARE_TOKENS ? count : LEAST_SHARE_TOKENS;
    if (count < 2 || count > MOST_SHARES || batch->num_tokens < count * least) return 0;
    for (int s = 0; s < batch->num_sequences; s++) total += sequence_cost(decoder, batch, s);
    first[0] = 0;
    for (int share = 0, s = 0; share < count; share++, begun = reached) {
        for (double cost; s < batch->num_sequences; s++, reached += cost) {
            cost = sequence_cost(decoder, batch, s);
            if (reached + cost / 2 > total * (share + 1) / count) break; /* without it nearer to what is due */
        }
        if (reached - begun > 1.2 * total / count) return 0;
        first[share + 1] = s;
    }
    return 1;
}

static int64_t starts_bytes(int sequences) { return (4 * ((int64_t)sequences + 1) + 63) / 64 * 64; }

static int64_t share_bytes(const struct decoder *decoder, const struct batch *batch, const int *first) {
    const int tokens = batch->query_starts[first[1]] - batch->query_starts[first[0]], sequences = first[1] - first[0];
    struct workspace space;
    return starts_bytes(sequences) + lay_out(decoder, tokens, sequences, 1, NULL, &space);
}

static void run_share(const void *argument, int share, int thread) {
    (void)thread;
    const struct shares *shares = argument;
    const struct batch *batch = shares->batch;
    struct pool alone = {.num_threads = 1};
    const int first = shares->first[share], sequences = shares->first[share + 1] - first;
    const int token = batch->query_starts[first];
    int32_t *starts = (int32_t *)shares->memory[share];
    for (int s = 0; s <= sequences; s++) starts[s] = batch->query_starts[first + s] - token;
    const struct batch part = {
        starts[sequences], sequences, batch->positions + token, batch->slots + token, starts,
        batch->kv_lens + first, batch->block_starts + first, batch->blocks,
    };
    run_together(shares->decoder, &alone, &part, shares->ids + token,
                 shares->memory[share] + starts_bytes(sequences),
                 shares->hidden + (int64_t)token * shares->decoder->hidden);
}

/* Bytes of working memory for decoder_step. */
int64_t decoder_workspace(const struct decoder *decoder, const struct pool *pool, const struct batch *batch) {
    int first[MOST_SHARES + 1];
    struct workspace space;
    if (!cut_evenly(decoder, batch, pool->num_threads, first))
        return lay_out(decoder, batch->num_tokens, batch->num_sequences, pool->num_threads, NULL, &space);
    int64_t used = 0;
    for (int i = 0; i < pool->num_threads; i++) used += share_bytes(decoder, batch, first + i);
    return used;
}

/* Hidden states [tokens][hidden] of `ids` after the final norm; keys and values go to the layers' caches. `memory`:
 * decoder_workspace bytes, aligned to 64. */
void decoder_step(const struct decoder *decoder, struct pool *pool, const struct batch *batch, const int64_t *ids,
                  char *memory, float *hidden) {
    struct shares shares = {decoder, batch, ids, hidden, {NULL}, {0}};
    if (!cut_evenly(decoder, batch, pool->num_threads, shares.first)) {
        run_together(decoder, pool, batch, ids, memory, hidden);
        return;
    }
    for (int i = 0; i < pool->num_threads; i++) {
        shares.memory[i] = memory;
        memory += share_bytes(decoder, batch, shares.first + i);
    }
    parallel(pool, pool->num_threads, run_share, &shares);
}

#endif

/* One layer of a decoder over packed tokens: norm, q k v, rotary positions and cache write,
 * attention, output product, norm, gated MLP or mixture of experts. The threads of a pool share
 * every loop: by tokens, by panels of weights, or by attention tasks. */
#ifndef SERVE_APP_LAYER_H
#define SERVE_APP_LAYER_H

#include "attention.h"
#include "experts.h"

struct layer {
    struct weight qkv, out, gate_up, down; /* the last two without weights if the layer has experts */
    struct experts experts;
    const float *attention_in, *mlp_in;   /* [hidden] norms of the residual stream */
    const float *attention_out, *mlp_out; /* [hidden] norms of what is added to it, or NULL */
    const float *query_norm, *key_norm;   /* [head_dim] or NULL */
    const float *value_norm;              /* [head_dim] or NULL */
    const float *cos, *sin;               /* [positions][rotary_half], or NULL without positions */
    const float *sinks;                   /* [heads] or NULL; see struct attention */
    void *keys, *values;
    int32_t num_heads, num_kv_heads, head_dim, window, intermediate;
    int32_t rotary_half; /* pairs of each head that are rotated */
    float scale;         /* of the scores */
    float factor;        /* of the residual stream after the layer */
};

struct decoder {
    int32_t num_layers, hidden, activation;
    int32_t arithmetic; /* of products */
    int32_t cache;      /* its format */
    float eps, embedding_factor;
    struct mixture mixture;
    struct weight embedding;
    const float *final_norm; /* [hidden] */
    struct layer *layers;
};

/* Memory of some tokens while they pass through the layers. Sizes are in floats per token. A layer
 * passes only the first two on to the next layer; begin_layer passes only the first three on to
 * end_layer. */
struct workspace {
    float *x;       /* [hidden] the residual stream */
    float *delta;   /* [hidden] what is added to `x` next */
    float *qkv;     /* [most padded outputs of qkv] */
    float *normed;  /* [widest input of a product] */
    float *gate_up; /* [most padded outputs of gate_up] */
    struct expert_rows experts;
    struct input input; /* `normed`, and its rounded form if the next product needs it */
    struct task *tasks;
    float *scratch;
    /* For the tokens whose hidden states are needed; see keep_wanted. */
    int32_t *kept, *starts;
    int64_t *positions;
};

/* Arguments of the loops over tokens. */
struct step {
    const struct decoder *decoder;
    const struct layer *layer;
    const struct batch *batch;
    const int64_t *ids;
    const struct workspace *space;
    struct attention attention;
    float *out;
};

static struct attention attention_of(const struct decoder *decoder, const struct layer *layer) {
    return (struct attention){layer->num_heads, layer->num_kv_heads, layer->head_dim,
                              layer->window, decoder->cache, layer->scale, layer->sinks};
}

/* What the layers need at most: numbers per token, bytes of tasks, floats per thread. */
struct sizes {
    int64_t qkv, gate_up, wide, tasks, scratch;
};

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static struct sizes most_of(const struct decoder *decoder, int64_t tokens, int64_t sequences) {
    struct sizes most = {.wide = decoder->hidden};
    for (const struct layer *layer = decoder->layers; layer < decoder->layers + decoder->num_layers; layer++) {
        const struct attention attention = attention_of(decoder, layer);
        most.qkv = larger(most.qkv, layer->qkv.outputs);
        most.gate_up = larger(most.gate_up, layer->gate_up.outputs);
        most.wide = larger(most.wide, larger(layer->out.inputs, layer->intermediate));
        most.tasks = larger(most.tasks, tasks_bytes(&attention, tokens, sequences));
        most.scratch = larger(most.scratch, attention_scratch(&attention));
    }
    return most;
}

/* Lay out, from `memory`, the data that parts of a layer pass on. Returns its size in bytes; call
 * it with NULL to get the size. */
static int64_t lay_out_stream(const struct decoder *decoder, int64_t tokens, char *memory, struct workspace *space) {
    int64_t used = 0;
    TAKE(space->x, 4 * tokens * decoder->hidden);
    TAKE(space->delta, 4 * tokens * decoder->hidden);
    TAKE(space->qkv, 4 * tokens * most_of(decoder, 0, 0).qkv);
    return used;
}

/* Lay out the rest of the workspace, like lay_out_stream. */
static int64_t lay_out(const struct decoder *decoder, int64_t tokens, int64_t sequences, int64_t threads, char *memory,
                       struct workspace *space) {
    const struct sizes most = most_of(decoder, tokens, sequences);
    int64_t used = 0;
    TAKE(space->normed, 4 * tokens * most.wide);
    TAKE(space->gate_up, 4 * tokens * most.gate_up);
    space->input.x = space->normed;
    TAKE(space->input.rounded, (tokens + ROWS_BEYOND) * most_rounded_bytes(most.wide));
    TAKE(space->tasks, most.tasks);
    TAKE(space->scratch, 4 * threads * most.scratch);
    TAKE(space->kept, 4 * tokens);
    TAKE(space->starts, 4 * (sequences + 1));
    TAKE(space->positions, 8 * tokens);
    return used + lay_out_experts(&decoder->mixture, decoder->hidden, tokens, memory + used, &space->experts);
}
#undef TAKE

/* Prepare token `t`'s input to the product with `next`, in the form that this product takes. */
static void prepare_input(const struct step *step, int t, const struct weight *next) {
    const struct input *input = &step->space->input;
    const int tokens = step->batch->num_tokens;
    round_activations(input->x + (int64_t)t * next->inputs, next->inputs,
                      form_for(next, step->decoder->arithmetic, tokens), t, tokens, (uint8_t *)input->rounded);
}

static void embed_token(const void *argument, int t, int thread) {
    (void)thread;
    const struct step *step = argument;
    const int64_t hidden = step->decoder->hidden;
    float *x = step->space->x + t * hidden;
    weight_row(&step->decoder->embedding, step->ids[t], x);
    if (step->decoder->embedding_factor != 1.0f) scale(x, step->decoder->embedding_factor, (int)hidden);
}

/* Add what the last product computed for token `t` to its residual stream. norm: [hidden], or
 * NULL. */
static float *add_delta(const struct step *step, int t, const float *norm) {
    const int hidden = step->decoder->hidden;
    float *x = step->space->x + (int64_t)t * hidden, *delta = step->space->delta + (int64_t)t * hidden;
    if (norm) rms_norm(delta, norm, step->decoder->eps, hidden, delta);
    add(x, delta, hidden);
    return x;
}

/* Add what the MLP of `layer` computed for token `t`, the layer's last part. */
static float *finish_layer(const struct step *step, int t, const struct layer *layer) {
    float *x = add_delta(step, t, layer->mlp_out);
    if (layer->factor != 1.0f) scale(x, layer->factor, step->decoder->hidden);
    return x;
}

static void attention_in_token(const void *argument, int t, int thread) {
    (void)thread;
    const struct step *step = argument;
    const int hidden = step->decoder->hidden;
    float *x = step->space->x + (int64_t)t * hidden, *normed = step->space->normed + (int64_t)t * hidden;
    if (step->layer != step->decoder->layers) finish_layer(step, t, step->layer - 1);
    rms_norm(x, step->layer->attention_in, step->decoder->eps, hidden, normed);
    prepare_input(step, t, &step->layer->qkv);
}

static void mlp_in_token(const void *argument, int t, int thread) {
    (void)thread;
    const struct step *step = argument;
    const int hidden = step->decoder->hidden;
    const float *x = add_delta(step, t, step->layer->attention_out);
    float *normed = step->space->normed + (int64_t)t * hidden;
    rms_norm(x, step->layer->mlp_in, step->decoder->eps, hidden, normed);
    if (!step->layer->experts.gate_up) prepare_input(step, t, &step->layer->gate_up);
}

static void final_norm_token(const void *argument, int t, int thread) {
    (void)thread;
    const struct step *step = argument;
    const int hidden = step->decoder->hidden;
    const float *x = finish_layer(step, t, step->layer);
    rms_norm(x, step->decoder->final_norm, step->decoder->eps, hidden,
             step->out + (int64_t)step->space->kept[t] * hidden);
}

static void position_token(const void *argument, int t, int thread) {
    (void)thread;
    const struct step *step = argument;
    const struct decoder *decoder = step->decoder;
    const struct layer *layer = step->layer;
    const int64_t at = step->batch->positions[t] * layer->rotary_half;
    const int dim = layer->head_dim, turned = layer->num_heads + layer->num_kv_heads;
    float *qkv = step->space->qkv + (int64_t)t * layer->qkv.outputs;
    for (int head = 0; head < turned; head++) {
        const float *norm = head < layer->num_heads ? layer->query_norm : layer->key_norm;
        if (norm) rms_norm(qkv + head * dim, norm, decoder->eps, dim, qkv + head * dim);
        if (layer->cos) rotate(qkv + head * dim, layer->cos + at, layer->sin + at, layer->rotary_half);
#if defined(BUILD_BYTE_CACHE)
        if (decoder->cache == CACHE_BYTES) spread(qkv + head * dim, dim);
#endif
    }
    float *values = qkv + turned * dim;
    for (float *value = values; layer->value_norm && value < values + layer->num_kv_heads * dim; value += dim)
        rms_norm(value, layer->value_norm, decoder->eps, dim, value);
    write_cache(&step->attention, qkv + layer->num_heads * dim, values, step->batch->slots[t],
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
    const int count = step->layer->intermediate;
    const float *gate = step->space->gate_up + (int64_t)t * step->layer->gate_up.outputs;
    gated(gate, gate + count, step->decoder->activation, count, step->space->normed + (int64_t)t * count);
    prepare_input(step, t, &step->layer->down);
}

/* The MLP's first product with its activation, panel by panel of gate and up. Used in tiles, where
 * the product takes no longer than writing its floats and reading them again. */
struct gated_product {
    struct matmul product;
    int activation, panels; /* of the gate, followed by as many of up */
    uint16_t *out;          /* [rows][panels][PANEL] */
};

static void gated_chunk(const void *argument, int chunk, int thread) {
    (void)thread;
    const struct gated_product *job = argument;
    const struct part part = part_of(&job->product, chunk);
    float gate[ROW_BLOCK * PANEL] __attribute__((aligned(64))), up[ROW_BLOCK * PANEL] __attribute__((aligned(64)));
    begin_tiles();
    for (int n = part.first; n < part.last; n++) {
        one_panel(&job->product, part.row, part.end, n, gate);
        one_panel(&job->product, part.row, part.end, job->panels + n, up);
        for (int r = 0; r < part.end - part.row; r++) {
            gated(gate + r * PANEL, up + r * PANEL, job->activation, PANEL, gate + r * PANEL);
            round_row(gate + r * PANEL, PANEL, job->out + ((int64_t)(part.row + r) * job->panels + n) * PANEL);
        }
    }
    end_tiles();
}

static int gates_in_tiles(const struct decoder *decoder, const struct layer *layer, int tokens) {
    return TILES && form_for(&layer->gate_up, decoder->arithmetic, tokens) == AS_BF16 &&
           form_for(&layer->down, decoder->arithmetic, tokens) == AS_BF16 && layer->intermediate % PANEL == 0;
}

/* Compute the input of the MLP's second product. */
static struct input gate(struct pool *pool, struct step *step, const struct layer *layer) {
    const struct decoder *decoder = step->decoder;
    const struct workspace *space = step->space;
    const int tokens = step->batch->num_tokens;
    if (!gates_in_tiles(decoder, layer, tokens)) {
        matmul(pool, &layer->gate_up, decoder->arithmetic, &space->input, tokens, space->gate_up);
        parallel_rows(pool, tokens, activate_token, step);
        return space->input;
    }
    int num_chunks;
    struct weight gate_alone = layer->gate_up;
    gate_alone.outputs = layer->intermediate;
    struct gated_product job = {
        plan_product(pool, &gate_alone, decoder->arithmetic, &space->input, tokens, &num_chunks),
        decoder->activation, layer->intermediate / PANEL, (uint16_t *)space->gate_up,
    };
    job.product.out_stride = PANEL;
    parallel(pool, num_chunks, gated_chunk, &job);
    return (struct input){NULL, (const uint8_t *)job.out}; /* rows after the last one lie in space->input.rounded */
}

/* Compute the layer's MLP, or its mixture of experts. */
static void mlp(struct pool *pool, struct step *step, const struct layer *layer) {
    const struct decoder *decoder = step->decoder;
    const struct workspace *space = step->space;
    const int tokens = step->batch->num_tokens;
    if (!layer->experts.gate_up) {
        const struct input gated = gate(pool, step, layer);
        matmul(pool, &layer->down, decoder->arithmetic, &gated, tokens, space->delta);
        return;
    }
    struct expert_rows rows = space->experts;
    const struct mixture_step mixture = {
        &decoder->mixture, &layer->experts, decoder->arithmetic, decoder->activation, decoder->hidden, space->normed,
        space->delta, &rows,
    };
    run_experts(pool, &mixture, tokens);
}

/* Compute layer `index` up to its keys and values, for all tokens of the step's batch. */
static void begin_layer(struct pool *pool, struct step *step, int index) {
    const struct layer *layer = step->layer = step->decoder->layers + index;
    const struct workspace *space = step->space;
    const int tokens = step->batch->num_tokens;
    step->attention = attention_of(step->decoder, layer);
    parallel_rows(pool, tokens, attention_in_token, step);
    matmul(pool, &layer->qkv, step->decoder->arithmetic, &space->input, tokens, space->qkv);
    parallel_rows(pool, tokens, position_token, step);
}

/* Compute the rest of the layer. Keys and values of all tokens that these tokens see must be
 * written. */
static void end_layer(struct pool *pool, struct step *step, int index) {
    const struct decoder *decoder = step->decoder;
    const struct layer *layer = step->layer = decoder->layers + index;
    const struct workspace *space = step->space;
    step->attention = attention_of(decoder, layer);
    const int num_tasks = make_tasks(&step->attention, step->batch, space->tasks);
    const struct attend attend = {
        &step->attention, step->batch, space->tasks, layer->keys, layer->values, space->qkv,
        layer->qkv.outputs, space->normed, space->scratch, num_tasks, pool->num_threads,
    };
    const int tokens = step->batch->num_tokens;
    parallel(pool, num_tasks, attend_task, &attend);
    parallel_rows(pool, tokens, attended_token, step);
    matmul(pool, &layer->out, decoder->arithmetic, &space->input, tokens, space->delta);
    parallel_rows(pool, tokens, mlp_in_token, step);
    mlp(pool, step, layer);
}

/* Return a batch of only the tokens whose hidden states are needed. Their residual streams and
 * queries are moved together. */
static struct batch keep_wanted(const struct step *step) {
    const struct decoder *decoder = step->decoder;
    const struct workspace *space = step->space;
    const struct batch *batch = step->batch;
    const struct layer *layer = step->layer;
    const int64_t hidden = decoder->hidden, qkv = layer->qkv.outputs;
    int kept = 0;
    for (int s = 0; s < batch->num_sequences; s++) {
        space->starts[s] = kept;
        for (int t = batch->query_starts[s]; t < batch->query_starts[s + 1]; t++) {
            if (batch->wanted && !batch->wanted[t]) continue;
            space->kept[kept] = t;
            space->positions[kept] = batch->positions[t];
            memmove(space->x + kept * hidden, space->x + t * hidden, sizeof(float) * (size_t)hidden);
            memmove(space->qkv + kept * qkv, space->qkv + t * qkv,
                    sizeof(float) * (size_t)(layer->num_heads * layer->head_dim));
            kept++;
        }
    }
    space->starts[batch->num_sequences] = kept;
    return (struct batch){
        kept, batch->num_sequences, batch->table_width, space->positions, NULL, space->starts, batch->kv_lens,
        batch->blocks, NULL,
    };
}

/* Compute the rest of the last layer after its keys and values, and the final norm, only for the
 * tokens whose hidden states are needed. */
static void end_last_layer(struct pool *pool, struct step *step) {
    const int last = step->decoder->num_layers - 1;
    step->layer = step->decoder->layers + last;
    const struct batch wanted = keep_wanted(step);
    if (!wanted.num_tokens) return;
    step->batch = &wanted;
    end_layer(pool, step, last);
    parallel_rows(pool, wanted.num_tokens, final_norm_token, step);
}

#endif

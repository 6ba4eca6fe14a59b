/* A mixture of experts in place of an MLP: a router chooses some experts for each token, and the
 * token's result is the weighted sum of theirs.
 *
 * The router's products are in float. Of equal scores, the expert with the lower number is chosen.
 * Rows (token, expert) are sorted by expert, so that each expert's weights are read once for all of
 * its rows. A token's sum runs over its experts in the order of their numbers. So a token's bits
 * do not depend on the other tokens of the batch. */
#ifndef SERVE_APP_EXPERTS_H
#define SERVE_APP_EXPERTS_H

#include "elementwise.h"
#include "matmul.h"

/* What the mixtures of all layers have in common. */
struct mixture {
    int32_t count; /* experts of a layer; 0 if no layer has any */
    int32_t used;  /* experts of a token */
    int32_t width; /* outputs of an expert's gate */
    int32_t renormalised; /* whether a token's shares have the sum 1 */
    float alpha, limit;   /* of CLAMPED */
};

struct experts {
    struct weight router;
    const struct weight *gate_up, *down; /* [count]; NULL in a layer with an MLP */
};

/* Each expert's rows begin at a multiple of this. */
enum { EXPERT_ROWS = TILES ? TILE_ROWS : 1 };

/* Rows of a step, sorted by expert. */
struct expert_rows {
    float *scores;         /* [tokens][padded experts] */
    int32_t *expert;       /* [tokens][used], ascending */
    float *share;          /* [tokens][used] */
    int32_t *row;          /* [tokens][used] */
    int32_t *first, *rows; /* [count]: the first row of each expert, and their number */
    int32_t *hit;          /* experts that have rows */
    float *x;              /* [rows][input_floats] */
    uint8_t *rounded;      /* [rows][input_bytes] */
    float *out;            /* [rows][output_floats] */
    int64_t input_floats, input_bytes, output_floats;
    int num_hit;
};

/* Arguments of the loops of a step. */
struct mixture_step {
    const struct mixture *mixture;
    const struct experts *experts;
    int arithmetic, activation, hidden;
    const float *x; /* [tokens][hidden] */
    float *out;     /* [tokens][hidden] */
    struct expert_rows *rows;
};

#define TAKE(pointer, bytes) (pointer = (void *)(memory + used), used += ((bytes) + 63) / 64 * 64)

/* Lay out the rows of a step from `memory`. Returns their size in bytes; call it with NULL to get
 * the size. */
static int64_t lay_out_experts(const struct mixture *mixture, int64_t hidden, int64_t tokens, char *memory,
                               struct expert_rows *to) {
    const int64_t choices = tokens * mixture->used, count = mixture->count, width = mixture->width;
    const int64_t most_hit = choices < count ? choices : count, rows = choices + most_hit * (EXPERT_ROWS - 1);
    const int64_t panels = (2 * width + PANEL - 1) / PANEL * PANEL;
    int64_t used = 0;
    if (!count) return 0;
    to->input_floats = hidden > width ? hidden : width;
    to->input_bytes = (most_rounded_bytes(to->input_floats) + 63) / 64 * 64;
    to->output_floats = hidden > panels ? hidden : panels;
    TAKE(to->scores, 4 * tokens * ((count + PANEL - 1) / PANEL * PANEL));
    TAKE(to->expert, 4 * choices);
    TAKE(to->share, 4 * choices);
    TAKE(to->row, 4 * choices);
    TAKE(to->first, 4 * count);
    TAKE(to->rows, 4 * count);
    TAKE(to->hit, 4 * count);
    TAKE(to->x, 4 * rows * to->input_floats);
    TAKE(to->rounded, (rows + ROWS_BEYOND) * to->input_bytes);
    TAKE(to->out, 4 * rows * to->output_floats);
    return used;
}

static inline float exponential_of(float x) { return exponential(splat(x))[0]; }

/* Put the `used` experts with the largest scores into `expert`, the largest first. Of equal scores
 * the first expert comes first. */
static void choose_experts(const float *scores, int count, int used, int32_t *expert) {
    for (int e = 0, known = 0; e < count; e++) {
        if (known == used && !(scores[e] > scores[expert[used - 1]])) continue;
        int at = known < used ? known++ : used - 1;
        for (; at > 0 && scores[e] > scores[expert[at - 1]]; at--) expert[at] = expert[at - 1];
        expert[at] = e;
    }
}

/* Choose a token's experts and compute their shares: the softmax of the scores of all experts, or,
 * renormalised, of the chosen ones. */
static void route_token(const void *argument, int t, int thread) {
    (void)thread;
    const struct mixture_step *step = argument;
    const struct mixture *mixture = step->mixture;
    const struct expert_rows *rows = step->rows;
    const float *scores = rows->scores + (int64_t)t * step->experts->router.outputs;
    int32_t *expert = rows->expert + (int64_t)t * mixture->used;
    float *share = rows->share + (int64_t)t * mixture->used, sum = 0.0f;
    choose_experts(scores, mixture->count, mixture->used, expert);
    const float largest = scores[expert[0]];
    for (int i = 1; i < mixture->used; i++) { /* sort by number */
        const int32_t moved = expert[i];
        int at = i;
        for (; at > 0 && expert[at - 1] > moved; at--) expert[at] = expert[at - 1];
        expert[at] = moved;
    }
    for (int i = 0; i < mixture->used; i++) share[i] = exponential_of(scores[expert[i]] - largest);
    if (mixture->renormalised)
        for (int i = 0; i < mixture->used; i++) sum += share[i];
    else
        for (int e = 0; e < mixture->count; e++) sum += exponential_of(scores[e] - largest);
    for (int i = 0; i < mixture->used; i++) share[i] /= sum;
}

/* Give every choice its row. */
static void sort_rows(const struct mixture *mixture, int choices, struct expert_rows *rows) {
    memset(rows->rows, 0, sizeof *rows->rows * (size_t)mixture->count);
    for (int i = 0; i < choices; i++) rows->row[i] = rows->rows[rows->expert[i]]++;
    rows->num_hit = 0;
    for (int e = 0, first = 0; e < mixture->count; e++) {
        rows->first[e] = first;
        if (!rows->rows[e]) continue;
        rows->hit[rows->num_hit++] = e;
        first += (rows->rows[e] + EXPERT_ROWS - 1) / EXPERT_ROWS * EXPERT_ROWS;
    }
    for (int i = 0; i < choices; i++) rows->row[i] += rows->first[rows->expert[i]];
}

static struct input input_of(const struct expert_rows *rows, int expert) {
    return (struct input){rows->x + rows->first[expert] * rows->input_floats,
                          rows->rounded + rows->first[expert] * rows->input_bytes};
}

/* Round a row in the form that the product with its expert's weight takes. `x` may be the row
 * itself. */
static void put_row(const struct mixture_step *step, const struct weight *weights, int choice, const float *x) {
    const int expert = step->rows->expert[choice], num_rows = step->rows->rows[expert];
    const int row = step->rows->row[choice] - step->rows->first[expert];
    const struct weight *weight = weights + expert;
    const enum form form = form_for(weight, step->arithmetic, num_rows);
    const struct input input = input_of(step->rows, expert);
    if (form == AS_FLOATS)
        memmove((float *)input.x + (int64_t)row * weight->inputs, x, sizeof(float) * (size_t)weight->inputs);
    else
        round_activations(x, weight->inputs, form, row, num_rows, (uint8_t *)input.rounded);
}

static void gather_row(const void *argument, int choice, int thread) {
    (void)thread;
    const struct mixture_step *step = argument;
    put_row(step, step->experts->gate_up, choice, step->x + (int64_t)(choice / step->mixture->used) * step->hidden);
}

/* Where the outputs of a row are. */
static float *output_of(const struct expert_rows *rows, const struct weight *weights, int choice) {
    const int expert = rows->expert[choice], first = rows->first[expert];
    return rows->out + first * rows->output_floats + (int64_t)(rows->row[choice] - first) * weights[expert].outputs;
}

static void activate_row(const void *argument, int choice, int thread) {
    (void)thread;
    const struct mixture_step *step = argument;
    const struct mixture *mixture = step->mixture;
    float *gate = output_of(step->rows, step->experts->gate_up, choice), *up = gate + mixture->width;
    if (step->activation == CLAMPED)
        clamped(gate, up, mixture->alpha, mixture->limit, mixture->width, gate);
    else
        gated(gate, up, step->activation, mixture->width, gate);
    put_row(step, step->experts->down, choice, gate);
}

/* The products of all rows with their experts' weights. Each expert's panels are cut into
 * `parts`. */
struct expert_product {
    const struct mixture_step *step;
    const struct weight *weights;
    int parts;
};

static void expert_chunk(const void *argument, int chunk, int thread) {
    (void)thread;
    const struct expert_product *job = argument;
    const struct expert_rows *rows = job->step->rows;
    const int expert = rows->hit[chunk / job->parts], part = chunk % job->parts, num_rows = rows->rows[expert];
    const struct weight *weight = job->weights + expert;
    const int panels = weight->outputs / PANEL, last = panels * (part + 1) / job->parts;
    const struct matmul product = {
        .weight = weight, .input = input_of(rows, expert), .form = form_for(weight, job->step->arithmetic, num_rows),
        .num_rows = num_rows, .out_stride = weight->outputs,
    };
    float *out = rows->out + rows->first[expert] * rows->output_floats;
    begin_tiles();
    for (int row = 0; row < num_rows; row += ROW_BLOCK) {
        const int end = num_rows < row + ROW_BLOCK ? num_rows : row + ROW_BLOCK;
        for (int n = panels * part / job->parts; n < last; n++)
            one_panel(&product, row, end, n, out + (int64_t)row * weight->outputs + n * PANEL);
    }
    end_tiles();
}

static void expert_products(struct pool *pool, const struct mixture_step *step, const struct weight *weights) {
    enum { CHUNKS_PER_THREAD = 4, MOST_PANELS = 32 }; /* see plan_product */
    const int num_hit = step->rows->num_hit, panels = weights->outputs / PANEL;
    int parts = (CHUNKS_PER_THREAD * pool->num_threads + num_hit - 1) / num_hit;
    if (parts < (panels + MOST_PANELS - 1) / MOST_PANELS) parts = (panels + MOST_PANELS - 1) / MOST_PANELS;
    if (parts > panels) parts = panels;
    const struct expert_product job = {step, weights, parts};
    parallel(pool, num_hit * parts, expert_chunk, &job);
}

static void sum_token(const void *argument, int t, int thread) {
    (void)thread;
    const struct mixture_step *step = argument;
    const int used = step->mixture->used;
    float *out = step->out + (int64_t)t * step->hidden;
    for (int i = 0; i < used; i++) {
        const float *more = output_of(step->rows, step->experts->down, t * used + i);
        const vec share = splat(step->rows->share[t * used + i]);
        for (int k = 0; k < step->hidden; k += LANES)
            store(out + k, i ? fma_(share, load(more + k), load(out + k)) : share * load(more + k));
    }
}

/* step->out = the mixture of step->x, for all tokens. */
static void run_experts(struct pool *pool, const struct mixture_step *step, int tokens) {
    const int choices = tokens * step->mixture->used;
    const struct input input = {step->x, NULL};
    matmul(pool, &step->experts->router, EXACT, &input, tokens, step->rows->scores);
    parallel_rows(pool, tokens, route_token, step);
    sort_rows(step->mixture, choices, step->rows);
    parallel_rows(pool, choices, gather_row, step);
    expert_products(pool, step, step->experts->gate_up);
    parallel_rows(pool, choices, activate_row, step);
    expert_products(pool, step, step->experts->down);
    parallel_rows(pool, tokens, sum_token, step);
}

#endif

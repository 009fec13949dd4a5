/* What every version of attention shares: the state of a task, where it starts and how it ends. */
#pragma once
#include "trireme_cpu.h"
#include <math.h>
#include <string.h>

enum { KEYS = 64 }; /* keys per block */
#define MASKED (-1e30f)

typedef struct {
    const Attention *args;
    const AttentionTask *task;
    int rows, group, first, first_token; /* first: position of the task's first query; first_token: its row in the batch */
    int kv_head;                         /* whose rows the following are: each KV head of the task has `rows` of them */
    const float **queries;               /* per row */
    float *output;                       /* [rows][head_dim], not yet divided by total */
    float *top, *total, *factor;         /* per row: maximum so far, sum so far, what older output is to be scaled by */
    float *logits;                       /* [rows][KEYS] of one KV head after the other */
    float *decoded;                      /* caches not of floats: 2 · KEYS · head_dim floats */
    const float *keys[KEYS], *values[KEYS];
    int coming;                          /* rows of the next block that are asked for beside the work on this one */
    const float *coming_keys[KEYS], *coming_values[KEYS];
} AttentionState;

/* For so many rows of all KV heads of a task. */
static inline size_t attention_scratch_bytes(const Attention *args, int rows) {
    size_t floats = (size_t)rows * (KEYS + args->head_dim + 5) + 2 * KEYS * (size_t)args->head_dim;
    return floats * 4 + 256;
}

/* The slots of `count` tokens from a position on; division only at the first. */
static inline void slots_from(const Sequences *sequences, int sequence, int position, int count, int32_t *slots) {
    const int32_t *page = sequences->page_table + sequences->page_rows[sequence] * sequences->page_stride;
    int size = sequences->page_size, offset = position % size;
    page += position / size;
    for (int i = 0; i < count; i++) {
        slots[i] = *page * size + offset;
        if (++offset == size) offset = 0, page++;
    }
}

static inline void attention_begin(AttentionState *state, const Attention *args, const AttentionTask *task, float *scratch) {
    const Sequences *sequences = args->sequences;
    int group = args->heads / args->kv_heads, rows = task->queries * group, all = rows * task->kv_heads, width = args->head_dim;
    int new_tokens = sequences->query_starts[task->sequence + 1] - sequences->query_starts[task->sequence];
    state->args = args, state->task = task, state->rows = rows, state->group = group, state->kv_head = task->kv_head;
    state->first = sequences->context_lengths[task->sequence] - new_tokens + task->query0;
    state->first_token = sequences->query_starts[task->sequence] + task->query0;
    state->logits = scratch;
    state->output = state->logits + (size_t)rows * KEYS;
    state->decoded = state->output + (size_t)all * width;
    state->queries = (const float **)(state->decoded + 2 * KEYS * (size_t)width);
    state->top = (float *)(state->queries + all);
    state->total = state->top + all;
    state->factor = state->total + all;
    memset(state->output, 0, (size_t)all * width * 4);
    for (int row = 0; row < all; row++) {
        int head = (task->kv_head + row / rows) * group + row % group;
        state->queries[row] = args->query + (state->first_token + row % rows / group) * args->query_stride + (int64_t)head * width;
        state->top[row] = MASKED, state->total[row] = 0, state->factor[row] = 0;
    }
}

/* Turns to the rows of another of the task's KV heads. */
static inline void attention_turn_to(AttentionState *state, int kv_head) {
    int past = (kv_head - state->kv_head) * state->rows;
    state->kv_head = kv_head;
    state->queries += past, state->output += (int64_t)past * state->args->head_dim;
    state->top += past, state->total += past, state->factor += past;
}

/* output = values / total, the sink (a logit without a value) joining the total */
static inline void attention_write(const Attention *args, int token, int head, float top, float total, const float *values) {
    float *output = args->output + token * args->output_stride + (int64_t)head * args->head_dim, factor = 1;
    if (args->sinks) {
        float peak = fmaxf(top, args->sinks[head]);
        factor = expf(top - peak);
        total = total * factor + expf(args->sinks[head] - peak);
    }
    factor = total > 0 ? factor / total : 0;
    for (int i = 0; i < args->head_dim; i++) output[i] = values[i] * factor;
}

static inline void attention_finish(const AttentionState *state) {
    const Attention *args = state->args;
    for (int row = 0; row < state->rows; row++) {
        const float *values = state->output + (int64_t)row * args->head_dim;
        if (!state->task->partial) {
            int head = state->kv_head * state->group + row % state->group;
            attention_write(args, state->first_token + row / state->group, head, state->top[row], state->total[row], values);
        } else {
            float *partial = state->task->partial + (state->kv_head - state->task->kv_head) * state->task->partial_stride;
            partial += (int64_t)row * (args->head_dim + 2);
            partial[0] = state->top[row], partial[1] = state->total[row];
            memcpy(partial + 2, values, (size_t)args->head_dim * 4);
        }
    }
}

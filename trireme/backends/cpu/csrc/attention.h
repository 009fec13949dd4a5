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
    const float **queries;               /* per row */
    float *logits;                       /* [rows][KEYS] */
    float *output;                       /* [rows][head_dim], not yet divided by total */
    float *top, *total, *factor;         /* per row: maximum so far, sum so far, what older output is to be scaled by */
    float *decoded;                      /* int8 caches: 2 · KEYS · head_dim floats */
    const float *keys[KEYS], *values[KEYS];
} AttentionState;

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
    int group = args->heads / args->kv_heads, rows = task->queries * group, width = args->head_dim;
    int new_tokens = sequences->query_starts[task->sequence + 1] - sequences->query_starts[task->sequence];
    state->args = args, state->task = task, state->rows = rows, state->group = group;
    state->first = sequences->context_lengths[task->sequence] - new_tokens + task->query0;
    state->first_token = sequences->query_starts[task->sequence] + task->query0;
    state->logits = scratch;
    state->output = state->logits + (size_t)rows * KEYS;
    state->decoded = state->output + (size_t)rows * width;
    state->queries = (const float **)(state->decoded + 2 * KEYS * (size_t)width);
    state->top = (float *)(state->queries + rows);
    state->total = state->top + rows;
    state->factor = state->total + rows;
    memset(state->output, 0, (size_t)rows * width * 4);
    for (int row = 0; row < rows; row++) {
        int head = task->kv_head * group + row % group;
        state->queries[row] = args->query + (state->first_token + row / group) * args->query_stride + (int64_t)head * width;
        state->top[row] = MASKED, state->total[row] = 0, state->factor[row] = 0;
    }
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
            int head = state->task->kv_head * state->group + row % state->group;
            attention_write(args, state->first_token + row / state->group, head, state->top[row], state->total[row], values);
        } else {
            float *partial = state->task->partial + (int64_t)row * (args->head_dim + 2);
            partial[0] = state->top[row], partial[1] = state->total[row];
            memcpy(partial + 2, values, (size_t)args->head_dim * 4);
        }
    }
}

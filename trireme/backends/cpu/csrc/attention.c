/* Attention over token slots: o = softmax(scale · q Kᵀ) V for each query, over the keys its sequence holds in its slots.
 *
 * One task is a few queries of one sequence times the query heads that share a KV head: these "rows" see the same keys, so
 * a block of keys is read once for all of them. Softmax is online: per row a running maximum, sum and output. A task of one
 * query may have several KV heads, whose rows of a slot lie side by side: it takes a block of all of them before the next one.
 *   logits: softcap · tanh(s / softcap);  + slope · (key - query);  masked outside (query - window, query] */
#include "attention.h"
#include "kv.h"
#include "vector.h"

#if defined(ISA_AVX2)
enum { VECTORS = 2 }; /* of output per row held in registers: 4 rows times this many */
#else
enum { VECTORS = 4 };
#endif
#if defined(ISA_DOTPROD)
enum { DOTTED = 4 }; /* rows that meet LANES keys at once: their sums are this times LANES vectors */
#else
enum { DOTTED = 1 };
#endif

#if defined(ISA_AVX512)
#define EVENS 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODDS 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define LANE_INDEX 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#elif defined(ISA_AVX2)
#define EVENS 0, 2, 4, 6, 8, 10, 12, 14
#define ODDS 1, 3, 5, 7, 9, 11, 13, 15
#define LANE_INDEX 0, 1, 2, 3, 4, 5, 6, 7
#else
#define EVENS 0, 2, 4, 6
#define ODDS 1, 3, 5, 7
#define LANE_INDEX 0, 1, 2, 3
#endif
/* Sums of neighbours: of a in the lower half, of b in the upper. log2(LANES) rounds turn LANES vectors into their sums. */
INLINE vf add_pairs(vf a, vf b) {
#if defined(ISA_DOTPROD)
    return (vf)vpaddq_f32((float32x4_t)a, (float32x4_t)b);
#else
    return __builtin_shufflevector(a, b, EVENS) + __builtin_shufflevector(a, b, ODDS);
#endif
}

INLINE vf sums_of(vf parts[LANES]) {
#pragma GCC unroll 4
    for (int count = LANES / 2; count; count /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) parts[i] = add_pairs(parts[2 * i], parts[2 * i + 1]);
    return parts[0];
}

/* logits[r][j] = query r · key j, for R rows and LANES keys from j0 on */
INLINE void dot_keys(const AttentionState *state, const int R, int row, int j0) {
    const float *const *queries = state->queries + row, *const *keys = state->keys + j0;
    int width = state->args->head_dim, i = 0;
    vf sums[DOTTED][LANES], q[DOTTED];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) sums[r][j] = (vf){0};
    for (; i + LANES <= width; i += LANES) {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) q[r] = load(queries[r] + i);
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) {
            vf key = load(keys[j] + i);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) sums[r][j] += q[r] * key;
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        vf result = sums_of(sums[r]);
        for (int k = i; k < width; k++)
            for (int j = 0; j < LANES; j++) result[j] += queries[r][k] * keys[j][k];
        store(state->logits + (row + r) * KEYS + j0, result);
    }
}

/* Asks for a row before it is read: rows of one head lie apart, which a Neoverse-N1 does not foresee. */
INLINE void ask_for(const float *row, int width) {
#if defined(__aarch64__)
    for (int i = 0; i < width; i += 16) __builtin_prefetch(row + i, 0, 2);
#else
    (void)row, (void)width;
#endif
}

INLINE void ask_ahead(const AttentionState *state, int first, int count) {
    for (int j = first; j < first + count && j < state->coming; j++)
        ask_for(state->coming_keys[j], state->args->head_dim), ask_for(state->coming_values[j], state->args->head_dim);
}

/* `dot_keys` for all keys of a block, of as many rows at once as there are registers for. */
INLINE void dot_block(const AttentionState *state, const int R, int row) {
    for (int r = 0; r < R; r += DOTTED)
        for (int j = 0; j < KEYS; j += LANES) {
            if (row + r == 0) ask_ahead(state, j, LANES);
            dot_keys(state, R < DOTTED ? R : DOTTED, row + r, j);
        }
}

/* Points keys and values at `count` slots, and asks for them unless that was done beside the block before; the rest of the block
 * repeats the last one and is masked later. */
static void gather(AttentionState *state, const int32_t *slots, int count, int asked) {
    const Attention *args = state->args;
    int64_t width = args->head_dim;
    for (int j = 0; j < count; j++) {
        int64_t row = (int64_t)slots[j] * args->kv_heads + state->kv_head;
        if (args->kv_kind == KV_F32) {
            state->keys[j] = (const float *)args->keys + row * width;
            state->values[j] = (const float *)args->values + row * width;
            if (!asked) ask_for(state->keys[j], (int)width), ask_for(state->values[j], (int)width);
            continue;
        }
        float *key = state->decoded + j * width, *value = key + KEYS * width;
        kv_get(args->kv_kind, args->keys, args->key_scales, row, state->kv_head, key, (int)width);
        kv_get(args->kv_kind, args->values, args->value_scales, row, state->kv_head, value, (int)width);
        state->keys[j] = key;
        state->values[j] = value;
    }
    for (int j = count; j < KEYS; j++) state->keys[j] = state->keys[count - 1];
}

/* How many of the next block's slots are worth asking for, and which: the task's own, or the next task's, which this core is likely
 * to take. One KV head's rows lie apart, and are asked for at once; what is kept in fewer bits is decoded as it is gathered. */
static int slots_ahead(const AttentionState *state, int key0, int32_t *slots) {
    const Attention *args = state->args;
    int left = args->sequences->context_lengths[state->task->sequence] - key0, count = left < KEYS ? left : KEYS;
    if (state->task->kv_heads == 1 || args->kv_kind != KV_F32 || count <= 0) return 0;
    slots_from(args->sequences, state->task->sequence, key0, count, slots);
    return count;
}

/* Of the task's KV heads in those slots, the share that is asked for beside this head's work, in the order of memory. */
static void look_ahead(AttentionState *state, const int32_t *slots, int count) {
    const Attention *args = state->args;
    int heads = state->task->kv_heads, first = (state->kv_head - state->task->kv_head) * KEYS;
    state->coming = 0;
    for (int token = first / heads, head = first % heads; state->coming < KEYS && token < count; state->coming++) {
        int64_t row = ((int64_t)slots[token] * args->kv_heads + state->task->kv_head + head) * args->head_dim;
        state->coming_keys[state->coming] = (const float *)args->keys + row;
        state->coming_values[state->coming] = (const float *)args->values + row;
        if (++head == heads) head = 0, token++;
    }
}

/* Turns a row's raw products into weights e^(logit - top), and updates its maximum, sum and pending factor. */
static void weigh(AttentionState *state, int row, int key0, int count) {
    const Attention *args = state->args;
    int position = state->first + row / state->group, head = state->kv_head * state->group + row % state->group;
    int high = args->causal ? position : key0 + count - 1, low = first_seen(args, position);
    if (high > key0 + count - 1) high = key0 + count - 1;
    int plain = key0 >= low && key0 + KEYS - 1 <= high;
    float *logits = state->logits + row * KEYS, slope = args->slopes ? args->slopes[head] : 0;
    vf top = splat(MASKED);
    for (int j = 0; j < KEYS; j += LANES) {
        vf logit = load(logits + j) * args->scale;
        vi index = (vi){LANE_INDEX} + (key0 + j);
        if (args->softcap > 0) logit = args->softcap * hyperbolic_tangent(logit / args->softcap);
        if (slope != 0) logit += slope * floats(index - position);
        if (!plain) logit = choose((index >= low) & (index <= high), logit, splat(MASKED));
        top = maximum(top, logit);
        store(logits + j, logit);
    }
    float before = state->top[row], after = fmaxf(before, max_of(top));
    state->top[row] = after;
    if (after <= MASKED) after = 0; /* nothing seen yet: every weight below becomes 0 */
    vf sum = {0};
    for (int j = 0; j < KEYS; j += LANES) {
        vf weight = exponential(load(logits + j) - after);
        sum += weight;
        store(logits + j, weight);
    }
    state->factor[row] = before <= MASKED ? 0 : expf(before - after);
    state->total[row] = state->total[row] * state->factor[row] + sum_of(sum);
}

/* output[r] = output[r] · factor[r] + Σ_j weight[r][j] · values[j], for R rows */
INLINE void add_values(AttentionState *state, const int R, int row, int count) {
    int width = state->args->head_dim, i = 0;
    const float *weights = state->logits + row * KEYS;
    float *output = state->output + (int64_t)row * width;
    for (; i + VECTORS * LANES <= width; i += VECTORS * LANES) {
        vf acc[R][VECTORS];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECTORS; v++) acc[r][v] = load(output + r * width + i + v * LANES) * state->factor[row + r];
        for (int j = 0; j < count; j++) {
            const float *value = state->values[j] + i;
            vf part[VECTORS];
            for (int v = 0; v < VECTORS; v++) part[v] = load(value + v * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
                for (int v = 0; v < VECTORS; v++) acc[r][v] += weights[r * KEYS + j] * part[v];
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECTORS; v++) store(output + r * width + i + v * LANES, acc[r][v]);
    }
    for (; i < width; i++) {
        for (int r = 0; r < R; r++) {
            float sum = output[r * width + i] * state->factor[row + r];
            for (int j = 0; j < count; j++) sum += weights[r * KEYS + j] * state->values[j][i];
            output[r * width + i] = sum;
        }
    }
}

/* work(state, R, row, ...) for all rows: four at once, then those left. */
#define BY_FOURS(state, work, ...)                                             \
    do {                                                                       \
        int row = 0, rows = (state)->rows;                                     \
        for (; row + 4 <= rows; row += 4) work(state, 4, row, ##__VA_ARGS__);  \
        if (rows - row == 3) work(state, 3, row, ##__VA_ARGS__);               \
        else if (rows - row == 2) work(state, 2, row, ##__VA_ARGS__);          \
        else if (rows - row == 1) work(state, 1, row, ##__VA_ARGS__);          \
    } while (0)

static void attend_block(AttentionState *state, int key0, int count) {
    BY_FOURS(state, dot_block);
    for (int row = 0; row < state->rows; row++) weigh(state, row, key0, count);
    BY_FOURS(state, add_values, count);
}

void KERNEL(attention)(const Attention *args, const AttentionTask *task, float *scratch) {
    AttentionState state;
    attention_begin(&state, args, task, scratch);
    int last_head = task->kv_head + task->kv_heads - 1;
    for (int key0 = task->key0; key0 < task->key1; key0 += KEYS) {
        int32_t slots[KEYS], coming[KEYS];
        int count = task->key1 - key0 < KEYS ? task->key1 - key0 : KEYS, ahead = slots_ahead(&state, key0 + KEYS, coming);
        slots_from(args->sequences, task->sequence, key0, count, slots);
        for (int head = task->kv_head; head <= last_head; head++) {
            attention_turn_to(&state, head);
            gather(&state, slots, count, task->kv_heads > 1 && key0 > task->key0);
            look_ahead(&state, coming, ahead);
            attend_block(&state, key0, count);
        }
    }
    for (int head = task->kv_head; head <= last_head; head++) {
        attention_turn_to(&state, head);
        attention_finish(&state);
    }
}

/* Attention of prompt chunks on AMX tiles: as attention.c, with products in bf16 and softmax in float.
 *
 * Logits are computed transposed, Sᵀ = K Qᵀ: keys are tile rows as they lie in the cache, and the 16 queries of a group are
 * lanes, so that maximum, exponential and sum run down the keys without a shuffle. Then O += P V, P turned back by 16 × 16. */
#include "amx.h"
#include "attention.h"
#include "vector.h"

extern void attention_avx512vnni(const Attention *, const AttentionTask *, float *);

enum { ROWS = 32, MOST_WIDTH = 256 };

typedef struct {
    _Alignas(64) uint8_t queries[2][MOST_WIDTH / 32][1024]; /* per 16 rows and 32 columns: [column pair][row] */
    _Alignas(64) uint16_t keys[KEYS][MOST_WIDTH];
    _Alignas(64) uint8_t values[2][MOST_WIDTH / 16][1024];  /* per 32 keys and 16 columns: [key pair][column] */
    _Alignas(64) float logits[2][KEYS][16];                 /* per 16 rows */
    _Alignas(64) uint8_t weights[2][2][1024];               /* per 16 rows and 32 keys: [row][key pair] */
    _Alignas(64) float sums[1024];
    _Alignas(64) float top[2][16], total[2][16], factor[2][16], slope[2][16];
    _Alignas(64) int32_t position[2][16];
} Work;

/* out[column][row] = in[row][column] for 16 × 16 ints */
INLINE void transpose16(const __m512i in[16], void *out) {
    __m512i a[16], b[16];
    for (int i = 0; i < 8; i++) {
        a[2 * i] = _mm512_unpacklo_epi32(in[2 * i], in[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(in[2 * i], in[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++)
        for (int h = 0; h < 2; h++) {
            b[4 * i + 2 * h] = _mm512_unpacklo_epi64(a[4 * i + h], a[4 * i + 2 + h]);
            b[4 * i + 2 * h + 1] = _mm512_unpackhi_epi64(a[4 * i + h], a[4 * i + 2 + h]);
        }
    for (int i = 0; i < 4; i++) { /* b[4g + i] holds column 4 lane + i of rows 4g .. 4g + 3 */
        __m512i low = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88), high = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
        __m512i low2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88), high2 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
        _mm512_store_si512((char *)out + (0 + i) * 64, _mm512_shuffle_i32x4(low, low2, 0x88));
        _mm512_store_si512((char *)out + (8 + i) * 64, _mm512_shuffle_i32x4(low, low2, 0xdd));
        _mm512_store_si512((char *)out + (4 + i) * 64, _mm512_shuffle_i32x4(high, high2, 0x88));
        _mm512_store_si512((char *)out + (12 + i) * 64, _mm512_shuffle_i32x4(high, high2, 0xdd));
    }
}

/* 32 floats as 32 bf16 */
INLINE __m512i narrow(const float *at) { return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(at + 16), _mm512_loadu_ps(at)); }

static void begin(Work *work, const AttentionState *state) {
    int width = state->args->head_dim;
    for (int g = 0; g < 2; g++)
        for (int lane = 0; lane < 16; lane++) {
            int row = g * 16 + lane, head = state->task->kv_head * state->group + row % state->group, live = row < state->rows;
            work->top[g][lane] = MASKED, work->total[g][lane] = 0;
            work->position[g][lane] = live ? state->first + row / state->group : -1;
            work->slope[g][lane] = live && state->args->slopes ? state->args->slopes[head] : 0;
        }
    for (int g = 0; g < 2; g++)
        for (int c = 0; c < width / 32; c++) {
            __m512i rows[16];
            for (int lane = 0; lane < 16; lane++) {
                int row = g * 16 + lane;
                rows[lane] = row < state->rows ? narrow(state->queries[row] + c * 32) : _mm512_setzero_si512();
            }
            transpose16(rows, work->queries[g][c]);
        }
}

/* Keys as bf16 rows, values as pairs of keys; past `count` there are zeros. */
static void load_block(Work *work, const AttentionState *state, int key0, int count) {
    const Attention *args = state->args;
    int width = args->head_dim;
    int32_t slots[KEYS];
    const float *values[KEYS];
    slots_from(args->sequences, state->task->sequence, key0, count, slots);
    static const float zeros[MOST_WIDTH];
    for (int j = 0; j < KEYS; j++) {
        const float *key = zeros;
        values[j] = zeros;
        if (j < count) {
            int64_t row = (int64_t)slots[j] * args->kv_heads + state->task->kv_head;
            key = (const float *)args->keys + row * width;
            values[j] = (const float *)args->values + row * width;
        }
        for (int c = 0; c < width; c += 32) _mm512_store_si512(work->keys[j] + c, narrow(key + c));
    }
    for (int pair = 0; pair < KEYS / 2; pair++)
        for (int c = 0; c < width / 16; c++) {
            __m512 even = _mm512_loadu_ps(values[2 * pair] + c * 16), odd = _mm512_loadu_ps(values[2 * pair + 1] + c * 16);
            _mm512_store_si512(work->values[pair / 16][c] + pair % 16 * 64, pair_bf16(even, odd));
        }
}

static void multiply_keys(Work *work, int width, int groups) {
    for (int j = 0; j < KEYS; j += 16) {
        _tile_zero(0);
        _tile_zero(1);
        for (int c = 0; c < width / 32; c++) {
            _tile_loadd(4, work->keys[j] + c * 32, MOST_WIDTH * 2);
            _tile_loadd(6, work->queries[0][c], 64);
            _tile_dpbf16ps(0, 4, 6);
            if (groups == 1) continue;
            _tile_loadd(7, work->queries[1][c], 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, work->logits[0][j], 64);
        if (groups == 2) _tile_stored(1, work->logits[1][j], 64);
    }
}

/* Logits of 16 rows become weights, in pairs of keys turned to rows; maximum, sum and factor follow. */
static void weigh_group(Work *work, const AttentionState *state, int g, int key0, int count) {
    const Attention *args = state->args;
    vi position = load_ints(work->position[g]), high = args->causal ? position : splat_int(key0 + count - 1);
    vi low = args->window ? position - (args->window - 1) : splat_int(0);
    int last = state->first + (state->rows - 1) / state->group, end = key0 + count - 1;
    int plain = count == KEYS && (!args->causal || end <= state->first) && (!args->window || key0 > last - args->window);
    vf slope = load(work->slope[g]), before = load(work->top[g]), top = before;
    for (int j = 0; j < KEYS; j++) {
        vf logit = load(work->logits[g][j]) * args->scale;
        vi index = splat_int(key0 + j);
        if (args->softcap > 0) logit = args->softcap * hyperbolic_tangent(logit / args->softcap);
        if (args->slopes) logit += slope * floats(index - position);
        if (!plain) logit = choose((index >= low) & (index <= high) & (index <= splat_int(end)), logit, splat(MASKED));
        top = maximum(top, logit);
        store(work->logits[g][j], logit);
    }
    vf shift = choose(top <= MASKED, splat(0), top), factor = exponential(before - shift), total = load(work->total[g]) * factor;
    store(work->top[g], top);
    store(work->factor[g], factor);
    for (int half = 0; half < 2; half++) {
        __m512i pairs[16];
        for (int pair = 0; pair < 16; pair++) {
            vf even = exponential(load(work->logits[g][half * 32 + 2 * pair]) - shift);
            vf odd = exponential(load(work->logits[g][half * 32 + 2 * pair + 1]) - shift);
            total += even + odd;
            pairs[pair] = pair_bf16((__m512)even, (__m512)odd);
        }
        transpose16(pairs, work->weights[g][half]);
    }
    store(work->total[g], total);
}

static void add_products(Work *work, const AttentionState *state, int g) {
    int width = state->args->head_dim;
    for (int c = 0; c < width / 16; c++) {
        _tile_zero(0);
        for (int half = 0; half < 2; half++) {
            _tile_loadd(4, work->weights[g][half], 64);
            _tile_loadd(6, work->values[half][c], 64);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, work->sums, 64);
        for (int lane = 0; lane < 16 && g * 16 + lane < state->rows; lane++) {
            float *at = state->output + (int64_t)(g * 16 + lane) * width + c * 16;
            store(at, load(at) * work->factor[g][lane] + load(work->sums + lane * 16));
        }
    }
}

static void finish(const Work *work, AttentionState *state) {
    for (int row = 0; row < state->rows; row++)
        state->top[row] = work->top[row / 16][row % 16], state->total[row] = work->total[row / 16][row % 16];
    attention_finish(state);
}

/* Whole tiles pay from a few queries on; int8 caches and odd widths go the other way. */
void attention_amx(const Attention *args, const AttentionTask *task, float *scratch) {
    int rows = task->queries * (args->heads / args->kv_heads), width = args->head_dim;
    if (rows < 8 || rows > ROWS || task->queries < 2 || width % 32 || width > MOST_WIDTH || args->key_scales || !args->rounded) {
        attention_avx512vnni(args, task, scratch);
        return;
    }
    AttentionState state;
    attention_begin(&state, args, task, scratch);
    Work work;
    begin(&work, &state);
    configure_tiles();
    int groups = rows > 16 ? 2 : 1;
    for (int key0 = task->key0; key0 < task->key1; key0 += KEYS) {
        int count = task->key1 - key0 < KEYS ? task->key1 - key0 : KEYS;
        load_block(&work, &state, key0, count);
        multiply_keys(&work, width, groups);
        for (int g = 0; g < groups; g++) weigh_group(&work, &state, g, key0, count);
        for (int g = 0; g < groups; g++) add_products(&work, &state, g);
    }
    _tile_release();
    finish(&work, &state);
}

/* Attention of prompt chunks on AMX tiles: as attention.c, with products in bf16 and softmax in float.
 *
 * Logits are computed transposed, Sᵀ = K Qᵀ: keys are tile rows as they lie in the cache, and the 16 queries of a group are
 * lanes, so that maximum, exponential and sum run down the keys without a shuffle. Then O += P V, P turned back by 16 × 16. */
#include "amx.h"
#include "attention.h"
#include "vector.h"

extern void attention_avx512vnni(const Attention *, const AttentionTask *, float *);

enum { GROUPS = 6, ROWS = 16 * GROUPS, MOST_WIDTH = 256 };
#define LOG2_E 1.44269504f

typedef struct {
    _Alignas(64) uint8_t queries[GROUPS][MOST_WIDTH / 32][1024]; /* per 16 rows and 32 columns: [column pair][row] */
    _Alignas(64) uint16_t keys[KEYS][MOST_WIDTH];
    _Alignas(64) uint8_t values[2][MOST_WIDTH / 16][1024];       /* per 32 keys and 16 columns: [key pair][column] */
    _Alignas(64) float logits[GROUPS][KEYS][16];                 /* per 16 rows, in units of ln 2 */
    _Alignas(64) uint8_t weights[GROUPS][2][1024];               /* per 16 rows and 32 keys: [row][key pair] */
    _Alignas(64) float output[GROUPS][MOST_WIDTH / 16][256];     /* per 16 rows and 16 columns: [row][column] */
    _Alignas(64) float top[GROUPS][16], total[GROUPS][16], factor[GROUPS][16], slope[GROUPS][16];
    _Alignas(64) int32_t position[GROUPS][16];
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

/* 2^x for x ≤ 0, by 2^n · p(r), |r| ≤ 1/2; relative error below 1.1e-4, a twentieth of what bf16 rounds away. Far below it is 0,
 * not a denormal number, which would take the processor a hundred cycles. */
INLINE vf power_of_two(vf x) {
    __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-125.0f), _CMP_GE_OQ);
    __m512 n = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vf r = x - (vf)n;
    vf p = ((r * 0.0559220356f + 0.242640083f) * r + 0.693121034f) * r + 0.999924481f;
    return (vf)_mm512_maskz_scalef_ps(normal, (__m512)p, n);
}

static int position_of(const AttentionState *state, int row) {
    return state->first + (row < state->rows ? row : state->rows - 1) / state->group;
}

static void begin(Work *work, const AttentionState *state, int groups) {
    int width = state->args->head_dim;
    for (int row = 0; row < 16 * groups; row++) {
        int g = row / 16, lane = row % 16, head = state->task->kv_head * state->group + row % state->group, live = row < state->rows;
        work->top[g][lane] = MASKED, work->total[g][lane] = 0;
        work->position[g][lane] = live ? position_of(state, row) : -1;
        work->slope[g][lane] = live && state->args->slopes ? state->args->slopes[head] * LOG2_E : 0;
    }
    for (int g = 0; g < groups; g++) {
        memset(work->output[g], 0, (size_t)width * 16 * 4);
        for (int c = 0; c < width / 32; c++) {
            __m512i rows[16];
            for (int lane = 0; lane < 16; lane++) {
                int row = g * 16 + lane;
                rows[lane] = row < state->rows ? narrow(state->queries[row] + c * 32) : _mm512_setzero_si512();
            }
            transpose16(rows, work->queries[g][c]);
        }
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

/* Logits of one or two groups of 16 rows, two blocks of 16 keys at a time. */
static void multiply_keys(Work *work, int width, int g, int two) {
    for (int j = 0; j < KEYS; j += 32) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int c = 0; c < width / 32; c++) {
            _tile_loadd(4, work->keys[j] + c * 32, MOST_WIDTH * 2);
            _tile_loadd(5, work->keys[j + 16] + c * 32, MOST_WIDTH * 2);
            _tile_loadd(6, work->queries[g][c], 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
            if (!two) continue;
            _tile_loadd(7, work->queries[g + 1][c], 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, work->logits[g][j], 64);
        _tile_stored(1, work->logits[g][j + 16], 64);
        if (!two) continue;
        _tile_stored(2, work->logits[g + 1][j], 64);
        _tile_stored(3, work->logits[g + 1][j + 16], 64);
    }
}

/* Products become logits in units of ln 2: capped, sloped, masked. Returns the largest of each row. */
static vf finish_logits(Work *work, const AttentionState *state, int g, int key0, int end, vf top) {
    const Attention *args = state->args;
    vi position = load_ints(work->position[g]), high = args->causal ? position : splat_int(end);
    vi low = args->window ? position - (args->window - 1) : splat_int(0);
    if (args->chunked) low = position / args->window * args->window;
    vf slope = load(work->slope[g]);
    for (int j = 0; j < KEYS; j++) {
        vf logit = load(work->logits[g][j]) * args->scale;
        vi index = splat_int(key0 + j);
        if (args->softcap > 0) logit = args->softcap * hyperbolic_tangent(logit / args->softcap);
        logit = logit * LOG2_E;
        if (args->slopes) logit += slope * floats(index - position);
        logit = choose((index >= low) & (index <= high) & (index <= splat_int(end)), logit, splat(MASKED));
        top = maximum(top, logit);
        store(work->logits[g][j], logit);
    }
    return top;
}

/* Weights of 16 rows, in pairs of keys turned to rows; maximum, sum and factor follow. */
static void weigh_group(Work *work, const AttentionState *state, int g, int key0, int count) {
    const Attention *args = state->args;
    int first = position_of(state, g * 16), last = position_of(state, g * 16 + 15), end = key0 + count - 1;
    int plain = count == KEYS && (!args->causal || end <= first) && key0 >= first_seen(args, last);
    vf before = load(work->top[g]), top = before, unit = splat(1);
    if (plain && args->softcap <= 0 && !args->slopes) { /* most blocks: nothing to change but the unit */
        vf most = load(work->logits[g][0]);
        for (int j = 1; j < KEYS; j++) most = maximum(most, load(work->logits[g][j]));
        unit = splat(args->scale * LOG2_E);
        top = maximum(before, most * unit);
    } else {
        top = finish_logits(work, state, g, key0, end, top);
    }
    vf shift = choose(top <= MASKED, splat(0), top), factor = power_of_two(before - shift), total = load(work->total[g]) * factor;
    store(work->top[g], top);
    store(work->factor[g], factor);
    for (int half = 0; half < 2; half++) {
        __m512i pairs[16];
        for (int pair = 0; pair < 16; pair++) {
            vf even = power_of_two(load(work->logits[g][half * 32 + 2 * pair]) * unit - shift);
            vf odd = power_of_two(load(work->logits[g][half * 32 + 2 * pair + 1]) * unit - shift);
            total += even + odd;
            pairs[pair] = pair_bf16((__m512)even, (__m512)odd);
        }
        transpose16(pairs, work->weights[g][half]);
    }
    store(work->total[g], total);
}

/* Older output shrinks where a row has met a larger logit, which soon becomes rare. */
static void rescale(Work *work, int width, int g) {
    vi changed = load(work->factor[g]) != splat(1);
    if (!_mm512_test_epi32_mask((__m512i)changed, (__m512i)changed)) return;
    for (int c = 0; c < width / 16; c++)
        for (int lane = 0; lane < 16; lane++) {
            float *at = work->output[g][c] + lane * 16;
            store(at, load(at) * work->factor[g][lane]);
        }
}

/* output += weights · values for one or two groups of 16 rows, 32 columns at a time */
static void add_products(Work *work, int width, int g, int two) {
    for (int c = 0; c < width / 16; c += 2) {
        _tile_loadd(0, work->output[g][c], 64);
        _tile_loadd(1, work->output[g][c + 1], 64);
        if (two) {
            _tile_loadd(2, work->output[g + 1][c], 64);
            _tile_loadd(3, work->output[g + 1][c + 1], 64);
        }
        for (int half = 0; half < 2; half++) {
            _tile_loadd(4, work->weights[g][half], 64);
            _tile_loadd(6, work->values[half][c], 64);
            _tile_loadd(7, work->values[half][c + 1], 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (!two) continue;
            _tile_loadd(5, work->weights[g + 1][half], 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, work->output[g][c], 64);
        _tile_stored(1, work->output[g][c + 1], 64);
        if (!two) continue;
        _tile_stored(2, work->output[g + 1][c], 64);
        _tile_stored(3, work->output[g + 1][c + 1], 64);
    }
}

static void finish(const Work *work, AttentionState *state) {
    int width = state->args->head_dim;
    for (int row = 0; row < state->rows; row++) {
        int g = row / 16, lane = row % 16;
        float top = work->top[g][lane];
        state->top[row] = top <= MASKED ? MASKED : top / LOG2_E, state->total[row] = work->total[g][lane];
        for (int c = 0; c < width / 16; c++)
            store(state->output + (int64_t)row * width + c * 16, load(work->output[g][c] + lane * 16));
    }
    attention_finish(state);
}

/* Whole tiles pay from a few queries on; caches not of floats and odd widths go the other way. */
void attention_amx(const Attention *args, const AttentionTask *task, float *scratch) {
    int rows = task->queries * (args->heads / args->kv_heads), width = args->head_dim, groups = (rows + 15) / 16;
    if (rows < 8 || rows > ROWS || task->queries < 2 || width % 32 || width > MOST_WIDTH || args->kv_kind != KV_F32 || !args->rounded) {
        attention_avx512vnni(args, task, scratch);
        return;
    }
    AttentionState state;
    attention_begin(&state, args, task, scratch);
    Work work;
    begin(&work, &state, groups);
    configure_tiles();
    for (int key0 = task->key0; key0 < task->key1; key0 += KEYS) {
        int count = task->key1 - key0 < KEYS ? task->key1 - key0 : KEYS, g = 0;
        load_block(&work, &state, key0, count);
        while (args->causal && g + 1 < groups && position_of(&state, g * 16 + 15) < key0) g++; /* these rows see none of it */
        for (; g < groups; g += 2) {
            int two = g + 1 < groups;
            multiply_keys(&work, width, g, two);
            for (int i = g; i <= g + two; i++) {
                weigh_group(&work, &state, i, key0, count);
                rescale(&work, width, i);
            }
            add_products(&work, width, g, two);
        }
    }
    _tile_release();
    finish(&work, &state);
}

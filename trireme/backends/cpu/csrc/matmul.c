/* Matrix products over packed weights: output[r][n] = Σ_k x[r][k] · w[n][k], for one row or many.
 *
 * A tile of 16 weight rows meets R activation rows at a time; weights are decoded to bytes in registers once per R rows.
 *   grouped   y = Σ_groups d_n s_r (correction_r + Σ q_n q_r) + m_n sum_r       (correction: see rows.c)
 *   float     y = Σ w x, the weight bf16, half or float */
#include "layout.h"
#include "vector.h"

#if defined(ISA_AVX512)
enum { MOST_ROWS = 16 };
#elif defined(ISA_PORTABLE)
enum { MOST_ROWS = 2 };
#else
enum { MOST_ROWS = 4 };
#endif
enum { PANEL_BYTES = 1 << 19 }; /* activations that stay in a second-level cache while tiles pass by */

typedef struct { vi quad[8][PARTS]; } GroupBytes; /* 32 columns of 16 rows, 4 columns of a row per int */

typedef int8_t vi_bytes __attribute__((vector_size(LANES * 4)));

/* A weight's table, repeated over the vector, its values as other bytes are stored. */
INLINE vi table_of(const Weight *weight) {
    int8_t bytes[LANES * 4];
    for (int i = 0; i < LANES * 4; i++) bytes[i] = (int8_t)(weight->table[i % 16] ^ STORED_BIAS);
    return load_ints(bytes);
}

/* table[i] for each byte i, from 0 to 15. */
INLINE vi look_up(vi table, vi indices) {
#if defined(ISA_AVX512)
    return (vi)_mm512_shuffle_epi8((__m512i)table, (__m512i)indices);
#elif defined(ISA_AVX2)
    return (vi)_mm256_shuffle_epi8((__m256i)table, (__m256i)indices);
#elif defined(ISA_DOTPROD)
    return (vi)vqtbl1q_s8((int8x16_t)table, (uint8x16_t)indices);
#else
    vi_bytes values = (vi_bytes)table, at = (vi_bytes)indices, found;
    for (int i = 0; i < LANES * 4; i++) found[i] = values[at[i]];
    return (vi)found;
#endif
}

/* Vector p of columns 4q .. 4q + 3 of a group, as `dot` takes them. */
INLINE vi quad_of(const int kind, const uint8_t *at, vi table, const int q, const int p) {
    if (!is_nibbles(kind) && kind != KIND_Q6_K) return load_ints(at + q * 64 + p * LANES * 4);
    vi packed = load_ints(at + q % 4 * 64 + p * LANES * 4), low = (q < 4 ? packed : packed >> 4) & 0x0f0f0f0f;
    if (kind == KIND_Q4_TABLE) return look_up(table, low);
    if (kind != KIND_Q6_K) return low;
    vi pairs = load_ints(at + SIX_HIGH + q % 2 * 64 + p * LANES * 4);
    vi high = (q < 4 ? pairs << (4 - q / 2 * 2) : pairs >> (q / 2 * 2 - 4)) & 0x30303030;
    return (vi)((vi_bytes)(low | high) + (int8_t)(STORED_BIAS - 32)); /* as other bytes are stored */
}

INLINE void decode_group(const int kind, const uint8_t *numbers, vi table, GroupBytes *out) {
#pragma GCC unroll 8
    for (int q = 0; q < 8; q++)
        for (int p = 0; p < PARTS; p++) out->quad[q][p] = quad_of(kind, numbers, table, q, p);
}

/* sum[i] += Σ_4 weights[4i..] · x[..]: weights are nibbles, or bytes as stored; x is 4 signed bytes. */
INLINE vi dot(vi sum, vi weights, int32_t x, const int nibbles) {
#if defined(ISA_AVX512)
    (void)nibbles;
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(x));
#elif defined(ISA_AVX2)
    __m256i w = (__m256i)weights, other = _mm256_set1_epi32(x);
    if (!nibbles) { /* signed by signed: move the weight's sign to x, which is never -128 */
        w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
        other = _mm256_sign_epi8(other, w);
        w = _mm256_abs_epi8(w);
    }
    return sum + (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(w, other), _mm256_set1_epi16(1));
#elif defined(ISA_DOTPROD)
    (void)nibbles;
    return (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, (int8x16_t)vdupq_n_s32(x));
#else
    for (int i = 0; i < 4; i++) {
        vi w = nibbles ? (weights >> (8 * i)) & 15 : (((weights >> (8 * i)) & 255) ^ (128 - STORED_BIAS)) - 128;
        sum += w * (int32_t)(int8_t)(x >> (8 * i));
    }
    return sum;
#endif
}

INLINE int32_t quad_at(const uint8_t *bytes, int quad) { int32_t value; memcpy(&value, bytes + 4 * quad, 4); return value; }

/* How many of R rows `dot_quads` takes at once. Arrays have the most for their size: of one that varies, though it is known where
 * it is inlined, GCC keeps the elements in memory. */
#if defined(ISA_I8MM)
#define TOGETHER(R) ((R) > 1 ? 2 : 1)
enum { MOST_TOGETHER = 2 };
#else
#define TOGETHER(R) 1
enum { MOST_TOGETHER = 1 };
#endif

/* For products of two rows at once: instead of 4 columns of rows 4p .. 4p + 3 each, an even quad and the one after it hold
 * all 8 columns of rows 4p, 4p + 1 and of rows 4p + 2, 4p + 3. */
INLINE void pair_quads(GroupBytes *weights) {
#if defined(ISA_I8MM)
    for (int q = 0; q < 8; q += 2)
        for (int p = 0; p < PARTS; p++) {
            int32x4_t even = (int32x4_t)weights->quad[q][p], odd = (int32x4_t)weights->quad[q + 1][p];
            weights->quad[q][p] = (vi)vzip1q_s32(even, odd);
            weights->quad[q + 1][p] = (vi)vzip2q_s32(even, odd);
        }
#else
    (void)weights;
#endif
}

/* total[r] += Σ over quads [begin, end) of weights · the bytes of row r, for `count` rows: one, or TOGETHER(R). */
INLINE void dot_quads(const int count, const GroupBytes *weights, const int begin, const int end, const uint8_t *bytes,
                      int64_t stride, const int nibbles, vi total[][PARTS]) {
#if defined(ISA_I8MM)
    if (count == 2) {
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) {
            int32x4_t low = {0}, high = {0}; /* of each row: weights 4p, 4p + 1; weights 4p + 2, 4p + 3 */
#pragma GCC unroll 4
            for (int q = begin; q < end; q += 2) {
                const int8_t *x = (const int8_t *)bytes + 4 * q;
                int8x16_t both = vcombine_s8(vld1_s8(x), vld1_s8(x + stride));
                low = vmmlaq_s32(low, both, (int8x16_t)weights->quad[q][p]);
                high = vmmlaq_s32(high, both, (int8x16_t)weights->quad[q + 1][p]);
            }
            total[0][p] += (vi)vzip1q_s64((int64x2_t)low, (int64x2_t)high);
            total[1][p] += (vi)vzip2q_s64((int64x2_t)low, (int64x2_t)high);
        }
        return;
    }
#endif
    (void)count, (void)stride;
#pragma GCC unroll 8
    for (int q = begin; q < end; q++) {
        int32_t x = quad_at(bytes, q);
        for (int p = 0; p < PARTS; p++) total[0][p] = dot(total[0][p], weights->quad[q][p], x, nibbles);
    }
}

/* Where a group's bytes are as many vectors as there are registers, one row takes them one by one, as they are decoded. */
enum { ONE_BY_ONE = LANES == 4 };
INLINE void dot_packed(const int kind, const uint8_t *numbers, vi table, const int begin, const int end, const uint8_t *bytes,
                       vi total[PARTS]) {
#pragma GCC unroll 8
    for (int q = begin; q < end; q++) {
        int32_t x = quad_at(bytes, q);
        for (int p = 0; p < PARTS; p++) total[p] = dot(total[p], quad_of(kind, numbers, table, q, p), x, is_unsigned(kind));
    }
}

INLINE void write_out(const Linear *linear, int tile, int row, const vf sum[PARTS]) {
    int valid = linear->weight->rows - tile * TILE;
    float *at = linear->output + row * linear->output_stride + tile * TILE;
    const float *bias = linear->bias ? linear->bias + tile * TILE : NULL;
    if (valid >= TILE) {
        for (int p = 0; p < PARTS; p++) {
            vf value = sum[p];
            if (bias) value += load(bias + p * LANES);
            if (linear->accumulate) value += load(at + p * LANES);
            store(at + p * LANES, value);
        }
        return;
    }
    float values[TILE];
    for (int p = 0; p < PARTS; p++) store(values + p * LANES, sum[p]); /* memcpy would keep the sums in memory all along */
    for (int i = 0; i < valid; i++) at[i] = values[i] + (bias ? bias[i] : 0) + (linear->accumulate ? at[i] : 0);
}

/* Scales (and minimums) of group g of a block; the super-block's header is at `super`. */
INLINE void load_scales(const int kind, const uint8_t *block, const uint8_t *super, int g, vf d[PARTS], vf m[PARTS]) {
    if (kind == KIND_Q4_K) {
        vf whole[PARTS], least[PARTS];
        load_halves(super, whole);
        load_halves(super + 32, least);
        load_bytes(block + g * 16, d);
        load_bytes(block + 32 + g * 16, m);
        for (int p = 0; p < PARTS; p++) { d[p] *= whole[p]; m[p] *= -least[p]; }
    } else {
        load_halves(block + g * 32, d);
        if (kind == KIND_Q4_MIN) load_halves(block + 64 + g * 32, m);
    }
}

/* acc += group g of the block times R rows' activations; `records` is the first row's record. */
INLINE void group_rows(const int kind, const int R, const uint8_t *numbers, vi table, const GroupBytes *weights, const vf d[PARTS],
                       const vf m[PARTS], const uint8_t *records, int64_t stride, int padded, int group, vf acc[][PARTS]) {
    const int groups = padded / GROUP, together = TOGETHER(R);
#pragma GCC unroll 16
    for (int r = 0; r < R; r += together) {
        const uint8_t *record = records + r * stride;
        vi total[MOST_TOGETHER][PARTS];
        for (int i = 0; i < together; i++) {
            const int32_t *corrections = (const int32_t *)(record + i * stride + padded) + groups;
            for (int p = 0; p < PARTS; p++) total[i][p] = has_min(kind) ? (vi){0} : splat_int(corrections[group]);
        }
        if (R == 1 && ONE_BY_ONE) dot_packed(kind, numbers, table, 0, 8, record + group * GROUP, total[0]);
        else dot_quads(together, weights, 0, 8, record + group * GROUP, stride, is_unsigned(kind), total);
        for (int i = 0; i < together; i++) {
            const float *scales = (const float *)(record + i * stride + padded), *sums = scales + groups;
            for (int p = 0; p < PARTS; p++) {
                acc[r + i][p] += floats(total[i][p]) * (d[p] * scales[group]);
                if (has_min(kind)) acc[r + i][p] += m[p] * sums[group];
            }
        }
    }
}

/* As group_rows, where each 16 columns have a scale of their own. */
INLINE void group_rows_q6(const int R, const uint8_t *numbers, const GroupBytes *weights, const uint8_t *block,
                          const vf whole[PARTS], int g, const uint8_t *records, int64_t stride, int padded, int group,
                          vf acc[][PARTS]) {
    const int together = TOGETHER(R);
    vf d[2][PARTS];
    for (int h = 0; h < 2; h++) {
        load_signed_bytes(block + (g * 2 + h) * 16, d[h]);
        for (int p = 0; p < PARTS; p++) d[h][p] *= whole[p];
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r += together) {
        const uint8_t *record = records + r * stride;
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            vi total[MOST_TOGETHER][PARTS];
            for (int i = 0; i < together; i++) {
                const int32_t *corrections = (const int32_t *)(record + i * stride + padded) + padded / GROUP + 2 * group;
                for (int p = 0; p < PARTS; p++) total[i][p] = splat_int(corrections[h]);
            }
            if (R == 1 && ONE_BY_ONE) dot_packed(KIND_Q6_K, numbers, (vi){0}, 4 * h, 4 * h + 4, record + group * GROUP, total[0]);
            else dot_quads(together, weights, 4 * h, 4 * h + 4, record + group * GROUP, stride, 0, total);
            for (int i = 0; i < together; i++) {
                const float *scales = (const float *)(record + i * stride + padded);
                for (int p = 0; p < PARTS; p++) acc[r + i][p] += floats(total[i][p]) * (d[h][p] * scales[group]);
            }
        }
    }
}

INLINE void grouped_tile(const int kind, const int R, const Linear *linear, const Activations *x, int tile, int row) {
    const Weight *weight = linear->weight;
    const uint8_t *data = weight->data + tile * weight->tile_bytes, *super = data, *records = x->data + row * x->stride;
    const vi table = kind == KIND_Q4_TABLE ? table_of(weight) : (vi){0};
    vf acc[MOST_ROWS][PARTS];
    for (int r = 0; r < R; r++) for (int p = 0; p < PARTS; p++) acc[r][p] = (vf){0};
    for (int block = 0; block < weight->padded / BLOCK; block++) {
        if (is_super(kind) && block % 4 == 0) { super = data; data += SUPER_HEADER; }
        fetch_ahead(data, block_bytes(kind));
        for (int g = 0; g < 2; g++) {
            const uint8_t *numbers = data + block_header(kind) + g * group_bytes(kind);
            GroupBytes decoded;
            vf d[PARTS], m[PARTS];
            if (R > 1 || !ONE_BY_ONE) decode_group(kind, numbers, table, &decoded);
            if (TOGETHER(R) > 1) pair_quads(&decoded);
            if (kind == KIND_Q6_K) {
                load_halves(super, d);
                group_rows_q6(R, numbers, &decoded, data, d, g, records, x->stride, x->padded, 2 * block + g, acc);
            } else {
                load_scales(kind, data, super, g, d, m);
                group_rows(kind, R, numbers, table, &decoded, d, m, records, x->stride, x->padded, 2 * block + g, acc);
            }
        }
        data += block_bytes(kind);
    }
    for (int r = 0; r < R; r++) write_out(linear, tile, row + r, acc[r]);
}

INLINE void float_tile(const int kind, const int R, const Linear *linear, const Activations *x, int tile, int row) {
    const Weight *weight = linear->weight;
    const uint8_t *data = weight->data + tile * weight->tile_bytes, *records = x->data + row * x->stride;
    const int chains = R == 1 ? 4 : R == 2 ? 2 : 1; /* enough independent sums to hide the product's latency */
    vf acc[4][MOST_ROWS][PARTS];
    for (int c = 0; c < 4; c++) for (int r = 0; r < R; r++) for (int p = 0; p < PARTS; p++) acc[c][r][p] = (vf){0};
    for (int k = 0; k < weight->padded; k += 4) {
        fetch_ahead(data + k * group_bytes(kind) / GROUP, 4 * group_bytes(kind) / GROUP);
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            vf w[PARTS];
            if (kind == KIND_F16) load_halves(data + (k + c) * TILE * 2, w);
            for (int p = 0; p < PARTS && kind != KIND_F16; p++) {
                if (kind == KIND_F32) {
                    w[p] = load((const float *)data + (k + c) * TILE + p * LANES);
                } else {
                    vi pair = load_ints(data + (k + c) / 2 * 64 + p * LANES * 4);
                    w[p] = (vf)(c & 1 ? pair & (int32_t)0xffff0000 : pair << 16);
                }
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                float value = ((const float *)(records + r * x->stride))[k + c];
                for (int p = 0; p < PARTS; p++) acc[c % chains][r][p] += w[p] * value;
            }
        }
    }
    for (int r = 0; r < R; r++) {
        for (int c = 1; c < chains; c++) for (int p = 0; p < PARTS; p++) acc[0][r][p] += acc[c][r][p];
        write_out(linear, tile, row + r, acc[0][r]);
    }
}

INLINE void tile_rows(const int kind, const int R, const Linear *linear, const Activations *x, int tile, int row) {
    if (is_float(kind)) float_tile(kind, R, linear, x, tile, row);
    else grouped_tile(kind, R, linear, x, tile, row);
}

/* All tiles and rows for one kind: whole steps of MOST_ROWS, then 8, 4, 2, 1. */
#define DEFINE_KIND(name, kind)                                                                                     \
    static void name(const Linear *linear, const Activations *x, int tile, int row, int end) {                      \
        for (; row + MOST_ROWS <= end; row += MOST_ROWS) tile_rows(kind, MOST_ROWS, linear, x, tile, row);          \
        if (MOST_ROWS > 8 && row + 8 <= end) { tile_rows(kind, 8, linear, x, tile, row); row += 8; }                \
        if (MOST_ROWS > 4 && row + 4 <= end) { tile_rows(kind, 4, linear, x, tile, row); row += 4; }                \
        if (MOST_ROWS > 2 && row + 2 <= end) { tile_rows(kind, 2, linear, x, tile, row); row += 2; }                                 \
        if (row < end) tile_rows(kind, 1, linear, x, tile, row);                                                    \
    }
DEFINE_KIND(rows_f32, KIND_F32)
DEFINE_KIND(rows_bf16, KIND_BF16)
DEFINE_KIND(rows_q4, KIND_Q4)
DEFINE_KIND(rows_q4_min, KIND_Q4_MIN)
DEFINE_KIND(rows_q8, KIND_Q8)
DEFINE_KIND(rows_q4_k, KIND_Q4_K)
DEFINE_KIND(rows_q6_k, KIND_Q6_K)
DEFINE_KIND(rows_q4_table, KIND_Q4_TABLE)
DEFINE_KIND(rows_f16, KIND_F16)

void KERNEL(matmul)(const Linear *linear, const Activations *x, int tile0, int tile1, int rows, float *scratch) {
    static void (*const by_kind[KIND_COUNT])(const Linear *, const Activations *, int, int, int) = {
        rows_f32, rows_bf16, rows_q4, rows_q4_min, rows_q8, rows_q4_k, rows_q6_k, rows_q4_table, rows_f16};
    (void)scratch;
    int panel = (int)(PANEL_BYTES / x->stride) / MOST_ROWS * MOST_ROWS;
    if (panel < MOST_ROWS) panel = MOST_ROWS;
    for (int row = 0; row < rows; row += panel) {
        int end = row + panel < rows ? row + panel : rows;
        for (int tile = tile0; tile < tile1; tile++) by_kind[linear->weight->kind](linear, x, tile, row, end);
    }
}

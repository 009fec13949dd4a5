/* Wide matrix products by bfmmla (ARM): 2 × 2 sums from 4 columns of 2 rows of activations and 2 rows of weights at a time.
 *
 * As with AMX, a tile of weights is decoded to bf16 once and reused for all activation rows, so that scales cost nothing in
 * the inner loop. Of each 4 columns, the decoded tile holds rows 0 and 1, then 2 and 3, and so on: 128 bytes. */
#include "layout.h"
#include "vector.h"

enum { PANEL_ROWS = 8, HALF = TILE / 2 }; /* activation rows and weight rows per pass: 16 vectors of sums */

/* Two vectors of 16 weight rows, rounded to bf16, as one int per lane: `even` in the low half. */
INLINE vi pair_bf16(vf even, vf odd) { return ((((vi)even + 0x8000) >> 16) & 0xffff) | (((vi)odd + 0x8000) & (int32_t)0xffff0000); }

/* Columns 0, 1 and 2, 3 of rows 4p .. 4p + 3 become 4 columns of two rows each. */
INLINE void put_columns(vi first, vi second, int p, uint8_t *out) {
    vst1q_s32((int32_t *)(out + p * 32), vzip1q_s32((int32x4_t)first, (int32x4_t)second));
    vst1q_s32((int32_t *)(out + p * 32 + 16), vzip2q_s32((int32x4_t)first, (int32x4_t)second));
}

/* Column c of four, a signed byte each in every int, times d, plus m. */
INLINE vf column_of(vi quad, int c, vf d, vf m) { return floats((quad << (24 - 8 * c)) >> 24) * d + m; }

INLINE void group_scale(const int kind, const uint8_t *block, const uint8_t *super, int g, int h, vf d[PARTS], vf m[PARTS]) {
    if (kind == KIND_Q6_K) {
        vf whole[PARTS];
        load_halves(super, whole);
        load_signed_bytes(block + (g * 2 + h) * 16, d);
        for (int p = 0; p < PARTS; p++) d[p] *= whole[p];
    } else {
        load_scales(kind, block, super, g, d, m);
    }
    if (!has_min(kind)) for (int p = 0; p < PARTS; p++) m[p] = kind == KIND_Q4 ? d[p] * -8.0f : splat(0);
}

INLINE void decode_tile(const int kind, const uint8_t *data, int padded, vi table, uint8_t *out) {
    const uint8_t *super = data;
    for (int block = 0; block < padded / BLOCK; block++) {
        if (is_super(kind) && block % 4 == 0) { super = data; data += SUPER_HEADER; }
        fetch_ahead(data, block_bytes(kind));
        for (int half = 0; half < 4; half++) { /* a group of 32 columns has two: Q6_K scales each by itself */
            int g = half / 2, h = half % 2;
            GroupBytes bytes;
            vf d[PARTS], m[PARTS];
            decode_group(kind, data + block_header(kind) + g * group_bytes(kind), table, &bytes);
            group_scale(kind, data, super, g, h, d, m);
            for (int q = 4 * h; q < 4 * h + 4; q++, out += 128)
                for (int p = 0; p < PARTS; p++) {
                    vi quad = bytes.quad[q][p];
                    vi first = pair_bf16(column_of(quad, 0, d[p], m[p]), column_of(quad, 1, d[p], m[p]));
                    put_columns(first, pair_bf16(column_of(quad, 2, d[p], m[p]), column_of(quad, 3, d[p], m[p])), p, out);
                }
        }
        data += block_bytes(kind);
    }
}

static void reorder_tile(const uint8_t *data, int padded, uint8_t *out) {
    for (int column = 0; column < padded; column += 4, data += 128, out += 128)
        for (int p = 0; p < PARTS; p++) put_columns(load_ints(data + p * 16), load_ints(data + 64 + p * 16), p, out);
}

static void round_tile(const uint8_t *data, int padded, uint8_t *out) {
    for (int column = 0; column < padded; column += 4, data += 128, out += 128) {
        vf w[4][PARTS];
        for (int c = 0; c < 4; c++) load_halves(data + c * TILE * 2, w[c]);
        for (int p = 0; p < PARTS; p++) put_columns(pair_bf16(w[0][p], w[1][p]), pair_bf16(w[2][p], w[3][p]), p, out);
    }
}

static void decode_any(const Weight *weight, int tile, uint8_t *out) {
    const uint8_t *data = weight->data + tile * weight->tile_bytes;
    switch (weight->kind) {
    case KIND_F16: round_tile(data, weight->padded, out); break;
    case KIND_BF16: reorder_tile(data, weight->padded, out); break;
    case KIND_Q4: decode_tile(KIND_Q4, data, weight->padded, (vi){0}, out); break;
    case KIND_Q4_MIN: decode_tile(KIND_Q4_MIN, data, weight->padded, (vi){0}, out); break;
    case KIND_Q8: decode_tile(KIND_Q8, data, weight->padded, (vi){0}, out); break;
    case KIND_Q4_TABLE: decode_tile(KIND_Q4_TABLE, data, weight->padded, table_of(weight), out); break;
    case KIND_Q4_K: decode_tile(KIND_Q4_K, data, weight->padded, (vi){0}, out); break;
    default: decode_tile(KIND_Q6_K, data, weight->padded, (vi){0}, out);
    }
}

/* sums[r][0 .. 8) = 8 activation rows times half a decoded tile */
static void multiply_half(const uint8_t *x, int64_t stride, const uint8_t *weights, int padded, float (*sums)[TILE]) {
    float32x4_t acc[4][4] = {0}; /* [i][j]: rows 2i, 2i + 1 by weights 2j, 2j + 1 */
    for (int column = 0; column < padded; column += 8, weights += 256) {
        uint64x2_t pairs[2][4]; /* 4 columns of rows 2i, 2i + 1 */
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const uint8_t *row = x + 2 * i * stride + 2 * column;
            uint64x2_t even = vld1q_u64((const uint64_t *)row), odd = vld1q_u64((const uint64_t *)(row + stride));
            pairs[0][i] = vzip1q_u64(even, odd), pairs[1][i] = vzip2q_u64(even, odd);
        }
#pragma GCC unroll 8
        for (int step = 0; step < 8; step++) {
            int k = step / 4, j = step % 4;
            bfloat16x8_t w = vreinterpretq_bf16_u8(vld1q_u8(weights + k * 128 + j * 16));
            for (int i = 0; i < 4; i++) acc[i][j] = vbfmmlaq_f32(acc[i][j], vreinterpretq_bf16_u64(pairs[k][i]), w);
        }
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j += 2) {
            float64x2_t left = vreinterpretq_f64_f32(acc[i][j]), right = vreinterpretq_f64_f32(acc[i][j + 1]);
            vst1q_f32(sums[2 * i] + 2 * j, vreinterpretq_f32_f64(vzip1q_f64(left, right)));
            vst1q_f32(sums[2 * i + 1] + 2 * j, vreinterpretq_f32_f64(vzip2q_f64(left, right)));
        }
}

/* scratch: 16 weight rows as bf16 */
void KERNEL(wide_matmul)(const Linear *linear, const Activations *x, int tile0, int tile1, int rows, float *scratch) {
    uint8_t *decoded = (uint8_t *)scratch;
    float sums[PANEL_ROWS][TILE];
    for (int tile = tile0; tile < tile1; tile++) {
        decode_any(linear->weight, tile, decoded);
        for (int row = 0; row < rows; row += PANEL_ROWS) {
            const uint8_t *records = x->data + row * x->stride;
            multiply_half(records, x->stride, decoded, x->padded, sums);
            multiply_half(records, x->stride, decoded + HALF * 8, x->padded, (float (*)[TILE])(sums[0] + HALF));
            for (int r = 0; r < PANEL_ROWS && row + r < rows; r++) {
                vf parts[PARTS];
                memcpy(parts, sums[r], sizeof parts);
                write_out(linear, tile, row + r, parts);
            }
        }
    }
}

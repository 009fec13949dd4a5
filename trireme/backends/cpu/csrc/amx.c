/* Wide matrix products on AMX tiles (x86): 16 × 16 results from 16 rows of activations and 16 rows of weights at a time.
 *
 * Grouped kinds are decoded to bf16 once per 32 weight rows and reused for all activation rows, so that scales cost nothing
 * in the inner loop; bf16 weights are read as they lie. */
#include "activate.h"
#include "amx.h"
#include "layout.h"

extern void prepare_avx512vnni(const Transform *, const float *, int, float *, const Activations *, int);
extern void matmul_avx512vnni(const Linear *, const Activations *, int, int, int, float *);
extern void row_map_avx512vnni(const RowMap *, int, float *);
extern void rope_store_avx512vnni(const RopeStore *, int, int);
extern void attention_amx(const Attention *, const AttentionTask *, float *);
extern size_t sample_bytes_avx512vnni(int);
extern int64_t sample_avx512vnni(const Sample *, int, void *);
extern int best_avx512vnni(const float *, int);

/* Column c of four (a byte each in every int) as the float 128 + q or, for whole bytes, 256 + q: its bits are put straight into
 * the fraction of 128.0 or 256.0, which saves the conversion. The caller's offset takes the 128 or 256 away again. */
INLINE __m512 column_float(__m512i quad, const int column, const int nibbles) {
    const int shift = (nibbles ? 16 : 15) - 8 * column;
    __m512i moved = shift >= 0 ? _mm512_slli_epi32(quad, shift) : _mm512_srli_epi32(quad, -shift);
    __m512i mask = _mm512_set1_epi32(nibbles ? 0x000f0000 : 0x007f8000), one = _mm512_set1_epi32(nibbles ? 0x43000000 : 0x43800000);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(moved, mask, one, 0xea)); /* (moved & mask) | one */
}

/* Four columns of 16 rows become two rows of a bf16 tile: value = column_float · d + m. */
INLINE void decode_quad(__m512i quad, const int nibbles, __m512 d, __m512 m, uint8_t *out) {
    __m512 a = column_float(quad, 0, nibbles), b = column_float(quad, 1, nibbles);
    __m512 c = column_float(quad, 2, nibbles), e = column_float(quad, 3, nibbles);
    _mm512_store_si512(out, pair_bf16(_mm512_fmadd_ps(a, d, m), _mm512_fmadd_ps(b, d, m)));
    _mm512_store_si512(out + 64, pair_bf16(_mm512_fmadd_ps(c, d, m), _mm512_fmadd_ps(e, d, m)));
}

INLINE __m512 halves(const uint8_t *at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }
INLINE __m512 bytes16(const uint8_t *at) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at))); }
INLINE __m512 signed16(const uint8_t *at) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at))); }

/* The scale and offset of group g, columns 16h on: value = q · d + m for the stored, unsigned q. */
INLINE void group_scale(const int kind, const uint8_t *block, const uint8_t *super, int g, int h, __m512 *d, __m512 *m) {
    switch (kind) {
    case KIND_Q4: *d = halves(block + g * 32); *m = _mm512_mul_ps(*d, _mm512_set1_ps(-8)); break;
    case KIND_Q4_MIN: *d = halves(block + g * 32); *m = halves(block + 64 + g * 32); break;
    case KIND_Q4_TABLE: /* the bytes of a table, as those of KIND_Q8, are stored 128 higher */
    case KIND_Q8: *d = halves(block + g * 32); *m = _mm512_mul_ps(*d, _mm512_set1_ps(-128)); break;
    case KIND_Q4_K:
        *d = _mm512_mul_ps(halves(super), bytes16(block + g * 16));
        *m = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(halves(super + 32), bytes16(block + 32 + g * 16)));
        break;
    default:
        *d = _mm512_mul_ps(halves(super), signed16(block + (g * 2 + h) * 16));
        *m = _mm512_mul_ps(*d, _mm512_set1_ps(-32));
    }
}

/* Columns 4q .. 4q + 3 of a group, a byte each; what lies above a nibble is left to be masked. */
INLINE __m512i stored_quad(const int kind, const uint8_t *numbers, __m512i table, int q) {
    if (!is_nibbles(kind) && kind != KIND_Q6_K) return _mm512_loadu_si512(numbers + q * 64);
    __m512i quad = _mm512_srli_epi32(_mm512_loadu_si512(numbers + q % 4 * 64), q < 4 ? 0 : 4);
    if (kind == KIND_Q4_TABLE) return _mm512_shuffle_epi8(table, _mm512_and_si512(quad, _mm512_set1_epi8(0x0f)));
    if (kind != KIND_Q6_K) return quad;
    __m512i pairs = _mm512_loadu_si512(numbers + SIX_HIGH + q % 2 * 64);
    pairs = q < 4 ? _mm512_slli_epi32(pairs, 4 - q / 2 * 2) : _mm512_srli_epi32(pairs, q / 2 * 2 - 4);
    quad = _mm512_and_si512(quad, _mm512_set1_epi8(0x0f));
    return _mm512_ternarylogic_epi32(pairs, _mm512_set1_epi8(0x30), quad, 0xea); /* (pairs & mask) | quad */
}

/* 16 weight rows as bf16 pairs: 1 KB per 32 columns. */
INLINE void decode_tile(const int kind, const uint8_t *data, int padded, __m512i table, uint8_t *out) {
    const int nibbles = is_unsigned(kind);
    const uint8_t *super = data;
    for (int block = 0; block < padded / BLOCK; block++) {
        if (is_super(kind) && block % 4 == 0) { super = data; data += SUPER_HEADER; }
        fetch_ahead(data, block_bytes(kind));
        for (int g = 0; g < 2; g++, out += 1024) {
            const uint8_t *numbers = data + block_header(kind) + g * group_bytes(kind);
            __m512 d = _mm512_setzero_ps(), m = d;
#pragma GCC unroll 8
            for (int q = 0; q < 8; q++) {
                if (q % 4 == 0) {
                    group_scale(kind, data, super, g, q / 4, &d, &m);
                    m = _mm512_fnmadd_ps(d, _mm512_set1_ps(nibbles ? 128 : 256), m);
                }
                decode_quad(stored_quad(kind, numbers, table, q), nibbles, d, m, out + q * 128);
            }
        }
        data += block_bytes(kind);
    }
}

/* Halves, rounded to bf16. */
static void round_tile(const uint8_t *data, int columns, uint8_t *out) {
    for (int column = 0; column < columns; column += 2, data += 64, out += 64) {
        fetch_ahead(data, 64);
        _mm512_store_si512(out, pair_bf16(halves(data), halves(data + 32)));
    }
}

/* A weight's table in each quarter of the vector, its values 128 higher. */
static __m512i table_of(const Weight *weight) {
    __m128i table = _mm_xor_si128(_mm_loadu_si128((const __m128i *)weight->table), _mm_set1_epi8(-128));
    return _mm512_broadcast_i32x4(table);
}

/* `columns` columns of a tile from `first` on. */
static void decode_any(const Weight *weight, int tile, int first, int columns, uint8_t *out) {
    const uint8_t *data = weight->data + tile * weight->tile_bytes;
    data += is_super(weight->kind) ? super_offset(weight->kind, first / SUPER) : block_offset(weight->kind, first / BLOCK);
    const __m512i none = _mm512_setzero_si512();
    switch (weight->kind) {
    case KIND_F16: round_tile(data, columns, out); break;
    case KIND_Q4: decode_tile(KIND_Q4, data, columns, none, out); break;
    case KIND_Q4_MIN: decode_tile(KIND_Q4_MIN, data, columns, none, out); break;
    case KIND_Q8: decode_tile(KIND_Q8, data, columns, none, out); break;
    case KIND_Q4_TABLE: decode_tile(KIND_Q4_TABLE, data, columns, table_of(weight), out); break;
    case KIND_Q4_K: decode_tile(KIND_Q4_K, data, columns, none, out); break;
    default: decode_tile(KIND_Q6_K, data, columns, none, out);
    }
}

/* A block of 16 × 16 results: where its sums begin (NULL: at zero) and where they go, as floats with so many bytes between rows. */
typedef struct { const float *from; int64_t from_stride; float *to; int64_t to_stride; } Block;

/* `more`: the output has sums already. A block with rows or weights past the last goes to `scratch`, and from there to its place. */
static Block block_of(const Linear *linear, int tile, int row, int rows, int more, float *scratch) {
    const int on = linear->accumulate || more, whole = (tile + 1) * TILE <= linear->weight->rows && row + 16 <= rows;
    const int64_t stride = linear->output_stride * 4;
    float *at = linear->output + row * linear->output_stride + tile * TILE;
    if (!whole || (linear->accumulate && linear->bias)) return (Block){.to = scratch, .to_stride = 64};
    if (on) return (Block){at, stride, at, stride};
    return (Block){linear->bias ? linear->bias + tile * TILE : NULL, 0, at, stride};
}

/* Adds a block in `scratch` to the output, those past the last row or weight left out. */
static void write_block(const Linear *linear, const float *sums, int tile, int row, int rows, int more) {
    const Weight *weight = linear->weight;
    int columns = weight->rows - tile * TILE, count = rows - row < 16 ? rows - row : 16;
    __mmask16 mask = columns >= TILE ? 0xffff : (__mmask16)((1 << columns) - 1);
    __m512 bias = linear->bias && !more ? _mm512_maskz_loadu_ps(mask, linear->bias + tile * TILE) : _mm512_setzero_ps();
    for (int r = 0; r < count; r++) {
        float *at = linear->output + (row + r) * linear->output_stride + tile * TILE;
        __m512 value = _mm512_load_ps(sums + r * 16);
        value = _mm512_add_ps(value, bias);
        if (linear->accumulate || more) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, at));
        _mm512_mask_storeu_ps(at, mask, value);
    }
}

#define BEGIN(number, block) \
    if ((block).from) _tile_loadd(number, (block).from, (int)(block).from_stride); \
    else _tile_zero(number)
#define END(number, block) _tile_stored(number, (block).to, (int)(block).to_stride)

/* Up to 2 × 2 blocks of results: two times 16 activation rows by two weight tiles. Tiles 0-3 sum, 4-5 hold x, 6-7 weights. */
INLINE void multiply(const int two_rows, const int two_tiles, const uint8_t *x, int64_t stride,
                     const uint8_t *w0, const uint8_t *w1, int steps, const Block *blocks) {
    BEGIN(0, blocks[0]);
    if (two_tiles) { BEGIN(1, blocks[1]); }
    if (two_rows) { BEGIN(2, blocks[2]); }
    if (two_rows && two_tiles) { BEGIN(3, blocks[3]); }
    _tile_loadd(4, x, (int)stride);
    _tile_loadd(6, w0, 64);
    for (int step = 0; step < steps; step++) { /* what the next step needs is asked for while this one multiplies */
        const int next = step + 1 < steps ? step + 1 : step;
        if (two_tiles) _tile_loadd(7, w1 + (size_t)step * 1024, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (two_rows) _tile_loadd(5, x + 16 * stride + step * 64, (int)stride);
        if (two_tiles) _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(4, x + next * 64, (int)stride);
        if (two_rows) _tile_dpbf16ps(2, 5, 6);
        _tile_loadd(6, w0 + (size_t)next * 1024, 64);
        if (two_rows && two_tiles) _tile_dpbf16ps(3, 5, 7);
    }
    END(0, blocks[0]);
    if (two_tiles) END(1, blocks[1]);
    if (two_rows) END(2, blocks[2]);
    if (two_rows && two_tiles) END(3, blocks[3]);
}

typedef struct { int first, columns; } Slice; /* of all columns */

INLINE void multiply_rows(const Linear *linear, const Activations *x, Slice slice, int tile, int two_tiles,
                          const uint8_t *w0, const uint8_t *w1, int row, int rows, float *scratch) {
    const uint8_t *records = x->data + row * x->stride + slice.first * 2;
    int steps = slice.columns / 32, two_rows = row + 16 < rows, more = slice.first > 0;
    Block blocks[4];
    for (int i = 0; i < 4; i++) blocks[i] = block_of(linear, tile + i % 2, row + i / 2 * 16, rows, more, scratch + i * 256);
    if (two_rows && two_tiles) multiply(1, 1, records, x->stride, w0, w1, steps, blocks);
    else if (two_rows) multiply(1, 0, records, x->stride, w0, w1, steps, blocks);
    else if (two_tiles) multiply(0, 1, records, x->stride, w0, w1, steps, blocks);
    else multiply(0, 0, records, x->stride, w0, w1, steps, blocks);
    for (int i = 0; i < 4; i++) {
        if (blocks[i].to == scratch + i * 256 && i % 2 <= two_tiles && i / 2 <= two_rows)
            write_block(linear, scratch + i * 256, tile + i % 2, row + i / 2 * 16, rows, more);
    }
}

/* Tiles [first, last) of some of the columns as bf16, `tile_size` bytes each: where they lie, or decoded. */
static const uint8_t *weights_of(const Weight *weight, Slice slice, int first, int last, size_t tile_size, uint8_t *decoded) {
    if (weight->kind == KIND_BF16) return weight->data + first * tile_size + (size_t)slice.first * 32;
    for (int tile = first; tile < last; tile++)
        decode_any(weight, tile, slice.first, slice.columns, decoded + (tile - first) * tile_size);
    return decoded;
}

static size_t size_of(const Weight *weight, Slice slice) {
    return weight->kind == KIND_BF16 ? (size_t)weight->tile_bytes : (size_t)slice.columns * 32;
}

/* All rows by tiles [first, last), some of the columns. */
static void multiply_slice(const Linear *linear, const Activations *x, Slice slice, int first, int last, int rows, uint8_t *decoded, float *spare) {
    const size_t tile_size = size_of(linear->weight, slice);
    const uint8_t *weights = weights_of(linear->weight, slice, first, last, tile_size, decoded);
    for (int row = 0; row < rows; row += 32)
        for (int tile = first; tile < last; tile += 2) {
            const uint8_t *w0 = weights + (tile - first) * tile_size;
            multiply_rows(linear, x, slice, tile, tile + 1 < last, w0, w0 + tile_size, row, rows, spare);
        }
}

/* scratch: as many weight rows as fit in WIDE_BYTES (32 at least) as bf16, then 4 KB of sums. Each 32 rows of activations meet all
 * of these weights, so that they come from far memory once for all, not once for each 32 weight rows. */
void matmul_amx(const Linear *linear, const Activations *x, int tile0, int tile1, int rows, float *scratch) {
    const int padded = linear->weight->padded, columns = wide_columns(padded, rows), most = wide_tiles(padded, rows);
    uint8_t *decoded = (uint8_t *)scratch;
    float *sums = (float *)(decoded + (size_t)most * columns * 32);
    configure_tiles();
    for (int first = tile0; first < tile1; first += most) {
        int last = first + most < tile1 ? first + most : tile1;
        for (Slice slice = {0, columns}; slice.first < padded; slice.first += columns) {
            if (slice.first + columns > padded) slice.columns = padded - slice.first;
            multiply_slice(linear, x, slice, first, last, rows, decoded, sums);
        }
    }
    _tile_release();
}

/* act(gate) · up of 16 columns, as bf16 */
INLINE void gate_rows(const int kind, const float *gate, const float *up, int count, uint8_t *out, int64_t stride) {
    for (int r = 0; r < count; r++) {
        vf value = activate(kind, load(gate + r * 16)) * load(up + r * 16);
        _mm256_storeu_si256((__m256i *)(out + r * stride), (__m256i)_mm512_cvtneps_pbh((__m512)value));
    }
}

static void gate_block(int kind, const float *gate, const float *up, int count, uint8_t *out, int64_t stride) {
    switch (kind) {
    case TRANSFORM_SILU_MUL: gate_rows(TRANSFORM_SILU_MUL, gate, up, count, out, stride); break;
    case TRANSFORM_GELU_TANH_MUL: gate_rows(TRANSFORM_GELU_TANH_MUL, gate, up, count, out, stride); break;
    default: gate_rows(TRANSFORM_GELU_MUL, gate, up, count, out, stride);
    }
}

/* 32 rows by one tile of the gate and the tile of what it gates. */
static void multiply_gated(const Linear *linear, const Activations *x, const Activations *gated, int tile,
                           const uint8_t *gate, const uint8_t *up, int row, int rows, float *sums) {
    const uint8_t *records = x->data + row * x->stride;
    const int half = linear->weight->rows / TILE / 2, steps = x->padded / 32;
    Block blocks[4];
    for (int i = 0; i < 4; i++) {
        const float *bias = linear->bias ? linear->bias + (tile + i % 2 * half) * TILE : NULL;
        blocks[i] = (Block){bias, 0, sums + i * 256, 64};
    }
    if (row + 16 < rows) multiply(1, 1, records, x->stride, gate, up, steps, blocks);
    else multiply(0, 1, records, x->stride, gate, up, steps, blocks);
    for (int part = 0; part < 2 && row + part * 16 < rows; part++) {
        int at = row + part * 16, count = rows - at < 16 ? rows - at : 16;
        uint8_t *out = gated->data + at * gated->stride + tile * TILE * 2;
        gate_block(linear->reader->transform.kind, sums + part * 512, sums + part * 512 + 256, count, out, gated->stride);
    }
}

/* As matmul_amx, tiles [tile0, tile1) of the gate with those they gate. The sums never leave the first cache. */
void gated_amx(const Linear *linear, const Activations *x, const Activations *gated, int tile0, int tile1, int rows, float *scratch) {
    const Weight *weight = linear->weight;
    const Slice all = {0, weight->padded};
    const int half = weight->rows / TILE / 2, most = gated_tiles(weight->padded, rows) / 2;
    const size_t tile_size = size_of(weight, all);
    uint8_t *decoded = (uint8_t *)scratch;
    float *sums = (float *)(decoded + (size_t)2 * most * weight->padded * 32);
    configure_tiles();
    for (int first = tile0; first < tile1; first += most) {
        int last = first + most < tile1 ? first + most : tile1;
        const uint8_t *gates = weights_of(weight, all, first, last, tile_size, decoded);
        const uint8_t *ups = weights_of(weight, all, first + half, last + half, tile_size, decoded + most * tile_size);
        for (int row = 0; row < rows; row += 32)
            for (int tile = first; tile < last; tile++) {
                size_t at = (tile - first) * tile_size;
                multiply_gated(linear, x, gated, tile, gates + at, ups + at, row, rows, sums);
            }
    }
    _tile_release();
}

const Kernels kernels_amx = {
    .name = "amx",
    .prepare = prepare_avx512vnni,
    .matmul = matmul_avx512vnni,
    .row_map = row_map_avx512vnni,
    .rope_store = rope_store_avx512vnni,
    .attention = attention_amx,
    .best = best_avx512vnni,
    .sample_bytes = sample_bytes_avx512vnni,
    .sample = sample_avx512vnni,
    .wide_rows = 16,
    .wide_matmul = matmul_amx,
    .gated_matmul = gated_amx,
};

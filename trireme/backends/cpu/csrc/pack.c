/* Packing weights: rows of floats or of GGUF blocks into tiles of 16 rows, and one row back to floats.
 * Quantised blocks are moved bit by bit, never through floats. Knows no arithmetic of matmuls. */
#include "half.h"
#include "layout.h"
#include <math.h>
#include <stdlib.h>

typedef enum { SOURCE_F32, SOURCE_F16, SOURCE_BF16, SOURCE_Q4_0, SOURCE_Q4_1, SOURCE_Q8_0, SOURCE_Q5_0, SOURCE_Q4_K, SOURCE_Q6_K,
               SOURCE_IQ4_NL, SOURCE_IQ4_XS, SOURCE_MXFP4 } Source;

int64_t trireme_padded_columns(int kind, int columns) {
    int unit = is_super(kind) ? SUPER : BLOCK;
    return (int64_t)(columns + unit - 1) / unit * unit;
}

int64_t trireme_tile_bytes(int kind, int columns) {
    int64_t padded = trireme_padded_columns(kind, columns);
    int64_t bytes = padded / BLOCK * block_bytes(kind);
    return is_super(kind) ? bytes + padded / SUPER * SUPER_HEADER : bytes;
}

typedef struct { uint8_t *tile; int lane, kind; } Row; /* one weight row inside its tile */

static uint8_t *group_of(Row row, int group) { /* the numbers of 32 columns */
    return row.tile + block_offset(row.kind, group / 2) + block_header(row.kind) + (group & 1) * group_bytes(row.kind);
}
static uint8_t *header_of(Row row, int group) { return row.tile + block_offset(row.kind, group / 2); }
static void put_half(uint8_t *at, int index, uint16_t value) { memcpy(at + 2 * index, &value, 2); }
static uint16_t get_half(const uint8_t *at, int index) { uint16_t value; memcpy(&value, at + 2 * index, 2); return value; }
static void put_scale(Row row, int group, uint16_t d) { put_half(header_of(row, group) + (group & 1) * 32, row.lane, d); }
static void put_min(Row row, int group, uint16_t m) { put_half(header_of(row, group) + 64 + (group & 1) * 32, row.lane, m); }

/* 16 bytes whose low nibbles are columns 0..15 of the group and whose high ones are 16..31. */
static void put_nibbles(Row row, int group, const uint8_t *nibbles) {
    uint8_t *at = group_of(row, group) + row.lane * 4;
    for (int quad = 0; quad < 4; quad++) memcpy(at + quad * 64, nibbles + quad * 4, 4);
}
static uint64_t eight(const uint8_t *at) { uint64_t bytes; memcpy(&bytes, at, 8); return bytes; }

/* 32 bytes of which one nibble each counts, the low ones or, with a shift of 4, the high ones. */
static void put_folded(Row row, int group, const uint8_t *from, int shift) {
    uint64_t nibbles[2];
    const uint64_t mask = 0x0f0f0f0f0f0f0f0fu;
    for (int i = 0; i < 2; i++) nibbles[i] = (eight(from + 8 * i) >> shift & mask) | (eight(from + 16 + 8 * i) >> shift & mask) << 4;
    put_nibbles(row, group, (const uint8_t *)nibbles);
}
static void put_bytes(Row row, int group, const int8_t *values) {
    uint8_t *at = group_of(row, group) + row.lane * 4;
    for (int quad = 0; quad < GROUP / 4; quad++) {
        uint32_t four;
        memcpy(&four, values + quad * 4, 4);
        four ^= STORED_BIAS * 0x01010101u; /* of a byte, adding 128 and turning its highest bit are the same */
        memcpy(at + quad * 64, &four, 4);
    }
}

static int rounded(float value, int low, int high) {
    int integer = (int)lrintf(value);
    return integer < low ? low : integer > high ? high : integer;
}

static float largest(const float *values, int count) { /* the value of largest magnitude, with its sign */
    float best = 0;
    for (int i = 0; i < count; i++) if (fabsf(values[i]) > fabsf(best)) best = values[i];
    return best;
}

static float inverse(float value) { return value != 0 ? 1 / value : 0; }

static void nibbles_of(const float *values, float factor, float shift, uint8_t *nibbles) {
    for (int i = 0; i < 16; i++) {
        int low = rounded(values[i] * factor + shift, 0, 15), high = rounded(values[i + 16] * factor + shift, 0, 15);
        nibbles[i] = (uint8_t)(low | high << 4);
    }
}

static void encode_q4(Row row, int group, const float *values) {
    uint8_t nibbles[16];
    uint16_t d = float_to_half(largest(values, GROUP) / -8);
    nibbles_of(values, inverse(half_to_float(d)), 8, nibbles);
    put_scale(row, group, d);
    put_nibbles(row, group, nibbles);
}

static void encode_q4_min(Row row, int group, const float *values) {
    uint8_t nibbles[16];
    float low = values[0], high = values[0];
    for (int i = 1; i < GROUP; i++) { low = fminf(low, values[i]); high = fmaxf(high, values[i]); }
    uint16_t m = float_to_half(low), d = float_to_half((high - half_to_float(m)) / 15);
    float factor = inverse(half_to_float(d));
    nibbles_of(values, factor, -half_to_float(m) * factor, nibbles);
    put_scale(row, group, d);
    put_min(row, group, m);
    put_nibbles(row, group, nibbles);
}

/* The number of `table` nearest to each value times `factor`. */
static void table_nibbles_of(const float *values, float factor, const int8_t *table, uint8_t *nibbles) {
    uint8_t codes[GROUP];
    for (int i = 0; i < GROUP; i++) {
        float wanted = values[i] * factor;
        codes[i] = 0;
        for (uint8_t code = 1; code < 16; code++)
            if (fabsf(wanted - table[code]) < fabsf(wanted - table[codes[i]])) codes[i] = code;
    }
    for (int i = 0; i < 16; i++) nibbles[i] = (uint8_t)(codes[i] | codes[i + 16] << 4);
}

/* The value of largest magnitude becomes the table's number of largest magnitude. */
static void encode_q4_table(Row row, int group, const float *values, const int8_t *table) {
    uint8_t nibbles[16];
    int most = 1;
    for (int code = 0; code < 16; code++) if (abs(table[code]) > abs(most)) most = table[code];
    uint16_t d = float_to_half(largest(values, GROUP) / (float)most);
    table_nibbles_of(values, inverse(half_to_float(d)), table, nibbles);
    put_scale(row, group, d);
    put_nibbles(row, group, nibbles);
}

static void bytes_of(const float *values, float factor, int8_t *bytes) {
    for (int i = 0; i < GROUP; i++) bytes[i] = (int8_t)rounded(values[i] * factor, -127, 127);
}

static void encode_q8(Row row, int group, const float *values) {
    int8_t bytes[GROUP];
    uint16_t d = float_to_half(fabsf(largest(values, GROUP)) / 127);
    bytes_of(values, inverse(half_to_float(d)), bytes);
    put_scale(row, group, d);
    put_bytes(row, group, bytes);
}

static void encode_plain(Row row, int group, const float *values) {
    uint8_t *at = group_of(row, group);
    for (int column = 0; column < GROUP; column++) {
        if (row.kind == KIND_F32) {
            memcpy(at + (column * TILE + row.lane) * 4, values + column, 4);
        } else if (row.kind == KIND_F16) {
            put_half(at, column * TILE + row.lane, float_to_half(values[column]));
        } else {
            uint16_t value = float_to_bf16(values[column]);
            memcpy(at + (column / 2 * TILE + row.lane) * 4 + column % 2 * 2, &value, 2);
        }
    }
}

/* `values` holds whole groups, zeros after the last column. */
static void encode_row(const Weight *weight, Row row, const float *values) {
    for (int group = 0; group < weight->padded / GROUP; group++) {
        const float *part = values + group * GROUP;
        switch (weight->kind) {
        case KIND_Q4: encode_q4(row, group, part); break;
        case KIND_Q4_MIN: encode_q4_min(row, group, part); break;
        case KIND_Q8: encode_q8(row, group, part); break;
        case KIND_Q4_TABLE: encode_q4_table(row, group, part, weight->table); break;
        default: encode_plain(row, group, part);
        }
    }
}

static void read_floats(int source, const uint8_t *from, int count, float *values) {
    for (int i = 0; i < count; i++) {
        if (source == SOURCE_F32) memcpy(values + i, from + 4 * i, 4);
        else values[i] = source == SOURCE_F16 ? half_to_float(get_half(from, i)) : bf16_to_float(get_half(from, i));
    }
}

static void repack_q4_0(Row row, int group, const uint8_t *block) { /* half d; 16 bytes */
    put_scale(row, group, get_half(block, 0));
    put_nibbles(row, group, block + 2);
}
static void repack_q4_1(Row row, int group, const uint8_t *block) { /* half d, m; 16 bytes */
    put_scale(row, group, get_half(block, 0));
    put_min(row, group, get_half(block, 1));
    put_nibbles(row, group, block + 4);
}
static void repack_q8_0(Row row, int group, const uint8_t *block) { /* half d; 32 int8 */
    put_scale(row, group, get_half(block, 0));
    put_bytes(row, group, (const int8_t *)block + 2);
}
static void repack_q5_0(Row row, int group, const uint8_t *block) { /* half d; 32 fifth bits; 16 bytes: w = d (q - 16) */
    int8_t bytes[GROUP];
    uint32_t fifth;
    memcpy(&fifth, block + 2, 4);
    for (int i = 0; i < 16; i++) {
        bytes[i] = (int8_t)(((block[6 + i] & 15) | (fifth >> i & 1) << 4) - 16);
        bytes[i + 16] = (int8_t)((block[6 + i] >> 4 | (fifth >> (i + 16) & 1) << 4) - 16);
    }
    put_scale(row, group, get_half(block, 0));
    put_bytes(row, group, bytes);
}

/* half d, dmin; 12 bytes of 6-bit scales and minimums; 128 bytes, each 32 of them two groups' low and high nibbles. */
static void repack_q4_k(Row row, int super, const uint8_t *block) {
    uint8_t *head = row.tile + super_offset(row.kind, super);
    const uint8_t *packed = block + 4, *numbers = block + 16;
    put_half(head, row.lane, get_half(block, 0));
    put_half(head + 32, row.lane, get_half(block, 1));
    for (int i = 0; i < 8; i++) {
        int scale = i < 4 ? packed[i] & 63 : (packed[i + 4] & 15) | packed[i - 4] >> 6 << 4;
        int minimum = i < 4 ? packed[i + 4] & 63 : packed[i + 4] >> 4 | packed[i] >> 6 << 4;
        int group = super * 8 + i, shift = i & 1 ? 4 : 0;
        header_of(row, group)[(group & 1) * 16 + row.lane] = (uint8_t)scale;
        header_of(row, group)[32 + (group & 1) * 16 + row.lane] = (uint8_t)minimum;
        put_folded(row, group, numbers + i / 2 * 32, shift);
    }
}

/* 128 bytes of low nibbles; 64 of high pairs of bits; 16 int8 scales; half d: w = d s (q - 32). */
static void repack_q6_k(Row row, int super, const uint8_t *block) {
    const uint8_t *low = block, *high = block + 128, *scales = block + 192;
    put_half(row.tile + super_offset(row.kind, super), row.lane, get_half(block + 208, 0));
    for (int i = 0; i < 8; i++) {
        int half = i / 4, part = i % 4, group = super * 8 + i; /* each half of 128 columns is four groups */
        uint64_t pairs = 0;
        for (int k = 0; k < 4; k++) pairs |= (eight(high + half * 32 + 8 * k) >> (2 * part) & 0x0303030303030303u) << (2 * k);
        put_folded(row, group, low + half * 64 + (part & 1) * 32, part & 2 ? 4 : 0);
        uint8_t *at = group_of(row, group) + SIX_HIGH + row.lane * 4;
        memcpy(at, &pairs, 4);
        memcpy(at + 64, (const uint8_t *)&pairs + 4, 4);
        for (int k = 0; k < 2; k++) header_of(row, group)[((group & 1) * 2 + k) * 16 + row.lane] = scales[i * 2 + k];
    }
}

/* half d; 8 high pairs of bits, 8 low nibbles of scales; 8 times 16 bytes as in Q4_0: w = d (s - 32) table[q] */
static void repack_iq4_xs(Row row, int super, const uint8_t *block) {
    uint16_t high = get_half(block, 1);
    float d = half_to_float(get_half(block, 0));
    for (int i = 0; i < 8; i++) {
        int scale = (block[4 + i / 2] >> (i & 1 ? 4 : 0) & 15) | (high >> 2 * i & 3) << 4;
        put_scale(row, super * 8 + i, float_to_half(d * (float)(scale - 32)));
        put_nibbles(row, super * 8 + i, block + 8 + 16 * i);
    }
}

/* e; 16 bytes as in Q4_0: w = 2^(e - 128) table[q], the table twice the floats of four bits. */
static void repack_mxfp4(Row row, int group, const uint8_t *block) {
    put_scale(row, group, float_to_half(ldexpf(1, block[0] - 128)));
    put_nibbles(row, group, block + 1);
}

static const struct { int kind, columns, bytes; void (*repack)(Row, int, const uint8_t *); } sources[] = {
    [SOURCE_Q4_0] = {KIND_Q4, 32, 18, repack_q4_0},   [SOURCE_Q4_1] = {KIND_Q4_MIN, 32, 20, repack_q4_1},
    [SOURCE_Q8_0] = {KIND_Q8, 32, 34, repack_q8_0},   [SOURCE_Q5_0] = {KIND_Q8, 32, 22, repack_q5_0},
    [SOURCE_Q4_K] = {KIND_Q4_K, 256, 144, repack_q4_k}, [SOURCE_Q6_K] = {KIND_Q6_K, 256, 210, repack_q6_k},
    [SOURCE_IQ4_NL] = {KIND_Q4_TABLE, 32, 18, repack_q4_0}, [SOURCE_IQ4_XS] = {KIND_Q4_TABLE, 256, 136, repack_iq4_xs},
    [SOURCE_MXFP4] = {KIND_Q4_TABLE, 32, 17, repack_mxfp4},
};

typedef struct { const Weight *weight; int first, count, source; const uint8_t *from; int64_t stride; } Packing;

static void pack_rows(void *context, Worker *worker) {
    const Packing *packing = context;
    const Weight *weight = packing->weight;
    float *values = pool_scratch(worker, (size_t)weight->padded * 4);
    for (Span span; pool_take(worker, packing->count, TILE, &span);) {
        for (int64_t r = span.first; r < span.end; r++) {
            int index = packing->first + (int)r;
            Row row = {(uint8_t *)weight->data + index / TILE * weight->tile_bytes, index % TILE, weight->kind};
            const uint8_t *from = packing->from + r * packing->stride;
            if (packing->source <= SOURCE_BF16) {
                read_floats(packing->source, from, weight->columns, values);
                memset(values + weight->columns, 0, (size_t)(weight->padded - weight->columns) * 4);
                encode_row(weight, row, values);
            } else {
                int count = weight->columns / sources[packing->source].columns, bytes = sources[packing->source].bytes;
                for (int b = 0; b < count; b++) sources[packing->source].repack(row, b, from + (size_t)b * bytes);
            }
        }
    }
    pool_next_phase(worker, packing->count);
}

/* Writes `count` rows from row `first` on. Returns 0, or -1 when that source cannot become that kind. The tiles start zeroed. */
int trireme_pack(const Weight *weight, int first, int count, int source, const void *from, int64_t stride) {
    int quantised = source > SOURCE_BF16;
    if (quantised && (source > SOURCE_MXFP4 || sources[source].kind != weight->kind || weight->columns % sources[source].columns)) return -1;
    if (!quantised && is_super(weight->kind)) return -1;
    Packing packing = {weight, first, count, source, from, stride};
    pool_run(pack_rows, &packing);
    return 0;
}

static float scale_of(const Weight *weight, Row row, int column, float *minimum) {
    int group = column / GROUP;
    const uint8_t *head = header_of(row, group), *super = row.tile + super_offset(row.kind, group / 8);
    *minimum = 0;
    switch (weight->kind) {
    case KIND_Q4_K:
        *minimum = -half_to_float(get_half(super + 32, row.lane)) * head[32 + (group & 1) * 16 + row.lane];
        return half_to_float(get_half(super, row.lane)) * head[(group & 1) * 16 + row.lane];
    case KIND_Q6_K:
        return half_to_float(get_half(super, row.lane)) * (int8_t)head[((group & 1) * 2 + column % GROUP / 16) * 16 + row.lane];
    case KIND_Q4_MIN: *minimum = half_to_float(get_half(head + 64 + (group & 1) * 32, row.lane)); /* fall through */
    default: return half_to_float(get_half(head + (group & 1) * 32, row.lane));
    }
}

/* output[0 .. columns) = row `index` of the weight */
void dequantize_row(const Weight *weight, int index, float *output) {
    Row row = {(uint8_t *)weight->data + index / TILE * weight->tile_bytes, index % TILE, weight->kind};
    for (int i = 0; i < weight->columns; i++) {
        int group = i / GROUP, column = i % GROUP, place = weight->order ? weight->order[i] : i;
        const uint8_t *at = group_of(row, group);
        if (weight->kind == KIND_F32) { memcpy(output + place, at + (column * TILE + row.lane) * 4, 4); continue; }
        if (weight->kind == KIND_F16) { output[place] = half_to_float(get_half(at, column * TILE + row.lane)); continue; }
        if (weight->kind == KIND_BF16) { output[place] = bf16_to_float(get_half(at, (column / 2 * TILE + row.lane) * 2 + column % 2)); continue; }
        float minimum, scale = scale_of(weight, row, i, &minimum);
        int number;
        int nibble = at[column % 16 / 4 * 64 + row.lane * 4 + column % 4] >> (column >= 16 ? 4 : 0) & 15;
        if (weight->kind == KIND_Q4_TABLE) number = weight->table[nibble];
        else if (is_nibbles(weight->kind)) number = nibble;
        else if (weight->kind == KIND_Q6_K)
            number = (nibble | (at[SIX_HIGH + column / 4 % 2 * 64 + row.lane * 4 + column % 4] >> (column / 8 * 2) & 3) << 4) - 32;
        else number = (int8_t)(at[column / 4 * 64 + row.lane * 4 + column % 4] - STORED_BIAS);
        if (weight->kind == KIND_Q4) number -= 8;
        output[place] = scale * (float)number + minimum;
    }
}

static void unpack_rows(void *context, Worker *worker) {
    const Packing *packing = context;
    for (Span span; pool_take(worker, packing->count, 1, &span);)
        dequantize_row(packing->weight, packing->first + (int)span.first, (float *)packing->from + span.first * packing->stride);
    pool_next_phase(worker, packing->count);
}

void trireme_unpack(const Weight *weight, int first, int count, float *output, int64_t stride) {
    Packing packing = {weight, first, count, 0, (const uint8_t *)output, stride};
    pool_run(unpack_rows, &packing);
}

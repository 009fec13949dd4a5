/* Where in a packed tile things lie. Shared by what writes tiles (pack.c) and what reads them (matmul.c, the AMX file). */
#pragma once
#include "trireme_cpu.h"

#if defined(__x86_64__)
enum { STORED_BIAS = 128 }; /* x86 multiplies unsigned by signed bytes: int8 weights are kept as w + 128 */
#else
enum { STORED_BIAS = 0 };
#endif

static inline int is_super(int kind) { return kind == KIND_Q4_K || kind == KIND_Q6_K; }
static inline int has_min(int kind) { return kind == KIND_Q4_MIN || kind == KIND_Q4_K; }
static inline int is_nibbles(int kind) { return kind == KIND_Q4 || has_min(kind) || kind == KIND_Q4_TABLE; }
/* Whether nibbles are multiplied as they are stored, from 0 to 15. A table's values are multiplied as the bytes of KIND_Q8. */
static inline int is_unsigned(int kind) { return is_nibbles(kind) && kind != KIND_Q4_TABLE; }
static inline int is_float(int kind) { return kind == KIND_F32 || kind == KIND_BF16 || kind == KIND_F16; }

/* Bytes of scales before the numbers of a block, and of numbers per 32 columns. */
static inline int block_header(int kind) { return is_float(kind) ? 0 : kind == KIND_Q4_MIN ? 128 : 64; }
static inline int group_bytes(int kind) {
    return kind == KIND_F32 ? 2048 : is_float(kind) ? 1024 : is_nibbles(kind) ? 256 : kind == KIND_Q6_K ? 384 : 512;
}
static inline int block_bytes(int kind) { return block_header(kind) + 2 * group_bytes(kind); }

/* Six bits: the low nibbles of 32 columns as in the kinds of four bits, then the high pairs of bits. Of columns 4q .. 4q + 3, a
 * row's four bytes lie in the (q % 2)th 64 bytes after SIX_HIGH, their pair at bit 2 (q / 2). */
enum { SIX_HIGH = 256 };

enum { SUPER_HEADER = 64 }; /* half d[16], dmin[16] before the four blocks of 256 columns */

static inline size_t block_offset(int kind, int block) {
    size_t offset = (size_t)block * block_bytes(kind);
    return is_super(kind) ? offset + (size_t)(block / 4 + 1) * SUPER_HEADER : offset;
}
static inline size_t super_offset(int kind, int super) { return (size_t)super * (SUPER_HEADER + 4 * block_bytes(kind)); }

/* Asks for weights some way ahead of those being read. The hardware of a Xeon does not look past the end of a page: with AMX one
 * row of 4-bit weights is read at 94 % of the memory's speed instead of 70 %, 8 rows 1.5 times as fast; 2048 was less good, 8192 no
 * better. A Neoverse-N1 looks ahead by itself, and asking costs it a seventh of a step (7.0 ms instead of 8.1, int8). */
enum { AHEAD = 4096 };
static inline __attribute__((always_inline)) void fetch_ahead(const uint8_t *at, int bytes) {
#if defined(__x86_64__)
    for (int line = 0; line < bytes; line += 64) __builtin_prefetch(at + AHEAD + line);
#else
    (void)at, (void)bytes;
#endif
}

/* What a wide product of so many rows decodes to bf16 at a time: columns, and tiles of them. Few rows want them in the first cache and
 * take all columns; many want them in the second, with enough weights to be worth 32 rows of activations from far memory. */
enum { WIDE_BYTES = 3 << 18, WIDE_COLUMNS = 2048, MANY_ROWS = 64 };
static inline int wide_columns(int padded, int rows) { return rows <= MANY_ROWS || padded < WIDE_COLUMNS ? padded : WIDE_COLUMNS; }
static inline int wide_tiles(int padded, int rows) {
    return rows <= MANY_ROWS ? 2 : WIDE_BYTES / (wide_columns(padded, rows) * 32) / 2 * 2;
}
/* A gated product takes all columns, and as many tiles of the gate as of what it gates. */
static inline int gated_tiles(int padded, int rows) {
    int tiles = rows <= MANY_ROWS ? 2 : WIDE_BYTES / (padded * 32) / 2 * 2;
    return tiles < 2 ? 2 : tiles;
}
static inline size_t gated_bytes(int padded, int rows) { return (size_t)gated_tiles(padded, rows) * padded * 32 + 4096; }
/* For these, or for one tile of all columns as the ARM kernels decode it, and the sums of 32 by 32. */
static inline size_t wide_bytes(int padded, int rows) {
    size_t part = (size_t)wide_tiles(padded, rows) * wide_columns(padded, rows) * 32, whole = (size_t)padded * 32;
    return (part > whole ? part : whole) + 4096;
}

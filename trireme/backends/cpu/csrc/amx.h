/* What both AMX files use: the tiles' shape, and two floats as one pair of bf16. */
#pragma once
#include <immintrin.h>
#include <stdint.h>

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
} __attribute__((packed)) TileConfig;

/* All eight tiles: 16 rows of 64 bytes. A constant: GCC believes that _tile_loadconfig reads eight bytes, and may drop what is
 * written behind them to a config on the stack. */
static inline void configure_tiles(void) {
    static const TileConfig config = {
        .palette = 1, .bytes_per_row = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&config);
}

/* Two vectors, rounded to bf16, as one int per lane: `even` in the low half. */
static inline __attribute__((always_inline)) __m512i pair_bf16(__m512 even, __m512 odd) {
    __m512i low = _mm512_castps_si512(even), high = _mm512_castps_si512(odd), half = _mm512_set1_epi32(0x8000);
    low = _mm512_srli_epi32(_mm512_add_epi32(low, half), 16);
    high = _mm512_add_epi32(high, half);
    return _mm512_ternarylogic_epi32(high, _mm512_set1_epi32((int)0xffff0000), low, 0xea); /* (high & mask) | low */
}

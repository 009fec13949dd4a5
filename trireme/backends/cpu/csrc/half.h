/* Conversions between float and the two 16-bit kinds, in plain C. */
#pragma once
#include <stdint.h>
#include <string.h>

static inline uint32_t bits_of(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
static inline float float_of(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }

/* Shifting the exponent into place and multiplying by 2^112 also mends subnormals. */
static inline float half_to_float(uint16_t half) {
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    if ((half & 0x7c00) == 0x7c00) return float_of(sign | 0x7f800000u | magnitude);
    return float_of(bits_of(float_of(magnitude) * 0x1p112f) | sign);
}

static inline uint16_t float_to_half(float value) {
    uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x47800000) return (uint16_t)(sign | (magnitude > 0x7f800000 ? 0x7e00 : 0x7c00));
    if (magnitude < 0x38800000) { /* subnormal: adding 0.5 aligns the bits that are kept */
        float shifted = float_of(magnitude) + 0.5f;
        return (uint16_t)(sign | (bits_of(shifted) - 0x3f000000));
    }
    magnitude += 0xfff + (magnitude >> 13 & 1); /* to nearest, ties to even */
    return (uint16_t)(sign | (magnitude - 0x38000000) >> 13);
}

static inline float bf16_to_float(uint16_t value) { return float_of((uint32_t)value << 16); }

static inline uint16_t float_to_bf16(float value) {
    uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

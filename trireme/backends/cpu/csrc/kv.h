/* Keys and values in fewer bits: one head of one slot, there and back. trireme_cpu.h says what each kind is.
 *
 * Loops over whole heads, in words that every compiler turns into vectors of its instruction set. */
#pragma once
#include "half.h"
#include "trireme_cpu.h"
#include <math.h>
#include <string.h>

#define FP8_MOST 448.0f

static inline int kv_groups(int width) { return (width + KV_GROUP - 1) / KV_GROUP; }

/* e4m3: a sign, four bits of exponent from -7 on, three of fraction; the largest code is no number. */
static inline uint8_t float_to_fp8(float x) {
    uint32_t bits = bits_of(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint8_t)(sign | 0x7f);
    if (magnitude >= bits_of(FP8_MOST)) return (uint8_t)(sign | 0x7e);
    if (magnitude < 0x3c800000) { /* below 2^-6 codes are steps of 2^-9: adding 2^14 puts them at the end of the fraction */
        return (uint8_t)(sign | (bits_of(float_of(magnitude) + 0x1p14f) - bits_of(0x1p14f)));
    }
    magnitude += 0x7ffff + (magnitude >> 20 & 1); /* to nearest, ties to even */
    return (uint8_t)(sign | (magnitude - 0x3c000000) >> 20);
}

static inline float fp8_to_float(uint8_t code) {
    uint32_t magnitude = code & 0x7f, small = magnitude < 8; /* below 2^-6: as a number of the next exponent, less its leading one */
    float value = float_of((magnitude << 20) + 0x3c000000 + (small << 23)) - (small ? 0x1p-6f : 0.0f);
    value = magnitude == 0x7f ? NAN : value;
    return float_of(bits_of(value) | (uint32_t)(code & 0x80) << 24);
}

static inline void put_int8(int8_t *to, float *scale, const float *x, int width) {
    float largest = 0;
    int broken = 0; /* what is no number stays none: every number of the head */
    for (int i = 0; i < width; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest, broken |= x[i] != x[i];
    float factor = largest > 0 ? 127.0f / largest : 0;
    for (int i = 0; i < width; i++) to[i] = (int8_t)lrintf(x[i] * factor);
    *scale = broken ? NAN : largest / 127.0f;
}

/* The scale is given: what is beyond it is clamped. */
static inline void put_int8_scaled(int8_t *to, float *scale, float given, const float *x, int width) {
    int broken = 0;
    for (int i = 0; i < width; i++) {
        float code = x[i] / given;
        broken |= x[i] != x[i];
        code = code > -128 ? code : -128, code = code < 127 ? code : 127;
        to[i] = (int8_t)lrintf(code);
    }
    *scale = broken ? NAN : given;
}

static inline void put_int4(uint8_t *to, uint16_t *scales, const float *x, int width) {
    int half = width / 2;
    memset(to, 0, (size_t)half);
    for (int g = 0; g < kv_groups(width); g++) {
        int first = g * KV_GROUP, end = first + KV_GROUP < width ? first + KV_GROUP : width, broken = 0;
        float low = x[first], high = low;
        for (int i = first; i < end; i++) {
            low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high;
            broken |= x[i] != x[i];
        }
        scales[2 * g] = float_to_half(broken ? NAN : (high - low) / 15), scales[2 * g + 1] = float_to_half(broken ? NAN : low);
        float scale = half_to_float(scales[2 * g]), base = half_to_float(scales[2 * g + 1]);
        if (!(scale > 0 && scale <= 65504.0f)) continue;
        for (int i = first; i < end; i++) {
            float code = rintf((x[i] - base) / scale);
            int whole = code < 0 ? 0 : code > 15 ? 15 : (int)code;
            if (i < half) to[i] |= (uint8_t)whole;
            else to[i - half] |= (uint8_t)(whole << 4);
        }
    }
}

/* Keeps the head `row` (slot · kv_heads + head) of a cache. */
static inline void kv_put(
    KVKind kind, void *cache, void *scales, const float *given, int64_t row, int head, const float *x, int width
) {
    if (kind == KV_F32) {
        memcpy((float *)cache + row * width, x, (size_t)width * 4);
    } else if (kind == KV_INT8 && given) {
        put_int8_scaled((int8_t *)cache + row * width, (float *)scales + row, given[head], x, width);
    } else if (kind == KV_INT8) {
        put_int8((int8_t *)cache + row * width, (float *)scales + row, x, width);
    } else if (kind == KV_FP8) {
        float factor = scales ? ((const float *)scales)[head] : 1;
        for (int i = 0; i < width; i++) ((uint8_t *)cache)[row * width + i] = float_to_fp8(x[i] / factor);
    } else {
        put_int4((uint8_t *)cache + row * (width / 2), (uint16_t *)scales + row * kv_groups(width) * 2, x, width);
    }
}

static inline void get_int4(const uint8_t *from, const uint16_t *scales, float *to, int width) {
    int half = width / 2;
    for (int i = 0; i < half; i++) {
        to[i] = (float)(from[i] & 15);
        to[half + i] = (float)(from[i] >> 4);
    }
    for (int g = 0; g < kv_groups(width); g++) {
        int first = g * KV_GROUP, end = first + KV_GROUP < width ? first + KV_GROUP : width;
        float scale = half_to_float(scales[2 * g]), low = half_to_float(scales[2 * g + 1]);
        for (int i = first; i < end; i++) to[i] = to[i] * scale + low;
    }
}

/* The head `row` of a cache that is not of floats. */
static inline void kv_get(KVKind kind, const void *cache, const void *scales, int64_t row, int head, float *to, int width) {
    if (kind == KV_INT8) {
        const int8_t *from = (const int8_t *)cache + row * width;
        float scale = ((const float *)scales)[row];
        for (int i = 0; i < width; i++) to[i] = (float)from[i] * scale;
    } else if (kind == KV_FP8) {
        const uint8_t *from = (const uint8_t *)cache + row * width;
        float factor = scales ? ((const float *)scales)[head] : 1;
        for (int i = 0; i < width; i++) to[i] = fp8_to_float(from[i]) * factor;
    } else {
        get_int4((const uint8_t *)cache + row * (width / 2), (const uint16_t *)scales + row * kv_groups(width) * 2, to, width);
    }
}

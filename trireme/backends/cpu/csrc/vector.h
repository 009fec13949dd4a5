/* Vectors of the instruction set being compiled for: LANES floats or ints, in the compiler's own vector arithmetic.
 * Only what that cannot say well (byte dot products, maximum, half floats) is written per instruction set. */
#pragma once
#include "trireme_cpu.h"
#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define PASTE2(a, b) a##_##b
#define PASTE(a, b) PASTE2(a, b)
#define KERNEL(name) PASTE(name, ISA)

#if defined(ISA_AVX512)
#include <immintrin.h>
enum { LANES = 16 };
#elif defined(ISA_AVX2)
#include <immintrin.h>
enum { LANES = 8 };
#else
#if defined(ISA_DOTPROD)
#include <arm_neon.h>
#endif
enum { LANES = 4 };
#endif
enum { PARTS = TILE / LANES }; /* vectors per tile of 16 weight rows */

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef int8_t vb __attribute__((vector_size(LANES)));
typedef uint8_t vub __attribute__((vector_size(LANES)));
typedef float vf_at __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t vi_at __attribute__((vector_size(LANES * 4), aligned(1), may_alias));
typedef int8_t vb_at __attribute__((vector_size(LANES), aligned(1), may_alias));

INLINE vf load(const float *at) { return *(const vf_at *)at; }
INLINE void store(float *at, vf value) { *(vf_at *)at = value; }
INLINE vi load_ints(const void *at) { return *(const vi_at *)at; }
INLINE vf splat(float value) { return value - (vf){0}; }
INLINE vi splat_int(int32_t value) { return value - (vi){0}; }
INLINE vf floats(vi value) { return __builtin_convertvector(value, vf); }
INLINE vf choose(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

INLINE vf maximum(vf a, vf b) {
#if defined(ISA_AVX512)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(ISA_AVX2)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(ISA_DOTPROD)
    return (vf)vmaxnmq_f32((float32x4_t)a, (float32x4_t)b);
#else
    return choose(a > b, a, b);
#endif
}
INLINE vf minimum(vf a, vf b) {
#if defined(ISA_DOTPROD)
    return (vf)vminnmq_f32((float32x4_t)a, (float32x4_t)b);
#else
    return -maximum(-a, -b);
#endif
}
INLINE vf absolute(vf a) { return (vf)((vi)a & 0x7fffffff); }

INLINE float sum_of(vf value) {
#if defined(ISA_AVX512)
    return _mm512_reduce_add_ps((__m512)value);
#else
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += value[i];
    return sum;
#endif
}
INLINE float max_of(vf value) {
#if defined(ISA_AVX512)
    return _mm512_reduce_max_ps((__m512)value);
#else
    float best = value[0];
    for (int i = 1; i < LANES; i++) best = value[i] > best ? value[i] : best;
    return best;
#endif
}

enum { MAGIC_BITS = 0x4b400000 }; /* 1.5 · 2^23: adding it rounds to an integer and leaves that in the low bits */
INLINE vi round_to_int(vf value) { return (vi)(value + 12582912.0f) - MAGIC_BITS; }

/* e^x by 2^n · p(r), |r| ≤ ln 2 / 2; relative error below 2e-7. Very negative x gives 0. */
INLINE vf exponential(vf x) {
    vi tiny = x < -87.0f;
    x = minimum(maximum(x, splat(-87.0f)), splat(88.0f));
    vf rounded = x * 1.44269504f + 12582912.0f, n = rounded - 12582912.0f;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vf result = (vf)((vi)p + (((vi)rounded - MAGIC_BITS) << 23));
    return (vf)(~tiny & (vi)result);
}

/* Clamped where tanh is 1 to the last bit, so that the exponential stays finite. */
INLINE vf hyperbolic_tangent(vf x) {
    vf twice = exponential(2.0f * minimum(maximum(x, splat(-10.0f)), splat(10.0f)));
    return (twice - 1.0f) / (twice + 1.0f);
}

/* 16 halves as floats, in PARTS vectors. */
INLINE void load_halves(const uint8_t *at, vf out[PARTS]) {
#if defined(ISA_AVX512)
    out[0] = (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
#elif defined(ISA_AVX2)
    for (int p = 0; p < PARTS; p++) out[p] = (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(at + 16 * p)));
#elif defined(ISA_DOTPROD)
    for (int p = 0; p < PARTS; p++) out[p] = (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)(at + 8 * p))));
#else
    typedef uint16_t half_lanes __attribute__((vector_size(LANES * 2), aligned(1), may_alias));
    for (int p = 0; p < PARTS; p++) {
        vi bits = __builtin_convertvector(*(const half_lanes *)(at + LANES * 2 * p), vi);
        out[p] = (vf)((vi)((vf)((bits & 0x7fff) << 13) * 0x1p112f) | (bits & 0x8000) << 16);
    }
#endif
}

/* 16 bytes as floats, unsigned and signed. */
INLINE void load_bytes(const uint8_t *at, vf out[PARTS]) {
#if defined(ISA_AVX512) /* compilers take the bytes apart one by one */
    out[0] = (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at)));
#elif defined(ISA_AVX2)
    for (int p = 0; p < PARTS; p++) out[p] = (vf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(at + 8 * p))));
#else
    for (int p = 0; p < PARTS; p++) {
        vub bytes;
        memcpy(&bytes, at + LANES * p, LANES);
        out[p] = floats(__builtin_convertvector(bytes, vi));
    }
#endif
}
INLINE void load_signed_bytes(const uint8_t *at, vf out[PARTS]) {
#if defined(ISA_AVX512)
    out[0] = (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
#elif defined(ISA_AVX2)
    for (int p = 0; p < PARTS; p++) out[p] = (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(at + 8 * p))));
#else
    for (int p = 0; p < PARTS; p++) {
        vb bytes;
        memcpy(&bytes, at + LANES * p, LANES);
        out[p] = floats(__builtin_convertvector(bytes, vi));
    }
#endif
}

/* Activations of a vector of values: silu(x) = x / (1 + e^-x), gelu by tanh and by erf, relu and its square. */
#pragma once
#include "vector.h"

INLINE vf silu(vf x) { return x / (1.0f + exponential(-x)); }
INLINE vf gelu_tanh(vf x) {
    return 0.5f * x * (1.0f + hyperbolic_tangent(0.7978845608f * (x + 0.044715f * x * x * x)));
}
/* erf by Abramowitz and Stegun 7.1.26, absolute error 1.5e-7 */
INLINE vf gelu(vf x) {
    vf z = absolute(x) * 0.7071067812f, t = 1.0f / (1.0f + 0.3275911f * z);
    vf p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
    vf erf = 1.0f - p * exponential(-z * z);
    return 0.5f * x * (1.0f + choose(x < 0.0f, -erf, erf));
}
INLINE vf activate(int kind, vf x) {
    switch (kind) {
    case TRANSFORM_SILU_MUL: return silu(x);
    case TRANSFORM_GELU_TANH_MUL: case TRANSFORM_GELU_TANH: return gelu_tanh(x);
    case TRANSFORM_GELU_MUL: case TRANSFORM_GELU: return gelu(x);
    default: x = maximum(x, splat(0)); return kind == TRANSFORM_RELU ? x : x * x;
    }
}

"""Scalar functions that Triton's language lacks, for other kernels to call. Knows no tensor."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from trireme.kernels import chips

# The interpreter has no device library, so there powers go through double precision.
INTERPRETED = tl.constexpr(chips.current().interpreted)


@triton.jit
def tanh(x):
    """tanh |x| = 1 − 2 / (exp(2|x|) + 1), and its series near 0 where that cancels"""
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    far = tl.where(x < 0, -far, far)
    s = x * x
    near = x * (1.0 + s * (-0.3333333333333333 + s * (0.13333333333333333 + s * (-0.05396825396825397 + s * 0.021869488536155203))))
    limit = 0.01 if x.dtype == tl.float64 else 0.25
    return tl.where(size < limit, near, tl.where(x != x, x, far))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def quick_divide(x, y):
    """x / y to two units in the last place, for |y| below 2¹²⁶"""
    if INTERPRETED:
        return x / y
    else:
        return libdevice.fast_dividef(x, y)


@triton.jit
def gelu(x):
    """x Φ(x)"""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def half_gelu(x):
    """x Φ(x), accurate enough for a half type: Φ(−z) = ½ erfc(z / √2) by a fit whose relative error stays below 1.2e-7
    (Numerical Recipes, erfcc, its coefficients here for powers of two), so that unlike 1 + erf nothing cancels for x < 0"""
    t = quick_divide(1.0, 1.0 + 0.35355339 * tl.abs(x))
    fit = -1.18611495 + t * 0.246517298
    fit = 2.14747446 + t * fit
    fit = -1.63775315 + t * fit
    fit = 0.402321582 + t * fit
    fit = -0.26875686 + t * fit
    fit = 0.139630057 + t * fit
    fit = 0.539700616 + t * fit
    fit = 1.4427292 + t * fit
    fit = -2.82574822 + t * fit
    tail = t * tl.exp2(fit - 0.72134752 * x * x)
    return x * tl.where(x < 0, tail, 1.0 - tail)


@triton.jit
def gelu_tanh(x):
    """x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))"""
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def divide(x, y):
    """x / y, rounded to nearest in every float type"""
    return tl.div_rn(x, y) if x.dtype == tl.float32 and y.dtype == tl.float32 else x / y


@triton.jit
def power(x, y):
    """x ** y with C's rules for signs, zeros, infinities and NaN"""
    if INTERPRETED:
        return _signed(x, y, tl.exp2(y.to(tl.float64) * tl.log2(tl.abs(x).to(tl.float64))))
    else:
        return libdevice.pow(x, y)


@triton.jit
def half_power(x, y):
    """the same, accurate enough for a half type: the exponent is at most 128, so its rounding stays below 1e-5"""
    return _signed(x, y, tl.exp2(y * tl.log2(tl.abs(x))))


@triton.jit
def _signed(x, y, size):
    """|x| ** y with the sign and the exceptions that x and y ask for"""
    whole = tl.floor(y) == y
    odd = whole & (tl.floor(y * 0.5) * 2.0 != y)
    signed = tl.where((x < 0) & odd, -size, size)
    signed = tl.where((x < 0) & (tl.abs(x) != float("inf")) & ~whole & (tl.abs(y) != float("inf")), float("nan"), signed)
    signed = tl.where((tl.abs(x) == 1.0) & (tl.abs(y) == float("inf")), 1.0, signed)
    return tl.where((y == 0) | (x == 1), 1.0, signed).to(x.dtype)


@triton.jit
def integer_power(x, y):
    """x ** y by squaring, modulo the type's range; negative exponents leave only the inverses of 1 and −1"""
    nothing = x * 0 + y * 0  # of both operands' shape, which a variable of the loop has from its start
    result = nothing + 1
    base = nothing + x
    rest = nothing + tl.where(y < 0, 0, y)
    for _ in range(63):
        result = tl.where(rest & 1 != 0, result * base, result)
        base = base * base
        rest = rest >> 1
    inverse = tl.where(x == 1, 1, tl.where(x == -1, tl.where(y & 1 != 0, -1, 1), 0))
    return tl.where(y < 0, inverse, result)


@triton.jit
def larger(a, b):
    """max, NaN before all"""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    """min, NaN before all"""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)

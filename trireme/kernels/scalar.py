"""Scalar functions that Triton's language lacks, for other kernels to call. Knows no tensor."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra import libdevice

from trireme.kernels import chips

# The interpreter has no device library, so there powers go through double precision.
INTERPRETED = tl.constexpr(chips.current().interpreted)
QUICK_LOG2 = tl.constexpr(chips.current().quick_log2)


@triton.jit
def exactly(number, DOUBLE: tl.constexpr):
    """A number of the host; of float64 by its bits (`launch.doubled`), since a run-time float reaches a kernel as float32"""
    if DOUBLE:
        number = tl.full((), number, tl.int64).to(tl.float64, bitcast=True)
    return number


@triton.constexpr_function
def lowest(dtype: Any) -> Any:
    """The number of a type that no other is below."""
    if dtype.is_floating():
        return float("-inf")
    return -(2 ** (dtype.primitive_bitwidth - 1)) if dtype.is_int_signed() else 0


@triton.constexpr_function
def highest(dtype: Any) -> Any:
    """The number of a type that no other is above."""
    if dtype.is_floating():
        return float("inf")
    return 2 ** (dtype.primitive_bitwidth - dtype.is_int_signed()) - 1


@triton.jit
def multiple(x, OF: tl.constexpr):
    """x, of which the compiler now knows that OF divides it; by itself it asks of 16 only"""
    return x // OF * OF if OF > 1 else x


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
def half_tanh(x):
    """the same, accurate enough for a half type: (1 − t) / (1 + t) with t = exp(−2|x|), and x − x³/3 where that cancels"""
    size = tl.abs(x)
    t = tl.exp2(size * -2.8853900817779268)
    far = quick_divide(1.0 - t, 1.0 + t)
    near = x * (1.0 - x * x * 0.3333333333333333)
    return tl.where(size < 0.03, near, tl.where(x < 0, -far, far))


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
    """x/2 (1 + tanh u) = x / (1 + exp(−2u)) with u = √(2/π) (x + 0.044715 x³), where nothing cancels"""
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


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
    """the same, accurate enough for a half type: the exponent is at most 128, so its rounding stays below 1e-4"""
    # Half types hold only whole, even numbers from 2¹² on. Beside 2²³ a float has no place for a fraction and ends in its parity.
    span = tl.minimum(tl.abs(y), 8192.0, propagate_nan=tl.PropagateNan.ALL)
    shifted = span + 8388608.0
    whole = shifted - 8388608.0 == span
    # What is negative has no logarithm, hence no broken power; only −∞ has.
    logarithm = _quick_log2(tl.where(whole | (x == float("-inf")), tl.abs(x), x))
    value = _raised(logarithm, y)
    sign = tl.where(whole, shifted.to(tl.int32, bitcast=True) << 31, 0) & x.to(tl.int32, bitcast=True)
    return (value.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
def half_power_by(x, y):
    """the same by one number other than NaN, whose rules then cost an element nothing"""
    if tl.floor(y) == y:
        result = half_power(x, tl.full((1,), y, tl.float32))
    else:
        result = tl.exp2(y * _quick_log2(tl.where(x == float("-inf"), float("inf"), x)))
    return result


@triton.jit
def positive_half_power(x, y):
    """the same for x > 0"""
    return _raised(_quick_log2(x), y)


@triton.jit
def _raised(logarithm, y):
    """2 ** (logarithm · y), where 1 to any power and anything to the power 0 are 1"""
    return tl.exp2(tl.where((logarithm == 0) | (y == 0), 0.0, y * logarithm))


@triton.jit
def _quick_log2(x):
    """log2 x to a relative 2e-6: the chip's own approximation errs by 2⁻²² of 1, so near 1 a fit replaces it"""
    off = x - 1.0
    near = off * (1.44269506 + off * (-0.72132887 + off * (0.48087164 + off * (-0.36542839 + off * 0.2933017))))
    if not QUICK_LOG2:
        far = tl.log2(x)
    else:
        small = x < 1.1754944e-38  # which the approximation takes for 0
        far = libdevice.fast_log2f(tl.where(small, x * 16777216.0, x)) - tl.where(small, 24.0, 0.0)
    return tl.where(tl.abs(off) < 0.125, near, far)


@triton.jit
def quick_cos(x):
    """cos x = (−1)ᵏ sin((k + ½) π − x), accurate enough for a half type; a block with larger numbers takes the exact way"""
    if tl.max(tl.abs(x)) < 65536.0:
        shifted = x * 0.3183098861837907 - 0.5 + 12582912.0
        result = _alternating_sin(-_beyond(x, shifted - 12582912.0 + 0.5), shifted)
    else:
        result = tl.cos(x)
    return result


@triton.jit
def quick_sin(x):
    """sin x = (−1)ᵏ sin(x − k π), as accurate; a block with larger numbers takes the exact way"""
    if tl.max(tl.abs(x)) < 65536.0:
        shifted = x * 0.3183098861837907 + 12582912.0  # 1.5 · 2²³, beside which there are whole numbers only
        result = _alternating_sin(_beyond(x, shifted - 12582912.0), shifted)
    else:
        result = tl.sin(x)
    return result


@triton.jit
def _beyond(x, turns):
    """x − turns · π, of which the first parts of π leave no rounding"""
    return ((x - turns * 3.140625) - turns * 9.67502593994140625e-4) - turns * 1.509957990978376e-7


@triton.jit
def _alternating_sin(x, shifted):
    """(−1)ᵏ sin x for |x| ≤ π / 2, where k is the whole number that `shifted` ends in; relative error 1e-6"""
    s = x * x
    value = x * (0.999999053 + s * (-0.166655472 + s * (8.31181278e-3 + s * -1.84854406e-4)))
    return (value.to(tl.int32, bitcast=True) ^ (shifted.to(tl.int32, bitcast=True) << 31)).to(tl.float32, bitcast=True)


@triton.jit
def _signed(x, y, size):
    """|x| ** y with the sign and the exceptions that x and y ask for"""
    whole = tl.floor(y) == y
    odd = whole & (tl.floor(y * 0.5) * 2.0 != y)
    negative = (x < 0) | ((x == 0) & (1.0 / x < 0))
    signed = size * tl.where(negative & odd, -1.0, 1.0)  # Triton's −0 is 0 − 0
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
    if a.dtype == tl.float64:  # of which no instruction knows
        return tl.where((a > b) | (a != a), a, b)
    else:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    """min, NaN before all"""
    if a.dtype == tl.float64:
        return tl.where((a < b) | (a != a), a, b)
    else:
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def log_of_sum(x):
    """log x of a sum of at least 1 and less than 2³¹; in float64 from that of float32, which an exponential corrects, since the
    device library's own takes much longer"""
    if x.dtype == tl.float64:
        near = tl.log(x.to(tl.float32)).to(tl.float64)
        off = x * tl.exp(-near) - 1.0
        return near + off * (1.0 - 0.5 * off)
    else:
        return tl.log(x)

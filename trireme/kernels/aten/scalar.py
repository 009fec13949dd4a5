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
def singly(pointers):
    """The same pointers, of which the compiler no longer knows whether a thread may take several elements at once. It lets threads
    have neighbours of different rows if it may, which then meet others for each row; where each should have its own, that costs"""
    return pointers + tl.program_id(2)  # which is 0: kernels that ask for this have grids of two dimensions


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
    elif x.dtype == tl.float32:
        return _single_power(x, y)
    else:
        return libdevice.pow(x, y)


@triton.jit
def _single_power(x, y):
    """the same of float32; a block with numbers that have rules of their own takes a longer way"""
    bits, span = x.to(tl.int32, bitcast=True), y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    above, endless = bits - 0x00800000, 0x7E967699 - span  # 1e38
    rules = tl.full((), 0, tl.int32)
    if tl.reduce(above | (0x7EFFFFFF - above) | endless, None, _either) < 0:  # any is not positive, normal and finite
        size = bits & 0x7FFFFFFF
        strange = ((size < 0x00800000) & (bits != 0)) | (size >= 0x7F800000) | (endless < 0)
        rules = tl.reduce(tl.where(strange, 4, tl.where(bits < 0, 2, tl.where(bits == 0, 1, 0))), None, _either)
    if rules < 4:
        upper, lower = _log2_in_two(tl.abs(x), True)
        result = _raised_in_two(y, upper, lower)
        if rules & 1:
            result = tl.where(bits == 0, tl.where(y > 0, 0.0, tl.where(y < 0, float("inf"), 1.0)), result)
        if rules & 2:
            result, broken = _signed_by_parity(result, x, y)
            result = tl.where((x < 0) & broken, float("nan"), result)
    else:
        result = _ruled_power(x, y)
    return result


@triton.jit
def _either(x, y):
    return x | y


@triton.jit
def _ruled_power(x, y):
    y = tl.minimum(tl.maximum(y, -1e38, propagate_nan=tl.PropagateNan.ALL), 1e38, propagate_nan=tl.PropagateNan.ALL)
    size = tl.abs(x)
    upper, lower = _log2_in_two(size, False)
    upper = tl.where(size == 0, float("-inf"), tl.where(size == float("inf"), size, upper))
    value, broken = _signed_by_parity(_raised_in_two(y, upper, lower), x, y)
    value = tl.where(((x < 0) & broken & (size != float("inf"))) | (x != x), float("nan"), value)
    return tl.where((y == 0) | (x == 1), 1.0, value)


@triton.jit
def _signed_by_parity(value, x, y):
    """|x| ** y with the sign that x and an odd y give it, and whether y has a fraction"""
    span = tl.abs(y)
    near = tl.where(span < 8388608.0, span + 8388608.0, span)  # ends in the parity of what is whole
    broken = (span < 8388608.0) & (near - 8388608.0 != span)
    odd = tl.where(broken | (span >= 16777216.0), 0, near.to(tl.int32, bitcast=True) << 31)
    return (value.to(tl.int32, bitcast=True) ^ (odd & x.to(tl.int32, bitcast=True))).to(tl.float32, bitcast=True), broken


@triton.jit
def _log2_in_two(x, NORMAL: tl.constexpr):
    """log2 of a positive, finite x as a sum of two floats: x = 2ᵏ m, where log2 m = 2 / ln 2 · artanh((m − 1) / (m + 1))"""
    bits = x.to(tl.int32, bitcast=True)
    if not NORMAL:
        small = x < 1.1754944e-38
        bits = tl.where(small, x * 16777216.0, x).to(tl.int32, bitcast=True)
    power = (bits - 0x3F3504F3) >> 23  # from the root of a half to that of two
    m = (bits - (power << 23)).to(tl.float32, bitcast=True)
    k = (power + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0
    if not NORMAL:
        k -= tl.where(small, 24.0, 0.0)
    over, under = m - 1.0, m + 1.0
    inverse = quick_divide(1.0, under)
    # Not as a product, which the compiler would make part of the sums below, unrounded, while `off` is what its rounding leaves.
    s = tl.fma(over, inverse, 0.0)
    minus = s * -1.0  # costs nothing as a factor, unlike Triton's −s, which is 0 − s
    off = tl.fma(minus, m - (under - 1.0), tl.fma(minus, under, over)) * inverse
    z = s * s
    fit = 0.142753781 + z * 0.116659427
    fit = 0.200000613 + z * fit
    fit = 0.333333333 + z * fit
    cubic = s * (z * fit)
    upper = s + cubic
    lower = ((s - upper) + cubic) + off
    # 2 / ln 2 in two parts.
    total = tl.fma(upper, 2.885390043258667, k)
    less = tl.fma(upper, 2.885390043258667, k - total)
    return total, less + (upper * 3.8519259e-8 + lower * 2.885390043258667)


@triton.jit
def _raised_in_two(y, upper, lower):
    """2 ** (y (upper + lower)) to one unit in the last place, three near the ends: what the first product rounds away is added to
    the exponent's fraction"""
    exponent = y * upper
    rest = tl.fma(y, lower, tl.fma(y, upper, exponent * -1.0))
    rest = tl.where(tl.abs(exponent) < 252.0, rest, 0.0)
    exponent = tl.minimum(tl.maximum(exponent, -252.0, propagate_nan=tl.PropagateNan.ALL), 252.0, propagate_nan=tl.PropagateNan.ALL)
    shifted = exponent + 12582912.0  # 1.5 · 2²³, beside which a float has no place for a fraction
    fraction = (exponent - (shifted - 12582912.0)) + rest
    value = 1.33909133e-3 + fraction * 1.54614939e-4
    value = 9.61805655e-3 + fraction * value
    value = 5.55035702e-2 + fraction * value
    value = 0.240226509 + fraction * value
    value = 0.693147188 + fraction * value
    value = 1.0 + fraction * value
    # In two steps, since one alone might be more than a float has.
    whole = shifted.to(tl.int32, bitcast=True) - 0x4B400000
    first = whole >> 1
    value = value * ((first + 127) << 23).to(tl.float32, bitcast=True)
    return value * ((whole - first + 127) << 23).to(tl.float32, bitcast=True)


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
    """cos x = (−1)ᵏ sin((k + ½) π − x), of float32 accurate enough for a half type, of float64 to two units in the last place; a
    block with larger numbers takes the exact way"""
    if tl.max(tl.abs(x).to(tl.float32)) < _most_turns(x):
        shifted = x * 0.3183098861837907 - 0.5 + _whole(x)
        turns = shifted - _whole(x) + 0.5
        result = _alternating_sin(-_beyond(x, turns), shifted)
    else:
        result = tl.cos(x)
    return result


@triton.jit
def quick_sin(x):
    """sin x = (−1)ᵏ sin(x − k π), as accurate; a block with larger numbers takes the exact way"""
    if tl.max(tl.abs(x).to(tl.float32)) < _most_turns(x):
        shifted = x * 0.3183098861837907 + _whole(x)
        result = _alternating_sin(_beyond(x, shifted - _whole(x)), shifted)
    else:
        result = tl.sin(x)
    return result


@triton.jit
def _most_turns(x):
    """Up to here multiples of π have no rounding in the first parts that π is cut into"""
    return 524288.0 if x.dtype == tl.float64 else 65536.0


@triton.jit
def _whole(x):
    """A number beside which there are whole ones only: 1.5 · 2⁵² or 1.5 · 2²³"""
    return 6755399441055744.0 if x.dtype == tl.float64 else 12582912.0


@triton.jit
def _beyond(x, turns):
    """x − turns · π"""
    if x.dtype == tl.float64:
        return ((x - turns * 3.1415926534682512) - turns * 1.2154201012607932e-10) - turns * 4.044532497591901e-21
    else:
        return ((x - turns * 3.140625) - turns * 9.67502593994140625e-4) - turns * 1.509957990978376e-7


@triton.jit
def _alternating_sin(x, shifted):
    """(−1)ᵏ sin x for |x| ≤ π / 2, where k is the whole number that `shifted` ends in; relative error 1e-6, of float64 4e-17 and
    what rounding adds"""
    s = x * x
    if x.dtype == tl.float64:
        p = -2.505210761669045e-08 + s * (1.6058977292642743e-10 + s * (-7.643969663988074e-13 + s * 2.7314368769379893e-15))
        p = -0.16666666666666666 + s * (0.008333333333333316 + s * (-0.00019841269841254966 + s * (2.7557319219160833e-06 + s * p)))
        size = tl.abs(x + (x * s) * p)
        size = tl.where(size > 1.0, 1.0, size)  # which rounding exceeds at times
        sign = (x.to(tl.int64, bitcast=True) ^ (shifted.to(tl.int64, bitcast=True) << 63)) & -(2**63)
        return (size.to(tl.int64, bitcast=True) | sign).to(tl.float64, bitcast=True)
    else:
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
    if a.dtype == tl.float64:  # of which no instruction knows: 126298 x 38 took 31 µs by the language's own
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

"""Rounding that gives the same bytes on a GPU, in Triton's interpreter, in torch and in compiled C: to bf16, to integers,
and to the codes of lowrank_kv/stores/quantization.py."""

import triton
import triton.language as tl

# Rounding to bf16 takes away at most this share (lowrank_kv/stores/quantization.py widens the range by it).
_ROUNDING = tl.constexpr(2.0**-8)
_TINY = tl.constexpr(1.1754943508222875e-38)
# Adding 1.5 · 2^23 leaves no bit of an fp32 number for fractions.
_NO_FRACTIONS = tl.constexpr(12582912.0)


@triton.jit
def bf16_bits(number):
    """The bits of the bf16 numbers nearest to fp32 ones, ties to even, as int32. The interpreter's own conversion cuts
    off."""
    bits = number.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where(number != number, 0x7FC0, rounded)


@triton.jit
def nearest_bf16(number):
    """fp32 numbers rounded to the nearest bf16 number, still as fp32."""
    return (bf16_bits(number) << 16).to(tl.float32, bitcast=True)


@triton.jit
def nearest_integer(number):
    """fp32 numbers below 2^22 rounded to the nearest integer, ties to even, still as fp32."""
    return (number + _NO_FRACTIONS) - _NO_FRACTIONS


@triton.jit
def integer_scales(low, high, BITS: tl.constexpr):
    """The step and the least value of groups of coefficients between `low` and `high`: bf16 numbers, as fp32."""
    least = nearest_bf16(low - tl.abs(low) * _ROUNDING)
    return nearest_bf16(tl.div_rn((high - least) * (1 + _ROUNDING), 2.0**BITS - 1)), least


@triton.jit
def integer_codes(coef, step, least, BITS: tl.constexpr):
    """Codes of coefficients, uint8."""
    level = tl.div_rn(coef - least, tl.maximum(step, _TINY))
    return nearest_integer(tl.minimum(tl.maximum(level, 0.0), 2.0**BITS - 1)).to(tl.uint8)

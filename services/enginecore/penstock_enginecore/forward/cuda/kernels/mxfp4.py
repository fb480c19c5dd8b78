"""Sums of products with MXFP4 weights: 4-bit floats, a power of two for each 32 of them. A tile is dequantized as it is read, to
the numbers that the weight has where it is dequantized at load, rounded as there.
"""

import triton
import triton.language as tl

BLOCK = 32
"""Columns that share an exponent."""


@triton.jit
def e2m1(codes):
    """What the lower 4 bits of uint8 ``codes`` mean, float32: a sign, two bits of exponent, one of mantissa."""
    magnitudes = (codes & 7).to(tl.int32)
    normal = ((magnitudes << 22) + 0x3F000000).to(tl.float32, bitcast=True)  # an exponent of 0 stands for 2 ** -1 here
    values = tl.where(magnitudes > 1, normal, magnitudes.to(tl.float32) * 0.5)
    return tl.where((codes & 8) != 0, -values, values)


@triton.jit
def mxfp4_sums(
    x_rows, numbers, exponents, n_read, out_features, in_features,
    HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of products of rows, which begin at ``x_rows``, and the rows ``n_read`` of a weight."""
    k = tl.arange(0, HALF)
    x_tile = x_rows[:, None] + k[None, :]
    number_tile = numbers + n_read[:, None].to(tl.int64) * (in_features // 2) + k[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, in_features, 2 * HALF):
        first = tl.load(x_tile + start)
        second = tl.load(x_tile + start + HALF)
        both = tl.load(number_tile + start // 2)
        place = exponents + (start // 32) * out_features + n_read
        lower_scale = _power(tl.load(place))
        upper_scale = _power(tl.load(place + (HALF // 32) * out_features))
        lower = (e2m1(both) * lower_scale[:, None]).to(first.dtype)
        upper = (e2m1(both >> 4) * upper_scale[:, None]).to(first.dtype)
        total = tl.dot(first, tl.trans(lower), total, input_precision=PRECISION)
        total = tl.dot(second, tl.trans(upper), total, input_precision=PRECISION)
    return total


@triton.jit
def _power(exponent):
    """``2 ** (exponent - 127)`` of uint8, float32; 0 for an exponent of 0, of which no float32 that devices keep is made."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
